"""A model, made smaller, and proved."""

from edge_opt.compress.attention import PrunedAttention
from edge_opt.compress.finetune import FineTuned, accuracy, finetune
from edge_opt.compress.pruning import prune
from edge_opt.compress.sensitivity import sensitivity
from edge_opt.compress.spec import apply_spec
from edge_opt.compress.storage import load_pruned, load_weights, save_pruned

__all__ = [
    "FineTuned",
    "PrunedAttention",
    "accuracy",
    "apply_spec",
    "finetune",
    "load_pruned",
    "load_weights",
    "prune",
    "save_pruned",
    "sensitivity",
]
