"""Files of pruned models: the recipe as JSON and the weights as safetensors, without pickles."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.extras import import_optional
from edge_opt._support.files import publish, staging
from edge_opt._support.json import from_plain
from edge_opt.errors import InvalidInput, NotSaved, UnreadableModel, UnreadableProfile
from edge_opt.pruning.recipe import apply_spec
from edge_opt.records.compression import PRUNE_SCHEMA, PRUNE_SCHEMA_VERSION, Pruned, PruneSpec

SPEC_FILE = "pruned.json"
WEIGHTS_FILE = "weights.safetensors"


def save_pruned(pruned: Pruned, folder: str | os.PathLike[str]) -> Path:
    """Write the recipe (pruned.json) and the weights (weights.safetensors) of a pruned model, both or neither.

    Args:
        pruned: What `prune` returned.
        folder: Where to write; made if it is not there.

    >>> import tempfile
    >>> from edge_opt.compress import prune
    >>> from edge_opt.model import SmallCNN
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_pruned(prune(SmallCNN(), (1, 1, 28, 28), 0.5), folder + "/small")
    ...     load_pruned(saved, SmallCNN).conv1
    Conv2d(1, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    return save_cut(pruned.model, pruned.spec, folder)


def save_cut(model: nn.Module, spec: PruneSpec, folder: str | os.PathLike[str]) -> Path:
    """Write a model that a recipe made, also one that takes nothing out and was only trained on."""
    recipe = json.dumps(dataclasses.asdict(spec), allow_nan=False).encode()
    weights = _safetensors().save(_stored(model))
    # Both files are complete before either is in place: renaming needs no room on the disk.
    with staging(folder, NotSaved) as aside:
        files = [aside / WEIGHTS_FILE, aside / SPEC_FILE]
        for file, content in zip(files, (weights, recipe), strict=True):
            file.write_bytes(content)
        publish(files, folder)
    return Path(folder)


def load_pruned(folder: str | os.PathLike[str], factory: Callable[[], nn.Module]) -> nn.Module:
    """Load a pruned model: the original from its factory, cut by the recipe, with the saved weights.

    Args:
        folder: What `save_pruned` wrote.
        factory: A function that builds the original model, with the arguments it had.
    """
    spec = read_spec(Path(folder) / SPEC_FILE)
    original = factory()
    if not isinstance(original, nn.Module):
        raise InvalidInput(f"the factory returned a {type(original).__name__}; it must build the original model")
    return load_weights(apply_spec(original, spec), Path(folder) / WEIGHTS_FILE)


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> nn.Module:
    """Load weights from a file into a model and return it. Every tensor must be there, and none besides.

    Args:
        model: The model that gets the weights.
        path: A .safetensors file, or a .pt or .pth file that holds tensors only.
        allow_pickle: Whether to load a pickled module. Loading runs its code: only for files that you trust like a
            program.
    """
    source = Path(path)
    if source.suffix not in (".safetensors", ".pt", ".pth"):
        raise InvalidInput(f"{str(source)!r} is not a file of weights; expected .safetensors, .pt or .pth")
    if not source.is_file():
        raise InvalidInput(f"no file {str(source)!r}; the folder is {Path.cwd()}")
    tensors = _read_safetensors(source) if source.suffix == ".safetensors" else _read_torch(source, allow_pickle)
    state = model.state_dict()
    shared = _shared_names(state)
    missing = [name for name in state if name not in tensors and not any(other in tensors for other in shared[name])]
    surplus = [name for name in tensors if name not in state]
    misshapen = [name for name in tensors if name in state and tensors[name].shape != state[name].shape]
    if missing or surplus or misshapen:
        if missing:
            what = f"lacks {missing[0]!r}"
        elif surplus:
            what = f"has {surplus[0]!r} besides"
        else:
            name = misshapen[0]
            what = f"has {name} as {tuple(tensors[name].shape)}, not {tuple(state[name].shape)}"
        raise UnreadableModel(f"{str(source)!r} does not hold the weights of this {type(model).__name__}: it {what}")
    model.load_state_dict(tensors, strict=False)
    return model


def read_spec(path: str | os.PathLike[str]) -> PruneSpec:
    """Read a recipe from its file, as written by 0.2.0 or later."""
    source = Path(path)
    if not source.is_file():
        raise InvalidInput(f"no file {str(source)!r}; a pruned model is a folder with {SPEC_FILE} and {WEIGHTS_FILE}")
    try:
        plain = json.loads(source.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnreadableModel(f"{str(source)!r} is cut off or is not JSON: {error}") from error
    if not isinstance(plain, dict) or plain.get("schema") != PRUNE_SCHEMA:
        raise UnreadableModel(
            f"{str(source)!r} is not the recipe of a pruned model; its schema must be {PRUNE_SCHEMA!r}"
        )
    if plain.get("schema_version") != PRUNE_SCHEMA_VERSION:
        raise UnreadableModel(
            f"{str(source)!r} has schema version {plain.get('schema_version')!r}; "
            f"this edge_opt reads {PRUNE_SCHEMA_VERSION}"
        )
    try:
        return from_plain(PruneSpec, plain)
    except UnreadableProfile as error:
        raise UnreadableModel(f"{str(source)!r} is damaged: {error}") from error


def _safetensors() -> Any:
    return import_optional("safetensors.torch", "weights on disk need", "compress")


def _shared_names(state: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return for each name all names of the same tensor."""
    by_tensor: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        by_tensor.setdefault(_identity(name, tensor), []).append(name)
    return {name: by_tensor[_identity(name, tensor)] for name, tensor in state.items()}


def _identity(name: str, tensor: torch.Tensor) -> Any:
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() and not tensor.is_meta else name


def _stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's state, each tensor once, each with memory of its own."""
    state = model.state_dict()
    firsts = {names[0] for names in _shared_names(state).values()}
    return {name: state[name].detach().cpu().contiguous().clone() for name in state if name in firsts}


def _read_safetensors(source: Path) -> dict[str, torch.Tensor]:
    library = _safetensors()
    try:
        tensors: dict[str, torch.Tensor] = library.load(source.read_bytes())
    except Exception as error:  # the library has its own tree of exceptions, which differs by version
        raise UnreadableModel(f"{str(source)!r} is cut off or is not a safetensors file: {error}") from error
    return tensors


def _read_torch(source: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise UnreadableModel(
                f"{str(source)!r} holds more than tensors, such as a pickled module, and loading that runs code from "
                "the file; save the state_dict as .safetensors instead, or pass allow_pickle=True if you trust the "
                "file as you trust a program"
            ) from error
        content = torch.load(source, map_location="cpu", weights_only=False)
    except (RuntimeError, EOFError, ValueError) as error:
        raise UnreadableModel(f"{str(source)!r} is cut off or is not a torch file: {error}") from error
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UnreadableModel(f"{str(source)!r} holds a {type(content).__name__}, not a state_dict of tensors")
    return content
