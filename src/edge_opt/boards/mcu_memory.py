"""RAM and flash of a model on a microcontroller, under TensorFlow Lite Micro or ST Edge AI."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

from edge_opt import units
from edge_opt._support.checks import check_one_of
from edge_opt._support.files import mapped
from edge_opt.boards.catalog import device, normalized
from edge_opt.boards.ethos_u import VELA, VelaRun, compiled_by_vela
from edge_opt.boards.st_edge_ai import KEEPS_CHANNELS, StMemory, st_memory
from edge_opt.boards.targets import ResolvedTarget
from edge_opt.errors import EdgeOptError, InvalidInput, UnknownDevice, UnreadableModel
from edge_opt.loading import resolve_call
from edge_opt.model_files.file_graph import read_errors
from edge_opt.model_files.file_model import FileModel
from edge_opt.model_files.tflite_reader import Flatbuffer
from edge_opt.model_files.tflm_arena import PlannedBuffer, TflmArena, replanned_head, tflm_arena
from edge_opt.model_files.tflm_graph import TflmGraph, TflmOperator, read_tflm
from edge_opt.model_files.tflm_kernels import Kernels, TflmBuild
from edge_opt.model_files.tflm_lowering import lowered
from edge_opt.model_files.tflm_support import code_size, refusal, registered_name
from edge_opt.records.devices import DeviceSpec
from edge_opt.records.microcontrollers import McuMemory, MemoryPart, MemoryVerdict, short_name
from edge_opt.records.predictions import Prediction
from edge_opt.records.profiles import ModelProfile
from edge_opt.trace import trace

# RAM beside the arena: stack, the interpreter and its operators, variables of the application and of its libraries.
RAM_MARGIN_BYTES = 8 * 1024
# Flash beside the model and TFLM: start-up code, drivers, printing.
FLASH_MARGIN_BYTES = 16 * 1024
MEMORY_UNKNOWN = "RAM and flash under TFLM are not known"
ST_RUNTIME: Literal["st-edge-ai"] = "st-edge-ai"
EXECUTORCH: Literal["executorch"] = "executorch"
# Activations of ST Edge AI may be above the estimate by this share; the worst of 20 rows is 25 % above it.
_ST_UNSURE = 0.3
# LiteRT's quantizer writes 256 KiB of weights and more behind the FlatBuffer. TFLM takes such tensors for activations.
_SPLIT = "TFLM reads this file only after `edge-opt convert FILE --runtime tflm`, which moves its weights into it"
_DRIVER = "not in it: the driver of the Ethos-U, and some bytes of its operator in the arena"
_RAM_MARGIN = "stack, interpreter, drivers and the application"
_FLASH_MARGIN = "start-up code, drivers and the application"


_DSP, _MVE, _PLAIN = (TflmBuild("reference", extension) for extension in ("dsp", "mve", "none"))
_OTHER, _HOST = TflmBuild("reference", "none", enum_bytes=4), TflmBuild("reference", "none", 8, 4)
# On a host it is the recording interpreter of the package `tflite-micro`.
CORES: Mapping[str, TflmBuild] = {
    "cortex-m0": _PLAIN, "cortex-m0plus": _PLAIN, "cortex-m0+": _PLAIN, "cortex-m3": _PLAIN, "cortex-m23": _PLAIN,
    "no-dsp": _PLAIN, "no-dsp-(m0,m0+,m3)": _PLAIN, "cortex-m4": _DSP, "cortex-m4f": _DSP, "cortex-m7": _DSP,
    "cortex-m33": _DSP, "cortex-m35p": _DSP, "cortex-m55": _MVE, "cortex-m85": _MVE, "cortex-m52": _MVE,
    "xtensa-lx6": _OTHER, "xtensa-lx7": _OTHER, "riscv32": _OTHER, "x86-64": _HOST, "aarch64": _HOST,
}  # fmt: skip


def mcu_memory(
    model: Any,
    inputs: Any = None,
    *,
    core: str | DeviceSpec = "cortex-m4",
    kernels: Kernels = "reference",
    precision: Literal["int8", "fp32"] = "int8",
    runtime: Literal["tflm", "st-edge-ai", "vela", "executorch"] = "tflm",
) -> McuMemory:
    """Return the RAM and flash that a runtime needs for a model, without running it.

    TFLM's arena is what its own allocator would use, to the byte (TFLM of 2026-08-20). Code is as measured on a
    Cortex-M4 with TFLM's release options; other cores and compilers differ by some per cent. Figures of ST Edge AI are
    estimates: the arena is its activations.

    Args:
        model: The path of a .tflite file; or a module, a reference or a profile as in `profile`: then the file is meant
            that LiteRT's converter would write for it, with a fixed batch.
        inputs: Inputs of a module, as in `profile`; a file and a profile have their own.
        core: A core such as "cortex-m4" or "cortex-m55", "x86-64" for the recording interpreter of the package
            `tflite-micro`, or a board of the catalog, such as "rp2040".
        kernels: "reference" for TFLM's own kernels, or "cmsis-nn" where the core is an Arm Cortex-M.
        precision: Of a module: "int8" for a quantized file (static, inputs in int8), or "fp32". A file has its own.
        runtime: "tflm" for TensorFlow Lite Micro, "st-edge-ai" (int8, on an Arm Cortex-M), or "vela": TFLM with the
            file that Arm's Vela compiles for the Ethos-U of a board; "executorch": planned memory of a `.pte` file.

    >>> from edge_opt.model import SmallCNN
    >>> memory = mcu_memory(SmallCNN(), (1, 1, 28, 28), core="rp2040")
    >>> memory.head_bytes == 28 * 28 * 16 + 14 * 14 * 16, memory.fits    # the first layer's result, and its pool
    (True, True)
    """
    check_one_of("kernels", kernels, get_args(Kernels))
    check_one_of("runtime", runtime, ("tflm", ST_RUNTIME, VELA, EXECUTORCH))
    spec, name, build = find_core(core)
    build = replace(build, kernels=kernels)
    if build.is_cmsis and not build.is_arm:
        raise InvalidInput(f"CMSIS-NN is for Arm Cortex-M, and {name} is not one; pass kernels='reference'")
    if runtime == VELA:
        return _vela_record(compiled_by_vela(_file(model), spec), build, name, spec)
    if runtime == EXECUTORCH:
        return _executorch_record(_file(model, ".pte"), name)
    graph = _graph(model, inputs, precision)
    if runtime == ST_RUNTIME:
        if not build.is_arm or _precision(graph) != "int8":
            raise InvalidInput(
                f"ST Edge AI is known in int8 on an Arm Cortex-M, and this is {_precision(graph)} on {name}; "
                "pass runtime='tflm'"
            )
        return _st_record(graph, st_memory(graph), name, spec)
    with read_errors(graph.name):
        why = refusal(graph)
        if why is not None:
            raise UnreadableModel(f"{why}; convert it with types and operators that TFLM has")
        return _tflm_record(graph, build, name, spec)


def find_core(core: str | DeviceSpec) -> tuple[DeviceSpec | None, str, TflmBuild]:
    """Return the board where one is named, its name, and TFLM on its core with the reference kernels."""
    if isinstance(core, str) and (known := CORES.get(normalized(core))) is not None:
        return None, normalized(core), known
    try:
        spec = device(core)
    except UnknownDevice as error:
        raise UnknownDevice(f"{core!r} is neither a core ({', '.join(CORES)}) nor a board: {error}") from None
    if spec.microcontroller is None:
        raise InvalidInput(f"{spec.name} is not a microcontroller; name a core ({', '.join(CORES)}), or another board")
    return spec, spec.name, CORES[spec.microcontroller.core]


def _graph(model: Any, inputs: Any, precision: str) -> TflmGraph:
    check_one_of("precision", precision, ("int8", "fp32"))
    if isinstance(model, ModelProfile):
        return lowered(model.trace, model.name, precision == "int8")
    if isinstance(model, (str, os.PathLike)) and Path(model).suffix.lower() == ".tflite":
        if inputs is not None:
            raise InvalidInput("a .tflite file has inputs of its own; leave inputs out")
        return read_tflm(model)
    module, inputs, kwargs, name = resolve_call(model, inputs, None)
    if isinstance(module, FileModel):
        raise InvalidInput(f"TFLM takes .tflite files, and {module.file.name} is not one; convert it")
    return lowered(trace(module, inputs, kwargs), name or type(module).__name__, precision == "int8")


def _file(model: Any, suffix: str = ".tflite") -> Path:
    """Return the path of a model that must be a file of this kind."""
    file = Path(model) if isinstance(model, (str, os.PathLike)) else None
    if file is None or file.suffix.lower() != suffix:
        runtime = "executorch" if suffix == ".pte" else "tflm"
        raise InvalidInput(f"this runtime takes a {suffix} file; write one with: edge-opt convert --runtime {runtime}")
    return file


def _tflm_record(graph: TflmGraph, build: TflmBuild, name: str, spec: DeviceSpec | None) -> McuMemory:
    """Return the record of the arena and the flash of the operators, with verdicts where a board is known."""
    arena = tflm_arena(graph, build)
    operators = sorted({registered_name(operator) for operator in graph.operators()})
    code = code_size(operators, build.kernels, build.extension == "mve")
    flash = (
        MemoryPart("weights and constants", graph.constant_bytes),
        MemoryPart("rest of the model file", graph.nbytes - graph.constant_bytes),
        MemoryPart("core of TFLM", code.core_bytes),
        MemoryPart("code shared by operators", code.shared_bytes),
        *(MemoryPart(operator, nbytes) for operator, nbytes in code.operators),
    )
    flash_bytes = graph.nbytes + code.nbytes
    step, alive = _peak(arena)
    verdicts = () if spec is None else _verdicts(spec, arena.minimum_bytes, flash_bytes)
    if graph.is_split:
        verdicts = tuple(replace(verdict, not_counted=f"{verdict.not_counted}; {_SPLIT}") for verdict in verdicts)
    return McuMemory(
        model=graph.name,
        core=name,
        kernels=build.kernels,
        arena_bytes=arena.minimum_bytes,
        head_bytes=arena.head_bytes,
        tail_bytes=arena.tail_bytes,
        tail_parts=tuple(MemoryPart(part, nbytes) for part, nbytes in arena.tail_parts.items()),
        planning_bytes=arena.planning_bytes,
        scratch_bytes=sum(buffer.nbytes for buffer in arena.buffers if buffer.is_scratch),
        peak_tensors=tuple(MemoryPart(buffer.name, buffer.nbytes) for buffer in alive),
        peak_operator=_named_step(graph, step),
        flash_bytes=flash_bytes,
        flash_parts=flash,
        operators=tuple(operators),
        verdicts=verdicts,
        notes=_notes(graph, build, spec),
        precision=_precision(graph),
        advice=_advice(graph, arena, step, alive),
    )


def _st_record(graph: TflmGraph, memory: StMemory, name: str, spec: DeviceSpec | None) -> McuMemory:
    """Return the record of ST Edge AI's activations and flash; its arena is the activations."""
    parts = (MemoryPart("weights and biases", memory.weight_bytes), MemoryPart("code", memory.code_bytes))
    flash_bytes = memory.weight_bytes + memory.code_bytes
    return McuMemory(
        model=graph.name,
        core=name,
        kernels=ST_RUNTIME,
        arena_bytes=memory.activation_bytes,
        head_bytes=memory.activation_bytes,
        flash_bytes=flash_bytes,
        flash_parts=parts,
        scratch_bytes=memory.scratch_bytes,
        peak_tensors=tuple(MemoryPart(buffer.name, buffer.nbytes) for buffer in memory.alive),
        peak_operator=_named_step(graph, memory.step),
        verdicts=() if spec is None else _verdicts(spec, memory.activation_bytes, flash_bytes, _ST_UNSURE),
        notes=("an estimate, fitted to ST Edge AI 4.0.0 on STM32H7; verdicts add 30 % to the activations",),
    )


def _executorch_record(file: Path, name: str) -> McuMemory:
    """Return the memory that ExecuTorch planned for a `.pte` file, as the file states it."""
    with read_errors(file):
        data = mapped(file)
        if bytes(data[4:6]) != b"ET":
            raise UnreadableModel("it does not begin like a program of ExecuTorch")
        plans = Flatbuffer(data).root().tables(1)
        planned = sum(sum(plan.numbers(8, "<i8")) for plan in plans)
    notes = ("not in it, so there is no verdict: code, records of tensors, and memory of delegates such as XNNPACK",)
    parts = (MemoryPart("program file", len(data)),)
    return McuMemory(file.name, name, EXECUTORCH, planned, planned, len(data), parts, notes=notes, precision="unknown")


def _vela_record(run: VelaRun, build: TflmBuild, name: str, spec: DeviceSpec | None) -> McuMemory:
    """Return the record of TFLM with a compiled file, whose activations Vela has placed."""
    memory = _tflm_record(run.graph, build, name, spec)
    return replace(memory, kernels=VELA, precision="int8", advice=(), notes=(run.note, _DRIVER, *memory.notes))


# Operators that compute each element from elements at the same place: the result can replace an input.
_IN_PLACE = frozenset("ADD SUB MUL RELU RELU6 LEAKY_RELU LOGISTIC TANH HARD_SWISH QUANTIZE RESHAPE".split())


def _advice(graph: TflmGraph, arena: TflmArena, step: int, alive: Sequence[PlannedBuffer]) -> tuple[str, ...]:
    """Return what would lower the arena: each change is planned again, with the sizes that it would leave."""
    graph_tensors, operator = graph.subgraphs[0].tensors, _operator_at(graph, step)
    if operator is None:
        return ()
    tensors = [buffer for buffer in alive if not buffer.is_scratch]
    ports = {graph_tensors[index].name for index in graph.subgraphs[0].inputs}
    changes: list[tuple[str, dict[str, int]]] = []
    alike = _with_same_channels(graph, tensors[0].name) if tensors else {}
    if alike and not alike.keys() & ports:
        changes.append((f"half the channels of {short_name(next(iter(alike)))}", alike))
    joined = [tensor for tensor in operator.inputs if tensor is not None and not tensor.is_constant]
    if operator.op in _IN_PLACE and joined and joined[0].nbytes == operator.outputs[0].nbytes:
        changes.append((f"{operator.op} in place, in another runtime", {operator.outputs[0].name: 0}))
    floats = {tensor.name: tensor.elements for tensor in graph_tensors if tensor.dtype == "float32"}
    changes.append(("int8 instead of float32, inputs included", floats))
    spatial = {
        tensor.name: tensor.nbytes // 4
        for tensor in graph_tensors
        if len(tensor.shape) == 4 and min(tensor.shape[1:3]) > 1
    }
    changes.append(("inputs of half the height and width", spatial))
    halves = {buffer.name: buffer.nbytes // 2 for buffer in tensors if buffer.name in spatial.keys() - ports}
    changes.append(("the layers at the peak in two patches, rows that overlap not counted", halves))
    heads = [(what, replanned_head(arena.buffers, sizes)) for what, sizes in changes]
    return tuple(f"{what}: {units.size(head)}" for what, head in heads if head < arena.head_bytes)


def _with_same_channels(graph: TflmGraph, name: str) -> dict[str, int]:
    """Return the tensors that lose channels with one, in the order they are made, with half of their bytes."""
    names = {name}
    steps = []
    for operator in graph.subgraphs[0].operators:
        tensors = [tensor for tensor in (*operator.inputs[:2], *operator.outputs) if tensor and not tensor.is_constant]
        is_alike = len({tensor.shape[-1:] for tensor in tensors}) == 1 and operator.op != "RESHAPE"
        if is_alike and operator.op in KEEPS_CHANNELS | _IN_PLACE:
            steps.append({tensor.name for tensor in tensors})
    for step in (*steps, *reversed(steps)):
        names |= step if names & step else set()
    made = [tensor for operator in graph.subgraphs[0].operators for tensor in operator.outputs]
    given = [graph.subgraphs[0].tensors[index] for index in graph.subgraphs[0].inputs]
    return {tensor.name: tensor.nbytes // 2 for tensor in (*given, *made) if tensor.name in names}


def with_mcu_memory(
    predictions: Sequence[Prediction],
    targets: Sequence[ResolvedTarget],
    profile: ModelProfile,
    model: Any,
    runtime: str | None = None,
) -> tuple[Prediction, ...]:
    """Return predictions with RAM and flash of targets that are microcontrollers: under TFLM, or ST's if asked for."""
    file = model.file if isinstance(model, FileModel) else None
    return tuple(
        _with_memory(prediction, target, file or profile, runtime)
        for prediction, target in zip(predictions, targets, strict=True)
    )


def kernels_on(target: ResolvedTarget) -> Kernels:
    """Return TFLM's kernels on a microcontroller: CMSIS-NN where the core is an Arm, unless its own were asked for."""
    is_reference = target.platform is not None and target.platform.runtime == "tflm-reference"
    return "cmsis-nn" if find_core(target.spec)[2].is_arm and not is_reference else "reference"


def _with_memory(
    prediction: Prediction, target: ResolvedTarget, source: Path | ModelProfile, runtime: str | None
) -> Prediction:
    if target.spec.microcontroller is None:
        return prediction
    if runtime == VELA:
        run = compiled_by_vela(_file(source), target.spec)
        build = replace(find_core(target.spec)[2], kernels=kernels_on(target))
        mcu = _vela_record(run, build, target.spec.name, target.spec)
        seconds = None if run.cpu_operators else run.seconds
        remarks, outside = (run.note, _DRIVER), run.cpu_operators
        return replace(prediction, mcu=mcu, seconds=seconds, basis="vendor", remarks=remarks, outside=outside)
    try:
        return replace(prediction, mcu=memory_on(target, source, prediction.precision, runtime))
    except EdgeOptError as error:
        # Weights stay in flash, so the sum of all tensors would be a wrong verdict.
        remark = f"{MEMORY_UNKNOWN}: {error}"
        return replace(prediction, ram_bytes=(), remarks=(*prediction.remarks, remark))


def memory_on(target: ResolvedTarget, source: Path | ModelProfile, precision: str, runtime: str | None) -> McuMemory:
    """Return RAM and flash on a microcontroller, as profiles and sweeps say them.

    Args:
        target: The microcontroller.
        source: A file, which has a precision of its own, or the profile of a module.
        precision: Of a module.
        runtime: The runtime that was asked for: ST's, else TFLM is meant.
    """
    if isinstance(source, ModelProfile) and precision not in ("int8", "fp32"):
        raise InvalidInput(f"TFLM does not compute in {precision}")
    return mcu_memory(
        source,
        core=target.spec,
        kernels=kernels_on(target),
        precision="fp32" if precision == "fp32" else "int8",
        runtime=ST_RUNTIME if runtime == ST_RUNTIME else "tflm",
    )


def _peak(arena: TflmArena) -> tuple[int, list[PlannedBuffer]]:
    """Return the step at which most bytes are alive, and the buffers of that step, the largest first."""
    change: Counter[int] = Counter()
    for buffer in arena.buffers:
        change[buffer.first] += buffer.size
        change[buffer.last + 1] -= buffer.size
    steps = sorted(change)
    live = list(accumulate(change[step] for step in steps))
    peak = steps[live.index(max(live))] if live else 0
    alive = [buffer for buffer in arena.buffers if buffer.first <= peak <= buffer.last]
    return peak, sorted(alive, key=lambda buffer: -buffer.nbytes)


def _operator_at(graph: TflmGraph, step: int) -> TflmOperator | None:
    """Return the operator of a step; None where operators call other graphs, which have steps of their own."""
    operators = graph.subgraphs[0].operators
    is_plain = not any(operator.subgraphs for operator in operators) and 0 < step <= len(operators)
    return operators[step - 1] if is_plain else None


def _named_step(graph: TflmGraph, step: int) -> str:
    operator = _operator_at(graph, step)
    return "" if operator is None else f"{operator.op} ({step} of {len(graph.subgraphs[0].operators)})"


def _precision(graph: TflmGraph) -> str:
    """Return the type of the operators' first inputs, by how many elements they have."""
    sizes: Counter[str] = Counter()
    for operator in graph.operators():
        for tensor in operator.outputs:
            sizes[tensor.dtype] += tensor.elements
    widest = sizes.most_common(1)[0][0] if sizes else "float32"
    return {"float32": "fp32", "float16": "fp16", "uint8": "int8"}.get(widest, widest)


def _verdicts(spec: DeviceSpec, arena_bytes: int, flash_bytes: int, unsure: float = 0.0) -> tuple[MemoryVerdict, ...]:
    """Return the verdicts on RAM and flash; `unsure` is the share of the arena that is added to the margin."""
    controller = spec.microcontroller
    assert controller is not None
    ram, banks = sum(int(size.value) for size in spec.ram_bytes[:1]), controller.ram_banks
    largest = max((int(bank.figure.value) for bank in banks), default=ram)
    # Without execution in place, code and weights are copied to RAM before they are used.
    in_ram = 0 if controller.executes_in_place else flash_bytes
    flash, margin = spec.flash_bytes, RAM_MARGIN_BYTES + int(unsure * arena_bytes)
    verdicts = (
        [MemoryVerdict("RAM", arena_bytes + in_ram, margin, ram, largest, _RAM_MARGIN, arena_bytes)] if ram else []
    )
    if flash is not None:
        size = int(flash.value)
        verdicts.append(MemoryVerdict("Flash", flash_bytes, FLASH_MARGIN_BYTES, size, size, _FLASH_MARGIN, flash_bytes))
    return tuple(verdicts)


def _notes(graph: TflmGraph, build: TflmBuild, spec: DeviceSpec | None) -> tuple[str, ...]:
    notes = ["TFLM of 2026-08-20; another date moves the figures by some bytes per operator"]
    if build.is_host:
        notes.append("a host with the recording interpreter; a microcontroller needs less")
    if build.extension != "dsp" or not build.is_arm:
        notes.append("code sizes are those of a Cortex-M4; this core's were not measured")
    if spec is not None and spec.microcontroller is not None and not spec.microcontroller.executes_in_place:
        notes.append("this device copies code and weights from flash to RAM: both count as RAM")
    if graph.is_split:
        notes.append(_SPLIT)
    return tuple(notes)
