"""Install a lock file into an environment: `python scripts/install.py .venv requirements/run.lock --project .`

`make` calls this before anything is installed, so it needs only the standard library. It says one line when all goes
well; when something fails it names the package, the Python and the cure.
"""

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# An older Python gets as far as this line, so nothing below may be syntax that Python 3.6 cannot read.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(
        f"error: edge-opt needs Python 3.10 or later, and {sys.executable} is {sys.version.split()[0]}; "
        "name another, such as: make PYTHON=/path/to/python3.11 demo"
    )

PYTHON = f"Python {sys.version.split()[0]} ({Path(sys.executable).resolve()})"
ANOTHER_PYTHON = "name a Python from 3.10 to 3.13, such as: make PYTHON=/path/to/python3.11 demo"

# Where pip, in its versions of the last years, names the requirement that it failed on.
CULPRITS = [
    r"No matching distribution found for ([^\s;]+)",
    r"Package '([^']+)' requires a different Python",
    r"Failed building (?:wheel|editable) for ([^\s,]+)",
    r"Failed to build '([^']+)'",
    r"╰─> (?!\[|See above)([^\s]+)",
]
# What pip prints, and what helps then; the first that is found counts.
CURES = [
    (r"No space left on device", "free some disk space (torch alone takes 0.7 GB) and run make again"),
    # pip lists all versions for other Pythons; it matters whether the wanted one is among them.
    (r"(?s)\s(\S+) Requires-Python.*No matching distribution found for [^\s=]+==\1\s|requires a different Python",
     ANOTHER_PYTHON),
    (r"Retrying \(|ConnectionError|SSLError|ProxyError|ReadTimeout|Temporary failure",
     "pip does not reach its package index: see to the network or to `pip config list`, and run make again"),
    (r"No matching distribution", f"the package index has no such version for this Python: {ANOTHER_PYTHON}"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Install a lock file into an environment.")
    parser.add_argument("environment", type=Path, help="folder of the environment; made if it is not there")
    parser.add_argument("lock", type=Path, help="exact versions, installed without their dependencies")
    parser.add_argument("--project", type=Path, help="a project to install too, as an editable one")
    asked = parser.parse_args()

    say(f"installing {asked.lock} into {asked.environment} with {PYTHON}")
    python = make_environment(asked.environment)
    # Without bytecode, which would take twice as long as all the rest; it is written when a module is first imported.
    install(python, asked.lock, "--no-deps", "-r", str(asked.lock))
    torch = re.search(r"^torch==[^\s;]+", asked.lock.read_text(encoding="utf-8"), re.MULTILINE)
    if torch:
        complete_torch(python, asked.lock, torch[0])
    if asked.project:
        install(python, asked.lock, "--no-deps", "--no-build-isolation", "--editable", str(asked.project))


def make_environment(folder: Path) -> Path:
    """The environment's Python; the environment is made anew unless this same Python made it and finished."""
    python = folder / "bin" / "python"
    same = python.exists() and python.resolve() == Path(sys.executable).resolve()
    if same and run(str(python), "-I", "-m", "pip", "--version").returncode == 0:
        return python
    need_ensurepip()
    done = run(sys.executable, "-m", "venv", "--clear", str(folder))
    if done.returncode:
        fail(f"{PYTHON} cannot make an environment in {folder}", done.stdout, "its own words are above")
    return python


def need_ensurepip() -> None:
    """Debian leaves out of Python what puts pip into an environment: installed here if we may, else asked for."""
    package = f"python3.{sys.version_info[1]}-venv"
    if importlib.util.find_spec("ensurepip") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {package}, without which this Python makes no environments")
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", package)
        importlib.invalidate_caches()
    if importlib.util.find_spec("ensurepip") is None:
        fail(f"{PYTHON} has no ensurepip and makes no environments", "", f"as root: apt-get install {package}")


def install(python: Path, lock: Path, *arguments: str) -> None:
    """Install by the environment's pip, silently unless it fails."""
    done = run(str(python), "-I", "-m", "pip", "install", "--quiet", "--no-compile", *arguments)
    if done.returncode:
        package = culprit(done.stdout) or "the packages"
        fail(f"cannot install {package} of {lock} with {PYTHON}", errors(done.stdout), cure(done.stdout))


def complete_torch(python: Path, lock: Path, torch: str) -> None:
    """A build of torch for CUDA does not even import without libraries that --no-deps left out: install them then."""
    first = run(str(python), "-I", "-c", "import torch")
    if first.returncode == 0:
        return
    say(
        f"this build of {torch} lacks libraries ({last_line(first)}): installing them too, "
        "which is some gigabytes if it is a build for CUDA"
    )
    install(python, lock, "--constraint", str(lock), torch)
    second = run(str(python), "-I", "-c", "import torch")
    if second.returncode:
        fail(f"{torch} is installed and does not import in {PYTHON}", second.stdout, ANOTHER_PYTHON)


def culprit(output: str) -> str | None:
    """The requirement that pip failed on, as far as its output names one."""
    named = (re.search(pattern, output) for pattern in CULPRITS)
    return next((found[1] for found in named if found), None)


def cure(output: str) -> str:
    return next((cure for pattern, cure in CURES if re.search(pattern, output)), "pip's own words are above")


def errors(output: str) -> str:
    """What pip says is wrong: its lines on a version that is not to be had, cut to a length; else the end of it all."""
    lines = [line for line in output.splitlines() if not line.startswith("WARNING")]
    if re.search(r"No matching distribution|requires a different Python", output):
        lines = [line if len(line) <= 300 else line[:300] + " ..." for line in lines if line.startswith("ERROR")]
    return "\n".join(lines[-40:])


def last_line(done: "subprocess.CompletedProcess[str]") -> str:
    return (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    """The finished command, its errors among its output."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def fail(what: str, output: str, cure: str) -> None:
    if output:
        say(output.rstrip())
    sys.exit(f"error: {what}; {cure}")


if __name__ == "__main__":
    main()
