"""Models side by side, layer by layer. The package is callable: it is also `edge_opt.compare`, the function."""

import sys
from types import ModuleType
from typing import Any

from edge_opt.compare.alignment import align
from edge_opt.compare.layers import layer_figures
from edge_opt.compare.models import compare_profiles
from edge_opt.compare.trials import compare_trials
from edge_opt.records import ModelComparison

__all__ = ["align", "compare_profiles", "compare_trials", "layer_figures"]


class _CallablePackage(ModuleType):
    """Importing a part of this package puts the package where `edge_opt.compare`, the function, is looked for."""

    def __call__(self, *args: Any, **kwargs: Any) -> ModelComparison:
        from edge_opt.comparing import compare

        return compare(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
