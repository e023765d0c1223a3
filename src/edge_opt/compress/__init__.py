"""A model made smaller or put into another precision, and proved: pruned, converted, run, explained.

Two modules share their name with a function: `finetune` and `sensitivity`. Both are imported here, so
that the package's own name is always the function.
"""

from edge_opt.compress.attention import PrunedAttention
from edge_opt.compress.converting import convert
from edge_opt.compress.explaining import explain
from edge_opt.compress.exporting import export_onnx
from edge_opt.compress.finetune import FineTuned, accuracy, finetune
from edge_opt.compress.kernels import profile_runner
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
    "explain",
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
