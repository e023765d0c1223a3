"""A pytest plugin: the fixture `model_budget`, by which a test fails when a model costs more than it may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from edge_opt.records import CheckResult


@pytest.fixture
def model_budget() -> Callable[..., CheckResult]:
    """A function `model_budget(model, shape, macs="<= 600M", peak_memory_mb="<= 64")` that fails the test."""
    return _check


def _check(
    model: Any,
    inputs: Any = None,
    *budgets: str,
    kwargs: Mapping[str, Any] | None = None,
    baseline: Any = None,
    max_increase: Mapping[str, str | float] | None = None,
    on_undecided: Literal["pass", "fail"] = "pass",
    **limits: str,
) -> CheckResult:
    # Nothing of edge_opt or torch is loaded before a test asks for it.
    from edge_opt.checking import check
    from edge_opt.errors import BudgetError
    from edge_opt.report.checked import render

    __tracebackhide__ = True
    wanted = [*budgets, *(f"{metric} {limit}" for metric, limit in limits.items())]
    try:
        result = check(
            model,
            *wanted,
            inputs=inputs,
            kwargs=kwargs,
            baseline=baseline,
            max_increase=max_increase,
            on_undecided=on_undecided,
        )
    except BudgetError as error:
        pytest.fail(str(error), pytrace=False)
    if not result.passed:
        pytest.fail(f"the model does not keep within its budget\n{render(result)}", pytrace=False)
    return result
