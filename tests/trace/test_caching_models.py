"""Models that cache and mutate in forward are, after a profile, what they were before."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import edge_opt as eo
import keepers


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Set aside what was imported before: a search through it takes seconds for each of hundreds of tests."""
    global keepers
    gc.collect()
    gc.freeze()
    spec = importlib.util.spec_from_file_location("keepers", keepers.__file__)
    assert spec is not None and spec.loader is not None
    before, sys.modules["keepers"] = keepers, importlib.util.module_from_spec(spec)
    keepers = sys.modules["keepers"]
    spec.loader.exec_module(keepers)
    yield
    keepers = sys.modules["keepers"] = before
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for limit in ("SMALL", "_CONSTANT_WORK_LIMIT"):
        monkeypatch.setattr(f"edge_opt.trace.tape.{limit}", 256)
    monkeypatch.setattr("gc.unfreeze", lambda: None)
    keepers.reset()
    yield
    keepers.reset()


def meta_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and value.is_meta]


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return getattr(keepers, kind)().eval()


@torch.no_grad()
def outputs_of(model: nn.Module, x: torch.Tensor, times: int = 2) -> list[torch.Tensor]:
    return [model(x).clone() for _ in range(times)]


def test_there_are_sixty_of_them() -> None:
    assert len(keepers.KEEPERS) >= 60


@pytest.mark.parametrize(
    ("warm", "error"),
    [(False, None), (True, None), (False, RuntimeError)],
    ids=["cold", "warm", "raises"],
)
@pytest.mark.parametrize("kind", [kind.__name__ for kind in keepers.KEEPERS])
def test_a_model_that_keeps_things_is_unchanged_and_no_tensor_of_the_trace_survives(
    kind: str, warm: bool, error: type[BaseException] | None
) -> None:
    x = torch.randn(4, 8)
    expected = outputs_of(made(kind), x, 3 if warm else 2)
    keepers.reset()
    model = made(kind)
    if warm:
        outputs_of(model, x, 1)
    on_meta = len(meta_tensors())
    before, outside = keepers.fingerprint(model), list(tensors_in(keepers.globals_now()))
    keepers.Stop.error = error
    with contextlib.suppress(KeyboardInterrupt) if error is KeyboardInterrupt else contextlib.nullcontext():
        profile_or_refuse(model, x, error)
    keepers.Stop.error = None
    assert keepers.fingerprint(model) == before
    assert len(meta_tensors()) == on_meta
    is_refused = type(model) in keepers.REFUSED
    new = [tensor for tensor in tensors_in(keepers.globals_now()) if not any(tensor is old for old in outside)]
    # A real trace computes the mask, which no input reaches, as an eager run does: it may stay.
    assert is_refused or all(error and torch.equal(tensor, keepers.cached_mask(keepers.WIDE)) for tensor in new)
    if not is_refused:
        again = outputs_of(model, x)
        assert all(torch.equal(a, b) for a, b in zip(again, expected[-2:], strict=True))


def profile_or_refuse(model: nn.Module, x: torch.Tensor, error: type[BaseException] | None) -> None:
    holder = keepers.REFUSED.get(type(model))
    try:
        profile = eo.profile(model, x)
    except eo.EdgeOptError as refusal:
        assert error is RuntimeError or (holder is not None and holder in str(refusal)), str(refusal)
    else:
        assert error is None and profile.totals.macs


def tensors_in(value: object, depth: int = 6) -> Iterator[torch.Tensor]:
    """Return the tensors in nested containers and attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0:  # a list may hold itself
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(key, depth - 1)
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif type(value).__module__ == "keepers":
        yield from tensors_in(
            [getattr(value, name, None) for name in (*getattr(value, "__dict__", ()), "value")], depth - 1
        )


def test_a_hook_that_removes_itself_is_still_registered() -> None:
    model = made("RemovesItsHook")
    eo.profile(model, (4, 8))
    assert len(model.linear._forward_hooks) == 1
    x = torch.randn(4, 8)
    first, second = outputs_of(model, x)
    assert torch.equal(first, second + 1)


def test_a_finalizer_runs_as_often_as_there_are_objects() -> None:
    keepers.Finalized.closed = 0
    eo.profile(made("InFinalized"), (4, 8))
    gc.collect()
    assert keepers.Finalized.closed == 1


def test_side_effects_happen_once() -> None:
    keepers.GLOBAL_COUNT = 0
    outputs_of(model := made("GlobalName"), torch.randn(4, 8), 1)
    keepers.GLOBAL_COUNT = 0
    eo.profile(model, (4, 8))
    assert keepers.GLOBAL_COUNT == 1
