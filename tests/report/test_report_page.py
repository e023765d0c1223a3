"""The page, opened in a real browser: everything is drawn, nothing leaves the file, and its numbers are the JSON's."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from browser import Browser, Page
from edge_opt import units
from edge_opt.model import SmallCNN
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import Finalist, Finals, Speedup, SpeedupRatio, TargetFigures, Trial
from edge_opt.report.page import embedded, page_text, write_page
from edge_opt.report.page_data import page_data, standard
from edge_opt.text import shorten
from sweeps import done, failed, sensitivity_of, small_sweep, sweep

MOST_BYTES = 2_500_000
HOSTILE = [
    "</script><script>hacked=1</script>", "<img src=x onerror='hacked=2'>", "=cmd()", "\"'`;--",
    "%{x}$a$", "n" * 500, "🚀🧠", "שכבה‮evil", "two\nlines", "__proto__x",
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


def deep_model() -> nn.Module:
    """400 leaves: 133 blocks of three, and one linear layer."""
    return nn.Sequential(*(Block(4) for _ in range(133)), nn.Linear(8, 8))


class Hostile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in HOSTILE:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def measured() -> ModelProfile:
    model = nn.Sequential(SmallCNN(), nn.Linear(10, 4))
    return eo.profile(
        model, (2, 1, 28, 28), measure={"min_time_s": 0.05, "threads": 1, "power_watts": 5}, name="small CNN"
    )


@pytest.fixture(scope="module")
def full_path(measured: ModelProfile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(
        tmp_path_factory.mktemp("full") / "page.html",
        profile=measured,
        sweep=small_sweep(),
        sensitivity=sensitivity_of({"0.conv1": 0.02}),
        reproducibility={"command": "edge-opt run", "config": {"seed": 3, "lr": math.inf}},
        summary={"best": "prune 0.5"},
        extra_profiles=[measured],
        devices=["raspberry-pi-4", "raspberry-pi-5"],
    )


@pytest.fixture(scope="module")
def full(browser: Browser, full_path: Path) -> Iterator[Page]:
    """One tab for the tests that leave it as they found it: loading takes seconds."""
    page = browser.page(full_path)
    yield page
    page.close()


def shown(page: Page, table: str, column: str) -> list[str]:
    """One column of a table, as its exact values."""
    return page.run(
        f"""(() => {{
            const place = [...document.querySelectorAll('#{table} thead th')]
                .findIndex((heading) => heading.dataset.column === '{column}');
            return [...document.querySelectorAll('#{table} tbody tr')].map((line) => line.cells[place].title);
        }})()"""
    )


def search(page: Page, table: str, text: str) -> None:
    box = f"document.querySelector('#{table} input[type=search]')"
    page.run(f"{box}.value = {json.dumps(text)}; {box}.dispatchEvent(new Event('input'))")


def choose(page: Page, selector: str, value: str) -> None:
    box = f"document.querySelector({json.dumps(selector)})"
    page.run(f"{box}.value = {json.dumps(value)}; {box}.dispatchEvent(new Event('change'))")


def assert_sound(page: Page) -> None:
    """Every chart is drawn with something in it, the console is silent, and nothing was fetched."""
    page.draw_everything()
    drawn = page.run("charts.map((c) => [c.node.id, c.node.querySelectorAll('.main-svg').length, c.node.data.length])")
    assert drawn and all(svgs >= 1 and traces >= 1 for _, svgs, traces in drawn), drawn
    assert page.problems() == []
    assert {address.partition(":")[0] for address in page.requests()} <= {"file", "data", "blob"}
    assert sum(address.startswith("file:") for address in page.requests()) == 1


def test_every_chart_is_drawn_and_nothing_leaves_the_file(full: Page) -> None:
    assert_sound(full)
    ids = full.run("charts.map((chart) => chart.node.id)")
    assert {
        "bars-macs", "bars-bytes", "bars-memory", "bars-time", "roofline-chart", "memory-timeline", "pareto",
        "precision-chart", "sensitivity-map",
    } <= set(ids)  # fmt: skip
    marks = full.run("charts.every((c) => c.node.querySelectorAll('.point, .points path, .hm image, .fills').length)")
    assert marks


def test_charts_have_words_and_a_table(full: Page) -> None:
    words = full.run(
        """charts.map(({ node }) => [node.getAttribute('aria-label').length, node.getAttribute('role'),
            node.parentElement.querySelector('figcaption').textContent.length])"""
    )
    assert all(label > 20 and role == "img" and caption > 10 for label, role, caption in words)
    rows = full.run(
        """[...document.querySelectorAll('figure details')].map((d) => { d.open = true; return d; })
            .map((d) => { d.dispatchEvent(new Event('toggle')); return d.querySelectorAll('tbody tr').length; })"""
    )
    assert all(rows)


def test_no_button_sends_a_chart_away(full: Page) -> None:
    full.draw_everything()
    titles = full.run("[...document.querySelectorAll('.modebar-btn')].map((b) => b.dataset.title ?? b.title)")
    assert titles
    assert not any("hare" in title or "loud" in title for title in titles)


def test_the_page_holds_the_numbers_of_the_profile(full: Page, measured: ModelProfile) -> None:
    assert measured.measurement is not None
    data = full.run("data.profile")
    assert data["totals"]["macs"] == measured.totals.macs
    assert data["latency_s"] == measured.measurement.latency.median_s
    full.run("document.querySelector('#as-list').click()")
    leaves = measured.to_dataframe("leaves")
    assert [int(value) for value in shown(full, "list", "macs")] == leaves["macs"].tolist()
    assert shown(full, "list", "path") == leaves["path"].tolist()
    cards = full.run(
        """Object.fromEntries([...document.querySelectorAll('.card')].map((card) => [
            card.querySelector('.label').textContent,
            [card.querySelector('.figure').title, card.querySelector('.badge').textContent]]))"""
    )
    assert cards["MACs"] == [str(measured.totals.macs), "counted"]
    assert (float(cards["Latency"][0]), cards["Latency"][1]) == (measured.measurement.latency.median_s, "measured")
    assert cards["Energy per sample"][1] == "proxy"
    assert cards["Peak activations"] == [str(measured.peak.live_bytes), "estimated"]


def test_bars_show_the_values_of_their_layers(full: Page, measured: ModelProfile) -> None:
    full.draw_everything()
    bars = next(item for item in full.run("data.profile.bars") if item["metric"] == "macs")
    drawn = full.run("document.getElementById('bars-macs').data[0].x")
    # The largest layer is conv2: 2 images x 14x14 outputs x 32 filters x (16 channels x 3x3), on an axis of millions.
    largest = 2 * 14 * 14 * 32 * 16 * 9
    assert max(bars["values"]) == largest
    assert max(drawn) == pytest.approx(largest / 1e6)
    assert sum(bars["values"]) == measured.totals.macs


def test_rounding_on_the_page_is_rounding_in_python(full: Page) -> None:
    generator = random.Random(0)
    values = [0, 1, 999, 1000, 1023, 1024, 1152, 2560, 0.0005, 0.9995, 1.125e3, 2.5e-6]
    values += [generator.randrange(2**40) / 8 for _ in range(300)] + [
        10 ** generator.uniform(-10, 14) for _ in range(300)
    ]
    values += [generator.randrange(2**16) * 8 for _ in range(300)]
    for name in ("count", "size", "duration", "ratio", "energy"):
        assert full.run(f"{json.dumps(values)}.map({name})") == [getattr(units, name)(value) for value in values], name
    shares = [value / 1000 for value in range(1001)] + [0.0001, 0.00049, 0.9999, 0.1125]
    assert full.run(f"{json.dumps(shares)}.map(percent)") == [units.percent(share) for share in shares]


def test_a_heading_sorts_and_turns_round_and_restores(full: Page) -> None:
    full.run("document.querySelector('#as-list').click()")
    original = shown(full, "list", "macs")
    press = "document.querySelector('#list th[data-column=macs] button').click()"
    numbers = sorted(map(int, original))
    for state, wanted in (("descending", numbers[::-1]), ("ascending", numbers)):
        full.run(press)
        assert [int(value) for value in shown(full, "list", "macs")] == wanted
        assert full.run("document.querySelector('#list th[data-column=macs]').getAttribute('aria-sort')") == state
    full.run(press)
    assert shown(full, "list", "macs") == original


def test_a_keyboard_sorts(full: Page) -> None:
    full.run("document.querySelector('#as-list').click()")
    full.run("document.querySelector('#list th[data-column=params] button').focus()")
    full.press("Enter", 13)
    numbers = [int(value) for value in shown(full, "list", "params")]
    assert numbers == sorted(numbers, reverse=True)
    # The focus stays where it was, so that the same key turns the order round.
    full.press(" ", 32)
    assert [int(value) for value in shown(full, "list", "params")] == sorted(numbers)
    assert full.run("document.activeElement.closest('th').dataset.column") == "params"
    full.press("Enter", 13)


def test_search_and_filter_narrow_the_list(full: Page) -> None:
    full.run("document.querySelector('#as-list').click()")
    search(full, "list", "CONV1")
    assert shown(full, "list", "path") == ["0.conv1"]
    assert "1 of" in full.run("document.querySelector('#list .status').textContent")
    search(full, "list", "")
    choose(full, "#list select", "Linear")
    assert set(shown(full, "list", "type")) == {"Linear"}
    choose(full, "#list select", "")


def test_the_tree_folds_and_a_search_opens_it(full: Page) -> None:
    full.run("document.querySelector('#tree .unfold').click()")
    unfolded = shown(full, "tree", "path")
    assert "0.conv1" in unfolded
    full.run("document.querySelector('#tree .foldall').click()")
    assert shown(full, "tree", "path") == ["", "0", "1"]
    assert full.run("document.querySelector('#tree tr[data-row=\"1\"] .fold').getAttribute('aria-expanded')") == "false"
    full.run("document.querySelector('#tree tr[data-row=\"1\"] .fold').click()")
    assert shown(full, "tree", "path") == unfolded
    full.run("document.querySelector('#tree .foldall').click()")
    search(full, "tree", "classifier")
    assert shown(full, "tree", "path") == ["", "0", "0.classifier"]
    search(full, "tree", "")


def test_columns_can_be_chosen(full: Page) -> None:
    full.run("document.querySelector('#tree .menu input[name=intensity]').click()")
    assert "intensity" in full.run("[...document.querySelectorAll('#tree th')].map((th) => th.dataset.column)")
    full.run("document.querySelector('#tree .menu input[name=macs]').click()")
    assert "macs" not in full.run("[...document.querySelectorAll('#tree th')].map((th) => th.dataset.column)")
    full.run("document.querySelector('#tree .menu input[name=macs]').click()")


def test_what_is_copied_is_csv_with_exact_numbers(full: Page, measured: ModelProfile) -> None:
    full.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    full.send("Page.bringToFront")
    full.run("document.querySelector('#as-list').click()")
    full.run("document.querySelector('#list .copy').click()")
    text = full.run("new Promise((done) => setTimeout(done, 100)).then(() => navigator.clipboard.readText())")
    rows = list(csv.DictReader(io.StringIO(text)))
    leaves = measured.to_dataframe("leaves")
    assert [int(row["macs"]) for row in rows] == leaves["macs"].tolist()
    assert [float(row["measured_s"]) for row in rows if row["measured_s"]] == leaves["measured_s"].dropna().tolist()


def test_switching_the_device_redraws_its_roof(full: Page) -> None:
    full.draw_everything()
    before = full.run("document.querySelector('#roofline-chart').data[0].y.at(-1)")
    assert full.run("document.querySelectorAll('#roofline select[aria-label=Device] option').length") == 2
    choose(full, "#roofline select[aria-label=Device]", "raspberry-pi-5")
    peaks = {spec.name: spec.peak(spec.engine, "fp32") for spec in eo.devices()}
    assert before == peaks["raspberry-pi-4"].value  # type: ignore[union-attr]
    assert full.run("document.querySelector('#roofline-chart').data[0].y.at(-1)") == peaks["raspberry-pi-5"].value  # type: ignore[union-attr]
    assert "Raspberry Pi 5" in full.run("document.querySelector('#roofline figcaption').textContent")


def test_axes_of_the_candidates_can_be_chosen(full: Page) -> None:
    full.draw_everything()
    rows = full.run("data.sweep.rows")
    choose(full, "#candidates select[aria-label='X axis']", "size_mb")
    accepted = full.run("document.querySelector('#pareto').data.find((trace) => trace.name === 'accepted').x")
    assert accepted == [row["size_mb"] for row in rows if row["accepted"]]
    hover = full.run("document.querySelector('#pareto').data.find((trace) => trace.name === 'rejected').text[0]")
    assert "Latency, batch 1: " in hover and "Energy, batch 1: " in hover and "violates" in hover


def test_a_sweep_that_a_target_decides_is_drawn_by_predictions(browser: Browser, tmp_path: Path) -> None:
    def untimed(trial: Trial, ms: float) -> Trial:
        assert trial.metrics is not None
        there = TargetFigures("raspberry-pi-4", "p", "predicted", ms / 1e3, ms / 2e3, ms / 5e2, 2**19, 2**14, None)
        here = dict.fromkeys(("latency_s", "latency_low_s", "latency_high_s", "deploy_latency_s"))
        return replace(trial, metrics=replace(trial.metrics, target=there, **here))

    # The first one breaks a budget.
    swept = sweep(done(0.0, "fp32", 5), done(0.5, "int8", 5))
    trials = tuple(untimed(trial, ms) for trial, ms in zip(swept.trials, (3.0, 2.0), strict=True))
    page = browser.page(write_page(tmp_path / "page.html", sweep=replace(swept, trials=trials)))
    page.draw_everything()
    assert page.run("document.querySelector('#pareto').data.find((trace) => trace.name === 'accepted').x") == [2.0]
    badges = page.run("[...document.querySelectorAll('#candidates .head .badge')].map((node) => node.textContent)")
    assert "predicted" in badges and "measured" not in badges
    page.close()


def test_dark_follows_the_system_and_the_button_overrules(browser: Browser, full_path: Path) -> None:
    page = browser.page(full_path, is_dark=True)
    tone = "getComputedStyle(document.body).backgroundColor"
    dark = page.run(tone)
    page.prefer("light")
    # The browser tells the page of the change a moment later.
    page.run(
        f"""(async () => {{
            for (let wait = 0; wait < 500 && {tone} === "{dark}"; wait += 1)
                await new Promise((done) => setTimeout(done, 20));
        }})()"""
    )
    assert page.run(tone) != dark
    page.run("document.getElementById('theme').click()")
    assert page.run(tone) == dark
    page.close()


CONTRAST = """(() => {
    const channels = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((value) => value / 255)
        .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    const shares = [0.2126, 0.7152, 0.0722];
    const light = (text) => channels(text).reduce((sum, value, place) => sum + shares[place] * value, 0);
    const [note, card] = ['.card .note', '.card'].map((it) => getComputedStyle(document.querySelector(it)));
    const [dark, bright] = [light(note.color), light(card.backgroundColor)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
})()"""


def test_at_every_width_light_and_dark_charts_are_there_without_scrolling(browser: Browser, full_path: Path) -> None:
    page = browser.page(full_path)
    page.run("chartsReady.then(() => null)")
    for width in (1280, 768, 390):
        page.resize(width, 900)
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            page.run(
                f"""(async () => {{
                    for (let wait = 0; wait < 500 && document.documentElement.dataset.theme !== "{scheme}"; wait += 1)
                        await new Promise((done) => setTimeout(done, 20));
                }})()"""
            )
            # No chart is empty, nothing is wider than the screen, and small print has the contrast that WCAG asks for.
            assert page.run("charts.every((chart) => chart.node.querySelectorAll('.main-svg').length)")
            assert page.run("document.documentElement.scrollWidth") <= width
            assert page.run(CONTRAST) >= 4.5
    assert page.run("window.scrollY") == 0 and page.problems() == []
    page.close()


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, full_path: Path) -> None:
    page = browser.page(full_path, width=390, height=844)
    assert_sound(page)
    assert page.run("document.documentElement.scrollWidth") <= 390
    # The answer comes first, then the figures of the winner.
    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert page.run(f"{top.format('#verdict')} < {top.format('.card')}")
    # A layer is a card: its name, a bar, its MACs, its time.
    labels = page.run("[...document.querySelector('#tree tbody tr').cells].map((cell) => cell.dataset.label)")
    assert labels == ["Module", "MACs", "MACs %", "Time"]
    assert page.run("getComputedStyle(document.querySelector('#tree tbody tr')).display") == "grid"
    page.close()


def test_on_paper_every_chart_is_there(full: Page) -> None:
    assert full.pdf().startswith(b"%PDF")
    assert full.run("charts.every((chart) => chart.isDrawn)")
    assert full.problems() == []


def test_on_paper_tables_fit_the_sheet_and_can_be_read(browser: Browser, full_path: Path) -> None:
    page = browser.page(full_path, width=717)  # a sheet of A4 between margins of a centimetre, in CSS pixels
    page.send("Emulation.setEmulatedMedia", media="print")
    assert page.run("[...document.querySelectorAll('.scroll table')].filter((t) => t.scrollWidth > 717).length") == 0
    assert page.run("parseFloat(getComputedStyle(document.querySelector('#tree td')).fontSize)") >= 8
    # A layer below another stands further to the right, on paper, too.
    pads = page.run("[...document.querySelectorAll('#tree td.name')].map((cell) => getComputedStyle(cell).paddingLeft)")
    assert len(set(pads)) > 1
    page.close()


def test_short_labels_of_charts_fit_and_keep_both_ends(full: Page) -> None:
    name = "encoder.layer.11.attention.output.dense"
    assert full.run(f"[20, 30].map((most) => short('{name}', most))") == [shorten(name, 20), shorten(name, 30)]
    assert full.run("['a.b', 'c'].map((name) => short(name, 20))") == ["a.b", "c"]
    assert full.run("['a b', '--keep', \"it's\", 'x<=1'].map(shellWord).join(' ')") == r"'a b' --keep 'it'\''s' 'x<=1'"


def test_a_model_of_one_layer(browser: Browser, tmp_path: Path) -> None:
    path = eo.profile(nn.Linear(16, 8), (4, 16)).save(tmp_path / "one.html")
    assert path.stat().st_size <= 2_000_000
    page = browser.page(path)
    assert_sound(page)
    assert page.run("data.profile.totals.macs") == 4 * 16 * 8
    assert page.run("document.querySelectorAll('#tree tbody tr').length") == 1
    page.close()


def test_a_model_of_400_layers_is_small_and_sound(browser: Browser, tmp_path: Path) -> None:
    path = eo.profile(deep_model(), (1, 4, 8, 8)).save(tmp_path / "deep.html")
    assert path.stat().st_size <= MOST_BYTES
    page = browser.page(path)
    assert_sound(page)
    page.run("document.querySelector('#as-list').click()")
    assert len(shown(page, "list", "path")) == 400
    page.close()


def test_a_model_without_any_operator(browser: Browser, tmp_path: Path) -> None:
    path = eo.profile(nn.Identity(), (4, 16)).save(tmp_path / "none.html")
    page = browser.page(path)
    assert page.problems() == []
    page.close()


def test_hostile_names_are_text_everywhere(browser: Browser, tmp_path: Path) -> None:
    profile = eo.profile(Hostile(), (2, 8), name=HOSTILE[0])
    path = write_page(
        tmp_path / "hostile.html",
        profile=profile,
        sweep=sweep(done(0.5), failed(0.25, HOSTILE[0]), name=HOSTILE[1]),
        sensitivity=sensitivity_of(dict.fromkeys(HOSTILE, 0.1)),
        reproducibility={name: name for name in HOSTILE},
    )
    page = browser.page(path)
    assert_sound(page)
    assert page.run("window.hacked") is None
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.querySelector('h1').textContent") == HOSTILE[0]
    assert shown(page, "tree", "path") == ["", *HOSTILE]
    copied = page.run(
        "new DataTable({ id: 'x', caption: 'x', ...data.profile.tables.leaves, visible: [], label: 'path' }).csv()"
    )
    lines = list(csv.DictReader(io.StringIO(copied)))
    assert [line["path"] for line in lines] == [f"'{name}" if name[0] == "=" else name for name in HOSTILE]
    page.run("""for (const chart of charts) for (let place = 0; place < 3; place += 1)
        try { Plotly.Fx.hover(chart.node, [{ curveNumber: 0, pointNumber: place }]); } catch {}""")
    assert page.run("window.hacked") is None
    assert page.run("document.querySelectorAll('.chart a, .chart script').length") == 0
    page.close()


def test_a_script_that_slipped_in_would_not_run(browser: Browser, full_path: Path, tmp_path: Path) -> None:
    """The page's policy names its scripts; this holds even if some text were not escaped."""
    path = tmp_path / "injected.html"
    path.write_text(full_path.read_text().replace("<main", "<script>window.hacked = 1</script><main", 1))
    page = browser.page(path)
    assert page.run("window.hacked") is None
    assert page.run("charts.length") > 5
    page.close()


@pytest.mark.parametrize(
    ("result", "words"),
    [(sweep(), "Ship nothing yet"), (sweep(failed(0.25, "no <b>luck</b>"), failed(0.5)), "Ship nothing yet")],
)
def test_a_sweep_without_results_says_so(result: Any, words: str, browser: Browser, tmp_path: Path) -> None:
    page = browser.page(write_page(tmp_path / "sweep.html", sweep=result))
    assert words in page.run("document.getElementById('verdict').textContent")
    assert page.run("document.querySelectorAll('#failures tbody tr').length") == len(result.trials)
    assert page.problems() == []
    page.close()


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Candidates from 1 to 8 ms, the slowest of them disturbed, the fastest compared in turns."""
    slow, fast = done(0.0), done(0.75, "int8")
    assert slow.metrics is not None
    slow = replace(slow, metrics=replace(slow.metrics, is_disturbed=True))
    result = replace(
        sweep(slow, done(0.5), fast),
        best=fast.candidate.key,
        finals=Finals(1, 1, "wall", 1, False, (), (
            Finalist(fast.candidate, 1e-3, 0.9e-3, 1.1e-3, 1e-5, 1.2e-3, SpeedupRatio(8.0, 7.6, 8.4), ()),
        )),
        speedup=Speedup(SpeedupRatio(8.0, 7.6, 8.4), None, None, None, 1, "wall", True),
    )  # fmt: skip
    return write_page(
        tmp_path_factory.mktemp("wide") / "page.html", profile=eo.profile(SmallCNN(), (1, 1, 28, 28)), sweep=result
    )


@pytest.fixture(scope="module")
def wide(browser: Browser, wide_path: Path) -> Iterator[Page]:
    page = browser.page(wide_path, width=700)
    page.draw_everything()
    yield page
    page.close()


def test_latency_beyond_a_factor_of_five_is_on_a_logarithmic_axis(wide: Page, full: Page) -> None:
    assert wide.run("document.querySelector('#pareto').layout.xaxis.type") == "log"
    assert "logarithmic" in wide.run("document.querySelector('#candidates figcaption').textContent")
    choose(full, "#candidates select[aria-label='X axis']", "latency_ms")  # 2 to 8 ms there
    full.draw_everything()
    assert full.run("document.querySelector('#pareto').layout.xaxis.type") != "log"


def test_no_candidate_is_averaged_with_another(full: Page) -> None:
    full.draw_everything()
    ran = [row for row in full.run("data.sweep.rows") if row["status"] == "done"]
    points = full.run("document.querySelector('#precision-chart').data.flatMap((trace) => trace.x)")
    assert sorted(points) == sorted(row["latency_ms"] for row in ran)


def test_a_disturbed_time_is_marked_in_table_chart_and_card(wide: Page) -> None:
    assert wide.run("document.querySelectorAll('#candidates-table .badge.disturbed').length") == 1
    symbols = wide.run(
        "document.querySelector('#pareto').data.find((trace) => trace.name === 'accepted').marker.symbol"
    )
    assert sorted(symbols) == ["circle", "circle", "circle-open"]
    assert wide.run("[...document.querySelectorAll('.card .badge.disturbed')].length") == 1


def test_a_ratio_has_its_interval(wide: Page) -> None:
    cards = wide.run("[...document.querySelectorAll('.card')].map((card) => card.innerText.replaceAll('\\n', ' '))")
    assert any("Speedup" in text and "8.0" in text and "95 % CI 7.6–8.4" in text for text in cards)
    assert "8.0× (7.6–8.4)" in wide.run("document.querySelector('#candidates-table').innerText")


def test_columns_that_are_cut_say_so_until_the_end_is_seen(wide: Page) -> None:
    frame = "document.querySelector('#candidates-table .frame')"
    assert wide.run(f"{frame}.classList.contains('cut-right')")
    assert wide.run(f"getComputedStyle({frame}.querySelector('.cue')).display") == "block"
    wide.run(f"{frame}.querySelector('.scroll').scrollLeft = 1e6")
    assert not wide.run(
        f"new Promise((done) => setTimeout(done, 100)).then(() => {frame}.classList.contains('cut-right'))"
    )


def test_every_page_names_what_it_was_written_with(wide: Page, full: Page) -> None:
    for page in (wide, full):
        text = page.run("document.querySelector('#written').innerText")
        assert eo.__version__ in text and version("torch") in text
    assert "reproducibility.json" in wide.run("document.querySelector('#environment .hint').textContent")
    assert "Processor" in full.run("document.querySelector('#machine').innerText")


def test_what_was_not_measured_is_named_with_its_command(browser: Browser, tmp_path: Path) -> None:
    page = browser.page(eo.profile(SmallCNN(), (1, 1, 28, 28)).save(tmp_path / "static.html"))
    assert "--measure" in page.run("document.querySelector('#costs .hint').textContent")
    assert page.run("document.querySelector('#agreement, #candidates, #sensitivity')") is None
    page.close()


def test_a_prediction_is_laid_beside_the_measurement(browser: Browser, tmp_path: Path) -> None:
    predicted = eo.profile(SmallCNN(), (1, 1, 28, 28), target="raspberry-pi-5", measure={"min_time_s": 0.05})
    assert predicted.prediction is not None and predicted.measurement is not None
    page = browser.page(predicted.save(tmp_path / "predicted.html"))
    assert_sound(page)
    found = page.run("data.profile.agreements[0]")
    assert found["predicted_s"] == predicted.prediction.seconds
    assert found["measured_s"] == predicted.measurement.latency.median_s
    assert found["ratio"] == found["predicted_s"] / found["measured_s"]
    times = {layer.path: layer.seconds for layer in predicted.prediction.layers}
    assert found["names"] and found["layer_predicted_s"] == [times[name] for name in found["names"]]
    assert page.run("data.profile.roofline.devices[0].name") == "raspberry-pi-5"
    assert page.run("charts.some((chart) => chart.node.id === 'bars-time-raspberry-pi-5-fp32')")
    badges = page.run("[...document.querySelectorAll('.card .badge')].map((badge) => badge.textContent)")
    assert "predicted" in badges
    page.close()


def test_embedded_data_cannot_end_its_element() -> None:
    text = embedded({"a": "</script><!--\u2028\u2029&"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028\u2029&"}


def test_text_that_looks_like_a_place_in_the_template_stays_text() -> None:
    assert page_text(page_data(sweep=sweep(), title="{{plotly}}")).count("{{plotly}}") == 2  # heading and data


def test_values_that_json_lacks_become_text() -> None:
    found = standard({"a": math.nan, 1: (2, {3}), "path": Path("x")})
    assert found == {"a": "nan", "1": [2, [3]], "path": "x"}
