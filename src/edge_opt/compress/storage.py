"""Pruned models and weights on disk: safetensors and JSON. Nothing that is loaded is executed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import secrets
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt.compress.spec import apply_spec
from edge_opt.errors import InvalidInput, MissingExtra, NotSaved, UnreadableModel
from edge_opt.records import (
    PRUNE_SCHEMA,
    PRUNE_SCHEMA_VERSION,
    ChangedAttribute,
    KeptIndices,
    Pruned,
    PruneSpec,
    TensorShape,
)

SPEC_FILE = "pruned.json"
WEIGHTS_FILE = "weights.safetensors"


def save_pruned(pruned: Pruned, folder: str | os.PathLike[str]) -> Path:
    """Write the recipe (pruned.json) and the weights (weights.safetensors) of a pruned model, both or neither.

    >>> import tempfile
    >>> from edge_opt.compress import prune
    >>> from edge_opt.model import SmallCNN
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_pruned(prune(SmallCNN(), (1, 1, 28, 28), 0.5), folder + "/small")
    ...     load_pruned(saved, SmallCNN).conv1
    Conv2d(1, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    recipe = json.dumps(dataclasses.asdict(pruned.spec), allow_nan=False).encode()
    weights = _safetensors().save(_stored(pruned.model))
    target = Path(folder)
    is_new = not target.exists()
    drafts: list[tuple[Path, Path]] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in ((WEIGHTS_FILE, weights), (SPEC_FILE, recipe)):
            draft = target / f".{name}.{secrets.token_hex(4)}.tmp"
            drafts.append((draft, target / name))
            draft.write_bytes(content)
        # Both are whole before either is in place: renaming needs no room on the disk.
        for draft, place in drafts:
            draft.replace(place)
    except OSError as error:
        for draft, _ in drafts:
            with contextlib.suppress(OSError):
                draft.unlink()
        if is_new:
            with contextlib.suppress(OSError):
                target.rmdir()
        why = error.strerror or error
        raise NotSaved(f"{str(target)!r} was not written: {why}; nothing is left of the attempt") from error
    return target


def load_pruned(folder: str | os.PathLike[str], factory: Callable[[], nn.Module]) -> nn.Module:
    """The pruned model again: the original from its factory, cut by the recipe, with the saved weights."""
    spec = read_spec(Path(folder) / SPEC_FILE)
    original = factory()
    if not isinstance(original, nn.Module):
        raise InvalidInput(f"the factory returned a {type(original).__name__}; it must build the original model")
    return load_weights(apply_spec(original, spec), Path(folder) / WEIGHTS_FILE)


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> nn.Module:
    """The model with weights from a .safetensors file, or from a .pt or .pth file that holds tensors only.

    Every tensor must be there, and none besides. A pickled module is code, and loading it runs that code: it needs
    `allow_pickle=True`, for files that you trust as you trust a program.
    """
    source = Path(path)
    if source.suffix not in (".safetensors", ".pt", ".pth"):
        raise InvalidInput(f"{str(source)!r} is no file of weights; expected .safetensors, .pt or .pth")
    if not source.is_file():
        raise InvalidInput(f"no file {str(source)!r}; the folder is {Path.cwd()}")
    found = _read_safetensors(source) if source.suffix == ".safetensors" else _read_torch(source, allow_pickle)
    wanted = model.state_dict()
    shared = _shared_names(wanted)
    missing = [name for name in wanted if name not in found and not any(other in found for other in shared[name])]
    surplus = [name for name in found if name not in wanted]
    odd = [name for name in found if name in wanted and found[name].shape != wanted[name].shape]
    if missing or surplus or odd:
        what = (
            f"lacks {missing[0]!r}" if missing
            else f"has {surplus[0]!r} besides" if surplus
            else f"has {odd[0]} as {tuple(found[odd[0]].shape)}, not {tuple(wanted[odd[0]].shape)}"
        )  # fmt: skip
        raise UnreadableModel(f"{str(source)!r} does not hold the weights of this {type(model).__name__}: it {what}")
    model.load_state_dict(found, strict=False)
    return model


def read_spec(path: str | os.PathLike[str]) -> PruneSpec:
    """A recipe from its file; anything else is refused with what is wrong about it."""
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
        return PruneSpec(
            original=tuple(TensorShape(_text(each["name"]), _numbers(each["shape"])) for each in plain["original"]),
            kept=tuple(
                KeptIndices(_text(each["tensor"]), _number(each["dim"]), _numbers(each["indices"]))
                for each in plain["kept"]
            ),
            attributes=tuple(
                ChangedAttribute(_text(each["module"]), _text(each["name"]), _count(each["value"]))
                for each in plain["attributes"]
            ),
            attention=tuple(_text(path) for path in plain["attention"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableModel(f"{str(source)!r} is damaged: {type(error).__name__}: {error}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is not a list of numbers")
    return tuple(_number(value) for value in values)


def _count(value: Any) -> int | tuple[int, ...]:
    return _numbers(value) if isinstance(value, list) else _number(value)


def _safetensors() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise MissingExtra(
            "weights on disk need safetensors, which is not installed; run `pip install 'edge-opt[compress]'`"
        ) from error


def _shared_names(state: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """For each name all names of the same tensor."""
    by_tensor: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        by_tensor.setdefault(_identity(name, tensor), []).append(name)
    return {name: by_tensor[_identity(name, tensor)] for name, tensor in state.items()}


def _identity(name: str, tensor: torch.Tensor) -> Any:
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() and not tensor.is_meta else name


def _stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, each tensor once, each with memory of its own."""
    state = model.state_dict()
    firsts = {names[0] for names in _shared_names(state).values()}
    return {name: state[name].detach().cpu().contiguous().clone() for name in state if name in firsts}


def _read_safetensors(source: Path) -> dict[str, torch.Tensor]:
    library = _safetensors()
    try:
        found: dict[str, torch.Tensor] = library.load(source.read_bytes())
    except Exception as error:  # the library has its own tree of exceptions, which differs by version
        raise UnreadableModel(f"{str(source)!r} is cut off or is not a safetensors file: {error}") from error
    return found


def _read_torch(source: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise UnreadableModel(
                f"{str(source)!r} holds more than tensors, such as a pickled module, and loading that runs code from "
                "the file; save the state_dict as .safetensors instead, or pass allow_pickle=True if you trust the "
                "file as you trust a program"
            ) from error
        found = torch.load(source, map_location="cpu", weights_only=False)
    except (RuntimeError, EOFError, ValueError) as error:
        raise UnreadableModel(f"{str(source)!r} is cut off or is not a torch file: {error}") from error
    if isinstance(found, nn.Module):
        found = found.state_dict()
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UnreadableModel(f"{str(source)!r} holds a {type(found).__name__}, not a state_dict of tensors")
    return found
