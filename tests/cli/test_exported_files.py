"""Files of exported programs: honest ones open, those that could run code are refused before they are opened."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from edge_opt import exported_file
from edge_opt.cli import app
from edge_opt.errors import InvalidInput, ModelNotFound
from edge_opt.exported_file import is_plain_expression
from edge_opt.loading import load_model

Change = Callable[[dict[str, bytes]], None]


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.mark,)  # type: ignore[return-value]


class Sized(nn.Module):
    """Its outputs' sizes are formulas of the batch; it branches, so that an operator takes functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).reshape(x.shape[0] * 2, 4), torch.cond(x.sum() > 0, torch.relu, torch.neg, (x,))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Sized().eval(), (torch.randn(4, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path


def changed(honest: Path, path: Path, change: Change) -> Path:
    with zipfile.ZipFile(honest) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_an_honest_file_opens(honest: Path) -> None:
    assert load_model(str(honest)).name == "net"


def pickled_inputs(mark: Path) -> Change:
    def change(members: dict[str, bytes]) -> None:
        buffer = io.BytesIO()
        torch.save(((torch.zeros(4, 8), Bomb(mark)), {}), buffer)
        members["net/data/sample_inputs/model.pt"] = buffer.getvalue()

    return change


def pickled_weight(mark: Path) -> Change:
    def change(members: dict[str, bytes]) -> None:
        name = "net/data/weights/model_weights_config.json"
        table = json.loads(members[name])
        entry = next(iter(table["config"].values()))
        entry["use_pickle"] = True
        members[name] = json.dumps(table).encode()
        members[f"net/data/weights/{entry['path_name']}"] = pickle.dumps(Bomb(mark))

    return change


def opaque_constant(mark: Path) -> Change:
    def change(members: dict[str, bytes]) -> None:
        entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
        members["net/data/constants/model_constants_config.json"] = json.dumps({"config": {"c": entry}}).encode()
        members["net/data/constants/opaque_obj_0"] = pickle.dumps(Bomb(mark))

    return change


def under_capitals(old: str, new: str) -> Callable[[Path], Change]:
    """The same bombs under names that torch's reader finds, for it does not tell capitals from small letters."""

    def made(mark: Path) -> Change:
        def change(members: dict[str, bytes]) -> None:
            (pickled_inputs if "sample_inputs" in old else opaque_constant)(mark)(members)
            members[f"net/data/{new}"] = members.pop(f"net/data/{old}")

        return change

    return made


def weight_by_another_name(spelled: str) -> Callable[[Path], Change]:
    def made(mark: Path) -> Change:
        def change(members: dict[str, bytes]) -> None:
            pickled_weight(mark)(members)
            name = "net/data/weights/model_weights_config.json"
            members[name] = members[name].replace(b'"weight_0"', spelled.encode())

        return change

    return made


def imports_a_neighbour(mark: Path) -> Change:
    def change(members: dict[str, bytes]) -> None:
        program = json.loads(members["net/models/model.json"])
        context = {"default_factory_module": "neighbour", "default_factory_name": "x", "dict_context": []}
        node = {"type": "collections.defaultdict", "context": context, "children_spec": []}
        program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, node])
        members["net/models/model.json"] = json.dumps(program).encode()

    return change


def in_graph(old: str, new: str) -> Callable[[Path], Change]:
    def made(mark: Path) -> Change:
        def change(members: dict[str, bytes]) -> None:
            text = members["net/models/model.json"].decode()
            assert old in text
            members["net/models/model.json"] = text.replace(old, new.format(mark=mark)).encode()

        return change

    return made


def library(mark: Path) -> Change:
    return lambda members: members.update({"net/data/aotinductor/model/net.so": b"\x7fELF"})


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (pickled_inputs, "is a pickle that builds more than tensors"),
        (pickled_weight, "is a pickle that builds more than tensors"),
        (opaque_constant, "carries an object of a class of its own"),
        (in_graph("torch.ops.aten.linear.default", "torch.os.system"), "it calls 'torch.os.system'"),
        (in_graph("torch.ops.aten.linear.default", "torch.ops.load_library"), "it calls 'torch.ops.load_library'"),
        (in_graph("Symbol('s77'", "__import__('pathlib').Path('{mark}').touch('"), "is no formula"),
        (in_graph("torch.ops.aten.linear.default", "torch.ops.aten.save.default"), "it calls 'torch.ops.aten.save"),
        (library, "a compiled library or something unknown"),
        (under_capitals("sample_inputs/model.pt", "sample_inputs/model.PT"), "builds more than tensors"),
        (under_capitals("constants/opaque_obj_0", "constants/OPAQUE_obj_0"), "an object of a class of its own"),
        (weight_by_another_name('"WEIGHT_0"'), "builds more than tensors"),
        (weight_by_another_name('"weight_0\\u0000x"'), "builds more than tensors"),
        (imports_a_neighbour, "imports 'neighbour'"),
    ],
)
def test_a_file_that_could_run_code_is_refused_and_nothing_has_run(
    attack: Callable[[Path], Change], said: str, honest: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "it-ran"
    path = changed(honest, tmp_path / "net.pt2", attack(mark))
    with pytest.raises(InvalidInput, match=said) as caught:
        load_model(str(path))
    assert "add --trust" in str(caught.value)
    assert not mark.exists()


def test_a_file_with_two_tables_of_contents_is_refused(honest: Path, tmp_path: Path) -> None:
    """One reader finds the table by its offset, the other by what stands in front of the end: here two differ."""
    mark = tmp_path / "it-ran"
    hidden = changed(honest, tmp_path / "hidden.pt2", pickled_inputs(mark)).read_bytes()
    count, _, size, offset = struct.unpack("<HHII", hidden[-14:-2])
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, zlib.crc32(b"8.14"), 4, 4, 7, 0) + b"version8.14"
    # A comment makes the second table as long as the first, so that one length fits both.
    start = offset - len(local)  # counted from where the second table would be, were it the first
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, zlib.crc32(b"8.14"), 4, 4, 7, 0, size - 53, 0, 0,
                        0, start) + b"version".ljust(size - 46)  # fmt: skip
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, offset, 0)
    crafted = hidden[: offset + size] + local + entry + end
    path = tmp_path / "net.pt2"
    path.write_bytes(crafted)
    with pytest.raises((InvalidInput, ModelNotFound), match="not opened|cannot be read"):
        load_model(str(path))
    assert not mark.exists()


def test_trust_opens_what_would_be_refused_for_one_command(honest: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    path = changed(honest, tmp_path / "net.pt2", pickled_inputs(mark))
    refused = CliRunner().invoke(app, ["profile", str(path), "-i", "4x8"])
    assert (refused.exit_code, mark.exists()) == (2, False)
    CliRunner().invoke(app, ["profile", str(path), "-i", "4x8", "--trust"])
    assert mark.exists()
    mark.unlink()
    assert CliRunner().invoke(app, ["profile", str(path), "-i", "4x8"]).exit_code == 2
    assert not mark.exists()


def test_a_file_that_is_larger_inside_than_outside_is_refused(honest: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/data/weights/weight_0", bytes(50_000_000))
    with pytest.raises(ModelNotFound, match="claims to hold 50000000 bytes"):
        load_model(str(path))


def many_members(members: dict[str, bytes]) -> None:
    members.update({f"net/data/weights/weight_{number}": b"" for number in range(50)})


def many_long_names(members: dict[str, bytes]) -> None:
    members.update({f"net/extra/{'x' * 60_000}{number}": b"" for number in range(86)})  # 86 x 60,000 > 256 x 20,000


def many_numbers(members: dict[str, bytes]) -> None:
    members["net/models/model.json"] = b"[" + b"0," * 1_000_000 + b"0]"


@pytest.mark.parametrize(("change", "said"), [
    (many_members, r"it holds \d+ members, and 50 are"), (many_long_names, "its table of contents has"),
    (many_numbers, r"its tables hold 1,000,\d+ values"),
])  # fmt: skip
def test_a_file_of_too_many_parts_is_refused_before_they_are_read(
    change: Change, said: str, honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported_file, "_MOST_MEMBERS", 50 if change is many_members else 200)
    with pytest.raises(InvalidInput, match=said):
        load_model(str(changed(honest, tmp_path / "net.pt2", change)))


def test_a_small_power_is_a_formula() -> None:
    assert is_plain_expression("s0**2 + Pow(s1, -1) * 2**10")


def test_a_damaged_program_is_one_sentence_and_no_traceback(
    honest: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = changed(honest, tmp_path / "net.pt2", lambda members: members.pop("net/archive_version") and None)
    with pytest.raises(ModelNotFound, match="archive_version"):
        load_model(str(path))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["9**9**9**9", "Pow(9, Pow(9, 9))", "((9**64)**64)**64", "1 << 10**9", "2**s0"])
def test_a_power_without_a_bound_is_no_formula(text: str) -> None:
    assert not is_plain_expression(text)


@pytest.mark.parametrize(
    "text", ["lambdify(x)", "x.__class__", "(lambda: 1)()", "[i for i in x]", "open('a')", "x.sum()"]
)
def test_what_is_more_than_arithmetic_is_no_formula(text: str) -> None:
    assert not is_plain_expression(text)
