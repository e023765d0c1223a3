"""A pytest plugin: the fixture `model_budget` fails a test when a model exceeds its budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from edge_opt.records.profiles import CheckResult


@pytest.fixture
def model_budget() -> Callable[..., CheckResult]:
    """Return a function that fails the test when a model exceeds its budgets.

    Call it as `model_budget(model, shape, macs="<= 600M", peak_memory_mb="<= 64")`. It returns the `CheckResult`.

    Args:
        model: A model, a profile, or the path of a saved one.
        inputs: As in `edge_opt.profile`, for a model.
        budgets: Limits such as "macs <= 600M".
        kwargs: Arguments of the model by name.
        baseline: A profile, or the path of a saved one, to compare with.
        max_increase: How much figures may grow over the baseline: `{"peak_memory": "5%"}`; a number is a share.
        on_undecided: Whether budgets that are undecided "pass" or "fail".
        limits: Limits by the name of the figure: `macs="<= 600M"`.
    """
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
    # pytest loads this plugin in every project that has edge_opt installed: torch must not be imported before its use.
    from edge_opt.budgets.check import check
    from edge_opt.errors import BudgetError

    __tracebackhide__ = True
    all_budgets = [*budgets, *(f"{metric} {limit}" for metric, limit in limits.items())]
    try:
        result = check(
            model,
            *all_budgets,
            inputs=inputs,
            kwargs=kwargs,
            baseline=baseline,
            max_increase=max_increase,
            on_undecided=on_undecided,
        )
    except BudgetError as error:
        pytest.fail(str(error), pytrace=False)
    if not result.passed:
        pytest.fail(f"the model does not keep within its budget\n{result}", pytrace=False)
    return result
