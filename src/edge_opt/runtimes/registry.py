"""The registry of runtimes: each is one file in this package and one line here.

Names are known without importing torch, so that command lines can list them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from edge_opt._support.extras import missing_extra
from edge_opt.errors import InvalidInput

if TYPE_CHECKING:
    from edge_opt.records.devices import Precision
    from edge_opt.runtimes.protocol import Runtime

# Each name with the module and the class; torch first, the others by how many models they take.
_CLASSES = {
    "torch": "torch_runtime:Torch",
    "onnxruntime": "onnxruntime:OnnxRuntime",
    "openvino": "openvino:OpenVino",
    "torch-compile": "torch_runtime:CompiledTorch",
    "litert": "litert:LiteRt",
    "executorch": "executorch:ExecuTorch",
}
# Limits what `auto` stands for, such as "torch,onnxruntime" on a machine that builds often.
LIMIT_VARIABLE = "EDGE_OPT_RUNTIMES"
_loaded: dict[str, Runtime] = {}


def register_runtime(runtime: Runtime) -> None:
    """Add a runtime of your own, which `convert` and `open_runner` then take by its name.

    Args:
        runtime: The runtime, as `edge_opt.runtimes.protocol.Runtime` describes it. A name that is taken is an error.

    >>> from edge_opt.runtimes.registry import find_runtime
    >>> register_runtime(find_runtime("onnxruntime"))
    Traceback (most recent call last):
    edge_opt.errors.InvalidInput: the runtime 'onnxruntime' is registered already; give yours another name
    """
    if runtime.name in runtime_names():
        raise InvalidInput(f"the runtime {runtime.name!r} is registered already; give yours another name")
    _loaded[runtime.name] = runtime


def runtime_names() -> tuple[str, ...]:
    """Return the names of all runtimes.

    >>> runtime_names()[:3]
    ('torch', 'onnxruntime', 'openvino')
    """
    return tuple(dict.fromkeys((*_CLASSES, *_loaded)))


def check_name(name: str) -> str:
    """Return the name of a runtime, or refuse an unknown one."""
    if name not in runtime_names():
        raise InvalidInput(f"unknown runtime {name!r}; it is one of {', '.join(runtime_names())}")
    return name


def find_runtime(name: str) -> Runtime:
    """Return a runtime by its name.

    >>> find_runtime("openvino").suffix
    'onnx'
    """
    if name not in _loaded:
        module, _, kind = _CLASSES[check_name(name)].partition(":")
        _loaded[name] = getattr(import_module(f"edge_opt.runtimes.{module}"), kind)()
    return _loaded[name]


def installed_runtimes() -> tuple[str, ...]:
    """Return what `auto` stands for: the runtimes whose packages are installed, without those that must be named.

    The environment variable `EDGE_OPT_RUNTIMES` limits them.
    """
    limit = [name.strip() for name in os.environ.get(LIMIT_VARIABLE, "").split(",") if name.strip()]
    names = [check_name(name) for name in limit] or runtime_names()
    return tuple(name for name in names if find_runtime(name).is_automatic and _missing_package(name) is None)


def check_installed(names: Iterable[str]) -> None:
    """Refuse a runtime whose packages are not installed, with the command that installs them."""
    for name in names:
        package = _missing_package(name)
        if package is not None:
            raise missing_extra(f"the runtime {name} needs", package.replace("_", "-"), find_runtime(name).extra)


def _missing_package(name: str) -> str | None:
    """Return a package that a runtime needs and that is not installed; nothing is imported."""
    return next((package for package in find_runtime(name).requires if find_spec(package) is None), None)


def all_runtimes() -> tuple[Runtime, ...]:
    """Return every runtime."""
    return tuple(find_runtime(name) for name in runtime_names())


def runtimes_by_ending() -> dict[str, str]:
    """Return the runtime that runs a file unless asked otherwise, by the ending of the file.

    >>> runtimes_by_ending()[".onnx"]
    'onnxruntime'
    """
    endings: dict[str, str] = {}
    for runtime in all_runtimes():
        if not runtime.runs_modules:
            endings.setdefault(f".{runtime.suffix}", runtime.name)
    return endings


def check_precision(runtime: Runtime, precision: str) -> None:
    """Refuse a precision that is unknown, or that the runtime does not support, with the reason."""
    known = dict.fromkeys(name for other in all_runtimes() for name in other.precisions)
    if precision not in known:
        raise InvalidInput(f"unknown precision {precision!r}; it is one of {', '.join(known)}")
    reason = runtime.precisions.get(precision, "it is not among its precisions")
    if reason:
        raise InvalidInput(f"{precision} is not supported on {runtime.name}: {reason}")


def unsupported_pairs() -> dict[tuple[Precision, str], str]:
    """Return every (precision, runtime) that cannot be built, with the reason."""
    return {
        (cast("Precision", precision), runtime.name): reason
        for runtime in all_runtimes()
        for precision, reason in runtime.precisions.items()
        if reason
    }
