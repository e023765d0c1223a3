"""What `make` does before anything else: locks that belong to pyproject.toml, and the script that installs them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install.py"
LOCKS = [ROOT / "requirements" / "run.lock", ROOT / "requirements" / "dev.lock"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
HERE = f"Python {sys.version.split()[0]} ({Path(sys.executable).resolve()})"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(python: str, *locks: Path) -> dict[str, str]:
    """Versions by name, as these locks give them to one Python."""
    lines = [line for lock in locks for line in lock.read_text().splitlines() if line and line[0] not in "#-"]
    found = [Requirement(line) for line in lines]
    here = [one for one in found if one.marker is None or one.marker.evaluate({"python_version": python})]
    versions = {normal(one.name): str(one.specifier).removeprefix("==") for one in here}
    assert len(versions) == len(here), "a package is locked twice"
    return versions


def wanted(extra: str | None, python: str) -> Iterator[Requirement]:
    """Direct requirements of the core (None) or of an extra and of those it names, for one Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        one = Requirement(line)
        if one.marker is not None and not one.marker.evaluate({"python_version": python}):
            continue
        if one.name == "edge-opt":
            for named in one.extras:
                yield from wanted(named, python)
        else:
            yield one


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("extras", "locks"), [([None, "run"], LOCKS[:1]), (["all", "dev", "bench", "docs"], LOCKS)], ids=["run", "dev"]
)
def test_locks_hold_what_the_project_asks_for(python: str, extras: list[str | None], locks: list[Path]) -> None:
    versions = pinned(python, *locks)
    for extra in extras:
        for one in wanted(extra, python):
            assert one.specifier.contains(versions[normal(one.name)]), one


def test_the_extra_all_holds_every_extra_but_those_of_developers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    everything = {name for entry in extras["all"] for name in Requirement(entry).extras}
    assert everything == set(extras) - {"all", "docs", "bench", "dev"}


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("output", "package"),
    [
        ("ERROR: Could not find a version that satisfies the requirement numpy==9.9 (from versions: 1.0, 2.0)\n"
         "ERROR: No matching distribution found for numpy==9.9\n", "numpy==9.9"),
        ("ERROR: Package 'pymdown-extensions' requires a different Python: 3.11.2 not in '>=3.11.5'\n",
         "pymdown-extensions"),
        ("  error: subprocess-exited-with-error\n  ╰─> [9 lines of output]\n      KeyError\n"
         "error: metadata-generation-failed\n╰─> iopath\n", "iopath"),
        ("  ERROR: Failed building wheel for fvcore\nERROR: Could not build wheels for fvcore, which is required\n",
         "fvcore"),
        ("ERROR: Failed to build 'iopath' when getting requirements to build wheel\n", "iopath"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", None),
    ],
    ids=["no version", "another Python", "metadata", "wheel", "newer pip", "disk"],
)  # fmt: skip
def test_the_package_that_pip_failed_on_is_named(installer: ModuleType, output: str, package: str | None) -> None:
    assert installer.culprit(output) == package


def test_the_cure_fits_the_failure(installer: ModuleType) -> None:
    offline = "WARNING: Retrying (Retry(total=0))\nERROR: No matching distribution found for rich==15.0.0"
    assert "does not reach its package index" in installer.cure(offline)
    assert "free some disk space" in installer.cure("ERROR: [Errno 28] No space left on device")
    ignored = "ERROR: Ignored the following versions: 12.9 Requires-Python <3.9; 13.0 Requires-Python >=3.11.5\n"
    refused = ignored + "ERROR: No matching distribution found for pymdown-extensions=={}\n"
    assert installer.cure(refused.format("13.0")) == installer.ANOTHER_PYTHON
    assert "has no such version" in installer.cure(refused.format("3.0"))


def pretend(before: str) -> subprocess.CompletedProcess[str]:
    """The script in a Python that something is wrong with."""
    start = f"import sys, runpy; sys.argv = ['install.py', 'never-made', 'none.lock']; {before}; "
    start += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)


def test_an_older_python_is_refused_in_a_sentence() -> None:
    done = pretend("sys.version_info, sys.version = (3, 9, 18), '3.9.18 (main)'")
    (said,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert said.startswith("error: edge-opt needs Python 3.10 or later") and "is 3.9.18; name another" in said


def test_a_python_without_ensurepip_is_refused_with_the_cure() -> None:
    done = pretend("import os; os.geteuid = lambda: 1000; sys.modules['ensurepip'] = None")
    cure = f"as root: apt-get install python3.{sys.version_info[1]}-venv"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"error: {HERE} has no ensurepip and makes no environments; {cure}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment made by the script, with nothing but pip in it."""
    folder = tmp_path_factory.mktemp("setup")
    (folder / "empty.lock").write_text("# nothing\n")
    done = install(folder / "env", folder / "empty.lock")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"installing {folder / 'empty.lock'} into {folder / 'env'} with {HERE}\n"
    return folder / "env"


def install(environment: Path, lock: Path) -> subprocess.CompletedProcess[str]:
    """The script, with the lock's folder for a package index."""
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(lock.parent), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(SCRIPT), str(environment), str(lock)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | settings)


def write_wheel(folder: Path, name: str, version: str, code: str, *metadata: str) -> None:
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", code)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
        wheel.writestr(f"{about}/METADATA", "\n".join(lines))
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")


@pytest.mark.slow
def test_a_version_that_does_not_exist_is_named_with_the_python(environment: Path, tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text("nowhere-to-be-found==4.0.4\n")
    done = install(environment, lock)
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"error: cannot install nowhere-to-be-found==4.0.4 of {lock} with {HERE}; ")
    assert "Traceback" not in done.stderr and "WARNING" not in done.stderr


@pytest.mark.slow
def test_a_package_for_another_python_is_named_with_the_cure(environment: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path, "tomorrow", "1.0", "", "Requires-Python: >=3.99")
    (tmp_path / "run.lock").write_text("tomorrow==1.0\n")
    said = install(environment, tmp_path / "run.lock").stderr.splitlines()[-1]
    assert said.startswith("error: cannot install tomorrow of ") and "name a Python from 3.10 to 3.13" in said


@pytest.mark.slow
def test_libraries_that_a_build_of_torch_needs_are_installed_too(environment: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path, "torch", "2.13.0", "import libcudart", "Requires-Dist: libcudart")
    (tmp_path / "run.lock").write_text("torch==2.13.0\n")
    done = install(environment, tmp_path / "run.lock")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: cannot install libcudart of ")

    write_wheel(tmp_path, "libcudart", "13.0", "")
    done = install(environment, tmp_path / "run.lock")
    assert (done.returncode, done.stdout) == (0, "")
    said = done.stderr.splitlines()[1:]
    assert said == [
        "this build of torch==2.13.0 lacks libraries (ModuleNotFoundError: No module named 'libcudart'): "
        "installing them too, which is some gigabytes if it is a build for CUDA"
    ]
