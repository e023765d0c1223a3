"""Every record shows itself: one short line, a short table, and HTML that a browser draws."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from torch import nn

import edge_opt as eo
import rasp
from browser import Browser
from edge_opt import units
from edge_opt.boards.platform_file import Platform
from edge_opt.hardware import LayerEstimate
from edge_opt.metrics import Metrics
from edge_opt.model_comparison import compare
from edge_opt.records.costs import OpCost
from edge_opt.records.fields import LONGEST, Shown
from edge_opt.records.measurements import Interval
from edge_opt.stream import HardwareProfile
from record_kinds import record_kinds
from shown import profiled, records, served

DEEP = ".".join(f"model.encoder.layers.{n}.self_attn" for n in range(40))
PLAIN = {str: DEEP, int: 123_456_789_012, float: 0.123456789012345, bool: True, bytes: b"x" * 900, NoneType: None}
KINDS = record_kinds()


def made(hint: Any, depth: int = 0) -> Any:
    """A value of a type, as long and as deep as it gets."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin is Literal:
        return parts[0]
    if origin in (Union, UnionType):
        return made(next(part for part in parts if part is not NoneType), depth)
    if origin is tuple:
        if Ellipsis in parts:
            return (made(parts[0], depth + 1),) * (40 if depth < 2 else 2)
        return tuple(made(part, depth + 1) for part in parts)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint, {**vars(sys.modules[hint.__module__]), "nn": nn})
        return hint(**{field.name: made(hints[field.name], depth + 1) for field in fields(hint)})
    return nn.Linear(2, 2)


OLDER = [LayerEstimate, Metrics, HardwareProfile]


@pytest.mark.parametrize("kind", [*KINDS, *OLDER], ids=lambda kind: kind.__name__)
def test_the_repr_of_a_record_is_one_short_line(kind: type) -> None:
    shown = repr(made(kind))
    assert len(shown) < 300 and "\n" not in shown
    assert shown.lstrip("<").startswith(kind.__name__)


def test_the_tree_of_the_older_tool_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    tree = rasp.stat(nn.Sequential(*(nn.Linear(4, 4) for _ in range(60))), input_shape=(4,), returns="tree")
    capsys.readouterr()
    assert len(tree.children) == 60 and len(repr(tree)) < 300


def test_every_public_record_is_tried() -> None:
    assert len(KINDS) > 110
    assert all("__repr__" in vars(kind) for kind in (*KINDS, Platform))


def test_a_small_record_reads_as_a_dataclass_does() -> None:
    assert repr(Interval(0.5, 2.0)) == "Interval(low=0.5, high=2.0)"
    assert repr(OpCost(3, 1, 2, 2)) == "OpCost(macs=3, other_ops=1, bytes_read=2, bytes_written=2)"


def test_records_that_people_meet_are_short_tables() -> None:
    for name, record in records().items():
        assert isinstance(record, Shown), name
        assert len(repr(record)) <= LONGEST, name
        text = str(record)
        assert text != repr(record) and "object at 0x" not in text, name
        assert text.count("\n") < 70, name


def test_a_profile_names_the_model_and_its_figures_in_one_line() -> None:
    shown = repr(profiled())
    # 4 x (4 + 2 x 2) x 8 x 8 products of 4 rows, 2 x 4 x 4 x 8 of attention in each layer, and 8 x 3 of the head
    macs = 4 * (8 * 8 * 8 * 4 + 2 * 4 * 4 * 8) + 24
    assert "encoder of 16 on 1×4×8" in shown and f"{macs / 1000:.2f} k MACs" in shown


def test_a_repr_imports_nothing_heavy() -> None:
    script = """
import sys
from edge_opt.records.devices import BatchFit
repr(BatchFit(1, 2, "ram", 3, 4, 5, 6, 7, 8))
assert not {"torch", "rich", "pandas", "numpy"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_notebooks_draw_every_record_without_a_network(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    cells = [f"<section>{record._repr_html_()}</section>" for record in records().values()]
    path.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{''.join(cells)}</body>", encoding="utf-8")
    page = browser.page(path)
    assert not page.problems()
    assert page.requests() == [path.resolve().as_uri()]
    heights = page.run("[...document.querySelectorAll('section')].map((cell) => cell.offsetHeight)")
    assert len(heights) == len(records()) and min(heights) > 10
    page.close()


def test_a_profile_in_a_notebook_is_a_tree_that_folds(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "profile.html"
    path.write_text(f"<!DOCTYPE html><meta charset='utf-8'>{profiled()._repr_html_()}", encoding="utf-8")
    page = browser.page(path)
    names = "[...document.querySelectorAll('table.tree tbody tr:not([hidden])')].map((row) => row.cells[0].innerText)"
    first = page.run(names)
    assert first[0].endswith("encoder of 16") and any("q_proj" in name for name in first)
    page.run("document.querySelectorAll('.tree tbody button')[0].click()")
    assert page.run(names) == [first[0].replace("▾", "▸")]
    # It opens one level at a time: four layers, and the classifier.
    page.run("document.querySelectorAll('.tree tbody button')[0].click()")
    assert [name.removeprefix("▸ ") for name in page.run(names)[1:]] == [
        *(f"model.encoder.layers.{number}" for number in range(4)),
        "classifier",
    ]
    page.run("document.querySelectorAll('.tree tbody button')[1].click()")
    assert page.run(names)[2].endswith("self_attn")
    assert not page.problems()
    page.close()


def test_a_record_without_a_view_of_its_own_shows_titles_and_units() -> None:
    totals = profiled().totals
    rows = [line.rsplit("  ", 1) for line in str(totals).splitlines()[1:]]
    shown = {label.strip(): value.strip() for label, value in rows}
    assert shown["Trainable params"] == units.count(totals.trainable_params)
    assert shown["Bytes read"] == units.size(totals.bytes_read)
    assert shown["Activation bytes"] == units.size(totals.activation_bytes)
    assert shown["Is lower bound"] == "no"


def test_an_unknown_name_is_refused_with_the_closest_ones() -> None:
    comparison = compare(profiled(), profiled(32))
    with pytest.raises(eo.EdgeOptError, match="'mac'.*macs"):
        comparison.figure("mac")
    with pytest.raises(eo.EdgeOptError, match="'latency_s'.*params, macs, "):
        comparison.figure("latency_s")
    with pytest.raises(eo.EdgeOptError, match="'nobody'"):
        records()["sweep"].trial("nobody")
    with pytest.raises(eo.EdgeOptError, match="'heads'.*head"):
        served().reports[0].part("heads")  # type: ignore[arg-type]
