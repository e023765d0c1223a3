"""Compress models: prune, convert, run and explain variants, each compared with the original."""

from edge_opt.explanation.explain import ModelVariant, explain
from edge_opt.explanation.sensitivity import sensitivity
from edge_opt.pruning.attention import PrunedAttention
from edge_opt.pruning.prune import prune
from edge_opt.pruning.recipe import apply_spec, load_pruned, load_weights, save_pruned
from edge_opt.records.compression import FineTuned
from edge_opt.runtimes.convert import convert
from edge_opt.runtimes.export import export_onnx
from edge_opt.runtimes.kernels import profile_runner
from edge_opt.runtimes.protocol import Runner, Runtime, measure_runner, measure_runners, open_runner
from edge_opt.runtimes.registry import register_runtime
from edge_opt.tasks.finetuning import accuracy, finetune

__all__ = [
    "FineTuned",
    "ModelVariant",
    "PrunedAttention",
    "Runner",
    "Runtime",
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
    "profile_runner",
    "prune",
    "register_runtime",
    "save_pruned",
    "sensitivity",
]
