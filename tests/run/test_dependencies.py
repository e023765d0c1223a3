"""What results depend on: a change in the model's file, in a neighbour, in a package, in the data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from edge_opt.data import Splits
from edge_opt.errors import InvalidInput
from edge_opt.loading import load_model
from edge_opt.records.sweeps import Candidate
from edge_opt.run.dependencies import code_sources, data_sources, same_twice
from edge_opt.run.model_and_data import ModelAndData
from edge_opt.search.space import Space
from edge_opt.search.store import ResultSource, Store
from edge_opt.search.sweep import run_sweep
from sweep_control import lines
from sweep_jobs import Arithmetic

pytestmark = pytest.mark.usefixtures("own_machine")

MODEL = """
from typing import TYPE_CHECKING
import torch
from layers_of_it import scaled
if TYPE_CHECKING:
    import never_there

class Net(torch.nn.Module):
    def forward(self, x):
        from package_of_it import halved
        return halved(scaled(x))
"""
NEIGHBOUR = "def scaled(x):\n    return x * 2\n"
PACKAGE = "def halved(x):\n    return x / 2\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's file, a neighbour that it imports, and a package that is installed."""
    root, installed = tmp_path / "project", tmp_path / "lib" / "site-packages"
    (installed / "package_of_it").mkdir(parents=True)
    root.mkdir()
    (root / "net.py").write_text(MODEL, encoding="utf-8")
    (root / "layers_of_it.py").write_text(NEIGHBOUR, encoding="utf-8")
    (root / "unrelated.py").write_text("x = 1\n", encoding="utf-8")
    (installed / "package_of_it" / "__init__.py").write_text("from .inner import halved\n", encoding="utf-8")
    (installed / "package_of_it" / "inner.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(root), str(installed), *sys.path])
    return tmp_path


def sources(project: Path) -> dict[str, ResultSource]:
    return code_sources(f"{project / 'project' / 'net.py'}:Net")


def test_the_file_its_neighbour_and_its_packages_are_what_a_model_depends_on(project: Path) -> None:
    assert sorted(sources(project)) == ["layers_of_it.py", "net.py", "package_of_it", "torch"]


CHANGES = [
    ("project/net.py", "halved(scaled(x))", "halved(scaled(x)) + 1", ["net.py"]),
    ("project/layers_of_it.py", "x * 2", "x * 3", ["layers_of_it.py"]),
    # An installed package counts by its version.
    ("lib/site-packages/package_of_it/inner.py", "x / 2", "x / 3", []),
    ("project/net.py", "import torch\n", "import torch  # a remark\n\n\n", []),
    ("project/unrelated.py", "x = 1", "x = 2", []),
]


@pytest.mark.parametrize(("file", "old", "new", "expected"), CHANGES)
def test_a_change_is_named_and_what_depends_on_it_is_run_again(
    file: str, old: str, new: str, expected: list[str], project: Path
) -> None:
    space, log, folder = Space((0.0, 0.5), ("fp32",), ("torch",)), project / "log", project / "out"
    said: list[str] = []

    def sweep() -> None:
        run_sweep(
            Arithmetic(log),
            space,
            folder=folder,
            sources=sources(project),
            on_event=lambda event: said.append(getattr(event, "text", "")),
        )

    sweep()
    before = sources(project)
    path = project / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    after = sources(project)
    assert [name for name in after if after[name] != before[name]] == expected
    sweep()
    # A build and a measurement for each of the two candidates; twice that if they were run again.
    assert len(lines(log)) == 4 * (1 + bool(expected))
    notices = [text for text in said if "changed since" in text]
    assert [text.partition(" changed since")[0] for text in notices] == expected
    assert all("2 of 2 candidates depends on that and is found anew" in text for text in notices)


def test_only_the_rows_that_depend_on_a_source_are_dropped(tmp_path: Path) -> None:
    kept, dropped = Candidate(0.5, "fp32", "torch"), Candidate(0.5, "int8", "onnxruntime")
    store = Store.open(tmp_path, {}, {"calibration data": ResultSource("a", "int8"), "net.py": ResultSource("b")})
    for candidate in (kept, dropped):
        store.count_attempt(candidate)
    store.close()
    said: list[str] = []
    changed = {"calibration data": ResultSource("c", "int8"), "net.py": ResultSource("b")}
    store = Store.open(tmp_path, {}, changed, on_notice=said.append)
    assert store.unfinished() == (kept,)
    store.close()
    assert "calibration data changed since: what was found for 1 of 2 candidates" in said[0]
    # The table as it was is a store of its own.
    (backup,) = tmp_path.glob("sweep.*.sqlite")
    assert backup.name in said[0]


def test_first_weights_count_where_they_are_always_the_same(project: Path) -> None:
    path = project / "project" / "drawn.py"
    path.write_text(
        "import os, torch\n"
        "def fixed():\n    return torch.nn.Linear(2, 2)\n"
        "def drawn():\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    torch.nn.init.constant_(model.bias, int.from_bytes(os.urandom(3), 'big'))\n"
        "    return model\n",
        encoding="utf-8",
    )
    fixed, drawn = (ModelAndData(f"{path}:{name}", {}) for name in ("fixed", "drawn"))
    assert list(same_twice(fixed.build(), fixed)) == ["first weights"]
    assert same_twice(drawn.build(), drawn) == {}


def splits(train: object, validation: float = 0.0) -> Splits:
    fixed = [(torch.full((2, 3), validation), torch.zeros(2))]
    return Splits("mine", train, fixed, fixed, fixed)  # type: ignore[arg-type]


def loader(value: float, seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    data = [(torch.full((3,), value + index), index % 2) for index in range(8)]
    return DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


def test_training_data_count_by_content_and_a_loader_is_left_as_found() -> None:
    mine = loader(0.0, seed=1)
    state = mine.generator.get_state()
    first = data_sources(splits(mine), 0, train="pruned")
    assert torch.equal(mine.generator.get_state(), state)
    assert data_sources(splits(loader(0.0, seed=1)), 0, train="pruned") == first
    other = data_sources(splits(loader(1.0, seed=1)), 0, train="pruned")
    assert [name for name in first if first[name] != other[name]] == ["training data"]
    assert first["training data"].scope == "pruned"


def test_training_data_that_differ_at_each_pass_do_not_look_changed() -> None:
    class Noise:
        def __iter__(self):  # type: ignore[no-untyped-def]
            import os

            return iter([(torch.tensor(list(os.urandom(3))), torch.zeros(1))])

    first, second = (data_sources(splits(Noise()), 0, train="all") for _ in range(2))
    assert first == second


def test_validation_data_in_another_order_at_each_pass_are_refused() -> None:
    shuffled = Splits("mine", [], [], loader(0.0, seed=1), None)
    with pytest.raises(InvalidInput, match="another order, at each pass.*shuffle=False"):
        data_sources(shuffled, 0, train="all")


def test_tensors_of_a_dataset_are_read_without_a_pass() -> None:
    data = TensorDataset(torch.arange(4.0), torch.zeros(4))
    found = [data_sources(splits(DataLoader(data, 2, shuffle=True)), 0, train="all") for _ in range(2)]
    assert found[0] == found[1]


def test_a_class_that_no_import_names_counts_by_the_model(project: Path) -> None:
    (project / "project" / "hidden.py").write_text(
        "import torch\nclass Hidden(torch.nn.Linear):\n    pass\n", encoding="utf-8"
    )
    (project / "project" / "dynamic.py").write_text(
        "import importlib\ndef net():\n    return importlib.import_module('hid' + 'den').Hidden(2, 2)\n",
        encoding="utf-8",
    )
    reference = f"{project / 'project' / 'dynamic.py'}:net"
    assert "hidden.py" in code_sources(reference, load_model(reference).model)
