"""Costs on the nodes of an exported program (`.pt2`), for Model Explorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from edge_opt.cost.rules import price
from edge_opt.records import OpCost
from edge_opt.trace.tracer import trace


class _Reading(torch.fx.Interpreter):
    """Runs the nodes one by one, and notes which operators of the trace each became."""

    def __init__(self, graph: Any, spans: dict[str, tuple[int, int]]) -> None:
        super().__init__(graph)
        self.spans = spans

    def run_node(self, n: torch.fx.Node) -> Any:
        before = self._recorded()
        found = super().run_node(n)
        self.spans[n.name] = (before, self._recorded())
        return found

    @staticmethod
    def _recorded() -> int:
        return len(getattr(_get_current_dispatch_mode(), "ops", ()))


class _Spans:
    """What a reading noted; an object of its own, which a trace does not copy."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}


class _Program(nn.Module):
    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph
        self.spans = _Spans()

    def forward(self, *given: Any, **named: Any) -> Any:
        reading = _Reading(self.graph, self.spans.found)
        return reading.run(*tree_leaves((given, named)), enable_io_processing=False)


def program_costs(program: Any, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> dict[str, OpCost]:
    """What each node of an exported program costs, by its name; together they are the whole model's.

    Args:
        program: What `torch.export.export` returns, or `torch.export.load` reads.
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
    """
    model = _Program(program.module())
    traced = trace(model, inputs, kwargs)
    prices = [price(signature).cost for signature in traced.signatures]
    calls = traced.ops
    return {
        name: sum((prices[call.signature] for call in calls[first:end]), OpCost())
        for name, (first, end) in model.spans.found.items()
        if end > first
    }
