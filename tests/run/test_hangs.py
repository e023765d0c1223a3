"""Code of the user that never returns is interrupted by `time_limit_s`, and named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import edge_opt as eo
from edge_opt.errors import InvalidInput
from edge_opt.search.isolation import Isolation, Limits, limit_user_code, pickle_job

CODE = """
import os, time, torch
from edge_opt.model import SmallCNN

def forever():
    time.sleep(1000)

def trained():
    forever() if os.environ["HANGS"] == "trained" else None
    return SmallCNN().eval()

def metric(outputs, targets):
    forever() if os.environ["HANGS"] == "metric" else None
    return 10**400 if os.environ["HANGS"] == "huge metric" else 1.0

class Broken:
    def __iter__(self):
        raise OSError("the disk is gone")

def loaders():
    forever() if os.environ["HANGS"] == "loaders" else None
    batches = [(torch.zeros(8, 3 if os.environ["HANGS"] == "shape" else 1, 28, 28), torch.arange(8))]
    if os.environ["HANGS"] == "iterator":
        batches = Broken()
    return {"train": batches, "validation": batches}

class Hanging:
    def build(self, candidate, folder):
        forever()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hangs") / "hanging_net.py"
    path.write_text(CODE)
    return str(path)


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("shape", "the first call of model, loss and metric raised RuntimeError: Given groups=1"),
        ("iterator", "loading the data raised OSError: the disk is gone"),
        ("huge metric", "it must return a number"),
    ],
)
def test_what_the_users_code_raises_is_one_sentence(
    file: str, way: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGS", way)
    metric = {"metric": f"{file}:metric", "metric_direction": "higher"}
    with pytest.raises(InvalidInput, match=sentence):
        eo.sweep(f"{file}:trained", f"{file}:loaders", output=tmp_path, **metric)


@pytest.mark.parametrize("hangs", ["trained", "loaders", "metric"])
def test_what_hangs_before_the_first_process_is_interrupted(
    file: str, hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGS", hangs)
    begun = time.monotonic()
    with pytest.raises(InvalidInput, match=r"time_limit_s, 1 s, in forever \(line 6\)"):
        eo.sweep(
            f"{file}:trained", f"{file}:loaders", output=tmp_path, time_limit_s=1.0,
            metric=f"{file}:metric", metric_direction="higher",
        )  # fmt: skip
    assert time.monotonic() - begun < 20


def test_what_hangs_in_a_process_is_named(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(file).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(file).parent))
    from hanging_net import Hanging  # type: ignore[import-not-found]

    with Isolation(["hanging_net"]) as isolation:  # imported before the limit begins
        outcome = isolation.run(pickle_job(Hanging()), "build", (None, None), tmp_path, Limits(None, 1.0))
    assert outcome.failure == "timed out"
    assert "in forever (hanging_net.py, line 6)" in outcome.reason


def test_the_timer_is_restored() -> None:
    import signal

    former = signal.getsignal(signal.SIGALRM)
    with limit_user_code(5.0, "nothing"):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) is former
