"""A --calibration reference of the command line, turned into batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edge_opt.cli.shell import first_line
from edge_opt.errors import InvalidInput
from edge_opt.loading.references import find_object, parse_reference

FORM = "file.py:NAME or package.module:NAME, a loader, a list of batches, or a function that returns one"


def load_batches(reference: str) -> Iterable[Any]:
    """The batches that a reference names."""
    found = parse_reference(reference)
    if found is None or found.arguments:
        raise InvalidInput(f"{reference!r} names no batches; write {FORM}")
    value = find_object(found)
    if callable(value) and not hasattr(value, "__iter__"):
        try:
            value = value()
        except Exception as error:
            raise InvalidInput(f"{reference!r} raised {first_line(error)}") from error
    if not isinstance(value, Iterable):
        raise InvalidInput(f"{reference!r} is of type {type(value).__name__}; it must be {FORM}")
    return value


def random_batches(inputs: list[Any], named: dict[str, Any], count: int) -> list[Any]:
    """Batches of noise in the shape of the inputs: enough to see that a model converts, not what it is worth."""
    import torch

    from edge_opt.trace.inputs import InputSpec

    generator = torch.Generator().manual_seed(0)

    def drawn(spec: Any) -> Any:
        kind = getattr(torch, spec.dtype or "float32")
        if not kind.is_floating_point:
            return torch.zeros(spec.shape, dtype=kind)
        return torch.randn(spec.shape, generator=generator).to(kind)

    specs = [*inputs, *(value for value in named.values() if isinstance(value, InputSpec))]
    return [tuple(drawn(spec) if isinstance(spec, InputSpec) else spec for spec in specs) for _ in range(count)]
