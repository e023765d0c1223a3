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


@pytest.fixture
def writer() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return import_module("write_operator_table")
    finally:
        sys.path.remove(str(SCRIPTS))


def test_every_operator_is_priced_free_or_explained_on_the_page(writer: Any) -> None:
    verdicts = [writer.verdict(info) for info in writer.database()]
    assert len(verdicts) > 600
    in_need = {item.name for item in verdicts if item.group in ("unpriced", "refused")}
    assert in_need == set(writer.REASONS)
    page = writer.PAGE.read_text(encoding="utf-8")
    if writer.torch_version() in page:
        assert page == writer.page(verdicts), "run `python scripts/write_operator_table.py`"
