"""What the documentation shows is what happens: docstrings, README and docs, code and commands with their output."""

from __future__ import annotations

import doctest
import html
import json
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
sys.path.insert(0, str(ROOT / "scripts"))
samples = import_module("write_samples")
sys.path.pop(0)
PAGES = samples.PAGES
_BLOCK = samples.BLOCK


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
    assert doctest.testmod(import_module(name), optionflags=samples.LENIENT).failed == 0


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one session, in order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(samples.WIDTH))
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
        example = samples.example(block["body"], names, place)
        outcome = doctest.DocTestRunner(optionflags=samples.LENIENT).run(example, clear_globs=False)
        assert outcome.failed == 0, place
        names.update(example.globs)


@pytest.mark.parametrize("session", blocks("console"))
def test_command_lines_in_the_pages(session: str, tmp_path: Path) -> None:
    """Each `$ ` line runs in the project's folder; what is shown under it is what it prints."""
    for command, shown in samples.commands(session):
        code, text = samples.printed(command, tmp_path)
        assert code == 0, text
        if shown.strip():
            assert samples.shown_part(text, shown) == shown, "run `make pages`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sample_is_wider_than_the_column(page: Path) -> None:
    """A reader of the site, of a phone or of a terminal need not scroll to the right."""
    text = page.read_text(encoding="utf-8")
    wide = [line for block in _BLOCK.finditer(text) for line in block["body"].splitlines() if len(line) > samples.WIDTH]
    assert not wide


@pytest.mark.parametrize("script", ["write_cli_page", "write_columns_page", "write_configuration_page"])
def test_pages_that_are_written_by_a_script_are_up_to_date(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    writer = import_module(script)
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(), "run `make pages`"


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
    # A whole run takes half a minute: the page shows it, and tests/run runs it.
    if callable(getattr(package, name)) and not isinstance(getattr(package, name), type) and name != "run"
]


@pytest.mark.parametrize(("package", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_every_public_function_is_shown_at_work(package: ModuleType, name: str) -> None:
    """In its own docstring, or in a block of a page; both run in these tests."""
    shown = "".join(
        block["body"] for page in PAGES for block in _BLOCK.finditer(page.read_text()) if block["language"] == "python"
    )
    assert ">>>" in (getattr(package, name).__doc__ or "") or re.search(rf"\b{name}\(", shown)


# What people ask, the page that answers, and what they should type.
QUESTIONS = [
    ("will it fit", "will_it_fit", "edge-opt profile"),
    ("how fast will it be there", "how_fast_there", "edge-opt profile"),
    ("why is int8 slower", "why_int8_slower", "eo.explain"),
    ("which variant do I ship", "which_variant", "edge-opt sweep"),
    ("why do two tools disagree", "why_tools_disagree", "--convention"),
    ("how do I stop it from growing", "stop_growing", "edge-opt check"),
    ("own metric", "own_metric", "--metric"),
    ("kv cache", "kv_cache", "edge-opt llm"),
]


@pytest.mark.parametrize(("question", "name", "command"), QUESTIONS)
def test_a_question_is_answered_on_the_first_screen(question: str, name: str, command: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    first, second = text.split("\n```", 2)[:2]
    assert question.lower() in first.lower().replace("?", "")
    assert first.count("\n") <= 8 and command in text[: text.index("\n## ")]
    assert second.count("\n") <= 30


def answers(index: list[dict[str, str]], question: str) -> list[str]:
    """Sections that hold every word of a question, as the search of the site asks; those with it in the title first."""
    words = question.lower().split()
    texts = [(entry["title"].lower(), f"{entry['title']} {entry['text']}".lower()) for entry in index]
    found = [place for place, (_, text) in enumerate(texts) if all(word in text for word in words)]
    found.sort(key=lambda place: -sum(word in texts[place][0] for word in words))
    return [index[place]["location"] for place in found]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_its_search_finds_the_command(tmp_path: Path) -> None:
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
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for question, name, command in QUESTIONS:
        pages = [location.partition("/")[0] for location in answers(index, question)]
        assert name in pages[:3], (question, pages)
        assert any(command in html.unescape(entry["text"]) for entry in index if entry["location"] == f"{name}/")
