"""The wheel, as somebody who installs it gets it: nothing but the package and its core requirements."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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


def run(core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path.insert(0, {str(core)!r}); from edge_opt.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, *arguments], capture_output=True, text=True, check=False, cwd=core
    )


def test_the_wheel_holds_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"edge_opt/py.typed", "rasp/py.typed", "edge_opt/devices/data/raspberry-pi-4.toml"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"edge_opt", "rasp"}


@pytest.mark.slow
def test_the_core_profiles(core: Path) -> None:
    done = run(core, "profile", "edge_opt.model:SmallCNN", "-i", "1x1x28x28")
    assert done.returncode == 0, done.stderr
    assert "1.03 M MACs" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "cure"), [(["profile", "timm:resnet18", "-i", "1x3x64x64"], "pip install timm")])
def test_what_needs_an_extra_says_which(core: Path, arguments: list[str], cure: str) -> None:
    done = run(core, *arguments)
    assert done.returncode == 2
    assert cure in done.stderr
    assert "Traceback" not in done.stderr
