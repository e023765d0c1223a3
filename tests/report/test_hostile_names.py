"""Names that a model's author chose are shown as text, whatever they contain and wherever they are shown."""

from __future__ import annotations

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from torch import nn

import edge_opt as eo
import rasp
from browser import Browser
from edge_opt.hardware import estimate_layerwise_stats, save_hardware_artifacts
from edge_opt.records.profiles import CheckResult, ModelComparison, ModelProfile
from edge_opt.report.check_sheets import as_junit
from edge_opt.report.comparison import as_csv, document, load_comparison
from edge_opt.report.html import _TREE_SCRIPT, sheet_page
from edge_opt.report.profile_text import profile_markdown
from edge_opt.report.sheets import sheet_markdown, sheet_of

NAMES = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"quoted\" 'twice'",
    "=cmd|' /C calc'!A0",
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "two\nlines",
    "tab\tand\x1b[31mred\x07",
    "nul\x00",
    "pipe|`tick`*star*_u_",
    "&lt;b&gt;",
    "x" * 500,
    "🚀 emoji",
    "שלום עולם",
    "\u202egnp.exe\u2066",
    "\ud800",
)
ACTED_ON = [*(chr(code) for code in (*range(32), 127) if chr(code) != "\n"), *map(chr, range(0x202A, 0x202F)),
            *map(chr, range(0x2066, 0x206A))]  # fmt: skip


def hostile(width: int) -> nn.Module:
    model = nn.Sequential()
    for name in NAMES:
        # add_module refuses dots only; a name set on the dict is anything at all.
        model._modules[name.replace(".", "")] = nn.Linear(width, width)
    return model


@pytest.fixture(scope="module")
def profiles() -> tuple[ModelProfile, ModelProfile]:
    name = "evil <b>|`\n\x1b[31m\u202e"
    return eo.profile(hostile(4), (1, 4), name=name), eo.profile(hostile(8), (1, 8), name=name)


@pytest.fixture(scope="module")
def comparison(profiles: tuple[ModelProfile, ModelProfile]) -> ModelComparison:
    return eo.compare(*profiles)


@pytest.fixture(scope="module")
def checked(profiles: tuple[ModelProfile, ModelProfile]) -> CheckResult:
    return eo.check(profiles[1], "macs <= 1", "params <= 1G", baseline=profiles[0], max_increase={"params": 0})


class Reader(HTMLParser):
    """Which tags a page has, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


HARMLESS = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "div", "table", "thead", "tbody", "tr", "th",
    "td", "caption", "ul", "li", "p", "strong", "details", "summary",
    "button", "span",
}  # fmt: skip


@pytest.mark.parametrize("what", ["comparison page", "comparison", "profile", "check", "check page"])
def test_html_shows_names_as_text(
    what: str, profiles: tuple[ModelProfile, ModelProfile], comparison: ModelComparison, checked: CheckResult,
    tmp_path: Path,
) -> None:  # fmt: skip
    page = {
        "comparison page": lambda: sheet_page(sheet_of(comparison)),
        "comparison": comparison._repr_html_,
        "profile": profiles[0]._repr_html_,
        "check": checked._repr_html_,
        "check page": lambda: checked.save(tmp_path / "check.html").read_text(encoding="utf-8"),
    }[what]()
    # The tree of a profile folds and sorts by a script of its own, which knows no names.
    read = Reader(page.replace(f"<script>(() => {{{_TREE_SCRIPT}}})();</script>", ""))
    assert read.tags <= HARMLESS
    assert not {name for name in read.attributes if name.startswith("on") or name in ("src", "href")}
    assert not [character for character in ACTED_ON if character in page]
    if what == "comparison page":
        text = "".join(read.words)
        assert all(
            shown in text for shown in ("</script><script>alert(1)</script>", "x" * 500, "שלום עולם", "&lt;b&gt;")
        )


def test_a_page_loads_nothing(comparison: ModelComparison) -> None:
    page = sheet_page(sheet_of(comparison))
    assert "default-src 'none'" in page
    assert not any(word in page for word in ("http://", "https://", "url(", "<link", "<script"))


def test_a_browser_shows_names_as_text_and_fetches_nothing(
    comparison: ModelComparison, browser: Browser, tmp_path: Path
) -> None:
    path = comparison.save(tmp_path / "comparison.html")
    page = browser.page(path)
    text = page.run("document.body.textContent")
    assert all(name in text for name in NAMES if name.isprintable() and "\n" not in name)
    assert page.run("document.querySelectorAll('script, img, iframe, a').length") == 0
    assert page.run("document.querySelectorAll('tbody tr').length") >= len(NAMES)
    assert page.problems() == []
    assert page.requests() == [path.resolve().as_uri()]
    page.close()


@pytest.mark.parametrize("level", ["leaves", "modules", "operators"])
def test_no_cell_of_a_profile_is_a_formula(
    level: str, profiles: tuple[ModelProfile, ModelProfile], tmp_path: Path
) -> None:
    path = profiles[0].save(tmp_path / "profile.csv", level=level)  # type: ignore[arg-type]
    check_cells(path.read_text(encoding="utf-8"))


def test_no_cell_of_a_comparison_is_a_formula(comparison: ModelComparison) -> None:
    rows = check_cells(as_csv(comparison))
    assert len(rows) == 1 + len(comparison.layers)


def test_no_cell_of_the_older_tables_is_a_formula(tmp_path: Path) -> None:
    model = hostile(4)
    table = pd.DataFrame({"layer": list(NAMES), "activation_bytes": 1, "macs": 1})
    precisions = pd.DataFrame({"precision": ["=1+1"], "accepted_ratio": [1.0]})
    plain = [name for name in NAMES if "$" not in name and name.isprintable()]
    save_hardware_artifacts(tmp_path, table[table["layer"].isin(plain)], precisions, {"bound": "=1"})
    for name in ("layerwise_breakdown.csv", "precision_tradeoffs.csv", "hardware_summary.csv"):
        check_cells((tmp_path / name).read_text(encoding="utf-8"))
    assert list(estimate_layerwise_stats(model, 1, input_shape=(4,))["layer"])[3] == NAMES[3]
    rasp.stat(model, (1, 4), save_path=tmp_path / "rasp.csv")
    check_cells((tmp_path / "rasp.csv").read_text(encoding="utf-8"))


def check_cells(text: str) -> list[list[str]]:
    rows = list(csv.reader(io.StringIO(text)))
    assert len({len(row) for row in rows}) == 1
    for cell in (cell for row in rows[1:] for cell in row):
        assert not [character for character in (*ACTED_ON, "\n") if character in cell]
        if cell.startswith(("=", "+", "-", "@")):
            float(cell)  # a number may have a sign
    return rows


@pytest.mark.parametrize("what", ["profile", "comparison", "check", "rasp"])
def test_a_markdown_table_keeps_its_columns(
    what: str, profiles: tuple[ModelProfile, ModelProfile], comparison: ModelComparison, checked: CheckResult,
    tmp_path: Path,
) -> None:  # fmt: skip
    if what == "rasp":
        rasp.stat(hostile(4), (1, 4), save_path=tmp_path / "rasp.md")
    text = {
        "profile": lambda: profile_markdown(profiles[0]),
        "comparison": lambda: sheet_markdown(sheet_of(comparison)),
        "check": lambda: sheet_markdown(sheet_of(checked)),
        "rasp": lambda: (tmp_path / "rasp.md").read_text(encoding="utf-8"),
    }[what]()
    assert not [character for character in ACTED_ON if character in text]
    unescaped = [line.replace("\\\\", "").replace("\\|", "") for line in text.splitlines() if " | " in line]
    assert unescaped
    blocks: dict[int, int] = {}
    for line in unescaped:
        blocks[line.count("|")] = blocks.get(line.count("|"), 0) + 1
    # One width for each table: the totals and the layers.
    assert len(blocks) <= 2 and min(blocks.values()) > 1
    assert "<img" not in text.replace("\\<img", "") and "<script" not in text.replace("\\<script", "")


def test_junit_is_well_formed(checked: CheckResult) -> None:
    root = ElementTree.fromstring(as_junit(checked))
    assert root.get("failures") == "2"
    assert "onerror" in "".join(root.itertext())


def test_the_terminal_gets_no_control_characters(
    profiles: tuple[ModelProfile, ModelProfile],
    comparison: ModelComparison,
    checked: CheckResult,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rasp.stat(hostile(4), (1, 4))
    printed = capsys.readouterr().out
    assert "onerror" in printed
    for text in (str(profiles[0]), str(comparison), str(checked), printed):
        assert not [character for character in ACTED_ON if character in text]


def test_json_keeps_names_exactly(
    profiles: tuple[ModelProfile, ModelProfile], comparison: ModelComparison, tmp_path: Path
) -> None:
    assert eo.load(profiles[0].save(tmp_path / "p.json")) == profiles[0]
    assert load_comparison(comparison.save(tmp_path / "c.json")) == comparison
    assert json.loads(document(comparison))["layers"]
