"""A MODEL reference, turned into a torch module. Weights are never downloaded."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_opt.errors import EdgeOptError, MissingExtra, ModelNotFound, first_line
from edge_opt.loading.exported import Example, load_exported
from edge_opt.loading.references import FORMS, closest, find_object, parse_reference

if TYPE_CHECKING:
    from torch import nn


class Loaded(NamedTuple):
    """A model with a name for it; an exported one may bring the arguments it was exported with."""

    model: nn.Module
    name: str
    example: Example | None = None


def load_model(reference: str) -> Loaded:
    """The model that a reference names: a hub's, a factory's with its arguments, or an exported program."""
    if reference.lower().endswith(".pt2"):
        model, example = load_exported(Path(reference))
        return Loaded(model, Path(reference).stem, example)
    found = parse_reference(reference)
    if found is None:
        raise _not_a_reference(reference)
    source, name, arguments = found
    if source == "torchvision":
        model = _torchvision(name, arguments)
    elif source == "timm":
        model = _timm(name, arguments)
    else:
        model = _built(find_object(found), arguments, reference)
    return Loaded(model, name)


def _not_a_reference(reference: str) -> EdgeOptError:
    path = Path(reference)
    if path.suffix == ".py":
        return ModelNotFound(f"{reference!r} names a file without a factory; write {path.name}:NAME")
    if path.suffix in (".pt", ".pth", ".onnx", ".safetensors"):
        return ModelNotFound(
            f"{reference!r} is not an exported program; write one with torch.export.save(..., 'NAME.pt2'), "
            "or give the factory of the model"
        )
    return ModelNotFound(f"{reference!r} is not a model reference; a model is {FORMS}")


def _hub(package: str) -> ModuleType:
    """A package of models. A broken one is as good as absent: which of its imports fails differs by version."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{package} models need {error.name}, which is not installed; run `pip install {error.name}`{_same_build()}"
        ) from error
    except Exception as error:
        what = first_line(error)
        culprit = "torchvision" if "torchvision" in what else package
        why = "torchvision was built for another torch; " if culprit == "torchvision" else ""
        raise MissingExtra(
            f"{package} is installed but cannot be imported ({what}): {why}"
            f"run `pip install --force-reinstall --no-deps {culprit}`{_same_build()}"
        ) from error


def _same_build() -> str:
    """What pip cannot know: compiled packages must fit the torch that is here."""
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
        cure = "; give arguments as NAME(width=1.0)" if isinstance(error, TypeError) and not arguments else ""
        raise ModelNotFound(f"{reference!r} raised {first_line(error)}{cure}") from error
    if not isinstance(model, nn.Module):
        raise ModelNotFound(f"{reference!r} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model
