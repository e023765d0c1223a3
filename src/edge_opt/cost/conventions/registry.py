"""The registry of counting conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from edge_opt.cost.conventions.ledger import Entry, Unit
from edge_opt.cost.conventions.reading import Layer
from edge_opt.errors import InvalidInput, RuleError

Counting = Callable[[Sequence[Layer]], Iterable[Entry]]


@dataclass(frozen=True, slots=True)
class Convention:
    """How another tool counts. `unit` is ours for its number; `by_module`: it goes by the classes of modules."""

    name: str
    unit: Unit
    description: str
    by_module: bool
    counting: Counting


_conventions: dict[str, Convention] = {}
CONVENTIONS: Mapping[str, Convention] = MappingProxyType(_conventions)


def convention(name: str, *, unit: Unit, description: str, by_module: bool) -> Callable[[Counting], Counting]:
    """Register a counting function under the name of its tool."""

    def register(counting: Counting) -> Counting:
        if name in _conventions:
            known = getattr(_conventions[name].counting, "__qualname__", "?")
            raise RuleError(f"convention {name!r} is registered twice: {known} and {counting.__qualname__}")
        _conventions[name] = Convention(name, unit, description, by_module, counting)
        return counting

    return register


def convention_named(name: str, *also: str) -> Convention:
    """The convention of that name; a refusal lists those there are, and what the caller takes besides."""
    try:
        return CONVENTIONS[name]
    except KeyError:
        allowed = ", ".join((*also, *sorted(CONVENTIONS)))
        raise InvalidInput(f"no counting convention named {name!r}; choose one of: {allowed}") from None
