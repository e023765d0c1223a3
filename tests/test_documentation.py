"""What the documentation shows is what happens: docstrings, README and docs, code and commands with their output."""

from __future__ import annotations

import doctest
import os
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import edge_opt
import rasp

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def module_names() -> list[str]:
    found = [
        info.name
        for package in (edge_opt, rasp)
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [name for name in found if not name.endswith("__main__")]


def blocks(*languages: str) -> list[object]:
    return [
        pytest.param(
            match["body"], id=f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}"
        )
        for page in PAGES
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
        if match["language"] in languages
    ]


@pytest.mark.parametrize("name", module_names())
def test_examples_in_docstrings(name: str) -> None:
    # import_module: a function may hide the module of its own name in its package.
    assert doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("code", blocks("python"))
def test_python_in_the_pages(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    if ">>>" not in code:
        exec(compile(code, "page", "exec"), {"__name__": "page"})
        return
    example = doctest.DocTestParser().get_doctest(code, {}, "page", None, None)
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example).failed == 0


@pytest.mark.parametrize("session", blocks("console"))
def test_command_lines_in_the_pages(session: str, tmp_path: Path) -> None:
    """Each `$ ` line runs in the project's folder; what is shown under it is what it prints, files apart."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE):
        done = subprocess.run(
            command.replace(" out/", f" {tmp_path}/"),
            shell=True,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if shown.strip():
            assert [line.rstrip() for line in done.stdout.splitlines()] == [
                line.rstrip() for line in shown.splitlines()
            ]
