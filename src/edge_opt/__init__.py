"""What a PyTorch model costs on limited hardware, layer by layer, before and after compression."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

# ONNX Runtime 1.29 and later otherwise sends events, and follows a link named /tmp/.ses, which another user may have
# made, to overwrite a file.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Every public name, by the module it lives in. Nothing is imported before it is asked for: `import edge_opt` costs
# nothing, and the command line starts without torch.
_HOMES = {
    "training_steps.step_report": ("training_step",),
    "budgets.batch_fit": ("compare_targets", "fit_batch"),
    "boards.battery": ("battery_life",),
    "boards.capacity": ("peak_memory",),
    "boards.catalog": ("device", "devices"),
    "boards.estimate": ("estimate",),
    "boards.mcu_memory": ("mcu_memory",),
    "boards.platforms": ("fit_platform", "platforms"),
    "boards.ratios": ("latency_ratio",),
    "boards.roofline": ("roofline",),
    "budgets.check": ("check",),
    "calibration.calibrate": ("calibrate",),
    "calibration.predict": ("predict",),
    "explanation.explain": ("explain",),
    "explanation.sensitivity": ("sensitivity",),
    "cost": ("Work", "cost_rule"),
    "cost.conventions": ("reconcile",),
    "errors": ("EdgeOptError",),
    "loading": ("load_model",),
    "measuring.session": ("measure",),
    "model_comparison": ("compare",),
    "profiling": ("profile",),
    "pruning.prune": ("prune",),
    "records.profiles": ("ModelProfile",),
    "report.save": ("load",),
    "run.pipeline": ("sweep",),
    "runtimes.convert": ("convert",),
    "search.space": ("Space",),
    "serving.llm_report": ("llm",),
    "stream": (
        "HardwareProfile", "PrecisionAdvice", "auto_adjust_batch_size", "build_hardware_profile_table",
        "compute_utilization", "estimate_batch_memory_mb", "find_bottleneck", "recommend_precision", "stream_advice",
        "utilization_advice", "write_hardware_profile_artifacts",
    ),
    "trace.inputs": ("InputSpec",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

# Packages that are used by their own name: `eo.compress.finetune`, and `eo.run(config)`, which can be called.
_PACKAGES = ("compress", "run")

# The older API of streams is found here as it always was, and is listed where it lives.
__all__ = sorted([*(name for name, home in _HOME_OF.items() if home != "stream"), *_PACKAGES])

if TYPE_CHECKING:  # the same names for type checkers; a test holds both lists together
    from edge_opt import compress as compress
    from edge_opt.boards.battery import battery_life as battery_life
    from edge_opt.boards.capacity import peak_memory as peak_memory
    from edge_opt.boards.catalog import device as device
    from edge_opt.boards.catalog import devices as devices
    from edge_opt.boards.estimate import estimate as estimate
    from edge_opt.boards.mcu_memory import mcu_memory as mcu_memory
    from edge_opt.boards.platforms import fit_platform as fit_platform
    from edge_opt.boards.platforms import platforms as platforms
    from edge_opt.boards.ratios import latency_ratio as latency_ratio
    from edge_opt.boards.roofline import roofline as roofline
    from edge_opt.budgets.batch_fit import compare_targets as compare_targets
    from edge_opt.budgets.batch_fit import fit_batch as fit_batch
    from edge_opt.budgets.check import check as check
    from edge_opt.calibration.calibrate import calibrate as calibrate
    from edge_opt.calibration.predict import predict as predict
    from edge_opt.cost import Work as Work
    from edge_opt.cost import cost_rule as cost_rule
    from edge_opt.cost.conventions import reconcile as reconcile
    from edge_opt.errors import EdgeOptError as EdgeOptError
    from edge_opt.explanation.explain import explain as explain
    from edge_opt.explanation.sensitivity import sensitivity as sensitivity
    from edge_opt.loading import load_model as load_model
    from edge_opt.measuring.session import measure as measure
    from edge_opt.model_comparison import compare as compare
    from edge_opt.profiling import profile as profile
    from edge_opt.pruning.prune import prune as prune
    from edge_opt.records.profiles import ModelProfile as ModelProfile
    from edge_opt.report.save import load as load
    from edge_opt.run.pipeline import run as run
    from edge_opt.run.pipeline import sweep as sweep
    from edge_opt.runtimes.convert import convert as convert
    from edge_opt.search.space import Space as Space
    from edge_opt.serving.llm_report import llm as llm
    from edge_opt.trace.inputs import InputSpec as InputSpec
    from edge_opt.training_steps.step_report import training_step as training_step


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"edge_opt.{name}")
    if name not in _HOME_OF:
        from edge_opt._support.deprecation import former_attribute

        return former_attribute("edge_opt", name, stacklevel=3)
    value = getattr(import_module(f"edge_opt.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _FormerModules:
    """Finds modules of ours under their former paths."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if not fullname.startswith("edge_opt."):
            return None
        # Not imported before it is needed: that would double the time of `import edge_opt`.
        from edge_opt._support.deprecation import spec_of_former_module

        return spec_of_former_module(fullname)


# Last in the list, it is asked only for modules that no other finder knows.
sys.meta_path.append(_FormerModules())
