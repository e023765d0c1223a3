"""Files: written as a whole by suffix, and read back or refused in one sentence."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput, UnreadableProfile


@pytest.fixture(scope="module")
def profile() -> eo.ModelProfile:
    return eo.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (2, 4))


class Named(nn.Module):
    """A model with the layer names it is given."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def test_save_returns_the_path_and_makes_the_folder(profile: eo.ModelProfile, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "profile.json"
    assert profile.save(str(path)) == path
    assert eo.load(str(path)) == profile
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_suffixes_are_read_without_regard_to_case(profile: eo.ModelProfile, tmp_path: Path) -> None:
    assert profile.save(tmp_path / "profile.CSV").read_text().startswith("path,type,")


@pytest.mark.parametrize(("name", "what"), [("profile.xlsx", "'.xlsx'"), ("profile", "no suffix")])
def test_an_unknown_suffix_names_the_known(profile: eo.ModelProfile, tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(InvalidInput, match=rf"{what}.*\.csv, \.html, \.json, \.md, \.trace\.json, \.txt"):
        profile.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_unknown_level_is_refused_for_json_too(profile: eo.ModelProfile, tmp_path: Path) -> None:
    wrong: Any = "layer"
    with pytest.raises(InvalidInput, match="unknown level 'layer'"):
        profile.save(tmp_path / "profile.json", wrong)


def test_a_failing_write_leaves_the_old_file(
    profile: eo.ModelProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile.save(tmp_path / "profile.csv")
    before = path.read_text()

    def full(self: Path, *_: Any, **__: Any) -> int:
        with self.open("w") as file:
            file.write("half of the fi")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InvalidInput, match=r"cannot write .*: No space left on device"):
        profile.save(path, "operators")
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way_is_an_error_of_ours(profile: eo.ModelProfile, tmp_path: Path) -> None:
    (tmp_path / "taken.csv").mkdir()
    with pytest.raises(InvalidInput, match="cannot write"):
        profile.save(tmp_path / "taken.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot write"):
        profile.save(tmp_path / "file" / "profile.csv")


def test_a_link_stays_a_link_and_its_target_is_written(profile: eo.ModelProfile, tmp_path: Path) -> None:
    target, link = tmp_path / "real.csv", tmp_path / "link.csv"
    target.write_text("old")
    link.symlink_to(target)
    profile.save(link)
    assert link.is_symlink()
    assert target.read_text().startswith("path")


def test_files_are_made_with_the_usual_permissions(profile: eo.ModelProfile, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    written = profile.save(tmp_path / "profile.md")
    assert written.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("name", "shown"),
    [(name, f"'{name}") for name in ("=cmd|' /C calc'!A0", "+1", "-1+2", "@SUM(A1)", " =1", "＝1")]
    + [("\t=1", r"\t=1")],
)
def test_no_cell_of_a_csv_is_a_formula(name: str, shown: str, tmp_path: Path) -> None:
    path = eo.profile(Named(name, "x"), (1, 4)).save(tmp_path / "profile.csv")
    with path.open(newline="", encoding="utf-8") as file:
        cells = [row["path"] for row in csv.DictReader(file)]
    assert shown in cells
    assert not any(cell.startswith(("=", "+", "-", "@", "\t")) for cell in cells)


def test_numbers_of_a_csv_are_never_quoted_away(tmp_path: Path) -> None:
    text = eo.profile(nn.Linear(4, 4), (2, 4)).save(tmp_path / "profile.csv").read_text()
    assert "'" not in text


def test_markdown_shows_names_literally(tmp_path: Path) -> None:
    names = ("a|b", "two\nlines", "<script>", "[x](y)", "`c`", "_i_", "plain_name")
    lines = eo.profile(Named(*names), (1, 4)).save(tmp_path / "profile.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(names)
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    for shown in (r"a\|b", r"two\\nlines", r"\<script\>", r"\[x\](y)", r"\`c\`", r"\_i\_", "plain_name"):
        assert any(f"| {shown} |" in line for line in table), shown


def test_markdown_and_text_say_when_totals_are_lower_bounds(tmp_path: Path) -> None:
    class Exponential(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(x)

    for suffix in ("md", "txt"):
        text = eo.profile(Exponential(), (4, 4)).save(tmp_path / f"x.{suffix}").read_text(encoding="utf-8")
        assert "1 operator unpriced: aten.linalg" in text.replace("\\", "")
        assert "≥ 0 MACs" in text


def test_text_holds_every_module(tmp_path: Path) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4)) for _ in range(80)]
    text = eo.profile(nn.Sequential(*layers), (1, 4)).save(tmp_path / "x.txt", "modules").read_text(encoding="utf-8")
    assert text.count("Linear") == 80


def _written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "profile.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnreadableProfile, match=r"no file '.*nothing\.json'; `edge-opt profile -o"):
        eo.load(tmp_path / "nothing.json")
    with pytest.raises(UnreadableProfile, match="cannot read"):
        eo.load(tmp_path)


@pytest.mark.parametrize("content", ["", "path,type\n", b"\x89PNG\r\n\xff", "[" * 100_000])
def test_what_is_not_json_is_refused(content: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(UnreadableProfile, match="not JSON"):
        eo.load(_written(tmp_path, content))


def test_a_file_that_is_cut_off_is_refused(profile: eo.ModelProfile, tmp_path: Path) -> None:
    text = profile.save(tmp_path / "whole.json").read_text()
    for share in (0.1, 0.5, 0.99):
        with pytest.raises(UnreadableProfile, match="cut off"):
            eo.load(_written(tmp_path, text[: int(len(text) * share)]))


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"format": "other"}', '{"name": "x", "macs": 1}'])
def test_json_of_others_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableProfile, match="not a profile"):
        eo.load(_written(tmp_path, content))


@pytest.mark.parametrize(
    ("version", "cure"), [(2, "upgrade edge-opt"), (0, "profile the model again"), (None, "profile the model again")]
)
def test_another_schema_says_which_and_what_to_do(
    profile: eo.ModelProfile, tmp_path: Path, version: int | None, cure: str
) -> None:
    data = json.loads(profile.save(tmp_path / "x.json").read_text()) | {"schema_version": version}
    with pytest.raises(UnreadableProfile, match=f"version {version}.*{cure}"):
        eo.load(_written(tmp_path, json.dumps(data)))


@pytest.mark.parametrize(
    ("keys", "value", "place"),
    [
        (("totals", "macs"), "many", r"totals\.macs is 'many'"),
        (("mode",), "test", "mode is 'test'.*'eval', 'train'"),
        (("layers", 0, "call", "path"), None, r"layers\[0\]\.call\.path is None"),
        (("trace", "ops", 1, "reads"), "01", r"trace\.ops\[1\]\.reads is '01'"),
        (("trace", "ops", 0, "module"), 99, r"trace\.ops\[0\]"),
        (("trace", "ops", 0, "creates"), [99], r"trace\.ops\[0\]"),
        (("prices",), [], "price"),
    ],
)
def test_a_damaged_file_names_the_place(
    profile: eo.ModelProfile, tmp_path: Path, keys: tuple[Any, ...], value: Any, place: str
) -> None:
    data = json.loads(profile.save(tmp_path / "x.json").read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    with pytest.raises(UnreadableProfile, match=place):
        eo.load(_written(tmp_path, json.dumps(data)))


def test_report_never_imports_torch() -> None:
    code = (
        "import sys, edge_opt.report.sheets, edge_opt.report.save, edge_opt.report.table;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
