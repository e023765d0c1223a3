"""Budgets are read as people write them; what cannot be read is pointed at."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_opt.budgets import PROFILE_METRICS, TRIAL_METRICS, parse_budget
from edge_opt.errors import BudgetError, EdgeOptError
from edge_opt.records.profiles import Budget

NAMES = sorted({*PROFILE_METRICS, *TRIAL_METRICS})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("macs <= 600M", ("macs", "<=", 600e6)),
        ("latency_ms <= 20", ("latency_ms", "<=", 20.0)),
        ("latency_ms <= 20 ms", ("latency_ms", "<=", 20.0)),
        ("peak_memory_mb <= 64", ("peak_memory_mb", "<=", 64.0)),
        ("peak_memory_mb <= 64MB", ("peak_memory_mb", "<=", 64.0)),
        ("accuracy_drop <= 0.01", ("accuracy_drop", "<=", 0.01)),
        ("accuracy_drop <= 1%", ("accuracy_drop", "<=", 0.01)),
        ("accuracy_drop <= 1 point", ("accuracy_drop", "<=", 0.01)),
        ("accuracy_drop <= 0.5points", ("accuracy_drop", "<=", 0.005)),
        ("accuracy_drop <= -1%", ("accuracy_drop", "<=", -0.01)),
        ("accuracy>=90%", ("accuracy", ">=", 0.9)),
        ("  size_mb\t<\n.5 ", ("size_mb", "<", 0.5)),
        ("energy_mj <= 3 mJ", ("energy_mj", "<=", 3.0)),
        ("params < 5e6", ("params", "<", 5e6)),
        ("params < 5_000_000", ("params", "<", 5e6)),
        ("throughput > 1.5k", ("throughput", ">", 1500.0)),
        ("flops ≤ 2T", ("flops", "<=", 2e12)),
        ("macs_ratio <= 120%", ("macs_ratio", "<=", 1.2)),
    ],
)
def test_budgets_as_people_write_them(text: str, expected: tuple[str, str, float]) -> None:
    found = parse_budget(text)
    assert (found.metric, found.relation, found.limit) == expected
    assert found.text == text


@pytest.mark.parametrize(
    ("text", "character", "words"),
    [
        ("", "", "name of a metric"),
        ("<= 3", "<", "name of a metric"),
        ("macs", "", "expected <=, <, >= or >"),
        ("macs = 3", "=", "expected <=, <, >= or >"),
        ("macs == 3", "=", "expected <=, <, >= or >"),
        ("macs <= ", "", "expected a number"),
        ("macs <= six", "s", "expected a number"),
        ("macs <= nan", "n", "expected a number"),
        ("macs <= 1e999", "1", "beyond all bounds"),
        ("macs <= -1", "-", "not negative"),
        ("macs <= 6%", "%", "expected k, M, G or T"),
        ("macs <= 6m", "m", "expected k, M, G or T"),
        ("latency_ms <= 20 s", "s", "latency_ms is in ms already"),
        ("latency_ms <= 20%", "%", "latency_ms is in ms already"),
        ("energy_mj <= 3 MJ", "M", "energy_mj is in mj already"),
        ("accuracy >= 90", "9", "write 90%, 90 points or 0.9"),
        ("accuracy_drop <= 1", "1", "write 1%, 1 point or 0.01"),
        ("coverage >= 1.0", "1", "write 1.0%, 1.0 point or 0.01"),
        ("accuracy >= 101%", "1", "at most 100%"),
        ("accuracy >= 0.9k", "k", "expected %, points or the end"),
        ("macs <= 1M params <= 2M", "p", "one budget at a time"),
        ("mcas <= 1M", "m", "closest: macs"),
        ("latency <= 20", "l", "latency_s, latency_ms, latency_us"),
        ("zzzzzz <= 20", "z", "metrics are macs, params"),
    ],
)
def test_the_caret_stands_under_the_character(text: str, character: str, words: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(text)
    problem, shown, caret = str(caught.value).split("\n")
    assert words in problem
    assert text[caught.value.position : caught.value.position + 1] == character
    assert shown == f"  {text}"
    assert caret.index("^") == 2 + caught.value.position


def test_a_metric_of_another_table_is_unknown() -> None:
    with pytest.raises(BudgetError, match="unknown metric 'accuracy'"):
        parse_budget("accuracy >= 0.9", PROFILE_METRICS)


def test_the_error_is_a_users_mistake_and_survives_a_process_boundary() -> None:
    with pytest.raises(EdgeOptError) as caught:
        parse_budget("macs <= x")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@given(st.sampled_from(NAMES), st.sampled_from(["<=", "<", ">=", ">"]), st.floats(0, 1))
def test_what_is_written_out_reads_back(name: str, relation: str, limit: float) -> None:
    found = parse_budget(f"{name} {relation} {limit!r}")
    assert found == Budget(name, found.relation, limit, found.text)
    assert found.relation == relation


@given(st.text() | st.from_regex(r"(macs|latency_ms|accuracy|x) ?(<=|>|=)? ?-?[0-9.e_]{0,5}[kM%s]?", fullmatch=True))
def test_any_text_parses_or_is_pointed_at(text: str) -> None:
    try:
        found = parse_budget(text)
    except BudgetError as error:
        assert 0 <= error.position <= len(text)
        assert str(error).isprintable() or str(error).count("\n") == 2
    else:
        assert found.metric in NAMES and found.text == text


@pytest.mark.parametrize(
    ("relation", "below", "at", "above"),
    [("<=", True, True, False), ("<", True, False, False), (">=", False, True, True), (">", False, False, True)],
)
def test_relations(relation: str, below: bool, at: bool, above: bool) -> None:
    budget = parse_budget(f"macs {relation} 10")
    assert [budget.holds(9), budget.holds(10), budget.holds(11)] == [below, at, above]
    assert not budget.holds(float("nan"))
