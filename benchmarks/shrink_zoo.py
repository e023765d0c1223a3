"""Over many kinds of models: which are pruned, exported, run in verified int8 and int4, and what wrong output passed.

    python benchmarks/shrink_zoo.py [PART OF A NAME ...] [--others] [--again] [--table]

Each model has a process of its own with a time limit, and its row is kept in `results/shrink_zoo.json`: run again, it
goes on with what is missing. `--others` takes models that are on nobody's list, `--again` does rows anew, and
`--table` prints what is there as Markdown.

A model counts as pruned where at least a tenth of its MACs or parameters goes at half of the channels, with the proof
that it is the original with those channels silenced. Models are as their library makes them, with random weights.
Whatever `convert` accepted is compared once more here, on inputs that it never saw. Models are also trained for int8,
two steps on random inputs towards outputs of zero, and the trained copy is converted.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from model_zoo import ALL_NETS, NETS, OTHERS, ZooNet
from timing import RESULTS, save
from torch import nn

from edge_opt.compress import convert, export_onnx, finetune, open_runner, prune
from edge_opt.errors import Disagrees, EdgeOptError, message_of
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import Exported
from edge_opt.runtimes.agreement import BOUNDS, difference_share
from edge_opt.runtimes.model_call import ModelCall, model_call
from edge_opt.trace.inputs import flat_tensors

RATIO = 0.5
# Batches of two samples each.
CALIBRATION, FRESH = 16, 8
AT_LEAST = 0.1
STEPS = 2
LIMIT_S = 900
PLACES = (("onnxruntime", "auto"), ("openvino", "static"))
# Asked where the others have no int8, for they are slower to convert to.
FURTHER_PLACES = (("onnxruntime", "static"), ("litert", "auto"), ("executorch", "auto"))
MARK = "ROW "


def row(name: str, net: ZooNet, stack: ExitStack) -> dict[str, Any]:
    """One model, taken through all steps; the model itself must compute afterwards what it computed before."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, start = net.build(), time.process_time()
    inputs, kwargs = net.inputs()
    subject = model_call(model, inputs, kwargs)
    before = subject.outputs(subject.tensors)
    calls = [model_call(model, *net.inputs()).tensors for _ in range(CALIBRATION + FRESH)]
    calibration, fresh = calls[:CALIBRATION], calls[CALIBRATION:]
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    export, file = _exported(model, inputs, kwargs, folder)
    found: dict[str, Any] = {
        "model": name, "prune": _pruned(model, inputs, kwargs), "export": export, "int8": [],
    }  # fmt: skip
    places = [*PLACES]
    call = (model, inputs, kwargs, file)
    while places:
        found["int8"].append(_verified(subject, call, "int8", *places.pop(0), [*calibration], fresh))
        if not places and len(found["int8"]) < len(PLACES) + 1 and not any(each["verified"] for each in found["int8"]):
            places = [*FURTHER_PLACES]
    if any(isinstance(module, nn.Linear) for module in model.modules()):
        found["int4"] = _verified(subject, call, "int4", "onnxruntime", "auto", [*calibration], fresh)
    found["trained"] = _trained(subject, inputs, kwargs, [*calibration], fresh)
    after = subject.outputs(subject.tensors)
    found["left_as_it_was"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {**found, "cpu_s": round(time.process_time() - start)}


def _pruned(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        pruned = prune(model, inputs, RATIO, kwargs=kwargs)
    except EdgeOptError as error:
        return {"pruned": False, "reason": message_of(error)}
    achieved = pruned.achieved
    return {
        "pruned": 1 - min(achieved.macs_ratio, achieved.params_ratio) >= AT_LEAST,
        "macs_left": round(achieved.macs_ratio, 3),
        "params_left": round(achieved.params_ratio, 3),
        "silenced_error": pruned.check.silenced_error,
        "whole": [layer.path for layer in achieved.layers if layer.after == layer.before],
        "layers": len(achieved.layers),
        "reasons": {fall.path: fall.reason for fall in pruned.shortfalls},
    }


def _exported(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any], folder: str
) -> tuple[dict[str, Any], Exported | None]:
    try:
        done = export_onnx(model, inputs, f"{folder}/model.onnx", kwargs=kwargs)
        agreed = convert(model, inputs, "fp32", "onnxruntime", kwargs=kwargs, exported=done).agreement
    except EdgeOptError as error:
        return {"exported": False, "reason": message_of(error)}, None
    return {
        "exported": True,
        "difference": agreed.relative_difference,
        "batch": done.batch,
        "remarks": done.remarks,
    }, done


def _trained(
    subject: ModelCall, inputs: Any, kwargs: Mapping[str, Any], calibration: list[Tensors], fresh: list[Tensors]
) -> dict[str, Any]:
    """Two steps of training for int8, and the trained copy in int8."""

    def forward(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        answer = flat_tensors(subject.flat(None, model)(*batch["tensors"]))
        return next(tensor for tensor in answer if tensor.is_floating_point())

    batches = [{"tensors": tensors, "labels": torch.zeros(len(tensors[0]))} for tensors in calibration[:STEPS]]
    try:
        tuned = finetune(
            subject.model, batches, epochs=1, learning_rate=1e-4, precision="int8", forward=forward, progress=False,
            loss=lambda outputs, labels: outputs.float().square().mean(),
        )  # fmt: skip
    except EdgeOptError as error:
        return {"verified": False, "disagrees": False, "reason": message_of(error)}
    call = (tuned.model, inputs, kwargs, None)
    copy = model_call(tuned.model, inputs, kwargs)
    return _verified(copy, call, "int8", "onnxruntime", "auto", calibration, fresh)


def _verified(
    subject: ModelCall,
    call: tuple[Any, ...],
    precision: str,
    runtime: str,
    scheme: str,
    batches: list[Any],
    fresh: list[Any],
) -> dict[str, Any]:
    """What `convert` accepted, compared once more, or why it refused."""
    model, inputs, kwargs, exported = call
    where: dict[str, Any] = {"runtime": runtime, "scheme": scheme, "verified": False}
    start = time.process_time()
    try:
        done = convert(
            model, inputs, precision, runtime, kwargs=kwargs, scheme=scheme, calibration=batches, exported=exported
        )
    except EdgeOptError as error:
        return {**where, "disagrees": isinstance(error, Disagrees), "reason": message_of(error)}
    with open_runner(done) as runner:
        theirs = _joined([runner(*batch) for batch in fresh])
    ours = _joined([subject.outputs(batch) for batch in fresh])
    floats = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.is_floating_point()]
    difference = max(difference_share(a, b) for a, b in floats)
    taken = sum(layer.precision == precision for layer in done.layers)
    return {
        **where,
        "verified": True,
        "difference": difference,
        "told_apart": min(told_apart(a, b) for a, b in floats),
        "is_wrong": not difference <= BOUNDS[precision],
        f"{precision}_layers": taken,
        "layers": len(done.layers),
        "left": {layer.path: layer.reason for layer in done.kept_layers},
        "cpu_s": round(time.process_time() - start),
    }


def _joined(found: list[Any]) -> list[torch.Tensor]:
    """The outputs of all batches, one under the other."""
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def told_apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Correlation of what tells samples apart: outputs less their mean over the samples. A ruined model is near 0."""
    a, b = ((each.double() - each.double().mean(0)).flatten() for each in (ours, theirs))
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*")
    for option in ("--others", "--again", "--table"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        with ExitStack() as stack:
            print(MARK + json.dumps(row(asked.one, ALL_NETS[asked.one], stack)))
        return
    kept = _kept()
    nets = OTHERS if asked.others else NETS
    names = [name for name in nets if not asked.parts or any(part in name for part in asked.parts)]
    for name in [] if asked.table else names:
        if name not in kept or asked.again:
            kept[name] = _in_a_process(name)
            save("shrink_zoo", [kept[name] for name in ALL_NETS if name in kept])
        print(line(kept[name]), flush=True)
    rows = [kept[name] for name in names if name in kept]
    if asked.table:
        print(
            "| model | pruned: MACs left, parameters left | ONNX | int8, layers | differs by |\n|---|---|---|---|---|"
        )
        print("\n".join(line(each) for each in rows))
        print(
            "\n| model | int4 weights, layers | differs by | trained for int8, layers | differs by |"
            "\n|---|---|---|---|---|"
        )
        print("\n".join(second_line(each) for each in rows if "trained" in each))
    print(
        f"\n{sum(each['prune'].get('pruned', False) for each in rows)} pruned, "
        f"{sum(each['export'].get('exported', False) for each in rows)} exported, "
        f"{sum(any(place['verified'] for place in each['int8']) for each in rows)} in a verified int8, "
        f"{sum(place.get('is_wrong', False) for each in rows for place in _places(each))} wrong outputs accepted, "
        f"{sum(not each.get('left_as_it_was', False) for each in rows)} models changed, of {len(rows)}"
    )


def _places(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*found["int8"], *(found[key] for key in ("int4", "trained") if key in found)]


def _kept() -> dict[str, dict[str, Any]]:
    path = RESULTS / "shrink_zoo.json"
    return {each["model"]: each for each in json.loads(path.read_text())["rows"]} if path.exists() else {}


def _in_a_process(name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * LIMIT_S, preexec_fn=_limited)
    except subprocess.TimeoutExpired:
        return _failed(name, f"not done in {10 * LIMIT_S} s")
    for text in done.stdout.splitlines():
        if text.startswith(MARK):
            found: dict[str, Any] = json.loads(text.removeprefix(MARK))
            return found
    return _failed(name, (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])


def _limited() -> None:
    """CPU time, not the clock's: other programs must not decide what is done."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))


def _failed(name: str, reason: str) -> dict[str, Any]:
    return {"model": name, "prune": {"reason": reason}, "export": {"reason": reason}, "int8": []}


def line(found: Mapping[str, Any]) -> str:
    """A row of the table."""
    cut, export = found["prune"], found["export"]
    share = f"{cut['macs_left']:.0%}, {cut['params_left']:.0%}" if "macs_left" in cut else f"no: {cut['reason'][:90]}"
    places = [each for each in found["int8"] if each["verified"]]
    refused = [each for each in found["int8"] if not each["verified"]]
    layers = "; ".join(f"{each['runtime']} {each['int8_layers']}/{each['layers']}" for each in places)
    layers += "".join(f"; not {each['runtime']}: {_why(each)}" for each in refused)
    worst = ", ".join(f"{each['difference']:.1%}{' WRONG' if each['is_wrong'] else ''}" for each in places)
    file = "yes" if export.get("exported") else f"no: {export['reason'][:90]}"
    text = f"| {found['model']} | {share} | {file} | {layers.lstrip('; ')} | {worst} |"
    return text if found.get("left_as_it_was") else f"{text} CHANGED OR NOT DONE"


def second_line(found: Mapping[str, Any]) -> str:
    """A row of the second table: int4 of weights, and int8 after training for it."""
    cells = []
    for key, precision in (("int4", "int4"), ("trained", "int8")):
        place = found.get(key)
        if place is None:
            cells += ["no linear layer", ""]
        elif place["verified"]:
            wrong = " WRONG" if place["is_wrong"] else ""
            cells += [f"{place[f'{precision}_layers']}/{place['layers']}", f"{place['difference']:.1%}{wrong}"]
        else:
            cells += [f"no: {_why(place)}", ""]
    return f"| {found['model']} | {' | '.join(cells)} |"


def _why(refused: Mapping[str, Any]) -> str:
    return "it disagrees" if refused["disagrees"] else str(refused["reason"]).partition(": ")[0][:60]


if __name__ == "__main__":
    main()
