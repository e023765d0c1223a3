"""The fixture `model_budget` fails a test that costs too much, and costs nothing where it is not used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import sys
import pytest

def test_torch_is_not_loaded_before_a_test_asks():
    assert "torch" not in sys.modules and "edge_opt.checking" not in sys.modules

def test_within(model_budget):
    from torch import nn
    result = model_budget(nn.Linear(16, 8), (1, 16), macs="<= 128", params="<= 136")
    assert result.passed

def test_beyond(model_budget):
    from torch import nn
    model_budget(nn.Sequential(nn.Linear(16, 8)), (1, 16), "flops <= 1k", macs="<= 100", params="< 1", size_mb="<= 1")

def test_wrong(model_budget):
    from torch import nn
    model_budget(nn.Linear(16, 8), (1, 16), mcas="<= 100")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_cost.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_model_beyond_its_budget_fails_its_test_with_all_there_is_to_know(tmp_path: Path) -> None:
    done = run(tmp_path, "-q", "-rA")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    for shown in (
        "the model does not keep within its budget",
        "FAIL  macs <= 100     128       <= 100   +28.0%",
        "FAIL  params < 1      136          < 1  +13500%",
        "ok    flops <= 1k",
        "0      Linear   128     136",
        "2 of 4 budgets not kept",
        "unknown metric 'mcas'; closest: macs",
    ):
        assert shown in done.stdout, done.stdout
    assert "Traceback" not in done.stdout and "checking.py" not in done.stdout


def test_the_entry_point_is_the_plugin() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\nedge_opt = "edge_opt.pytest_plugin"' in text
