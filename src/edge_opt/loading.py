"""A model by its reference: `torchvision:NAME`, `hf:ORG/NAME`, `file.py:name`, or the path of a model file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from edge_opt._support.extras import pip_name
from edge_opt._support.progress import quiet, report_progress
from edge_opt.errors import EdgeOptError, InvalidInput, MissingExtra, ModelNotFound, first_line

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

FORMS = (
    "torchvision:resnet50, timm:NAME, hf:ORG/NAME, package.module:factory, file.py:factory, file.pt2, file.onnx or "
    "file.tflite"
)
MODEL_FILES = (".onnx", ".tflite", ".pt2")
# `--trust` sets it for one command: processes that build candidates open the file as well, and inherit it.
TRUST = "EDGE_OPT_TRUST"
# What every public function takes as its model.
ModelLike: TypeAlias = "nn.Module | ExportedProgram | Loaded | str | os.PathLike[str]"
_REFERENCE = re.compile(r"(?P<source>.+):(?P<name>[\w./@-]+)(?P<call>\(.*\))?", re.DOTALL)


class ModelReference(NamedTuple):
    """Where to look, what for, and the keyword arguments to call it with."""

    source: str
    name: str
    arguments: dict[str, Any]


def absolute_reference(reference: str) -> str:
    """Return a reference that means the same file in every process, wherever it runs.

    >>> absolute_reference("torchvision:resnet18"), absolute_reference("/nets/net.py:Net")
    ('torchvision:resnet18', '/nets/net.py:Net')
    """
    parsed = parse_reference(reference)
    if parsed is None or not parsed.source.endswith(".py"):
        return reference
    return f"{Path(parsed.source).resolve()}{reference[len(parsed.source) :]}"


def parse_reference(text: str) -> ModelReference | None:
    """Return the parts of `SOURCE:NAME(key=value)`; None where the text has no such form.

    >>> parse_reference("net.py:Net(width=2)")
    ModelReference(source='net.py', name='Net', arguments={'width': 2})
    """
    match = _REFERENCE.fullmatch(text)
    return None if match is None else ModelReference(match["source"], match["name"], _arguments(match["call"], text))


def find_object(reference: ModelReference) -> Any:
    """Return what a reference names, in a Python file or an installed package."""
    return _attribute(_module(reference.source), reference.name, reference.source)


def import_source(text: str) -> None:
    """Import the file or the package of a reference, so that what is pickled from it can be read; nothing is built."""
    reference = parse_reference(text)
    if reference is not None and reference.source not in ("torchvision", "timm", "hf"):
        _module(reference.source)


def _module(source: str) -> ModuleType:
    return _from_file(Path(source)) if source.endswith(".py") else _from_package(source)


def _arguments(call: str | None, reference: str) -> dict[str, Any]:
    """Return the keyword arguments of `factory(width=2)`: literals only, nothing is evaluated."""
    if call is None:
        return {}
    remedy = "write keyword arguments with literal values, such as Net(num_classes=10, act='relu')"
    try:
        node = ast.parse(f"f{call}", mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError("only keyword arguments are taken")
        return dict(map(_keyword, node.keywords))
    except (SyntaxError, ValueError) as error:
        raise ModelNotFound(f"cannot read the arguments of {reference!r}: {error}; {remedy}") from error


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
        what = first_line(error)
        remedy = f"; {_reinstall('torchvision')}" if "torchvision::" in what else ""
        raise ModelNotFound(f"{str(path)!r} cannot be imported: {what}{_line(error, path)}{remedy}") from error
    return module


def _line(error: BaseException, path: Path) -> str:
    """Return the line of the user's file that raised the error, for a message."""
    step, number = error.__traceback__, None
    while step is not None:
        if Path(step.tb_frame.f_code.co_filename) == path:
            number = step.tb_lineno
        step = step.tb_next
    return f" (line {number})" if number else ""


def _from_package(name: str) -> ModuleType:
    try:
        # The current folder may belong to others: only what is not installed is looked for there.
        first = name.partition(".")[0]
        if first not in sys.modules and importlib.util.find_spec(first) is None:
            _on_path(Path.cwd())
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
    """Return names that the user may have meant: models, classes and functions, the module's own first."""
    from torch import nn

    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    usable = {name: value for name, value in public.items() if isinstance(value, nn.Module) or callable(value)}
    own = [name for name, value in usable.items() if getattr(value, "__module__", None) == module.__name__]
    return own or list(usable)


Example = tuple[tuple[Any, ...], dict[str, Any]]


def load_exported(path: Path, trust: bool = False) -> tuple[nn.Module, Example | None]:
    """Return the module of an exported program, and the arguments it was exported with if the file holds them."""
    from edge_opt.trace.module_calls import exported_module

    program = open_program(path, trust)
    return exported_module(program), program.example_inputs


def open_program(path: Path, trust: bool = False) -> Any:
    """Open the exported program of a `.pt2` file.

    torch's reader unpickles parts of the file, evaluates the text of symbolic sizes and loads compiled libraries, so
    opening a file can execute code from it. A check of the members before opening was tried and two crafted files
    passed it; therefore nothing is opened without trust.

    Args:
        path: The file.
        trust: Whether the file's origin is known. The environment variable EDGE_OPT_TRUST, which `--trust` sets, says
            so for a whole process.
    """
    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}; torch.export.save(program, path) writes one")
    if not trust and not os.environ.get(TRUST):
        raise InvalidInput(
            f"{str(path)!r} was not opened: opening a .pt2 file can execute code from the file; if you know its "
            "origin, add --trust (in Python: trust=True), or export the model as .onnx, which is never executed"
        )
    import torch

    try:
        with quiet():  # torch logs tracebacks of its own
            return torch.export.load(path)
    except Exception as error:  # zip, JSON and torch errors alike: none of them is documented
        raise ModelNotFound(
            f"{str(path)!r} cannot be read by torch {torch.__version__}: {first_line(error)}; export it again"
        ) from error


class Loaded(NamedTuple):
    """A model with a name for it.

    Attributes:
        model: The model.
        name: A name for tables.
        example: The arguments that an exported program was exported with, or that a file describes; None for others.
    """

    model: nn.Module
    name: str
    example: Example | None = None


def load_model(reference: str | os.PathLike[str], *, trust: bool = False) -> Loaded:
    """Return the model that a reference names; `profile` and the other functions take the result as a model.

    Args:
        reference: `torchvision:NAME`, `timm:NAME`, `hf:ORG/NAME` (built from its configuration, without weights),
            a folder with the config.json of such a model, `file.py:factory(width=2)`, `package.module:factory`,
            `file.pt2`, or `file.onnx` or `file.tflite`, which are read and not run.
        trust: Whether a `.pt2` may be opened, which can execute code from the file.
    """
    reference = os.fspath(reference)
    report_progress(f"loading {reference}")
    if reference.lower().endswith((".onnx", ".tflite")):
        from edge_opt.model_files.file_model import FileModel, load_onnx, load_tflite

        is_onnx = reference.lower().endswith(".onnx")
        file_model: FileModel = load_onnx(reference) if is_onnx else load_tflite(reference)
        return Loaded(file_model, Path(reference).stem, file_model.example())
    if reference.lower().endswith(".pt2"):
        model, example = load_exported(Path(reference), trust)
        return Loaded(model, Path(reference).stem, example)
    if Path(reference).is_dir() and (Path(reference) / "config.json").is_file():
        from edge_opt.serving.model_source import build_hub_model

        return Loaded(build_hub_model(reference, {}), Path(reference).resolve().name)
    parsed = parse_reference(reference)
    if parsed is None:
        raise _not_a_reference(reference)
    source, name, arguments = parsed
    if source == "torchvision":
        model = _torchvision(name, arguments)
    elif source == "timm":
        model = _timm(name, arguments)
    elif source == "hf":
        from edge_opt.serving.model_source import build_hub_model

        model = build_hub_model(name, arguments)
    else:
        model = _built(find_object(parsed), arguments, reference)
    return Loaded(model, name)


def resolve_call(
    model: Any, inputs: Any = None, kwargs: Mapping[str, Any] | None = None, trust: bool = False
) -> tuple[nn.Module, Any, Mapping[str, Any] | None, str | None]:
    """Return the module, the inputs, the keyword arguments and the name of what a public function takes as its model.

    Without inputs, a file's or an exported program's own are used. The name is None where only the module knows it.

    >>> import torch
    >>> program = torch.export.export(torch.nn.Linear(4, 2), (torch.zeros(3, 4),))
    >>> resolve_call(program)[1][0].shape
    torch.Size([3, 4])
    """
    if isinstance(model, (str, os.PathLike)):
        model = load_model(model, trust=trust)
    name = None
    exported = sys.modules.get("torch.export")
    if exported is not None and isinstance(model, exported.ExportedProgram):
        from edge_opt.trace.module_calls import exported_module

        model, example = exported_module(model), model.example_inputs
    elif isinstance(model, Loaded):
        model, name, example = model
    else:
        return model, inputs, kwargs, None
    if inputs is None and not kwargs and example is not None:
        inputs, kwargs = list(example[0]) or None, dict(example[1])
    return model, inputs, kwargs, name


def check_can_change(module: nn.Module, action: str) -> None:
    """Refuse to prune or train what is not a module, or has a fixed graph: a model file or an exported program."""
    from torch import nn
    from torch.export import UnflattenedModule

    from edge_opt.model_files.file_model import FileModel

    if not isinstance(module, nn.Module):
        raise InvalidInput(f"the model must be a torch.nn.Module, and this is a {type(module).__name__}")
    if isinstance(module, (FileModel, UnflattenedModule)):
        raise InvalidInput(
            f"a model file or an exported program cannot be {action}; pass the module that it was exported from, or "
            "its factory as file.py:NAME"
        )


def _not_a_reference(reference: str) -> EdgeOptError:
    path = Path(reference)
    if path.suffix == ".py":
        return ModelNotFound(f"{reference!r} names a file without a factory; write {path.name}:NAME")
    if path.suffix in (".pt", ".pth", ".safetensors"):
        return ModelNotFound(
            f"{reference!r} is not an exported program; write one with torch.export.save(..., 'NAME.pt2'), "
            "or give the factory of the model"
        )
    return ModelNotFound(f"{reference!r} is not a model reference; a model is {FORMS}")


def _hub(package: str) -> ModuleType:
    """Import a package of models. A broken one counts as missing: which import fails differs by version."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{package} models need {error.name}, which is not installed; run `pip install {pip_name(error.name)}`"
            f"{_same_build()}"
        ) from error
    except Exception as error:
        what = first_line(error)
        culprit = "torchvision" if "torchvision" in what else package
        raise MissingExtra(f"{package} is installed but cannot be imported ({what}): {_reinstall(culprit)}") from error


def _reinstall(package: str) -> str:
    why = "torchvision was built for another torch; " if package == "torchvision" else ""
    return f"{why}run `pip install --force-reinstall --no-deps {package}`{_same_build()}"


def _same_build() -> str:
    """Return which index to install from. pip does not know that compiled packages must fit this torch."""
    import torch

    build = torch.__version__.partition("+")[2]
    return f" from the package index of your torch's {build!r} build" if build else ""


def _no_weights(arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    asked = [name for name in names if arguments.get(name)]
    if asked:
        raise ModelNotFound(f"{asked[0]}= would download weights, and costs do not depend on them; leave it out")


def _torchvision(name: str, arguments: dict[str, Any]) -> nn.Module:
    models = _hub("torchvision").models
    _no_weights(arguments, ("weights", "weights_backbone", "pretrained", "pretrained_backbone"))
    if name not in models.list_models():
        raise ModelNotFound(f"torchvision has no model {name!r}; {closest(name, models.list_models(), 'it')}")
    builder = models.get_model_builder(name)
    # Detection and segmentation models fetch weights for their backbone unless told otherwise.
    accepted = inspect.signature(builder).parameters
    none = {key: None for key in ("weights", "weights_backbone") if key in accepted}
    return _built(builder, {**arguments, **none}, f"torchvision:{name}")


def _timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    timm = _hub("timm")
    _no_weights(arguments, ("pretrained", "checkpoint_path"))
    if name.partition(".")[0] not in timm.list_models():
        raise ModelNotFound(f"timm has no model {name!r}; {closest(name, timm.list_models(), 'it')}")

    def build(**given: Any) -> Any:
        return timm.create_model(name, pretrained=False, **given)

    return _built(build, arguments, f"timm:{name}")


def _built(factory: Any, arguments: dict[str, Any], reference: str) -> nn.Module:
    from torch import nn

    if isinstance(factory, nn.Module):
        if arguments:
            raise ModelNotFound(f"{reference!r} is a model already and takes no arguments; drop the parentheses")
        return factory
    if not callable(factory):
        raise ModelNotFound(f"{reference!r} is of type {type(factory).__name__}; name a model, its class or a function")
    try:
        model = factory(**arguments)
    except (Exception, SystemExit) as error:
        remedy = "; give arguments as NAME(width=1.0)" if isinstance(error, TypeError) and not arguments else ""
        raise ModelNotFound(f"{reference!r} raised {first_line(error)}{remedy}") from error
    if not isinstance(model, nn.Module):
        raise ModelNotFound(f"{reference!r} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model
