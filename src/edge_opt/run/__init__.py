"""Runs and sweeps: from a configuration, or a user's own model, to the model to ship.

`eo.run(config, output=None, *, measure_on=None, fresh=False, workers=0)` is `edge_opt.run.pipeline.run`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Calls `run` of the pipeline.

    The function and this package share the name `edge_opt.run`, and Python binds the name to the package as soon as
    one of its modules is imported. To rename the package would break every script that imports from it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from edge_opt.run.pipeline import run

        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
