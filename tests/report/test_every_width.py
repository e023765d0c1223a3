"""Every table at every width: no line is longer, and no two rows have the same name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from rich.cells import cell_len

import edge_opt as eo
from edge_opt.report.sheets import Column, grid, record_text, sheet_of, sheet_text, wrapped
from edge_opt.report.table import module_tree
from needed import needed
from rendering import render
from shown import profiled, records, served

WIDTHS = (60, 80, 100, 200)
GUIDES = re.compile(r"^[│├└ ]*")

# Tables that are drawn in a way of their own, each at a width; all others are drawn as sheets.
OWN: dict[str, Callable[[int], str]] = {
    "tree": lambda width: render(profiled(), width=width, depth=9),
    "leaves": lambda width: render(profiled(), width=width, level="leaves"),
    "list": lambda width: render(profiled(is_measured=True), width=width, sort="time"),
    "operators": lambda width: render(profiled(), width=width, level="operators"),
    "predicted": lambda width: render(profiled(target="raspberry-pi-4"), width=width, depth=9, is_verbose=True),
    "targets": lambda width: record_text(records()["targets"], width),
    "targets, all": lambda width: sheet_text(sheet_of(records()["targets"]), width),
    "training step": lambda width: record_text(records()["training step"], width),
}


def rows_of(text: str) -> Iterator[list[str]]:
    """The names of the rows of each table, that of a tree's row behind those above it; marks and numbers aside."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        if set(line.strip()) != {"─"}:
            continue
        names: list[str] = []
        above: dict[int, str] = {}
        is_marked = lines[start - 1].startswith(("      ", "  #"))
        for row in lines[start + 1 :]:
            if not row.strip() or row.startswith(("More ", "Folded")):
                break
            depth = len(GUIDES.match(row)[0])  # type: ignore[index]
            cells = re.split(r"\s{2,}", row[depth:].strip())
            above = {place: name for place, name in above.items() if place < depth} | {depth: cells[0]}
            names.append(" / ".join(cells[:2] if is_marked else above.values()))
        yield names


def too_long(text: str, width: int) -> list[str]:
    return [line for line in text.splitlines() if cell_len(line) > width]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_table_is_wider_than_the_terminal_and_no_two_rows_are_called_the_same(width: int) -> None:
    texts = {name: draw(width) for name, draw in OWN.items()}
    texts |= {f"{name}, as a sheet": record_text(record, width) for name, record in records().items()}
    tables = 0
    for name, text in texts.items():
        assert not too_long(text, width), name
        for names in rows_of(text):
            tables += 1
            # In 60 columns, long names may have their difference in the middle, which is left out.
            assert width < 80 or sorted(set(names)) == sorted(names), name
    assert tables > 25


def test_language_models_side_by_side_fit_the_terminal() -> None:
    needed("transformers")
    found = served()
    for width in WIDTHS:
        drawn = (sheet_text(sheet_of(found), width), record_text(found.reports[0], width), record_text(found, width))
        assert not [line for text in drawn for line in too_long(text, width)]


def test_several_targets_have_at_most_three_lines_of_notes_at_80_columns() -> None:
    table, _, notes = record_text(records()["targets"], 80).partition("\n\n")
    assert len(table.splitlines()) == 2 + len(records()["targets"].targets)
    assert len(notes.splitlines()) <= 3
    everything = sheet_text(sheet_of(records()["targets"]), 80)
    assert all(note.split()[-1] in everything for note in records()["targets"].notes)


def test_targets_spell_out_every_name_at_60_columns() -> None:
    targets = {fit.prediction.target for fit in records()["targets"].targets}
    assert targets <= {line.split()[0] for line in record_text(records()["targets"], 60).splitlines() if line}


def test_the_whole_is_bound_by_what_the_sentence_below_says() -> None:
    profile = profiled(target="raspberry-pi-4")
    assert profile.prediction is not None
    root = module_tree(profile).row.predicted
    assert root is not None and (root.bound, root.seconds) == (profile.prediction.bound, profile.prediction.seconds)


def test_a_check_keeps_its_limit_and_growth_where_there_is_little_room() -> None:
    check = eo.check(
        profiled(32, target="raspberry-pi-4"), "predicted_ms <= 50", baseline=profiled(),
        max_increase={"macs": "5%", "latency": "2%"},
    )  # fmt: skip
    for width, heads in ((60, ("Value", "Limit", "Growth")), (80, ("Value", "Limit", "Growth"))):
        text = record_text(check, width)
        assert all(head in text.splitlines()[1] for head in heads), width
        # A baseline without a latency has no limit that follows from it.
        assert "<= 0 s" not in text


def test_a_long_training_step_shows_its_largest_layers_and_says_so() -> None:
    step = records()["training step"]
    many = replace(step, layers=tuple(replace(step.layers[0], path=f"layers.{n}") for n in range(80)))
    text = record_text(many, 80)
    assert text.count("layers.") < 60 and "30 layers with fewer FLOPs; --top 80 shows all" in text
    # No column is empty from top to bottom: nothing of this step is computed again.
    assert "Again" not in text


def test_a_figure_and_its_unit_stay_on_one_line() -> None:
    assert wrapped("planner bound 144 KiB", 17) == ["planner bound", "144 KiB"]


def test_nothing_of_a_table_is_read_as_markup() -> None:
    assert next(iter(grid([Column("[bold]x", ())], 40))).plain == "[bold]x"
