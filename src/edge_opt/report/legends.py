"""What the headings and marks of each table mean, a sentence each; `--legend` prints them."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from edge_opt.report.table import meanings
from edge_opt.report.terminal import print_sentences

_MOVED = "bytes read plus bytes written by its operators"
_SHARE = "its part of the whole model; so are other columns with %"

PROFILE: Mapping[str, str] = {
    **meanings("path", "op", "index", "kind", "type", "params", "measured_s", "predicted_s", "predicted_bound", "macs"),
    "Output": "shape of its output; +1 means that there is another",
    **dict.fromkeys(("MACs %", "FLOPs %", "Params %", "Moved %", "Activ. %", "Time %", "Pred. %"), _SHARE),
    **meanings("flops", "bytes_moved", "peak_live_bytes", "live_bytes", "activation_bytes", "intensity"),
    "(own work)": "what the module does outside of its children",
    f"({chr(0xD7)}3)": "the module is called three times; the row is all calls together",
    "≥": "at least: an operator in it has no cost rule",
    "planner bound": meanings("planner_bytes")["Planner bound"],
}

TARGETS: Mapping[str, str] = {
    "Target": "the device, platform or calibration that was asked for",
    "Fits": "whether the smallest RAM it is sold with holds the model; an operating system comes on top",
    "Time": "predicted for one forward",
    "90 % interval": "holds the truth nine times in ten",
    "Bound by": "what most of the time goes to: compute, memory or overhead",
    "Est. energy": "joules of one forward, a proxy or a model, never a measurement",
    "Batch": "the largest batch that fits the smallest RAM",
    "Basis": "calibrated or timed there, fitted to times of whole models there, or a rough roofline",
}

COMPARISON: Mapping[str, str] = {
    "A, B": "the models, A is the baseline",
    "Layer": "path of the layer; old → new where it was renamed",
    "Type": "class of the layer; old → new where it was replaced",
    "changed": "what became of the layer: changed, renamed, added, removed",
    "Moved": _MOVED,
    "Peak": "most bytes of activations alive at once while it runs",
    "B − A": "the difference in the figure's unit; the share behind it is of A",
}

CHECK: Mapping[str, str] = {
    "ok, FAIL, ?": "kept, not kept or not known, and undecided: the limit lies inside the interval",
    "Budget": "the limit as it was written",
    "Value": "the figure of this model, with its interval where it is measured or predicted",
    "Limit": "the most, or the least, that is allowed",
    "Over": "how far the value is from its limit, as a share of the limit",
    "Baseline": "the figure of the earlier model",
    "Growth": "how far the value is from the baseline's",
}

TRAINING: Mapping[str, str] = {
    "Layer": "path of the module, without its children",
    "Trained": "parameters that get a gradient",
    "Forward": "FLOPs of the forward",
    "Input grad": "FLOPs of the gradient of its inputs",
    "Weight grad": "FLOPs of the gradient of its weights",
    "Again": "FLOPs that a checkpoint computes again in the backward",
    "Kept": "bytes of activations kept for the backward",
    "Gradients": "bytes of the gradients of its weights",
    "State": "bytes that the optimizer keeps for them",
}

SERVING: Mapping[str, str] = {
    "Part": "part of the model, all layers together",
    "Held": "bytes of its weights in memory",
    "Streamed per step": "bytes read from memory for one token of each sequence, at full context",
    "Share": "its part of those bytes: decoding takes about as long as they take to read",
    "FLOPs per step": "arithmetic for one token of each sequence",
    "Context": "positions in the cache",
    "Cache": "bytes of keys and values at that context",
    "Tokens/s": "tokens per second, of all sequences together",
    "Target": "the device that was asked for",
    "Weights": "format of the weights",
    "Memory": "weights, cache and activations together",
    "Fits": "the smallest RAM that holds it, or what is missing",
    "First token": "seconds until the prompt is read",
    "Interval": "tokens per second that are likely",
    "At start": "tokens per second right after the prompt",
    "Bits": "bits per weight on average",
    "Energy": "joules per token, estimated",
}

DEVICES: Mapping[str, str] = {
    "Device": "the name to ask for it by",
    "Runs on": "who runs a model unless another engine is asked for",
    "RAM": "every size it is sold with, smallest and largest",
    "On paper": "memory bandwidth by the data sheet",
    "Used": "the bandwidth that a roofline uses: measured where somebody has, else a usual share of the paper's",
    "fp32": "operations per second at most in float32",
    "fp16": "operations per second at most in float16",
    "int8": "operations per second at most in int8",
    "Power": "watts, from idle to load",
}


def print_legend(console: Console, legend: Mapping[str, str]) -> None:
    """Print what each heading means; headings with the same meaning, such as shares, stand once."""
    first: dict[str, str] = {}
    for heading, meaning in legend.items():
        first.setdefault(meaning, heading)
    console.print()
    lines = [(heading, meaning) for meaning, heading in first.items()]
    print_sentences(console, lines, label_width=max(len(heading) for heading, _ in lines) + 2)
