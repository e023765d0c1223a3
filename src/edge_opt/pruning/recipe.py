"""The recipe of a pruned model: applied in one place, saved without pickles."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt._support.extras import import_optional
from edge_opt.errors import InvalidInput, NotSaved, PruningFailed, UnreadableModel
from edge_opt.pruning.attention import HEAD_COUNTS, HEAD_WIDTHS, PrunedAttention
from edge_opt.pruning.coupling import NONE, ChannelMap, Side, channels, counted_attributes
from edge_opt.records.compression import (
    PRUNE_SCHEMA,
    PRUNE_SCHEMA_VERSION,
    ChangedAttribute,
    KeptIndices,
    Pruned,
    PruneSpec,
    TensorShape,
)

# What models call the width of their stream of features, where they keep it beside the layer that makes it.
WIDTHS = ("hidden_dim", "embed_dim", "hidden_size", "d_model")


def prune_spec(model: nn.Module, found: ChannelMap, removed: np.ndarray) -> PruneSpec:
    """The recipe that takes these units out of the model."""
    kept = [
        KeptIndices(place.tensor, place.dim, tuple(np.flatnonzero(stays).tolist()))
        for place, owner in found.tensors.items()
        if not (stays := (owner == NONE) | ~removed[owner]).all()
    ]
    attributes = [
        *_layer_attributes(model, found, removed),
        *_norm_attributes(model, kept),
        *_head_attributes(model, found, removed),
    ]
    changed = {each.tensor for each in kept}
    attention = tuple(
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        and any(f"{path}.{name}".lstrip(".") in changed for name in ("in_proj_weight", "out_proj.weight"))
    )
    return PruneSpec(fingerprint(model), tuple(kept), tuple(dict.fromkeys(attributes)), attention)


def fingerprint(model: nn.Module) -> tuple[TensorShape, ...]:
    """Names and shapes of all that a model's state holds."""
    return tuple(TensorShape(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())


def _layer_attributes(model: nn.Module, found: ChannelMap, removed: np.ndarray) -> list[ChangedAttribute]:
    """What each layer counts, and the width that the module around it remembers for its own reshapes."""

    def left(path: str, module: nn.Module, side: Side) -> int:
        owner = found.layers.get((path, side), found.layers.get((path, "both")))
        return channels(module, side) if owner is None else int(((owner == NONE) | ~removed[owner]).sum())

    changes = []
    for path in dict.fromkeys(path for path, _ in found.layers):
        module = model.get_submodule(path)
        counts = counted_attributes(module, left(path, module, "in"), left(path, module, "out"))
        changes += [ChangedAttribute(path, *item) for item in counts.items() if getattr(module, item[0]) != item[1]]
        before, after = channels(module, "out"), left(path, module, "out")
        parent = path.rpartition(".")[0]
        changes += [
            ChangedAttribute(parent, name, after)
            for name in WIDTHS
            if path and before != after and getattr(model.get_submodule(parent), name, None) == before
        ]
    return changes


def _norm_attributes(model: nn.Module, kept: list[KeptIndices]) -> list[ChangedAttribute]:
    """Norms that torch-pruning does not know, of which only the weight was followed."""
    changes = []
    for each in kept:
        path = each.tensor.rpartition(".")[0]
        module = model.get_submodule(path)
        if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) == 1:
            changes.append(ChangedAttribute(path, "normalized_shape", (len(each.indices),)))
    return changes


def _head_attributes(model: nn.Module, found: ChannelMap, removed: np.ndarray) -> list[ChangedAttribute]:
    changes = []
    for path, units in found.heads.items():
        if removed[units].any():
            changes.append(ChangedAttribute(path, "num_heads", int((~removed[units]).sum())))
    for path, heads in found.head_owners.items():
        owner = found.layers[heads.projections[0], "out"]
        left = int(((owner == NONE) | ~removed[owner]).sum())
        if left == len(owner):
            continue
        module = model.get_submodule(path)
        changes += [
            ChangedAttribute(path, name, left * heads.heads // len(owner))
            for name in HEAD_COUNTS
            if getattr(module, name, None) == heads.heads
        ]
        widths = [name for name in HEAD_WIDTHS if getattr(module, name, None) == heads.width]
        changes += [ChangedAttribute(path, name, left * heads.width // len(owner)) for name in widths]
    return changes


def apply_spec(model: nn.Module, spec: PruneSpec) -> nn.Module:
    """A pruned copy of the original model: the same weights, without what the recipe leaves out.

    Args:
        model: The original model, as it was before pruning.
        spec: The recipe.

    >>> from edge_opt.compress import prune
    >>> from edge_opt.model import SmallCNN
    >>> original = SmallCNN()
    >>> pruned = prune(original, (1, 1, 28, 28), 0.5)
    >>> again = apply_spec(original, pruned.spec)
    >>> again.conv2, bool((again.conv2.weight == pruned.model.conv2.weight).all())
    (Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)), True)
    """
    check_original(model, spec)
    try:
        pruned = copy.deepcopy(model)
    except Exception as error:
        raise PruningFailed(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error
    for path in spec.attention:
        pruned = _replaced(pruned, path)
    _cut(pruned, spec)
    for change in spec.attributes:
        holder = _part(pruned, change.module)
        if not isinstance(getattr(holder, change.name, None), (int, tuple)):
            raise InvalidInput(f"{change.module} has no count {change.name!r}; the recipe is of another model")
        setattr(holder, change.name, change.value)
    for path in spec.attention:
        # A module of its own for its weights only; its sizes are for people who print the model.
        projection: Any = pruned.get_submodule(f"{path}.out_proj".lstrip("."))
        projection.out_features, projection.in_features = projection.weight.shape
    return pruned


def check_original(model: nn.Module, spec: PruneSpec) -> None:
    """Refuse a model that is not the one the recipe was made for."""
    ours = {each.name: each.shape for each in spec.original}
    found = {each.name: each.shape for each in fingerprint(model)}
    cure = "build the original model, with the arguments it had when it was pruned"
    missing, surplus = sorted(ours.keys() - found.keys()), sorted(found.keys() - ours.keys())
    if missing or surplus:
        what = f"lacks {missing[0]!r}" if missing else f"has {surplus[0]!r} besides"
        raise InvalidInput(f"{type(model).__name__} is not the model that was pruned: it {what}; {cure}")
    for name, shape in ours.items():
        if found[name] != shape:
            raise InvalidInput(
                f"{type(model).__name__} is not the model that was pruned: {name} is {found[name]}, not {shape}; {cure}"
            )
    for each in spec.kept:
        size = dict(enumerate(ours.get(each.tensor, ()))).get(each.dim, 0)
        if not each.indices or not 0 <= min(each.indices) <= max(each.indices) < size:
            raise InvalidInput(f"the recipe keeps impossible indices of {each.tensor}, dimension {each.dim}")


def _part(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise InvalidInput(f"{type(model).__name__} has no {path!r}; the recipe is of another model") from error


def _replaced(model: nn.Module, path: str) -> nn.Module:
    module = _part(model, path)
    if not isinstance(module, nn.MultiheadAttention):
        kind = type(module).__name__
        raise InvalidInput(f"{path} is a {kind}, not nn.MultiheadAttention; the recipe is of another model")
    if not path:
        return PrunedAttention(module)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, PrunedAttention(module))
    return model


def _cut(model: nn.Module, spec: PruneSpec) -> None:
    """Take the entries out of the tensors; a tensor that two modules share stays shared."""
    cuts: dict[str, list[KeptIndices]] = {}
    for each in spec.kept:
        cuts.setdefault(each.tensor, []).append(each)
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    names = dict(_named_tensors(model))
    by_identity: dict[int, list[KeptIndices]] = {}
    for name, dims in cuts.items():
        by_identity.setdefault(id(names[name]), dims)
    for name, tensor in names.items():
        if id(tensor) not in by_identity:
            continue
        if id(tensor) not in done:
            # The old tensor is kept alive with the new one: its id must not be used again.
            done[id(tensor)] = (tensor, _selected(tensor, by_identity[id(tensor)]))
        holder, _, leaf = name.rpartition(".")
        module = model.get_submodule(holder)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = done[id(tensor)][1]  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # Recurrent layers keep a second list of their weights, which their kernels read.
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _selected(tensor: torch.Tensor, dims: list[KeptIndices]) -> torch.Tensor:
    with torch.no_grad():
        cut = tensor.detach()
        for each in dims:
            cut = cut.index_select(each.dim, torch.tensor(each.indices, device=cut.device))
        cut = cut.contiguous()
    return nn.Parameter(cut, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cut


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
    """The pruned model again: the original from its factory, cut by the recipe, with the saved weights.

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
    """The model with weights from a file. Every tensor must be there, and none besides.

    Args:
        model: The model that gets the weights.
        path: A .safetensors file, or a .pt or .pth file that holds tensors only.
        allow_pickle: Whether to load a pickled module. Loading runs its code: only for files that you trust like a
            program.
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
    return import_optional("safetensors.torch", "weights on disk need", "compress")


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
