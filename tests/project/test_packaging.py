"""The wheel, as somebody who installs it gets it: nothing but the package and its core requirements."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import edge_opt as eo
from edge_opt.model import SmallCNN
from forked_commands import started

ROOT = Path(__file__).parents[2]
NET = "edge_opt.model:SmallCNN"
LOADERS = """
import torch

def batches():
    return [(torch.zeros(8, 1, 28, 28), torch.arange(8))]

def loaders():
    return {"train": batches(), "validation": batches()}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.glob("*.tar.gz"))
    return next(folder.glob("*.whl"))


def core_requirements(name: str = "edge-opt") -> Iterator[str]:
    """Distributions that `pip install edge-opt` brings along, extras left out."""
    seen: set[str] = set()
    waiting = [re.split(r"[^\w.-]", line)[0] for line in wheel_requirements(name)]
    while waiting:
        wanted = waiting.pop()
        if wanted.lower() in seen:
            continue
        seen.add(wanted.lower())
        try:
            waiting += [re.split(r"[^\w.-]", line)[0] for line in wheel_requirements(wanted)]
        except metadata.PackageNotFoundError:
            continue  # a requirement of another platform
        yield wanted


def wheel_requirements(name: str) -> list[str]:
    return [line for line in metadata.requires(name) or [] if "extra ==" not in line]


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the unpacked wheel and links to its core requirements: an installation without downloads."""
    folder = tmp_path_factory.mktemp("core")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for name in core_requirements():
        for file in metadata.files(name) or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(core: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run a command of the core with no other packages; each is forked from one process that has torch loaded."""
    support = str(Path(__file__).parents[1] / "support")
    start = f"import sys; sys.path[:0] = ['', {str(core)!r}]; sys.path.append({support!r}); "
    start += "from forked_commands import serve; serve(sys.argv[1])"
    with started(tmp_path_factory.mktemp("commands"), "-I", "-S", "-c", start) as command:
        yield lambda *arguments: subprocess.run(
            [*shlex.split(command), *arguments], capture_output=True, text=True, check=False, cwd=core
        )


def test_the_wheel_holds_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"edge_opt/py.typed", "rasp/py.typed", "edge_opt/boards/data/raspberry-pi-4.toml"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"edge_opt", "rasp"}


@pytest.mark.slow
def test_the_core_profiles(run: Run) -> None:
    done = run("profile", NET, "-i", "1x1x28x28")
    assert done.returncode == 0, done.stderr
    assert "1.03 M MACs" in done.stdout


@pytest.mark.slow
def test_the_core_predicts(run: Run) -> None:
    done = run("profile", NET, "-i", "1x1x28x28", "--target", "raspberry-pi-4")
    assert done.returncode == 0, done.stderr
    assert "raspberry-pi-4" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["profile", "timm:resnet18", "-i", "1x3x64x64"], "pip install timm"),
        (["init", "written.yaml"], "pip install '.[run]'"),
        (["run", "config.yaml"], "pip install '.[run]'"),
        (["sweep", NET, "-i", "8x1x28x28", "--data", "loaders.py:loaders"], "pip install '.[run]'"),
        (["prune", NET, "-i", "1x1x28x28", "--ratio", "0.5"], "pip install '.[compress]'"),
        (["convert", NET, "-i", "1x1x28x28", "-o", "net.onnx"], "pip install '.[onnx]'"),
        (["convert", NET, "-i", "1x1x28x28", "-o", "int8", "--calibration", "loaders.py:batches"],
         "pip install '.[onnx]'"),
        (["report", "profile.json"], "pip install '.[report]'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_needs_an_extra_says_which(core: Path, run: Run, arguments: list[str], cure: str) -> None:
    (core / "config.yaml").write_text("epochs: 1\n")
    (core / "loaders.py").write_text(LOADERS)
    eo.profile(SmallCNN(), (1, 1, 28, 28)).save(core / "profile.json")
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: ") and cure in said
