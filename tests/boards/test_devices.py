"""The catalogue: every figure with its source, found by name, and the user's own files beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt._support.json import from_plain, to_plain
from edge_opt.boards.catalog import KINDS, user_folder
from edge_opt.cli import app
from edge_opt.errors import EdgeOptError, UnknownDevice
from edge_opt.records.devices import DeviceSpec, Figure

DATA = Path(eo.__file__).parent / "boards" / "data"
MINE = """
name = "my-board"
engine = "cpu"
aliases = ["mb"]
[bandwidth_bytes_per_s]
datasheet = { value = 8e9, source = "data sheet, table 3", kind = "vendor" }
[peak_ops_per_s.cpu]
fp32 = { value = 16e9, source = "2 cores x 1 GHz x 8", kind = "derived" }
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the devices of whoever runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = user_folder()
    folder.mkdir(parents=True)
    return folder


def figures(spec: DeviceSpec) -> Iterator[Figure]:
    yield from (item for item in (spec.cores, spec.clock_hz, spec.flash_bytes, spec.overhead_s) if item is not None)
    yield from spec.ram_bytes
    for group in (spec.bandwidths, spec.peaks, spec.powers, spec.latencies):
        yield from (item.figure for item in group)


def test_there_are_at_least_twenty_devices_sorted_by_name() -> None:
    names = [spec.name for spec in eo.devices()]
    assert len(names) >= 20
    assert names == sorted(names)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.toml")), ids=lambda path: path.stem)
def test_every_figure_has_a_source_and_a_kind(path: Path) -> None:
    spec = eo.device(path.stem)
    found = list(figures(spec))
    assert found
    assert all(figure.source.strip() and figure.kind in KINDS and figure.value > 0 for figure in found)
    # A source is a document of somebody else.
    assert not any(word in figure.source for figure in found for word in ("edge_opt", "survey", "public table"))
    assert bool(spec.bandwidths) != bool(spec.bandwidth_unknown)
    assert spec.origin == path.name


@pytest.mark.parametrize(
    "asked",
    "raspberry-pi-zero-2-w raspberry-pi-4 raspberry-pi-5 jetson-nano jetson-xavier-nx jetson-orin-nano jetson-orin-nx "
    "jetson-agx-orin rk3588 intel-n100 desktop-ddr4 apple-m1 apple-m4 snapdragon-8-gen-1 snapdragon-8-gen-2 apple-a16 "
    "coral-usb hailo-8 hailo-8l stm32h747 esp32-s3 rp2040 rp2350".split(),
)
def test_the_devices_that_were_asked_for_are_there(asked: str) -> None:
    assert eo.device(asked).name == asked


def test_datasheet_and_measured_bandwidth_stay_apart() -> None:
    pi = eo.device("raspberry-pi-4")
    datasheet, copied = pi.bandwidth("datasheet"), pi.bandwidth("memcpy", "cpu")
    assert datasheet is not None and copied is not None
    # 32 bits = 4 bytes at 2400 MT/s
    assert datasheet.value == 4 * 2.4e9
    assert (copied.kind, copied.low, copied.high) == ("measured", 2.24e9, 2.78e9)


def test_a_missing_figure_is_none() -> None:
    assert eo.device("raspberry-pi-4").peak("cpu", "fp16") is None
    assert eo.device("apple-m1").bandwidth("traffic", "gpu") is None


@pytest.mark.parametrize("name", ["pi4", "Raspberry Pi 4", "raspberry_pi_4", " RPI4 "])
def test_aliases_and_ways_of_writing_lead_to_the_same_device(name: str) -> None:
    assert eo.device(name).name == "raspberry-pi-4"


def test_a_miss_names_the_closest_and_where_to_put_a_file(own_folder: Path) -> None:
    with pytest.raises(UnknownDevice) as caught:
        eo.device("jetson-nanoo")
    assert "closest: jetson-nano" in str(caught.value)
    assert str(own_folder) in str(caught.value)


@pytest.mark.parametrize("wrong", [7, None, ["pi4"]])
def test_something_else_than_a_name_is_refused(wrong: object) -> None:
    with pytest.raises(UnknownDevice, match="a name, a file or a DeviceSpec"):
        eo.device(wrong)  # type: ignore[arg-type]


def test_a_file_in_the_users_folder_is_a_device_like_any_other(own_folder: Path) -> None:
    (own_folder / "board.toml").write_text(MINE)
    (own_folder / "README.md").write_text("not a device")
    assert eo.device("MB").name == "my-board"
    assert "my-board" in [spec.name for spec in eo.devices()]


def test_a_key_of_thousands_of_parts_is_refused(tmp_path: Path) -> None:
    # 50 000 parts took gigabytes.
    for number, text in enumerate(("a" + ".a" * 5_000 + " = 1", "x = {" + "a." * 5_000 + "a = 1}")):
        (path := tmp_path / f"{number}.toml").write_text(text)
        with pytest.raises(EdgeOptError, match="more than 100 parts"):
            eo.device(path)


def test_a_file_by_path_as_toml_and_as_json_is_the_same_device(tmp_path: Path) -> None:
    as_toml, as_json = tmp_path / "board.toml", tmp_path / "board.json"
    as_toml.write_text(MINE)
    bandwidth = {"datasheet": {"value": 8e9, "source": "data sheet, table 3", "kind": "vendor"}}
    peak = {"cpu": {"fp32": {"value": 16e9, "source": "2 cores x 1 GHz x 8", "kind": "derived"}}}
    data = {"name": "my-board", "engine": "cpu", "aliases": ["mb"]}
    as_json.write_text(json.dumps({**data, "bandwidth_bytes_per_s": bandwidth, "peak_ops_per_s": peak}))
    first, second = eo.device(str(as_toml)), eo.device(as_json)
    assert (first.bandwidths, first.peaks, first.aliases) == (second.bandwidths, second.peaks, second.aliases)
    assert eo.device(first) is first


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CONFIG_HOME": "/xdg"}, "/xdg/edge-opt/devices"),
        ("linux", {}, "/home/me/.config/edge-opt/devices"),
        ("darwin", {}, "/home/me/Library/Application Support/edge-opt/devices"),
        ("darwin", {"XDG_CONFIG_HOME": "/xdg"}, "/xdg/edge-opt/devices"),
        ("win32", {"APPDATA": "/roaming"}, "/roaming/edge-opt/devices"),
        ("win32", {}, "/home/me/AppData/Roaming/edge-opt/devices"),
    ],
)
def test_the_users_folder_is_where_the_platform_keeps_such_things(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("XDG_CONFIG_HOME", "APPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert user_folder() == Path(expected)


def test_two_devices_of_one_name_are_an_error_that_names_both_files(own_folder: Path) -> None:
    (own_folder / "board.toml").write_text(MINE.replace('["mb"]', '["pi4"]'))
    with pytest.raises(EdgeOptError, match=r"two devices are called 'pi4': .*board.toml and raspberry-pi-4.toml"):
        eo.devices()


DATASHEET = 'datasheet = { value = 8e9, source = "data sheet, table 3", kind = "vendor" }'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (DATASHEET, "", "bandwidth_bytes_per_s is missing; write datasheet"),
        ("value = 8e9", "value = -8e9", "bandwidth_bytes_per_s.datasheet.value is -8000000000.0"),
        ("value = 16e9", "value = 0", "peak_ops_per_s.cpu.fp32.value is 0; write a number, more than zero"),
        ("value = 16e9", "value = -1", "peak_ops_per_s.cpu.fp32.value is -1"),
        ("value = 16e9", "value = nan", "peak_ops_per_s.cpu.fp32.value is nan"),
        ("value = 16e9", "value = true", "peak_ops_per_s.cpu.fp32.value is True"),
        ("value = 16e9, ", "", "peak_ops_per_s.cpu.fp32 has no value"),
        ("value = 16e9", "value = 16e9, low = 17e9, high = 18e9", "outside its own range"),
        ('source = "data sheet, table 3", ', "", "bandwidth_bytes_per_s.datasheet has no source"),
        ('source = "data sheet, table 3"', 'source = " "', "bandwidth_bytes_per_s.datasheet has no source"),
        ('kind = "vendor"', 'kind = "rumour"', "has the kind 'rumour'; say how its source knows: vendor, measured"),
        ("fp32 = {", "fp23 = {", "unknown key peak_ops_per_s.cpu.fp23; did you mean fp32?"),
        ("[peak_ops_per_s.cpu]", "[peak_ops_per_s.tpu]", "unknown key peak_ops_per_s.tpu"),
        ("[peak_ops_per_s.cpu]", "[peak_op_per_s.cpu]", "unknown key peak_op_per_s; did you mean peak_ops_per_s?"),
        ("fp32 = { value = 16e9", "fp32 = 16e9 #", "cpu.fp32 is 16000000000.0; every figure carries its source"),
        ('name = "my-board"', "", "name is missing"),
        ('name = "my-board"', 'name = "My Board"', "name is 'My Board'; write it in small letters"),
        ('engine = "cpu"', 'engine = "tpu"', "engine is 'tpu'; name what runs a model"),
        ('aliases = ["mb"]', 'aliases = "mb"', "aliases is 'mb'"),
        ("[bandwidth_bytes_per_s]", '[bandwidth_bytes_per_s]\nunknown = "why"', "set, and there are figures"),
        ("[bandwidth_bytes_per_s]", "[bandwidth_bytes_per_s", "is not TOML, or is cut off"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_with_its_key_and_its_cure(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MINE
    path = tmp_path / "board.toml"
    path.write_text(MINE.replace(old, new))
    with pytest.raises(EdgeOptError) as caught:
        eo.device(path)
    assert "board.toml" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", '{"name": "x"', "is not JSON, or is cut off"),
        ("x.json", "[1, 2]", "holds a list"),
        ("x.json", '{"format": "edge_opt.profile"}', "unknown key format"),
        ("x.toml", b"\xff\xfe", "cannot read"),
        ("x.yaml", "", "must end in .toml or .json"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(EdgeOptError, match=message):
        eo.device(path)


def test_a_file_that_is_not_there_is_an_unknown_device(tmp_path: Path) -> None:
    with pytest.raises(UnknownDevice, match="no file"):
        eo.device(tmp_path / "absent.toml")


def test_an_unknown_bandwidth_must_say_why(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text('name = "b"\nengine = "npu"\n[bandwidth_bytes_per_s]\nunknown = "not published"\n')
    assert eo.device(path).bandwidth_unknown == "not published"
    path.write_text('name = "b"\nengine = "npu"\n[bandwidth_bytes_per_s]\nunknown = true\n')
    with pytest.raises(EdgeOptError, match="write why there is no figure"):
        eo.device(path)


def test_sizes_of_ram_stand_smallest_first(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text('ram_bytes = { value = [4096, 1024], source = "s", kind = "vendor" }\n' + MINE)
    assert [figure.value for figure in eo.device(path).ram_bytes] == [1024, 4096]
    path.write_text('ram_bytes = { value = [], source = "s", kind = "vendor" }\n' + MINE)
    with pytest.raises(EdgeOptError, match="ram_bytes.value is an empty list"):
        eo.device(path)


def test_overhead_may_be_known_to_be_zero(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text('overhead_s = { value = 0, source = "s", kind = "measured" }\n' + MINE)
    overhead = eo.device(path).overhead_s
    assert overhead is not None and overhead.value == 0


@pytest.mark.parametrize(
    "first", ["import edge_opt.boards.roofline as _", "from edge_opt import device", "import edge_opt.hardware"]
)
def test_devices_and_platforms_can_be_called_whatever_was_imported_before(first: str) -> None:
    code = f"{first}; import edge_opt as eo; assert len(eo.devices()) >= 20; assert eo.platforms('pi4')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_device_goes_through_json_and_back() -> None:
    spec = eo.device("raspberry-pi-4")
    assert from_plain(DeviceSpec, json.loads(json.dumps(to_plain(spec)))) == spec


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["devices", *arguments], env={"COLUMNS": "120"})
    return result.exit_code, result.stdout, result.stderr


def test_the_command_lists_every_name_that_works_by_group() -> None:
    code, out, err = run()
    assert code == 0
    names = set(out.replace("*", "").replace(",", "").split())
    assert names >= {spec.name for spec in eo.devices()} | {item.device for item in eo.platforms()}
    assert "raspberry-pi-4* 1–8 GiB," in out and "stm32n6* 4.1 MiB," in out and "galaxy-s24*," in out
    assert len(out.splitlines()) < 80 and "shows aliases, platforms and sources" in err


def test_the_command_shows_every_figure_of_one_device_with_its_source() -> None:
    code, out, _ = run("pi4")
    assert code == 0
    words = " ".join(out.split())
    for figure in figures(eo.device("pi4")):
        assert figure.source in words
    assert "A roofline uses 5.53 GB/s" in out and "Also called  raspberry-pi-4b, " in out


def test_the_command_says_that_a_bandwidth_is_unknown_and_why() -> None:
    code, out, _ = run("coral")
    assert code == 0
    assert "so the roofline does not use it: weights stay in on-chip memory" in " ".join(out.split())


def test_the_command_prints_json() -> None:
    one, every = run("coral", "--json"), run("--json")
    document = json.loads(one[1])
    assert (document.pop("format"), document.pop("schema_version")) == ("edge_opt.device", 1)
    assert from_plain(DeviceSpec, document) == eo.device("coral")
    names = [spec["name"] for spec in json.loads(every[1])]
    assert names[: len(eo.devices())] == [spec.name for spec in eo.devices()] and "galaxy-s24" in names


def test_the_command_refuses_an_unknown_device_with_exit_code_2() -> None:
    code, out, err = run("raspbery-pi-4")
    assert (code, out) == (2, "")
    assert err.startswith("error: no device named 'raspbery-pi-4'; closest: raspberry-pi-4")


def test_the_command_works_in_an_ascii_terminal() -> None:
    for arguments in ([], ["pi4"]):
        done = subprocess.run(
            [sys.executable, "-m", "edge_opt.cli", "devices", *arguments],
            env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(eo.__file__).parent.parent)},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
