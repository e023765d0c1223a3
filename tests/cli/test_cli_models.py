"""MODEL references: what they find, and one sentence with the cure when they find nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import edge_opt
import edge_opt as eo
from edge_opt.cli.arguments import load_model
from edge_opt.errors import MissingExtra, ModelNotFound

SOURCE = str(Path(edge_opt.__file__).parents[1])

NET = """
from torch import nn
from neighbour import WIDTH

class Net(nn.Module):
    def __init__(self, width=WIDTH, bias=True):
        super().__init__()
        self.layer = nn.Linear(4, width, bias)
    def forward(self, x):
        return self.layer(x)

class Holder:
    net = Net()

def build():
    return Net()
def broken():
    raise KeyError("no such key\\nin two lines")
def quits():
    raise SystemExit(3)
def returns_dict():
    return {}
def needs(width):
    return Net(width)
ready = Net()
number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "neighbour.py").write_text("WIDTH = 6\n")
    return str(tmp_path / "net.py")


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Net", 4 * 6 + 6),
        ("build", 4 * 6 + 6),
        ("ready", 4 * 6 + 6),
        ("Holder.net", 4 * 6 + 6),
        ("Net()", 4 * 6 + 6),
        ("Net(width=10)", 4 * 10 + 10),
        ("Net(width=10, bias=False)", 4 * 10),
        ("needs(width=2)", 4 * 2 + 2),
    ],
)
def test_a_file_with_a_class_a_function_or_a_model(file: str, name: str, params: int) -> None:
    loaded = load_model(f"{file}:{name}")
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == params
    assert loaded.name == name.partition("(")[0]


def test_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert type(load_model("edge_opt.model:SmallCNN(num_classes=3)").model).__name__ == "SmallCNN"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    # Nothing is imported from a folder that may belong to others where the package is installed.
    assert load_model("edge_opt.model:SmallCNN") and str(tmp_path) not in sys.path
    (tmp_path / "in_this_folder.py").write_text("from torch import nn\nnet = nn.Linear(2, 2)\n")
    assert isinstance(load_model("in_this_folder:net").model, nn.Linear)


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("{file}:Nett", "has no 'Nett'; closest: Net"),
        ("{file}:zzz", "has no 'zzz'; it has Holder, Net, broken, build, needs, quits, ..."),
        ("{file}:Holder.nt", "has no 'Holder.nt'"),
        ("{file}:broken", "raised KeyError: 'no such key"),
        ("{file}:quits", "raised SystemExit: 3"),
        ("{file}:returns_dict", "returned a dict; it must return a torch.nn.Module"),
        ("{file}:number", "is of type int; name a model, its class or a function"),
        ("{file}:needs", "missing 1 required positional argument: 'width'; give arguments as NAME(width=1.0)"),
        ("{file}:ready(width=3)", "is a model already and takes no arguments"),
        ("{file}:Net(3)", "only keyword arguments are taken"),
        ("{file}:Net(width=open('x'))", "open('x') is not a literal"),
        ("{file}:Net(**{{}})", "** is not taken"),
        ("{file}:Net(width=)", "cannot read the arguments"),
        ("{file}:Net(width=1)(2)", "cannot read the arguments"),
        ("{file}", "names a file without a factory; write net.py:NAME"),
        ("missing.py:Net", "no file 'missing.py'"),
        ("missing.pt2", "no file 'missing.pt2'"),
        ("weights.pth", "is not an exported program"),
        ("resnet50", "'resnet50' is not a model reference; a model is torchvision:resnet50"),
        ("", "'' is not a model reference"),
        ("no_such_package:Net", "no module named 'no_such_package'; install it"),
        ("hf:no/such", "'no/such'"),
        ("edge_opt.nothing:Net", "no module named 'edge_opt.nothing'"),
        ("edge_opt.model:SmallCN", "closest: SmallCNN"),
    ],
)
def test_what_leads_nowhere_is_one_sentence_with_the_cure(file: str, reference: str, sentence: str) -> None:
    with pytest.raises(ModelNotFound) as refusal:
        load_model(reference.format(file=file))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_package_here\n", "ModuleNotFoundError: No module named 'no_such_package_here' (line 1)"),
        ("\n\n1 / 0\n", "ZeroDivisionError: division by zero (line 3)"),
        ("import sys\nsys.exit('usage: ...')\n", "SystemExit: usage: ... (line 2)"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why(file: str, content: str, sentence: str) -> None:
    Path(file).write_text(content)
    with pytest.raises(ModelNotFound) as refusal:
        load_model(f"{file}:Net")
    assert "cannot be imported: " in str(refusal.value)
    assert sentence in str(refusal.value)


def test_a_package_whose_own_imports_fail_is_not_called_missing(file: str) -> None:
    Path(file).with_name("half.py").write_text("import no_such_package_here\n")
    sys.path.insert(0, str(Path(file).parent))
    with pytest.raises(ModelNotFound, match="'half'.*ModuleNotFoundError: No module named 'no_such"):
        load_model("half:Net")


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x).mean((2, 3)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_program_keeps_its_tree_its_types_and_its_inputs(tmp_path: Path) -> None:
    model, path = Exported().eval(), tmp_path / "net.pt2"
    torch.export.save(torch.export.export(model, (torch.zeros(2, 3, 8, 8),)), path)
    loaded = load_model(str(path), trust=True)
    assert loaded.name == "net"
    assert loaded.example is not None
    ours, theirs = eo.profile(loaded.model, list(loaded.example[0])), eo.profile(model, (2, 3, 8, 8))
    # 2 images x 8x8 outputs x 4 filters x (3 channels x 3x3), and 2 rows of 4 to 2
    assert ours.totals.macs == theirs.totals.macs == 2 * 64 * 4 * 3 * 9 + 2 * 4 * 2
    assert ours.totals.params == theirs.totals.params
    kinds = [(call.path, call.kind) for call in theirs.trace.modules]
    assert [(call.path, call.kind) for call in ours.trace.modules] == kinds


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_program_without_a_tree_is_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("cannot be unflattened")

    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(Exported().eval(), (torch.zeros(2, 3, 8, 8),)), path)
    monkeypatch.setattr(torch.export, "unflatten", refuse)
    assert (
        eo.profile(load_model(str(path), trust=True).model, (2, 3, 8, 8)).totals.macs == 2 * 64 * 4 * 3 * 9 + 2 * 4 * 2
    )


def test_a_damaged_exported_program_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "net.pt2").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(ModelNotFound, match=r"net\.pt2.*torch"):
        load_model(str(tmp_path / "net.pt2"), trust=True)


@pytest.mark.parametrize("hub", ["torchvision", "timm"])
def test_a_broken_torchvision_is_as_good_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: str) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (tmp_path / "timm.py").write_text("import torchvision\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torchvision", "timm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingExtra) as refusal:
        load_model(f"{hub}:resnet18")
    assert str(refusal.value).startswith(
        f"{hub} is installed but cannot be imported (RuntimeError: operator torchvision"
    )
    assert "built for another torch; run `pip install --force-reinstall --no-deps torchvision" in str(refusal.value)


def test_the_torchvision_of_this_machine_works_or_says_why_not() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "edge_opt.cli", "profile", "torchvision:resnet18", "-i", "1x3x32x32"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONIOENCODING": "utf-8"},
    )
    if result.returncode:
        assert result.returncode == 2
        assert result.stderr.startswith("error: torchvision is installed but cannot be imported (")
        assert len(result.stderr.splitlines()) == 1


def test_an_absent_hub_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for hub in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, hub, None)
        with pytest.raises(MissingExtra, match=rf"{hub}.*`pip install {hub}"):
            load_model(f"{hub}:resnet18")


def test_a_hub_that_lacks_torchvision_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("import torchvision\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(MissingExtra, match="timm.*`pip install torch"):
        load_model("timm:resnet18")


# PyPI's torchvision looks for compiled operators that a CPU build of torch lacks; its models do without them.
HUBS = """
import sys, torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms") if torch.version.cuda is None else ():
    try:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:
        pass

def no_network(*_, **__):
    raise AssertionError("weights are being downloaded")
torch.hub.load_state_dict_from_url = torch.hub.download_url_to_file = no_network

from edge_opt.cli.arguments import load_model
from edge_opt.errors import EdgeOptError
for reference in sys.argv[1:]:
    try:
        loaded = load_model(reference)
        print(loaded.name, sum(parameter.numel() for parameter in loaded.model.parameters()))
    except EdgeOptError as error:
        print(error)
"""


def hub(*references: str) -> list[str]:
    """What each reference leads to, in a process of its own: to declare operators cannot be undone."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HUBS, *references],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_torchvision_models_are_built_without_weights() -> None:
    plain, narrow, segmentation, wrong, weights = hub(
        "torchvision:resnet18",
        "torchvision:resnet18(num_classes=10)",
        "torchvision:lraspp_mobilenet_v3_large",  # would fetch weights for its backbone
        "torchvision:resnet81",
        "torchvision:resnet18(weights='DEFAULT')",
    )
    assert plain == "resnet18 11689512"  # as torchvision documents it
    assert narrow == f"resnet18 {11689512 - 990 * 513}"
    assert segmentation.startswith("lraspp_mobilenet_v3_large 3")
    assert wrong.startswith("torchvision has no model 'resnet81'; closest: resnet18")
    assert weights == "weights= would download weights, and costs do not depend on them; leave it out"


@pytest.mark.slow
def test_timm_models_are_built_without_weights() -> None:
    found, wrong, weights = hub("timm:resnet18.a1_in1k", "timm:resnet_18", "timm:resnet18(pretrained=True)")
    assert found == "resnet18.a1_in1k 11689512"
    assert wrong.startswith("timm has no model 'resnet_18'; closest: ")
    assert weights.startswith("pretrained= would download weights")
