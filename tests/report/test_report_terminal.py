"""The terminal's view: a tree or a list that fits its width and hides nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from torch import nn

import edge_opt as eo
from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.report.profile_text import summary_lines
from edge_opt.report.sheets import OPTIONAL, Cell, Column, fitted
from edge_opt.text import shorten
from rendering import render


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4, 8))
        self.act = nn.GELU()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), Attention()) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.position
        for layer in self.layers:
            x = self.act(layer(x))
        return x


@pytest.fixture(scope="module")
def profile() -> eo.ModelProfile:
    return eo.profile(Net(), (1, 4, 8))


def labels(text: str) -> list[str]:
    """The first column of the table."""
    table = text.split("\n\n")[0].splitlines()[2:]
    return [re.split(r"\s{2,}", line)[0] for line in table if not line.startswith("Folded")]


def test_the_tree_has_guides_and_names_relative_to_the_parent(profile: eo.ModelProfile) -> None:
    twice = f"├ act ({units.TIMES}2)"
    assert labels(render(profile, depth=1)) == ["Net", "├ layers.0", twice, "├ layers.1", "└ (own work)"]
    block = ["│ ├ 0", "│ └ 1", "│   ├ qkv", "│   ├ out", "│   └ (own work)"]
    lines = [line.rstrip() for line in str(profile).splitlines()[2:]]
    assert [line[: len(start)] for line, start in zip(lines[2:], block, strict=False)] == block


def test_work_outside_the_children_has_a_line_that_says_what_it_is(profile: eo.ModelProfile) -> None:
    # 4 queries x 4 keys x 8, for the scores and again for the values
    line = next(line for line in str(profile).splitlines() if "(own work)" in line and "attention" in line)
    assert re.search(rf"\b{2 * 4 * 4 * 8}\b", line)


def test_macs_of_the_lines_below_add_up_to_the_line_above(profile: eo.ModelProfile) -> None:
    text = render(profile, depth=1, width=140)
    shares = [float(found) for found in re.findall(r"(\d+\.\d)%", text.split("\n\n")[0])]
    assert shares[0] == 100.0
    assert sum(shares[1:]) == pytest.approx(100, abs=0.3)


def test_depth_folds_and_says_so(profile: eo.ModelProfile) -> None:
    assert labels(render(profile, depth=0)) == ["Net"]
    assert "Folded       at depth 1 of 3; depth 3 shows every module" in render(profile, depth=1)
    assert "Folded" not in render(profile, depth=3)


def test_a_large_model_is_folded_to_about_a_screen() -> None:
    profile = eo.profile(Net(blocks=40), (1, 4, 8))
    assert len(labels(str(profile))) == 1 + 40 + 2
    assert "Folded       at depth 1 of 3" in str(profile)
    assert len(labels(render(profile, depth=3))) == 1 + 40 * (1 + 2 + 3) + 2


def test_sort_gives_a_list_whose_rows_add_up(profile: eo.ModelProfile) -> None:
    text = render(profile, sort="macs")
    # 4 x 8 x 24 of qkv, then 2 x 4 x 4 x 8 of attention and as many, 4 x 8 x 8, of out
    assert labels(text)[:4] == ["layers.0.1.qkv", "layers.1.1.qkv", "layers.0.1 (own work)", "layers.0.1.out"]
    shares = [float(found) for found in re.findall(r"(\d+\.\d)%", text.split("\n\n")[0])]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert labels(render(profile, sort="macs", depth=1))[:2] == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("key", "first", "header"),
    [
        ("params", "layers.0.1.qkv", "Params %"),
        ("bytes", "layers.0.1.qkv", "Moved %"),
        ("flops", "layers.0.1.qkv", "FLOPs %"),
        ("activations", "layers.0.1.qkv", "Activ. %"),
        # without a dimension of heads torch takes attention apart: its scores are alive too, beside q, k and v
        ("peak", "layers.0.1 (own work)", "MACs %"),
    ],
)
def test_each_key_sorts_by_its_own_column(profile: eo.ModelProfile, key: str, first: str, header: str) -> None:
    text = render(profile, sort=key)
    assert labels(text)[0] == first
    assert header in text.splitlines()[0]


def test_intensity_is_shown_where_it_is_sorted_by(profile: eo.ModelProfile) -> None:
    lines = render(profile, sort="intensity", width=80).split("\n\n")[0].splitlines()
    assert lines[0].endswith("FLOPs/byte")
    values = [float(line.split()[-1].replace(units.DASH, "0")) for line in lines[2:]]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("key", "column"),
    [("flops", "FLOPs"), ("bytes", "Moved"), ("peak", "Peak"), ("activations", "Activations"), ("params", "Params")],
)
def test_what_is_sorted_by_is_never_left_out(profile: eo.ModelProfile, key: str, column: str) -> None:
    assert column in re.split(r"\s{2,}", render(profile, sort=key, width=60).splitlines()[0])


def test_top_keeps_the_largest_and_sums_up_the_rest(profile: eo.ModelProfile) -> None:
    text = render(profile, top=2)
    assert labels(text) == ["layers.0.1.qkv", "layers.1.1.qkv", "… 8 more"]
    # all but two of the two blocks' qkv (4 x 8 x 24): twice out (4 x 8 x 8) and attention (2 x 4 x 4 x 8)
    assert units.count(2 * (4 * 8 * 8 + 2 * 4 * 4 * 8)) in next(line for line in text.splitlines() if "8 more" in line)
    assert labels(render(profile, top=99))[-1] != "more"


def test_levels_have_lists_of_their_own(profile: eo.ModelProfile) -> None:
    assert labels(render(profile, level="leaves")).count("act") == 1
    assert "act (call 2)" in labels(render(profile, level="leaves"))
    operators = render(profile, level="operators", sort="macs", width=140)
    assert [line.split()[1] for line in operators.splitlines()[2:4]] == ["linear", "linear"]
    assert "scaled_dot_product" in operators
    assert render(profile, level="root").startswith("Compute")


@pytest.mark.parametrize(
    ("view", "sentence"),
    [
        ({"depth": -1}, "depth is -1"),
        ({"top": 0}, "top is 0"),
        ({"sort": "size"}, "cannot sort by 'size'; use one of macs, flops, params, bytes"),
        ({"level": "layers"}, "unknown level 'layers'"),
        ({"level": "operators", "depth": 1}, "drop one of the two"),
    ],
)
def test_a_view_that_cannot_be_shown_is_refused(profile: eo.ModelProfile, view: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        render(profile, **view)


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [
        (60, {"Module", "Params", "MACs"}, {"FLOPs", "Moved"}),
        (80, {"Module", "Type", "Output", "Params", "MACs", "MACs %", "Peak"}, {"FLOPs", "Activations"}),
        (100, {"Type", "Output", "Params", "MACs", "MACs %", "FLOPs", "Moved", "Peak"}, {"FLOPs/byte"}),
        (140, {"Type", "Output", "FLOPs", "Moved", "Peak", "Activations", "FLOPs/byte"}, set()),
    ],
)
def test_columns_give_way_to_the_width(profile: eo.ModelProfile, width: int, shown: set[str], hidden: set[str]) -> None:
    lines = render(profile, width=width).splitlines()
    header = set(re.split(r"\s{2,}", lines[0]))
    assert shown <= header
    assert not hidden & header
    assert max(map(cell_len, lines)) <= width


def test_names_are_text_and_never_markup() -> None:
    names = ["[red]", "[/bold]", ":smile:", "\x1b[31mred", "two\nlines", "層" * 30, "a" * 90 + "_end", "\\"]
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(2, 2))
    profile = eo.profile(model, (1, 2), name="[b]model[/b]")
    for color in (False, True):
        for width in (80, 100):
            text = render(profile, width=width, color=color)
            for shown in ("[b]model[/b]", "[red]", "[/bold]", ":smile:", r"\x1b[31mred", r"two\nlines", "_end"):
                assert shown in text
            assert "\x1b[31m" not in text
    plain = render(profile, width=80).splitlines()
    assert max(map(cell_len, plain)) <= 80
    assert any("層…層" in line for line in plain)


def test_unpriced_operators_are_named_and_every_sum_over_them_is_marked() -> None:
    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(torch.linalg.matrix_exp(self.layer(x)))

    profile = eo.profile(Exponential(), (4, 4))
    text = render(profile, width=140)
    assert f"2 operators unpriced: aten.linalg_matrix_exp {units.TIMES}2 — totals are lower bounds" in text
    assert "≥ 64 MACs" in text  # 4 x 4 x 4
    assert "33.3%: 1 of 3 operators" in text
    root, layer = text.splitlines()[2:4]
    assert "≥ 64" in root
    assert "≥" not in layer
    assert "?" in next(line for line in render(profile, level="operators").splitlines() if "matrix_exp" in line)


def test_notes_of_the_trace_are_shown() -> None:
    class LooksAtValues(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    text = str(eo.profile(LooksAtValues(), (2, 2)))
    assert "Note         traced with real tensors" in text
    assert "100% of" in text


def test_color_is_only_added_on_request(profile: eo.ModelProfile) -> None:
    assert "\x1b[" not in render(profile)
    colored = render(profile, color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored).split() == render(profile).split()


@pytest.mark.parametrize("width", range(12))
@pytest.mark.parametrize("text", ["beginning.middle.end", "层层层层层层层层"])
def test_shortened_text_keeps_both_ends_within_its_width(text: str, width: int) -> None:
    short = shorten(text, width, cell_len)
    assert cell_len(short) <= width
    if width > 6:
        assert short[:1] == text[:1] and short[-1:] == text[-1:] and "…" in short


def test_columns_give_way_from_the_right_and_the_dispensable_go_first() -> None:
    cells = (Cell("x" * 30),)
    name, kind = Column("Name", cells, "left", min_width=10), Column("Kind", cells, "left", min_width=10, drop_order=2)
    number, luxury = Column("Number", cells, drop_order=5), Column("Luxury", cells, drop_order=OPTIONAL)
    strips = [name, kind, number, luxury]
    assert [width for _, width in fitted(strips, 4 * 30 + 3 * 2)] == [30, 30, 30, 30]
    assert fitted(strips, 4 * 30 + 3 * 2 - 1) == [(name, 30), (kind, 30), (number, 30)]
    assert fitted(strips, 10 + 10 + 30 + 2 * 2) == [(name, 10), (kind, 10), (number, 30)]
    assert fitted(strips, 10 + 10 + 30 + 2 * 2 - 1) == [(name, 30), (kind, 53 - 30 - 2)]
    assert fitted(strips, 25) == [(name, 13), (kind, 10)]
    assert fitted(strips, 12) == [(name, 12)]
    assert fitted(strips, 5) == [(name, 5)]


@pytest.mark.parametrize(
    ("width", "target", "precision", "sentence"),
    [
        # 8x8 weights of one byte and 8 biases of four, 8 inputs of four, 8 outputs of one.
        (8, "raspberry-pi-zero-2-w", "int8",
         "yes: 136 B in int8 (weights, input, activations), and raspberry-pi-zero-2-w has 512 MiB"),
        # 16384x16384 weights of four bytes alone are 1 GiB.
        (16384, "raspberry-pi-zero-2-w", "fp32",
         "no: 1.00 GiB in fp32 (weights, input, activations), and raspberry-pi-zero-2-w has 512 MiB"),
    ],
)  # fmt: skip
def test_a_profile_for_one_device_says_whether_it_fits(width: int, target: str, precision: str, sentence: str) -> None:
    with torch.device("meta"):
        layer = nn.Linear(width, width)
    profile = eo.profile(layer, (1, width), target=target, precision=precision)
    assert ("Fits", sentence) in summary_lines(profile)


def test_a_microcontroller_has_an_answer_for_ram_and_one_for_flash() -> None:
    lines = dict(summary_lines(eo.profile(nn.Linear(1024, 1024), (1, 1024), target="rp2040")))
    # Two vectors of 4 KiB and TFLM's own data fit the RAM; 4 MiB of weights do not fit 2 MiB of flash.
    assert lines["RAM"].startswith("yes: ") and "activations and scratch 8.00 KiB" in lines["RAM"]
    assert lines["Flash"].startswith("no: ") and "weights 4.00 MiB" in lines["Flash"]
    assert "Fits" not in lines
