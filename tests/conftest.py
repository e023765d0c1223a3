"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "support"))
# What fits the platforms that ship is no part of the package, and has tests all the same.
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "platform_fit"))

# Sweeps of tests try these two unless a test names others: converting for every installed runtime takes a minute.
os.environ.setdefault("EDGE_OPT_RUNTIMES", "torch,onnxruntime")

# How long an example takes says something about the machine, not about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

if TYPE_CHECKING:
    from browser import Browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a process that begins with one of them at the end lets the others wait for it."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One headless browser for the whole session."""
    from browser import Browser

    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def edge_opt_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a shell runs for `edge-opt`: real processes, forked from one that has torch loaded."""
    from forked_commands import started

    with started(tmp_path_factory.mktemp("commands")) as command:
        yield command


@pytest.fixture(scope="module")
def one_fork_server() -> Iterator[None]:
    """Sweeps of this module fork from one and the same process: to start one takes seconds."""
    from edge_opt.search.isolation import keep_fork_servers

    with keep_fork_servers():
        yield


@pytest.fixture(autouse=True, scope="module")
def a_young_process() -> None:
    """What earlier modules imported and left is not searched for garbage again and again.

    A trace looks for what it has left behind. Late in the suite that took five times as long as in a new process.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def new_to_former_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test sees the warning about a former name, which a process shows once."""
    from edge_opt._support import deprecation

    monkeypatch.setattr(deprecation, "_warned", set())


@pytest.fixture
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of this test do not wait for those of others on the machine: their locks are in a folder of their own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


# Each of the many processes that tests start would compile edge_opt and its packages anew, about a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Some virtual machines announce AMX and refuse it, which ends a process that multiplies in bfloat16. oneDNN reads this
# before its first kernel, here and in processes that tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Threads of several tests share the cores: one that waits must not spin, or everything takes several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests that run side by side measure nothing that matters: their sweeps need not wait for each other.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="edge-opt-locks-")

# A calibration or a device file of whoever runs the tests must not change what they see.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="edge-opt-tests-")
