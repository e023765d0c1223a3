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
from types import ModuleType

import pytest

import edge_opt
import rasp
from zoo import torchvision_models

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LENIENT = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
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
    assert doctest.testmod(import_module(name), optionflags=_LENIENT).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one session, in order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    # transformers imports torchvision, whose build here may lack operators.
    torchvision_models()
    names: dict[str, object] = {"__name__": "page"}
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        if block["language"] != "python":
            continue
        place = f"{page.relative_to(ROOT)}:{text[: block.start()].count(chr(10)) + 1}"
        if ">>>" not in block["body"]:
            exec(compile(block["body"], place, "exec"), names)
            continue
        # Outputs hold empty lines as they are printed; doctest would end there.
        body = re.sub(r"\n\n(?!\s*(?:>>>|\Z))", "\n<BLANKLINE>\n", block["body"])
        example = doctest.DocTestParser().get_doctest(body, names, place, place, 0)
        outcome = doctest.DocTestRunner(optionflags=_LENIENT).run(example, clear_globs=False)
        assert outcome.failed == 0, place
        names.update(example.globs)


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


def test_the_page_of_commands_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    writer = import_module("write_cli_page")
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(), "run `python scripts/write_cli_page.py`"


@pytest.mark.parametrize("name", sorted(set(edge_opt.__all__) - {"compress"}))
def test_every_public_name_is_in_the_reference(name: str) -> None:
    """By itself, or with the module that it is defined in."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))
    home = getattr(getattr(edge_opt, name), "__module__", None)
    assert any(entry.endswith(f".{name}") or entry == home for entry in documented)


FUNCTIONS = [
    (package, name)
    for package in (edge_opt, edge_opt.compress)
    for name in package.__all__
    if callable(getattr(package, name)) and not isinstance(getattr(package, name), type)
]


@pytest.mark.parametrize(("package", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_every_public_function_is_shown_at_work(package: ModuleType, name: str) -> None:
    """In its own docstring, or in a block of a page; both run in these tests."""
    shown = "".join(
        block["body"] for page in PAGES for block in _BLOCK.finditer(page.read_text()) if block["language"] == "python"
    )
    assert ">>>" in (getattr(package, name).__doc__ or "") or re.search(rf"\b{name}\(", shown)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api" / "index.html").exists()
