"""References to Python objects: `file.py:name` or `package.module:name`, with literal arguments behind it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from edge_opt.errors import ModelNotFound, first_line

FORMS = "torchvision:resnet50, timm:NAME, package.module:factory, file.py:factory or file.pt2"
_REFERENCE = re.compile(r"(?P<source>.+):(?P<name>[\w./@-]+)(?P<call>\(.*\))?", re.DOTALL)


class Reference(NamedTuple):
    """Where to look, what for, and the keyword arguments to call it with."""

    source: str
    name: str
    arguments: dict[str, Any]


def parse_reference(text: str) -> Reference | None:
    """The parts of `SOURCE:NAME(key=value)`; None where the text has no such form.

    >>> parse_reference("net.py:Net(width=2)")
    Reference(source='net.py', name='Net', arguments={'width': 2})
    """
    found = _REFERENCE.fullmatch(text)
    return None if found is None else Reference(found["source"], found["name"], _arguments(found["call"], text))


def find_object(reference: Reference) -> Any:
    """What a reference names, in a Python file or an installed package."""
    source = reference.source
    module = _from_file(Path(source)) if source.endswith(".py") else _from_package(source)
    return _attribute(module, reference.name, source)


def _arguments(call: str | None, reference: str) -> dict[str, Any]:
    """Keyword arguments of `factory(width=2)`: literals only, nothing is evaluated."""
    if call is None:
        return {}
    cure = "write keyword arguments with literal values, such as Net(num_classes=10, act='relu')"
    try:
        node = ast.parse(f"f{call}", mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError("only keyword arguments are taken")
        return dict(map(_keyword, node.keywords))
    except (SyntaxError, ValueError) as error:
        raise ModelNotFound(f"cannot read the arguments of {reference!r}: {error}; {cure}") from error


def _keyword(keyword: ast.keyword) -> tuple[str, Any]:
    if keyword.arg is None:
        raise ValueError("** is not taken")
    try:
        return keyword.arg, ast.literal_eval(keyword.value)
    except ValueError:
        raise ValueError(f"{ast.unparse(keyword.value)} is not a literal") from None


def closest(name: str, names: Iterable[str], where: str) -> str:
    known = sorted(names)
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"closest: {', '.join(close)}"
    return f"{where} has {', '.join(known[:6])}{', ...' * (len(known) > 6)}" if known else f"{where} has no models"


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}; the folder is {Path.cwd()}")
    # As with `python file.py`, the file's neighbours can be imported, also later from inside forward.
    _on_path(path.parent.resolve())
    name = f"edge_opt_model_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelNotFound(f"{str(path)!r} cannot be imported; it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ModelNotFound(f"{str(path)!r} cannot be imported: {first_line(error)}{_line(error, path)}") from error
    return module


def _line(error: BaseException, path: Path) -> str:
    """Where in the user's file it went wrong."""
    step, number = error.__traceback__, None
    while step is not None:
        if Path(step.tb_frame.f_code.co_filename) == path:
            number = step.tb_lineno
        step = step.tb_next
    return f" (line {number})" if number else ""


def _from_package(name: str) -> ModuleType:
    _on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ModelNotFound(
                f"no module named {error.name!r}; install it, or run from the folder that holds it; a model is {FORMS}"
            ) from error
        raise ModelNotFound(f"{name!r} cannot be imported: {first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise ModelNotFound(f"{name!r} cannot be imported: {first_line(error)}") from error


def _on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _attribute(module: ModuleType, name: str, source: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise ModelNotFound(f"{source!r} has no {name!r}; {closest(name, _factories(module), 'it')}")
        value = getattr(value, part)
    return value


def _factories(module: ModuleType) -> list[str]:
    """Names that could be meant: models, their classes and functions, of the module's own making first."""
    from torch import nn

    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    usable = {name: value for name, value in public.items() if isinstance(value, nn.Module) or callable(value)}
    own = [name for name, value in usable.items() if getattr(value, "__module__", None) == module.__name__]
    return own or list(usable)
