"""Models that cache and mutate in forward are, after a profile, what they were before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import edge_opt as eo
import keepers


@pytest.fixture(autouse=True, scope="module")
def unfrozen_at_the_end() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for limit in ("SMALL", "_CONSTANT_WORK_LIMIT"):
        monkeypatch.setattr(f"edge_opt.trace.tape.{limit}", 256)
    keepers.reset()
    # Objects from before do not slow the search for tensors: seconds each in a process that has imported much.
    gc.collect()
    gc.freeze()
    yield
    keepers.reset()


def meta_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and value.is_meta]


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


@torch.no_grad()
def outputs_of(model: nn.Module, x: torch.Tensor, times: int = 2) -> list[torch.Tensor]:
    return [model(x).clone() for _ in range(times)]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt], ids=["succeeds", "raises", "interrupted"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", keepers.KEEPERS, ids=lambda kind: kind.__name__)
def test_a_model_that_keeps_things_is_left_as_found(
    kind: type[nn.Module], warm: bool, error: type[BaseException] | None
) -> None:
    x = torch.randn(4, 8)
    expected = outputs_of(made(kind), x, 3 if warm else 2)
    keepers.reset()
    model = made(kind)
    if warm:
        outputs_of(model, x, 1)
    on_meta = len(meta_tensors())
    before, outside = keepers.fingerprint(model), keepers.globals_now()
    keepers.Stop.error = error
    if error is None:
        eo.profile(model, x)
    else:
        with pytest.raises(eo.EdgeOptError if error is RuntimeError else KeyboardInterrupt):
            eo.profile(model, x)
    keepers.Stop.error = None
    assert keepers.fingerprint(model) == before
    now = keepers.globals_now()
    for name, value in outside.items():
        assert same(now[name], value), name
    assert len(meta_tensors()) == on_meta
    again = outputs_of(model, x)
    assert all(torch.equal(a, b) for a, b in zip(again, expected[-2:], strict=True))


def same(a: object, b: object) -> bool:
    """Whether two values are the same objects in the same places."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(a[key] is b[key] for key in a)
    if isinstance(a, list) and isinstance(b, list) and not all(isinstance(item, str) for item in a):
        return len(a) == len(b) and all(map(lambda one, other: one is other, a, b))
    return a is b if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a == b
