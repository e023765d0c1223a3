"""A model made smaller or put into another precision, and proved: pruned, converted, run, explained.

Two modules share their name with a function, `finetune` and `precision`; all are imported here, in this order, so that
the package's own name is always the function.
"""

from edge_opt.compress.attention import PrunedAttention
from edge_opt.compress.exporting import export_onnx
from edge_opt.compress.finetune import FineTuned, accuracy, finetune
from edge_opt.compress.kernels import profile_runner
from edge_opt.compress.precision import convert
from edge_opt.compress.pruning import prune
from edge_opt.compress.registry import precision, precisions
from edge_opt.compress.runtimes import Runner, measure_runner, measure_runners, open_runner
from edge_opt.compress.sensitivity import sensitivity
from edge_opt.compress.spec import apply_spec
from edge_opt.compress.storage import load_pruned, load_weights, save_pruned

__all__ = [
    "FineTuned",
    "PrunedAttention",
    "Runner",
    "accuracy",
    "apply_spec",
    "convert",
    "export_onnx",
    "finetune",
    "load_pruned",
    "load_weights",
    "measure_runner",
    "measure_runners",
    "open_runner",
    "precision",
    "precisions",
    "profile_runner",
    "prune",
    "save_pruned",
    "sensitivity",
]
# Where each public name lives. Nothing is imported until it is asked for.
_HOMES = {
    "Runner": "runtimes",
    "convert": "precision",
    "explain": "explaining",
    "export_onnx": "exporting",
    "measure_runner": "runtimes",
    "measure_runners": "runtimes",
    "open_runner": "runtimes",
    "precision": "registry",
    "precisions": "registry",
    "profile_runner": "kernels",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_opt.compress' has no attribute {name!r}")
    return getattr(import_module(f"edge_opt.compress.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
