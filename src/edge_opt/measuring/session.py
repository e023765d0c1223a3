"""measure(): latency, layers, memory and energy of one model on this machine; measure_pair(): two models in turn.

What disturbs the machine disturbs both models of a pair, and goes out of their ratio. diagnose() says what a
measurement on this machine would rest on.

The module that `model_files` reads from a file computes nothing; what is measured of a file is a `FileSession`.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt import __version__
from edge_opt._support.checks import check_one_of, check_threads
from edge_opt._support.extras import import_optional, installed
from edge_opt._support.unchanged import unchanged
from edge_opt.cost.rules import price
from edge_opt.cost.totals import layer_costs
from edge_opt.errors import ConversionFailed, InvalidInput, MeasurementFailed, first_line
from edge_opt.loading import ModelLike, resolve_call
from edge_opt.measuring.latency import Progress, TimedCall, cold_memory_latency_s, interleaved, longest_time_s
from edge_opt.measuring.layers import LayerRecorder, clock_of, layer_latencies, measured_step, recording_cost
from edge_opt.measuring.machine import CPU, DEVICE_TYPES, Device, device_count, find_device, read_environment
from edge_opt.measuring.statistics import compare_latencies, compare_placements
from edge_opt.model_files.file_model import FileModel, OnnxModel
from edge_opt.records.costs import LayerCost, Trace
from edge_opt.records.measurements import (
    Comparison,
    Diagnosis,
    Energy,
    Environment,
    Facility,
    Latency,
    LayerLatencies,
    MeasuredMemory,
    Measurement,
    Refusal,
)
from edge_opt.records.profiles import ModelProfile
from edge_opt.trace import trace
from edge_opt.trace.inputs import CallArguments, InputSpec, call_on, map_arguments, on_device
from edge_opt.trace.module_calls import module_paths


def first_dimension(arguments: CallArguments) -> int:
    """Return the batch size, if the first tensor among the arguments has it in front; 1 where there is none."""
    sizes: list[int] = []

    def look(value: torch.Tensor | InputSpec) -> torch.Tensor | InputSpec:
        sizes.append(value.shape[0] if len(value.shape) else 1)
        return value

    map_arguments(arguments, look)
    return sizes[0] if sizes else 1


class Caller:
    """Calls the model with the same arguments each time; what forward may write to comes fresh for each call."""

    def __init__(self, model: nn.Module, arguments: CallArguments) -> None:
        self.model = model
        self.arguments = arguments
        self._fresh: deque[CallArguments] = deque()

    def runner(self, recorder: LayerRecorder | None = None) -> TimedCall:
        """Return a timed call of the model, which the recorder watches."""
        values = (*self.arguments.args, *self.arguments.kwargs.values())
        is_fresh = any(_is_mutable(value) for value in values)

        def prepare(count: int) -> None:
            if is_fresh:
                self._fresh = deque(map_arguments(self.arguments, lambda tensor: tensor) for _ in range(count))
            if recorder is not None:
                recorder.attach(count)

        def collect(count: int) -> None:
            if recorder is not None:
                recorder.detach(count)

        return TimedCall(self._call, prepare, collect)

    def _call(self) -> object:
        arguments = self._fresh.popleft() if self._fresh else self.arguments
        return self.model(*arguments.args, **arguments.kwargs)


def _is_mutable(value: Any) -> bool:
    """Return whether forward could change an argument: a list, a dict, a cache. Tensors do not count."""
    if isinstance(value, tuple):
        return any(_is_mutable(item) for item in value)
    plain = (torch.Tensor, bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, nn.Module)
    return not (value is None or isinstance(value, plain) or callable(value))


@contextmanager
def ready(model: nn.Module, trace: Trace, training: bool, threads: int | None) -> Iterator[None]:
    """Let the model run for inference in the given mode and number of threads; then restore what running changed."""
    modules = list(module_paths(model))
    state = [tensor for module in modules for tensor in module._buffers.values() if tensor is not None]
    if writes_parameters(trace):
        state += list(model.parameters())
    state = [tensor for tensor in state if tensor.layout is torch.strided]
    threads_before = torch.get_num_threads()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        copies = [tensor.clone() for tensor in state]
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        with unchanged(modules, training):
            # The guard switches it off for tracing; what is measured is what the caller would run.
            torch.backends.mha.set_fastpath_enabled(fast_path)
            with torch.inference_mode() if not training else torch.no_grad():
                yield
    finally:
        if threads is not None:
            torch.set_num_threads(threads_before)
        with torch.no_grad():
            for tensor, before in zip(state, copies, strict=True):
                # Expanded tensors and those of inference mode cannot be written to; forward could not either.
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def writes_parameters(trace: Trace) -> bool:
    """Return whether an operator of the trace writes to a parameter, so that running the model would change it."""
    return any(
        trace.signatures[call.signature].op.endswith("_")
        and call.reads
        and trace.storages[call.reads[0]].role == "parameter"
        for call in trace.ops
    )


def measure(
    model: ModelLike,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    batch_size: int | None = None,
    min_time_s: float = 1.0,
    max_time_s: float | None = None,
    target_precision: float = 0.02,
    threads: int | None = None,
    layers: bool = True,
    memory: bool = True,
    energy: str | None = "auto",
    power_watts: float | None = None,
    subtract_idle: bool = False,
    mode: Literal["eval", "train"] = "eval",
    profile: ModelProfile | None = None,
    progress: Progress | None = None,
    repeats: int | None = None,
    warmup: int = 0,
) -> Measurement:
    """Measure latency by layer, memory and energy of one forward pass on this machine.

    Args:
        model: As in `profile`; a module that lives elsewhere than `device` is copied there.
        inputs: As in `profile`; a shape is filled with random numbers.
        kwargs: Arguments of the model by name.
        device: Where to run it, such as "cuda:0".
        batch_size: Samples in one forward, for the throughput; default: the first dimension of the first tensor.
        min_time_s: Seconds to measure at least.
        max_time_s: Seconds to measure at most; default: five times `min_time_s`.
        target_precision: Stop when the 95 % interval of the median is within ± this share of it.
        threads: Threads that torch uses; default: its own number.
        layers: Whether to time each layer.
        memory: Whether to record the allocator in one more forward.
        energy: Name of a meter, "auto" for the first that works, or None for no energy.
        power_watts: Draw of the device in watts, for a proxy where no meter can be used.
        subtract_idle: Whether to measure the idle power and subtract it.
        mode: "eval" for inference; "train" runs the forward of training, and on the CPU a backward (`.training`).
        profile: The profile of the model, if there is one; the model is then not traced again.
        progress: Called with the share that is done and the name of the step.
        repeats: Run it exactly this many times instead of until its latency is known well enough.
        warmup: Runs before those, which are not timed.

    >>> measured = measure(torch.nn.Linear(16, 8), (4, 16), min_time_s=0.01, memory=False, energy=None)
    >>> measured.latency.batch_size, [row.kind for row in measured.layers.layers]
    (4, ['Linear'])
    """
    check_threads(threads)
    limit_s = longest_time_s(min_time_s, max_time_s, target_precision, batch_size, repeats, warmup)
    where, is_training = find_device(device), mode == "train"
    module, inputs, kwargs, _ = resolve_call(model, inputs, kwargs)
    traced, costs = _traced(module, inputs, kwargs, mode, profile)
    caller, runtime = caller_on(module, inputs, kwargs, where, threads)
    plain = caller.runner()
    with ready(caller.model, traced, is_training, threads):
        environment = read_environment(where.name)
        remarks = [*runtime, *_output_remarks(plain.once())]
        recorder = LayerRecorder(caller.model, traced.modules, clock_of(where)) if layers and not runtime else None
        latencies = interleaved(
            {"plain": plain} | ({} if recorder is None else {"recorded": caller.runner(recorder)}),
            batch_size=first_dimension(caller.arguments) if batch_size is None else batch_size,
            min_time_s=min_time_s, max_time_s=limit_s, target_precision=target_precision, device=where,
            environment=environment, progress=progress, repeats=repeats, warmup=warmup,
        )  # fmt: skip
        latency = replace(latencies["plain"], remarks=(*latencies["plain"].remarks, *remarks))
        is_cpu = where.torch_name == "cpu"
        fresh_s = cold_memory_latency_s(plain, min_time_s / 2) if is_cpu and repeats is None else None
        has_step = is_training and recorder is not None and is_cpu
        step = measured_step(caller.model, plain.once, min_time_s, limit_s, target_precision) if has_step else None
        joules, refusals = _energy(
            plain, latency, where, energy=energy, power_watts=power_watts, profile=profile, subtract_idle=subtract_idle
        )
    return Measurement(
        latency=latency,
        layers=None if recorder is None else _layers(costs, latency, latencies["recorded"], recorder, where),
        memory=_memory(caller, traced, where, is_training) if memory and not runtime else None,
        energy=joules, energy_refusals=refusals, environment=environment, training=step, fresh_latency_s=fresh_s,
    )  # fmt: skip


def _energy(
    plain: TimedCall, latency: Latency, device: Device, **options: Any
) -> tuple[Energy | None, tuple[Refusal, ...]]:
    """Return joules of one forward, and the meters that could not be used; options are those of `measure_energy`."""
    from edge_opt.measuring.energy import measure_energy

    def forward() -> None:
        plain.once()
        device.synchronize()

    return measure_energy(forward, latency, device=device.torch_name, **options)


def _memory(caller: Caller, traced: Trace, device: Device, is_training: bool) -> MeasuredMemory | None:
    """Return the memory of one forward; not known on devices whose allocator cannot be asked."""
    if device.torch_name == "mps":
        return None
    from edge_opt.measuring.memory import measure_memory

    args, kwargs = caller.arguments.args, caller.arguments.kwargs
    return measure_memory(caller.model, args, kwargs, traced, device.torch_name, is_training)


def _layers(
    costs: Sequence[LayerCost], plain: Latency, recorded: Latency, recorder: LayerRecorder, device: Device
) -> LayerLatencies:
    """Return the layers of the recorded blocks that were timed; those before them warmed up."""
    blocks = recorder.blocks[-len(recorded.samples_s) :]
    return layer_latencies(costs, plain, recorded, blocks, recording_cost(clock_of(device)))


def open_session(path: Path, threads: int, profile_prefix: str | None = None) -> Any:
    """Open an ONNX file on the CPU; with a prefix, the session writes a profile."""
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Fatal only: an error is raised as well, and warnings are about its own optimizations.
    options.log_severity_level = 4
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own classes, one per status code, with no common base of theirs
        raise ConversionFailed(f"ONNX Runtime cannot load {path.name}: {reason(error)}") from error


def onnxruntime() -> Any:
    """Import ONNX Runtime, or say how to install it."""
    return import_optional("onnxruntime", "ONNX files need", "onnx")


def reason(error: BaseException) -> str:
    """Return the last line of an error, without status codes and folder names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", lines[-1]) if lines else ""


# Beside the sessions, because LiteRT's interpreter refuses to run while anybody else refers to its parts, and what can
# be reached from a module is recorded while it is measured.
_calls: WeakKeyDictionary[FileSession, Callable[[dict[str, Any]], Sequence[Any]]] = WeakKeyDictionary()


class FileSession(nn.Module):
    """A file that its own runtime has loaded. It is called as the model is, and returns tensors.

    Args:
        model: The model that was read from the file.
        threads: Threads of the runtime; default: as many as torch uses.
    """

    def __init__(self, model: FileModel, threads: int | None = None) -> None:
        super().__init__()
        is_onnx = isinstance(model, OnnxModel)
        self.version = f"ONNX Runtime {onnxruntime().__version__}" if is_onnx else "LiteRT"
        self._plan = model.plan
        threads = torch.get_num_threads() if threads is None else threads
        _calls[self] = (_onnx_call if is_onnx else _tflite_call)(model.file, threads)

    def __deepcopy__(self, memo: dict[int, Any]) -> FileSession:
        raise TypeError("what a runtime has loaded cannot be copied")

    def forward(self, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        tensors = self._plan.arguments(given, named)
        outputs = _calls[self]({name: tensor.detach().numpy() for name, tensor in tensors.items()})
        # Texts, sequences and maps are not tensors.
        return tuple(
            torch.from_numpy(value) for value in outputs if hasattr(value, "dtype") and value.dtype.kind in "fiub"
        )


def _onnx_call(file: Path, threads: int) -> Callable[[dict[str, Any]], Sequence[Any]]:
    try:
        session = open_session(file, threads)
    except ConversionFailed as error:
        raise MeasurementFailed(str(error)) from error
    return partial(session.run, None)


def _tflite_call(file: Path, threads: int) -> Callable[[dict[str, Any]], Sequence[Any]]:
    package = import_optional("ai_edge_litert.interpreter", "running a .tflite file needs", "litert", "ai-edge-litert")
    try:
        interpreter = package.Interpreter(model_path=str(file), num_threads=threads)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise MeasurementFailed(f"LiteRT cannot load {str(file)!r}: {first_line(error)}") from error
    ports = interpreter.get_input_details()
    shapes = {port["index"]: tuple(port["shape"]) for port in ports}

    def call(arrays: dict[str, Any]) -> list[Any]:
        # The interpreter and the file list the inputs in one order.
        feeds = {port["index"]: array for port, array in zip(ports, arrays.values(), strict=True)}
        resized = {index: array.shape for index, array in feeds.items() if array.shape != shapes[index]}
        for index, shape in resized.items():
            interpreter.resize_tensor_input(index, shape)
        if resized:
            interpreter.allocate_tensors()
            shapes.update(resized)
        for index, array in feeds.items():
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return [interpreter.get_tensor(details["index"]) for details in interpreter.get_output_details()]

    return call


def caller_on(
    model: ModelLike, inputs: Any, kwargs: Mapping[str, Any] | None, device: Device, threads: int | None
) -> tuple[Caller, list[str]]:
    """Return what is run: the model on the device, or for a file its runtime, with a remark that says which."""
    module, inputs, kwargs, _ = resolve_call(model, inputs, kwargs)
    remarks = []
    if not isinstance(module, FileModel):
        module = on_device(module, device.torch_name)
    elif device.torch_name != "cpu":
        raise InvalidInput(f"a file is measured on the CPU, and the device is {device.torch_name!r}")
    else:
        module = FileSession(module, threads)
        remarks = [f"run by {module.version}; its layers and its memory were not measured"]
    return Caller(module, call_on(module, inputs, kwargs, device.torch_name)), remarks


def _traced(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, mode: str, profile: ModelProfile | None
) -> tuple[Trace, Sequence[LayerCost]]:
    """Return what the model calls and what that costs: from the profile, or found now."""
    check_one_of("mode", mode, ("eval", "train"))
    if profile is not None:
        if profile.mode != mode:
            raise InvalidInput(
                f"the profile is of mode {profile.mode!r} and {mode!r} is to be measured; profile it again"
            )
        return profile.trace, profile.layers
    traced = trace(model, inputs, kwargs, training=mode == "train")
    return traced, layer_costs(traced, [price(signature) for signature in traced.signatures])


def _output_remarks(result: object) -> list[str]:
    """Return a sentence when the model's output has NaN in it; its speed is then that of an accident."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    spoiled = sum(bool(torch.isnan(tensor).any()) for tensor in tensors)
    return [f"{spoiled} of {len(tensors)} output tensors have NaN; check the weights and inputs"] if spoiled else []


def measure_pair(
    baseline: ModelLike,
    model: ModelLike,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    profiles: tuple[ModelProfile, ModelProfile],
    min_time_s: float = 1.0,
    max_time_s: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    limit: float | None = None,
) -> tuple[Measurement, Measurement, Comparison]:
    """Measure both models on the same inputs, a block of each in turn, and compare them round by round.

    Args:
        baseline: The model to compare with.
        model: The model to judge.
        inputs: As in `profile`; both get the same.
        kwargs: Arguments of the models by name.
        profiles: Profiles of both, which say what running them changes.
        min_time_s: Least seconds to measure; each of five copies of a model gets half of it.
        max_time_s: Most seconds, likewise; default: five times the least.
        threads: Threads that torch uses; default: its own number.
        progress: Called with the share that is done and the name of the step.
        limit: The ratio that is asked about: while it lies inside the interval, both are timed again, up to four times
            in all, with copies at other places.
    """
    models = {_BASELINE: baseline, _MODEL: model}
    check_threads(threads)
    callers = {name: caller_on(each, inputs, kwargs, CPU, threads)[0] for name, each in models.items()}
    subjects = {name: caller.model for name, caller in callers.items()}
    with ExitStack() as states:
        for module, profile in zip(subjects.values(), profiles, strict=True):
            states.enter_context(ready(module, profile.trace, False, threads))
        environment = read_environment(CPU.name)
        batch = first_dimension(callers[_MODEL].arguments)
        pairs: list[tuple[Latency, Latency]] = []
        for session in range(_MOST_SESSIONS):
            placements = _placements(subjects, has_originals=not session)
            if not placements:
                break
            latencies = interleaved(
                {
                    f"{name} {number}": Caller(module, callers[name].arguments).runner()
                    for number, pair in enumerate(placements)
                    for name, module in pair.items()
                },
                batch_size=batch, min_time_s=_SHARE_OF_TIME * min_time_s,
                max_time_s=None if max_time_s is None else _SHARE_OF_TIME * max_time_s,
                environment=environment, progress=progress,
            )  # fmt: skip
            pairs += [
                (latencies[f"{_BASELINE} {number}"], latencies[f"{_MODEL} {number}"])
                for number in range(len(placements))
            ]
            verdict = compare_latencies(*pairs[0], paired=True) if len(pairs) == 1 else compare_placements(pairs)
            if limit is None or not verdict.ratio_interval.low <= limit <= verdict.ratio_interval.high:
                break
    before, after = (Measurement(latency, None, None, None, (), environment) for latency in pairs[0])
    return before, after, verdict


_BASELINE, _MODEL = "baseline", "model"
# The models themselves and four copies of each: an interval over five places, for 2.5 times the time.
_COPIES = 4
_SHARE_OF_TIME = 0.5
_MOST_SESSIONS = 4


def _placements(subjects: Mapping[str, nn.Module], has_originals: bool) -> list[Mapping[str, nn.Module]]:
    """Return the models, and copies of them that lie elsewhere in memory; without copies where one cannot be copied.

    The same weights at another address take up to some per cent more or less time, as long as they lie there.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about what an exported program holds
            copies = [{name: copy.deepcopy(module) for name, module in subjects.items()}
                      for _ in range(_COPIES + (not has_originals))]  # fmt: skip
    except Exception:  # whatever a model's own code raises: it is compared as it is
        copies = []
    return [subjects, *copies] if has_originals else [*copies]


_PACKAGES = ("torch", "numpy", "pandas", "torchvision", "timm", "onnxruntime", "openvino")
# A product of this size takes about a millisecond on a small core and fits into its cache.
_SIDE = 256


def diagnose(max_time_s: float = 5.0) -> Diagnosis:
    """Return the machine, packages, devices and meters with why each is or is not usable, and the noise."""
    from edge_opt.measuring.energy import meters

    environment = read_environment()
    noise, repetition = machine_noise(max_time_s, environment)
    return Diagnosis(
        environment=environment,
        interop_threads=torch.get_num_interop_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        versions=(("edge-opt", __version__), *((package, installed(package)) for package in _PACKAGES)),
        devices=tuple(
            Facility(kind, None if device_count(kind) else f"torch {torch.__version__} finds none here")
            for kind in DEVICE_TYPES
        ),
        meters=tuple(Facility(meter.name, meter.refusal) for meter in meters()),
        noise=noise,
        repetition=repetition,
    )


def machine_noise(max_time_s: float, environment: Environment) -> tuple[Latency, Comparison]:
    """Measure a fixed matrix product against itself, in `max_time_s` at most: its latency, and how well it repeats."""
    if not 0 < max_time_s <= 3600:
        raise InvalidInput(f"seconds is {max_time_s}; it must be above 0 and at most 3600, such as 5")
    matrix = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))

    def product() -> object:
        return torch.mm(matrix, matrix)

    # Both sides warm up for a twentieth at most and are measured for two fifths at most.
    with torch.inference_mode():
        sides = interleaved(
            {"once": product, "again": product},
            min_time_s=max_time_s / 20,
            max_time_s=max_time_s * 0.4,
            target_precision=0.005,
            environment=environment,
        )
    return sides["once"], compare_latencies(sides["once"], sides["again"], paired=True)
