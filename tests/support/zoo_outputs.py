"""Whether models nobody here wrote give the same output before and after a profile, and keep their state."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import edge_opt as eo
from zoo import torchvision_models

Call = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def outputs(model: nn.Module, call: Call) -> list[torch.Tensor]:
    """Every tensor that the model returns, with the same random numbers each time."""
    torch.manual_seed(0)
    result = model(*call[0], **call[1])
    values = tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [value.clone() for value in values if isinstance(value, torch.Tensor)]


def verdict(build: Callable[[], nn.Module], call: Call) -> str:
    """ "same", or what is not; "cannot run" where the model fails without us, "refused" where we do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            model = build().eval()
            before = outputs(model, call)
        except Exception as error:  # whatever a model of others raises
            return f"cannot run: {type(error).__name__}"
        state = _state(model)
        others = _on_meta()
        try:
            eo.profile(model, list(call[0]) or None, kwargs=call[1])
        except eo.EdgeOptError as error:
            found = f"refused: {str(error)[:80]}"
        else:
            found = "same"
        try:
            after = outputs(model, call)
        except Exception as error:  # left broken
            return f"broken: {type(error).__name__}"
    if len(before) != len(after) or not all(map(_is_same, before, after)):
        return "other outputs"
    if _state(model) != state:
        return "other attributes"
    return found if _on_meta() <= others else "tensors on meta"


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def _state(model: nn.Module) -> list[Any]:
    return [
        (type(module), module.training, sorted(module.__dict__), [id(value) for value in module._parameters.values()],
         [id(value) for value in module._buffers.values()], [len(module.__dict__[name]) for name in _HOOKS])
        for module in model.modules()
    ]  # fmt: skip


_HOOKS = [name for name in nn.Module().__dict__ if name.endswith("_hooks")]


def _on_meta() -> int:
    """How many tensors without values there are in this process."""
    gc.collect()
    return sum(torch.Tensor in type(value).__mro__ and value.is_meta for value in gc.get_objects())


def torchvision_zoo(names: list[str] | None = None) -> Iterator[tuple[str, Callable[[], nn.Module], Call]]:
    models = torchvision_models()
    for name in names or models.list_models(module=models):
        size = 299 if name.startswith("inception") else 224
        yield f"torchvision:{name}", partial(models.get_model, name, weights=None), ((image(size),), {})


def timm_families(names: list[str] | None = None) -> Iterator[tuple[str, Callable[[], nn.Module], Call]]:
    """One model of each family: the one whose name is shortest, which is rarely a large one."""
    torchvision_models()
    import timm

    for family in names or timm.list_modules():
        models = timm.list_models(module=family) or [family]
        name = min(models, key=len)
        known = timm.models.get_pretrained_cfg(name) if timm.is_model(name) else None
        size = known.input_size if known else (3, 224, 224)
        yield f"timm:{name}", partial(timm.create_model, name, pretrained=False), ((torch.zeros(1, *size),), {})


def hugging_face(most: int, names: list[str] | None = None) -> Iterator[tuple[str, Callable[[], nn.Module], Call]]:
    """Small models of the default configurations that read tokens."""
    torchvision_models()
    import transformers

    for name in (names or sorted(transformers.CONFIG_MAPPING))[:most]:

        def build(name: str = name) -> nn.Module:
            config = transformers.CONFIG_MAPPING[name]()
            for key, value in _SMALL.items():
                if isinstance(getattr(config, key, None), int):
                    setattr(config, key, value)
            return transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]

        yield f"hf:{name}", build, ((), {"input_ids": torch.arange(32)[None] % 7 + 1})


_SMALL = {
    "num_hidden_layers": 1, "num_layers": 1, "n_layer": 1, "encoder_layers": 1, "decoder_layers": 1,
    "vocab_size": 128, "num_local_experts": 2,
}  # fmt: skip


def image(size: int) -> torch.Tensor:
    return torch.zeros(1, 3, size, size)
