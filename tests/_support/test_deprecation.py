"""Former names work, warn once with the new name, and are gone in the version that the table names."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

import edge_opt
from edge_opt._support import deprecation
from edge_opt._support.deprecation import (
    FORMER_NAMES,
    FormerName,
    FormerNameWarning,
    accept_former_parameters,
    current_options,
    former_attributes,
)
from edge_opt.cli.shell import Shell
from edge_opt.errors import InvalidInput

ROOT = Path(__file__).parents[2]
ROWS = (
    FormerName("module", "edge_opt.old_costs", "edge_opt.records.costs", "0.2", "0.4"),
    FormerName("function", "edge_opt.old_check", "edge_opt.budgets.check.check", "0.2", "0.4"),
    FormerName("parameter", "area(breadth)", "area(width)", "0.2", "0.4"),
    FormerName("option", "area --breadth", "area --width", "0.2", "0.4"),
    FormerName("option", "--noisy", "--verbose", "0.2", "0.4"),
    FormerName("configuration key", "rounds", None, "0.2", None, instead="min_time_s"),
)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "FORMER_NAMES", ROWS)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.mark.parametrize("row", FORMER_NAMES, ids=lambda row: row.old)
def test_a_former_name_is_gone_in_the_version_that_removes_it(row: FormerName) -> None:
    """A row that fails here is to be removed, together with what serves it."""
    assert row.removed_in is None or numbers(edge_opt.__version__) < numbers(row.removed_in)


@pytest.mark.parametrize("row", FORMER_NAMES, ids=lambda row: row.old)
def test_the_new_name_exists(row: FormerName) -> None:
    if row.new is not None and row.kind == "module":
        import_module(row.new)
    elif row.new is not None and row.kind == "function":
        home, _, name = row.new.rpartition(".")
        assert hasattr(import_module(home), name)


def test_a_name_has_one_row() -> None:
    assert len({(row.kind, row.old) for row in FORMER_NAMES}) == len(FORMER_NAMES)


def test_the_page_lists_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "FORMER_NAMES", FORMER_NAMES)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    writer = import_module("write_former_names")
    assert writer.page() == writer.PAGE.read_text(encoding="utf-8"), "run `make pages`"


def test_a_module_is_found_under_its_former_path() -> None:
    with pytest.warns(FormerNameWarning) as caught:
        old = import_module("edge_opt.old_costs")
    assert [str(warning.message) for warning in caught] == [
        "the module edge_opt.old_costs is deprecated since 0.2, use edge_opt.records.costs; it is removed in 0.4"
    ]
    new = import_module("edge_opt.records.costs")
    assert old is new
    assert new.__name__ == "edge_opt.records.costs" and new.__spec__ is not None
    assert new.__spec__.name == "edge_opt.records.costs"
    del sys.modules["edge_opt.old_costs"], edge_opt.__dict__["old_costs"]


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'edge_opt\.nothing'"):
        import_module("edge_opt.nothing")


def test_a_warning_is_visible_without_any_setting() -> None:
    row = next(row for row in FORMER_NAMES if row.kind == "module")
    done = subprocess.run([sys.executable, "-c", f"import {row.old}"], check=True, capture_output=True, text=True)
    assert row.message in done.stderr


def test_a_former_function_of_a_module_warns_once_at_the_line_that_uses_it() -> None:
    module = ModuleType("edge_opt")
    vars(module)["__getattr__"] = former_attributes("edge_opt")
    with pytest.warns(FormerNameWarning, match=r"use edge_opt\.budgets\.check\.check") as caught:
        assert module.old_check is edge_opt.check
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.old_check is edge_opt.check
    with pytest.raises(AttributeError, match="'edge_opt' has no attribute 'older_check'"):
        _ = module.older_check


def test_a_former_name_of_the_package_is_served_too() -> None:
    with pytest.warns(FormerNameWarning) as caught:
        assert edge_opt.old_check is edge_opt.check
    assert caught[0].filename == __file__


def test_a_function_takes_the_former_name_of_a_parameter() -> None:
    @accept_former_parameters
    def area(height: int, width: int) -> int:
        return height * width

    with pytest.warns(FormerNameWarning, match=r"area\(breadth\)") as caught:
        assert area(2, breadth=3) == 6  # type: ignore[call-arg]  # the former name
    assert caught[0].filename == __file__
    assert list(inspect.signature(area).parameters) == ["height", "width"]
    with pytest.raises(InvalidInput, match="width is given twice"):
        area(2, width=3, breadth=3)  # type: ignore[call-arg]


def test_options_of_one_command_and_of_all() -> None:
    with pytest.warns(FormerNameWarning):
        words = current_options("area", ["--breadth=3", "--noisy", "x", "--", "--noisy"])
    assert words == ["--width=3", "--verbose", "x", "--", "--noisy"]
    assert current_options("volume", ["--breadth", "3"]) == ["--breadth", "3"]


def test_the_command_line_warns_in_one_line() -> None:
    app = typer.Typer(cls=Shell)

    @app.command("area")
    def area(width: int) -> None:
        typer.echo(width)

    @app.command("sides")
    def sides(width: int = 1, verbose: bool = False) -> None:
        typer.echo(f"{width} {verbose}")

    done = CliRunner().invoke(app, ["sides", "--noisy"])
    assert (done.exit_code, done.stdout) == (0, "1 True\n")
    assert done.stderr == "warning: the option --noisy is deprecated since 0.2, use --verbose; it is removed in 0.4\n"


def test_a_name_without_effect_says_what_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    writer = import_module("write_former_names")
    assert ROWS[-1].message == "the configuration key rounds has no effect since 0.2, use min_time_s"
    assert "Since 0.2, they stay:\n\n- configuration key `rounds` (without effect) → `min_time_s`" in (
        writer.former_names()
    )
