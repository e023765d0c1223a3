"""Optimizers by name: torch's own on parameters without data, and 8-bit states by their sizes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from edge_opt.errors import InvalidInput

_BLOCK = 256  # elements that share one scale in bitsandbytes' block-wise optimizers
_LEAST = 4096  # smaller parameters keep states of 32 bits there


class EightBit(torch.optim.Optimizer):
    """States of 8 bits with a scale in float32 per 256 elements, as bitsandbytes keeps them; its update is fused.

    Nothing is updated: it has the memory of the real one, on parameters without data.
    """

    def __init__(self, params: Any, moments: int) -> None:
        super().__init__(params, {})
        self.moments = moments

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._state(parameter)

    def _state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for moment in range(self.moments):
            if parameter.numel() < _LEAST:
                state[f"state{moment + 1}"] = torch.zeros_like(parameter, dtype=torch.float32)
                continue
            state[f"state{moment + 1}"] = torch.zeros_like(parameter, dtype=torch.uint8)
            blocks = -(-parameter.numel() // _BLOCK)
            state[f"absmax{moment + 1}"] = parameter.new_zeros((blocks,), dtype=torch.float32)
        return state


_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adamw-8bit": partial(EightBit, moments=2),
    "momentum-8bit": partial(EightBit, moments=1),
}
NAMES = tuple(_BY_NAME)


def find_optimizer(wanted: Any) -> tuple[str, Callable[..., Any]]:
    """Return its name, and how to make it for a list of parameters.

    `wanted` is a name, a class of optimizers, an optimizer (its settings are taken) or a function of parameters.
    """
    if isinstance(wanted, str):
        key = wanted.lower().replace("_", "-")
        if key not in _BY_NAME:
            close = difflib.get_close_matches(key, NAMES, n=2, cutoff=0.4)
            closest = f"; closest: {', '.join(close)}" if close else ""
            raise InvalidInput(f"no optimizer named {wanted!r}{closest}. Known: {', '.join(NAMES)}")
        return key, _BY_NAME[key]
    if isinstance(wanted, torch.optim.Optimizer):
        accepted = type(wanted).__init__.__code__.co_varnames
        settings = {name: value for name, value in _unfused(wanted.defaults).items() if name in accepted}
        return type(wanted).__name__, partial(type(wanted), **settings)
    if isinstance(wanted, type) and issubclass(wanted, torch.optim.Optimizer):
        return wanted.__name__, wanted
    if callable(wanted):
        return getattr(wanted, "__name__", type(wanted).__name__), wanted
    raise InvalidInput(
        f"optimizer must be a name ({', '.join(NAMES)}), a torch optimizer or a function; got {wanted!r}"
    )


def groups_of(wanted: Any) -> tuple[tuple[tuple[int, ...], dict[str, Any]], ...]:
    """Return the groups of a given optimizer, ids and settings of each; none where it is yet to be made."""
    if not isinstance(wanted, torch.optim.Optimizer):
        return ()
    return tuple(
        (tuple(map(id, group["params"])), {name: value for name, value in _unfused(group).items() if name != "params"})
        for group in wanted.param_groups
    )


def _unfused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the fused kernel, which torch refuses to run on parameters without data.

    The loop in its place has the same state, and the temporaries of one parameter on top.
    """
    return {name: None if name == "fused" else value for name, value in settings.items()}
