"""The recipe of a pruned model: what stays of each tensor, and which attributes change with it.

On disk a pruned model is its recipe as JSON and its weights as safetensors, without pickles.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt._support.extras import import_optional
from edge_opt._support.files import publish, staging
from edge_opt._support.json import from_plain, read_document
from edge_opt.errors import InvalidInput, NotSaved, PruningFailed, UnreadableModel, UnreadableProfile, first_line
from edge_opt.pruning.attention import HEAD_COUNTS, HEAD_WIDTHS, PrunedAttention
from edge_opt.pruning.coupling import ChannelMap, kept_channels
from edge_opt.pruning.layer_kinds import Side, channels, counted_attributes, state_tensors
from edge_opt.records.compression import (
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
# Attributes in which models keep the width of their stream of features, beside the layer that makes it.
WIDTHS = ("hidden_dim", "embed_dim", "hidden_size", "d_model")


def prune_spec(model: nn.Module, channel_map: ChannelMap, removed: np.ndarray) -> PruneSpec:
    """Return the recipe that takes these units out of the model."""
    kept = [
        KeptIndices(at.tensor, at.dim, tuple(np.flatnonzero(stays).tolist()))
        for at, owner in channel_map.tensors.items()
        if not (stays := kept_channels(owner, removed)).all()
    ]
    attributes = [
        *_layer_attributes(model, channel_map, removed),
        *_norm_attributes(model, kept),
        *_head_attributes(model, channel_map, removed),
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
    """Return names and shapes of all tensors that a model's state holds."""
    return tuple(TensorShape(name, tuple(tensor.shape)) for name, tensor in state_tensors(model).items())


def _layer_attributes(model: nn.Module, channel_map: ChannelMap, removed: np.ndarray) -> list[ChangedAttribute]:
    """Return what each layer counts, and the width that the module around it keeps for its own reshapes."""

    def kept_count(path: str, module: nn.Module, side: Side) -> int:
        owner = channel_map.layers.get((path, side), channel_map.layers.get((path, "both")))
        return channels(module, side) if owner is None else int(kept_channels(owner, removed).sum())

    changes = []
    for path in dict.fromkeys(path for path, _ in channel_map.layers):
        module = model.get_submodule(path)
        before, after = channels(module, "out"), kept_count(path, module, "out")
        counts = counted_attributes(module, kept_count(path, module, "in"), after)
        changes += [ChangedAttribute(path, *item) for item in counts.items() if getattr(module, item[0]) != item[1]]
        parent = path.rpartition(".")[0]
        changes += [
            ChangedAttribute(parent, name, after)
            for name in WIDTHS
            if path and before != after and getattr(model.get_submodule(parent), name, None) == before
        ]
    return changes


def _norm_attributes(model: nn.Module, kept: list[KeptIndices]) -> list[ChangedAttribute]:
    """Return the sizes of norms that torch-pruning does not know: it followed only their weight."""
    changes = []
    for each in kept:
        path = each.tensor.rpartition(".")[0]
        module = model.get_submodule(path)
        if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) == 1:
            changes.append(ChangedAttribute(path, "normalized_shape", (len(each.indices),)))
    return changes


def _head_attributes(model: nn.Module, channel_map: ChannelMap, removed: np.ndarray) -> list[ChangedAttribute]:
    changes = []
    for path, units in channel_map.heads.items():
        if removed[units].any():
            changes.append(ChangedAttribute(path, "num_heads", int((~removed[units]).sum())))
    for path, heads in channel_map.head_owners.items():
        owner = channel_map.layers[heads.projections[0], "out"]
        kept, module = int(kept_channels(owner, removed).sum()), model.get_submodule(path)
        for names, count in ((HEAD_COUNTS, heads.heads), (HEAD_WIDTHS, heads.width)):
            changes += [
                ChangedAttribute(path, name, kept * count // len(owner))
                for name in names
                if kept < len(owner) and getattr(module, name, None) == count
            ]
    return changes


def apply_spec(model: nn.Module, spec: PruneSpec) -> nn.Module:
    """Return a pruned copy of the original model: its weights, without the channels that the recipe removes.

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
    pruned = copied_model(model)
    for path in spec.attention:
        attention = _part(pruned, path)
        if not isinstance(attention, nn.MultiheadAttention):
            kind = type(attention).__name__
            raise InvalidInput(f"{path} is a {kind}, not nn.MultiheadAttention; the recipe is of another model")
        if path:
            pruned.set_submodule(path, PrunedAttention(attention))
        else:
            pruned = PrunedAttention(attention)
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


def copied_model(model: nn.Module) -> nn.Module:
    """Return a copy of the model; refuse one that cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise PruningFailed(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error


def check_original(model: nn.Module, spec: PruneSpec) -> None:
    """Refuse a model that is not the one the recipe was made for."""
    expected = {each.name: each.shape for each in spec.original}
    shapes = {each.name: each.shape for each in fingerprint(model)}
    faults = [f"it lacks {name!r}" for name in sorted(expected.keys() - shapes.keys())]
    faults += [f"it has {name!r} besides" for name in sorted(shapes.keys() - expected.keys())]
    common = [name for name in expected if name in shapes]
    faults += [f"{name} is {shapes[name]}, not {expected[name]}" for name in common if shapes[name] != expected[name]]
    if faults:
        raise InvalidInput(
            f"{type(model).__name__} is not the model that was pruned: {faults[0]}; build the original model, with the "
            "arguments it had when it was pruned"
        )
    for each in spec.kept:
        size = dict(enumerate(expected.get(each.tensor, ()))).get(each.dim, 0)
        if not each.indices or not 0 <= min(each.indices) <= max(each.indices) < size:
            raise InvalidInput(f"the recipe keeps impossible indices of {each.tensor}, dimension {each.dim}")


def _part(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise InvalidInput(f"{type(model).__name__} has no {path!r}; the recipe is of another model") from error


def _cut(model: nn.Module, spec: PruneSpec) -> None:
    """Take the entries out of the tensors; a tensor that two modules share stays shared.

    Tensors are compared by id, because equal values do not make a tensor shared. Python reuses the id of an object
    that was collected, so `names` keeps every old tensor alive until all are replaced.
    """
    names = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    dims_of: dict[int, dict[int, KeptIndices]] = {}
    for kept in spec.kept:
        dims_of.setdefault(id(names[kept.tensor]), {}).setdefault(kept.dim, kept)  # a shared tensor is cut once
    cut: dict[int, torch.Tensor] = {}
    for name, tensor in names.items():
        if id(tensor) not in dims_of:
            continue
        if id(tensor) not in cut:
            cut[id(tensor)] = _selected(tensor, dims_of[id(tensor)].values())
        holder, _, leaf = name.rpartition(".")
        module = model.get_submodule(holder)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = cut[id(tensor)]  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # Recurrent layers keep a second list of their weights, which their kernels read instead of the parameters.
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _selected(tensor: torch.Tensor, dims: Iterable[KeptIndices]) -> torch.Tensor:
    with torch.no_grad():
        cut = tensor.detach()
        for each in dims:
            cut = cut.index_select(each.dim, torch.tensor(each.indices, device=cut.device))
        cut = cut.contiguous()
    return nn.Parameter(cut, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cut


def save_pruned(pruned: Pruned, folder: str | os.PathLike[str]) -> Path:
    """Write the recipe (pruned.json) and the weights (weights.safetensors) of a pruned model, both or neither.

    Args:
        pruned: The result of `prune`.
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
        folder: Folder that `save_pruned` wrote.
        factory: A function that builds the original model, with the arguments it had.
    """
    spec = read_spec(Path(folder) / SPEC_FILE)
    original = factory()
    if not isinstance(original, nn.Module):
        raise InvalidInput(f"the factory returned a {type(original).__name__}; it must build the original model")
    return load_weights(apply_spec(original, spec), Path(folder) / WEIGHTS_FILE)


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> nn.Module:
    """Load weights from a file into a model and return it. The file must have exactly the model's tensors.

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
    state = state_tensors(model)
    shared = _shared_names(state)
    faults = [f"lacks {name!r}" for name in state if not any(other in tensors for other in shared[name])]
    faults += [f"has {name!r} besides" for name in tensors if name not in state]
    faults += [
        f"has {name} as {tuple(tensor.shape)}, not {tuple(state[name].shape)}"
        for name, tensor in tensors.items()
        if name in state and tensor.shape != state[name].shape
    ]
    if faults:
        kind = type(model).__name__
        raise UnreadableModel(f"{str(source)!r} does not hold the weights of this {kind}: it {faults[0]}")
    model.load_state_dict(tensors, strict=False)
    return model


def read_spec(path: str | os.PathLike[str]) -> PruneSpec:
    """Read a recipe from its file, as written by 0.2.0 or later."""
    source = Path(path)
    if not source.is_file():
        raise InvalidInput(f"no file {str(source)!r}; a pruned model is a folder with {SPEC_FILE} and {WEIGHTS_FILE}")
    plain = read_document(source, UnreadableModel, "prune the model again")
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
    names_of: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        is_known = tensor.numel() and not tensor.is_meta
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if is_known else name
        names_of.setdefault(key, []).append(name)
    return {name: names for names in names_of.values() for name in names}


def _stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's state, each tensor once, each with memory of its own."""
    state = state_tensors(model)
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
        if zipfile.is_zipfile(source):  # torch stores without compression: no file may become larger in memory
            with zipfile.ZipFile(source) as archive:
                parts = archive.infolist()
            is_packed = any(part.compress_type for part in parts)
            if is_packed or sum(part.file_size for part in parts) > source.stat().st_size:
                raise ValueError("it is compressed, which torch.save does not do; save it again")
        with source.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as stored:
            if stored.find(b"bytearray") >= 0:  # torch makes one of any size
                raise ValueError("it holds a bytearray")
        content = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise UnreadableModel(
                f"{str(source)!r} holds more than tensors, such as a pickled module, and loading that runs code from "
                "the file; save the state_dict as .safetensors instead, or pass allow_pickle=True if you trust the "
                "file as you trust a program"
            ) from error
        content = torch.load(source, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the unpickler of a damaged file stumbles over
        raise UnreadableModel(f"{str(source)!r} is cut off or is not a torch file: {first_line(error)}") from error
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UnreadableModel(f"{str(source)!r} holds a {type(content).__name__}, not a state_dict of tensors")
    return content
