"""docs/operators.md says the truth about torch's own database of operators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_operator_table.py"


@pytest.mark.slow
def test_every_operator_is_priced_free_or_explained_on_the_page() -> None:
    # A process of its own: torch's samples look up the stack for the test that asks, which is slow below pytest.
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make pages`: {done.stdout}{done.stderr}"
    assert int(done.stdout.split()[0]) > 600
