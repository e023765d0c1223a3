"""docs/operators.md says the truth about torch's own database of operators."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # samples are meant to be odd
]


@pytest.fixture(scope="module")
def writer() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return import_module("write_operator_table")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def verdicts(writer: Any) -> list[Any]:
    return [writer.verdict(info) for info in writer.database()]


def test_every_operator_is_priced_free_or_explained(writer: Any, verdicts: list[Any]) -> None:
    assert len(verdicts) > 600
    unexplained = [
        item for item in verdicts if item.group in ("unpriced", "refused") and item.name not in writer.REASONS
    ]
    assert unexplained == []


def test_no_explanation_is_left_over(writer: Any, verdicts: list[Any]) -> None:
    explained = {item.name for item in verdicts if item.group in ("unpriced", "refused")}
    assert set(writer.REASONS) <= explained


def test_the_page_is_up_to_date(writer: Any, verdicts: list[Any]) -> None:
    page = writer.PAGE.read_text(encoding="utf-8")
    if writer.torch_version() not in page:
        pytest.skip("the page is of another version of torch")
    assert page == writer.page(verdicts), "run `python scripts/write_operator_table.py`"
