"""Pruned models and weights on disk: rebuilt exactly, or refused; no foreign code, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import edge_opt
from edge_opt.compress import apply_spec, load_pruned, load_weights, prune, save_pruned
from edge_opt.errors import InvalidInput, NotSaved, UnreadableModel
from edge_opt.model import SmallCNN
from pruned_nets import Residual, TiedLanguageModel

IMAGE = (1, 3, 16, 16)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save_pruned(prune(Residual(), IMAGE, 0.5), tmp_path / "pruned")


def test_two_files_hold_the_model(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["pruned.json", "weights.safetensors"]
    recipe = json.loads((saved / "pruned.json").read_text())
    assert (recipe["schema"], recipe["schema_version"]) == ("edge_opt.pruned", 1)


def test_trained_weights_survive(tmp_path: Path) -> None:
    pruned = prune(Residual(), IMAGE, 0.5)
    with torch.no_grad():
        for parameter in pruned.model.parameters():
            parameter.add_(1.0)
    again = load_pruned(save_pruned(pruned, tmp_path), Residual)
    assert all(torch.equal(a, b) for a, b in zip(pruned.model.parameters(), again.parameters(), strict=True))


def test_shared_tensors_are_stored_once_and_stay_shared(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pruned = prune(TiedLanguageModel(), [((2, 6), "int64")], 0.5)
    folder = save_pruned(pruned, tmp_path)
    names = set(load_file(folder / "weights.safetensors"))
    assert len(names & {"out.weight", "embedding.weight"}) == 1
    again = load_pruned(folder, TiedLanguageModel)
    assert again.out.weight is again.embedding.weight
    ids = torch.randint(0, 50, (2, 6))
    with torch.no_grad():
        assert torch.equal(again(ids), pruned.model(ids))


def test_another_model_is_refused(saved: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Residual is not the model that was pruned: stem.weight is \(8, 3, 3, 3\)"):
        load_pruned(saved, lambda: Residual(8, 32))
    with pytest.raises(InvalidInput, match="SmallCNN is not the model that was pruned: it lacks 'down.bias'"):
        load_pruned(saved, SmallCNN)
    with pytest.raises(InvalidInput, match="the factory returned a dict"):
        load_pruned(saved, dict)


def test_a_recipe_is_not_applied_twice(saved: Path) -> None:
    pruned = prune(Residual(), IMAGE, 0.5)
    with pytest.raises(InvalidInput, match="is not the model that was pruned"):
        apply_spec(pruned.model, pruned.spec)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not JSON, or is cut off"),
        (lambda text: "[]", "is not the recipe of a pruned model"),
        (lambda text: '{"schema": "other"}', "is not the recipe of a pruned model"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "has schema version 99"),
        (lambda text: text.replace('"dim": 0', '"dim": "zero"'), "is damaged"),
        (lambda text: text.replace('"kept"', '"held"'), "is damaged: the document has the unknown field 'held'"),
        (lambda text: text.replace('"dim": 0', '"dim": 7'), "impossible indices"),
        (lambda text: text.replace('"name": "out_channels"', '"name": "made_up"'), "no count 'made_up'"),
        (lambda text: text.replace('"name": "out_channels"', '"name": "forward"'), "no count 'forward'"),
        (lambda text: text.replace('"attention": []', '"attention": ["nowhere"]'), "Residual has no 'nowhere'"),
        (lambda text: text.replace('"attention": []', '"attention": ["stem"]'), "stem is a Conv2d, not nn.Multihead"),
    ],
)
def test_damaged_recipes_are_refused(saved: Path, damage, message: str) -> None:
    recipe = saved / "pruned.json"
    recipe.write_text(damage(recipe.read_text()))
    with pytest.raises((UnreadableModel, InvalidInput), match=message):
        load_pruned(saved, Residual)


def test_damaged_weights_are_refused(saved: Path) -> None:
    weights = saved / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UnreadableModel, match="is cut off or is not a safetensors file"):
        load_pruned(saved, Residual)
    weights.unlink()
    with pytest.raises(InvalidInput, match="no file"):
        load_pruned(saved, Residual)
    with pytest.raises(InvalidInput, match="a pruned model is a folder with pruned.json and weights.safetensors"):
        load_pruned(saved / "nowhere", Residual)


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return Path.touch, (Path(os.environ["EDGE_OPT_TRAP"]),)


def test_loading_weights_never_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "sprung"
    monkeypatch.setenv("EDGE_OPT_TRAP", str(trap))
    torch.save({"weight": torch.zeros(2), "extra": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(UnreadableModel, match="loading that runs code from the file; .* allow_pickle=True"):
        load_weights(nn.Linear(2, 2), tmp_path / "trap.pt")
    assert not trap.exists()


@pytest.mark.parametrize("damage", ["compressed", "stack"])
def test_a_file_of_weights_that_torch_does_not_write_is_refused(tmp_path: Path, damage: str) -> None:
    torch.save({"weight": torch.zeros(2**20)}, tmp_path / "whole.pt")
    kind = zipfile.ZIP_DEFLATED if damage == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "w.pt", "w", kind) as changed:
        for name in whole.namelist():
            is_changed = damage == "stack" and name.endswith("data.pkl")
            changed.writestr(name, b"\x80\x02" + b"(" * 1000 + b"." if is_changed else whole.read(name))
    # 4 MiB of zeros are 4 KiB of a compressed file; 4 GiB are 4 MiB.
    with pytest.raises(UnreadableModel, match="is compressed" if damage == "compressed" else "cut off"):
        load_weights(nn.Linear(2, 2), tmp_path / "w.pt")


def test_a_file_of_weights_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/data.pkl", b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x10\x85R.")  # 2²⁸ bytes
        archive.writestr("w/version", "3")
    with pytest.raises(UnreadableModel, match="it holds a bytearray"):
        load_weights(nn.Linear(2, 2), path)


def test_a_file_of_weights_with_a_damaged_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(nn.Linear(2, 2).state_dict(), path)
    path.write_bytes(path.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x03"))
    with pytest.raises(UnreadableModel, match="cut off"):
        load_weights(nn.Linear(2, 2), path)


def test_weights_come_from_either_kind_of_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = SmallCNN()
    torch.save(model.state_dict(), tmp_path / "small.pt")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pth")
    save_file(model.state_dict(), tmp_path / "small.safetensors")
    for name in ("small.pt", "checkpoint.pth", "small.safetensors"):
        loaded = load_weights(SmallCNN(), tmp_path / name)
        assert torch.equal(loaded.conv1.weight, model.conv1.weight)


def test_a_pickled_module_needs_an_explicit_flag(tmp_path: Path) -> None:
    model = SmallCNN()
    torch.save(model, tmp_path / "module.pt")
    with pytest.raises(UnreadableModel, match="holds more than tensors"):
        load_weights(SmallCNN(), tmp_path / "module.pt")
    loaded = load_weights(SmallCNN(), tmp_path / "module.pt", allow_pickle=True)
    assert torch.equal(loaded.conv1.weight, model.conv1.weight)


def test_weights_of_another_model_are_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    torch.save(SmallCNN(8, 32).state_dict(), tmp_path / "small.pt")
    model = SmallCNN(16, 32)
    before = model.conv2.weight.clone()
    with pytest.raises(UnreadableModel, match=r"it has conv1.weight as \(8, 1, 3, 3\), not \(16, 1, 3, 3\)"):
        load_weights(model, tmp_path / "small.pt")
    assert torch.equal(model.conv2.weight, before)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "small.pt").read_bytes()[:500])
    with pytest.raises(UnreadableModel, match="is cut off or is not a torch file"):
        load_weights(model, tmp_path / "cut.pt")
    with pytest.raises(InvalidInput, match="expected .safetensors, .pt or .pth"):
        load_weights(model, tmp_path / "model.onnx")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A process that may not write files larger than 20 kB: the recipe would fit, the weights do not."""
    code = (
        "import resource, signal, sys\n"
        "from edge_opt.compress import prune, save_pruned\n"
        "from edge_opt.model import SmallCNN\n"
        "pruned = prune(SmallCNN(32, 64), (1, 1, 28, 28), 0.5)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "save_pruned(pruned, sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(edge_opt.__file__).parents[1])}
    target = tmp_path / "out" / "pruned"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=False, env=environment
    )
    assert re.search("cannot write to .*: File too large", done.stderr)
    assert not target.exists()


def test_a_failed_save_keeps_the_old_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "pruned.json" in path.name:
            write(path, data[:10])
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(NotSaved, match="No space left on device"):
        save_pruned(prune(Residual(), IMAGE, 0.25), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
