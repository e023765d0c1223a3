"""A training step: FLOPs from dimensions, memory against a real step, what the model keeps, and mistakes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt import units
from edge_opt.cli import app
from edge_opt.errors import EdgeOptError, InvalidInput, TraceFailed
from edge_opt.measuring.memory import record_events, replay
from edge_opt.records.training_steps import TrainingStep
from edge_opt.report.training_tables import _curve_svg
from edge_opt.training_steps.step_report import fewest_checkpoints
from edge_opt.training_steps.step_trace import summed

F32 = 4


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(self.block() for _ in range(3)))
        self.head = nn.Linear(8, 4)
        self.unused = nn.Flatten()

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        for block in self.blocks:
            y = y + block(y)
        return self.head(y.mean((2, 3)))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.lstm = nn.LSTM(16, 20, batch_first=True, bidirectional=True)
        self.head = nn.Linear(40, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.layers(self.embed(ids)))[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], list[str], str]] = {
    "conv": (ConvNet, lambda: torch.randn(2, 3, 8, 8), ["blocks.0", "blocks.2"], "stem"),
    "reader": (Reader, lambda: torch.randint(0, 50, (2, 7)), ["layers.layers.1"], "embed"),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def made_in_step(step: TrainingStep) -> tuple[int, int]:
    """Peaks of the first and of later steps, without what is there before: weights, buffers, batch."""
    before = step.peak.memory.weights + step.peak.memory.buffers + step.peak.memory.inputs
    return step.first_peak_bytes - before, step.peak_bytes - before


def real_peaks(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, **how: Any) -> tuple[int, int]:
    """The allocator's peaks of the first and the second step, with gradients and state that were there before."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=how.get("set_to_none", True))
        for _ in range(how.get("accumulate", 1)):
            loss = summed(model(x))
            loss.backward()
        optimizer.step()

    first = replay(record_events(step, torch.device("cpu"))).tensor_peak_bytes
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    held = 0 if how.get("set_to_none", True) else sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return first, replay(record_events(step, torch.device("cpu"))).tensor_peak_bytes + state + held


def assert_apart_by_random_states(step: TrainingStep, real: tuple[int, int], checkpoints: int) -> None:
    """A checkpoint keeps the state of the random numbers; one more is kept while it recomputes. Neither is traced."""
    most = (checkpoints + 1) * torch.get_rng_state().nbytes
    assert all(0 <= theirs - ours <= most for ours, theirs in zip(made_in_step(step), real, strict=True))


HOW: list[dict[str, Any]] = [
    {"accumulate": 2}, {"set_to_none": False}, {"frozen": True}, {"checkpoint": True},
]  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    *((optimizer, {}) for optimizer in OPTIMIZERS),
    *(("sgd", how) for how in HOW),
    ("adamw", {"checkpoint": True}),
    ("adamw", {"frozen": True}),
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("optimizer", "how"), CASES, ids=str)
def test_the_peak_is_that_of_a_real_step(kind: str, optimizer: str, how: dict[str, Any]) -> None:
    make, make_input, paths, frozen = MODELS[kind]
    model, x = make().train(), make_input()
    options: dict[str, Any] = {key: value for key, value in how.items() if key not in ("frozen", "checkpoint")}
    step = eo.training_step(
        model, x, optimizer=optimizer, frozen=frozen if "frozen" in how else (),
        checkpoint=paths if "checkpoint" in how else (), **options,
    )  # fmt: skip
    if "frozen" in how:
        model.get_submodule(frozen).requires_grad_(False)
    for path in paths if "checkpoint" in how else ():
        module = model.get_submodule(path)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    real = real_peaks(model, x, OPTIMIZERS[optimizer](model.parameters()), **options)
    if "checkpoint" in how:
        assert_apart_by_random_states(step, real, checkpoints=len(paths))
    else:
        assert made_in_step(step) == real


def test_an_optimizer_for_all_parameters_at_once_is_passed_as_it_is() -> None:
    model, x = ConvNet().train(), torch.randn(2, 3, 8, 8)
    step = eo.training_step(model, x, optimizer=torch.optim.Adam(model.parameters(), foreach=True))
    assert made_in_step(step) == real_peaks(model, x, torch.optim.Adam(model.parameters(), foreach=True))


def test_a_fused_optimizer_is_counted_as_the_loop() -> None:
    model, x = ConvNet().train(), torch.randn(2, 3, 8, 8)
    steps = [eo.training_step(model, x, optimizer=torch.optim.AdamW(model.parameters(), fused=f)) for f in (True, None)]
    assert made_in_step(steps[0]) == made_in_step(steps[1])


class Checkpointed(nn.Module):
    """Blocks that checkpoint themselves, in either of torch's two ways."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(16, 16)
        block = functools.partial(nn.Sequential, nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_the_model_itself_are_followed(use_reentrant: bool) -> None:
    model, x = Checkpointed(use_reentrant), torch.randn(8, 16)
    step = eo.training_step(model, x, optimizer="sgd")
    real = real_peaks(model, x, OPTIMIZERS["sgd"](model.parameters()))
    assert_apart_by_random_states(step, real, checkpoints=len(model.blocks))


def test_groups_of_a_given_optimizer_keep_their_settings() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "momentum": 0.9},
    ]
    step = eo.training_step(model, (2, 8), optimizer=torch.optim.SGD(groups, lr=0.1))
    # momentum of the second group alone; the last layer has gradients, and the optimizer does not know it
    assert [layer.state_bytes for layer in step.layers[:3]] == [0, F32 * (16 * 4 + 4), 0]


def test_gradients_that_are_sparse_are_followed() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2))
    step = eo.training_step(model, torch.zeros(2, 5, dtype=torch.int64), optimizer="sgd")
    assert step.used_real_tensors and step.trained_params == 50 * 8 + 8 * 2 + 2


def test_a_linear_layer_from_its_dimensions() -> None:
    # 2 rows x 8 x 4 MACs forward; as many for the weights' gradient; the input needs none
    step = eo.training_step(nn.Linear(8, 4), (2, 8), optimizer="adam")
    assert (step.forward_flops, step.backward_flops) == (2 * 64, 2 * 64)
    assert step.layers[0].input_gradient.macs == 0
    parameters = 8 * 4 + 4
    assert step.layers[0].gradient_bytes == F32 * parameters
    assert step.layers[0].state_bytes == 2 * F32 * parameters + 2 * F32  # two moments; weight and bias count steps
    assert step.trained_params == step.params == parameters


def test_both_gradients_of_a_convolution_in_groups() -> None:
    # each 2 images x 64 outputs x 8 filters x (8/2 channels x 3x3)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=2))
    layer = eo.training_step(model, (2, 3, 8, 8)).layers[-2]
    macs = 2 * 64 * 8 * 4 * 9
    assert (layer.path, layer.forward.macs) == ("1", macs)
    assert (layer.input_gradient.macs, layer.weight_gradient.macs) == (macs, macs)


@pytest.mark.parametrize(
    "first", [nn.Linear(16, 32), nn.LayerNorm(32), nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU())]
)
def test_what_a_linear_layer_hands_on_is_the_gradient_of_its_input(first: nn.Module) -> None:
    # forward, gradient of inputs and gradient of weights: 4 rows x 32 x 8 MACs each, whatever comes before
    width = 32 if isinstance(first, nn.LayerNorm) else 16
    [layer] = [layer for layer in eo.training_step(nn.Sequential(first, nn.Linear(32, 8)), (4, width)).layers
               if layer.path == "1"]  # fmt: skip
    assert [part.macs for part in (layer.forward, layer.input_gradient, layer.weight_gradient)] == 3 * [4 * 32 * 8]


def test_weights_that_are_computed_have_a_gradient_too() -> None:
    [layer] = [layer for layer in eo.training_step(weight_norm(nn.Linear(16, 8)), (4, 16)).layers if layer.forward.macs]
    assert (layer.input_gradient.macs, layer.weight_gradient.macs) == (0, 4 * 16 * 8)


def test_flops_without_groups_are_those_of_the_flop_counter() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))
    step = eo.training_step(model, (2, 3, 8, 8))
    with FlopCounterMode(display=False) as counter:
        summed(model.to("meta")(torch.empty(2, 3, 8, 8, device="meta"))).backward()
    assert step.flops == counter.get_total_flops()


@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_compute_part_of_the_forward_again(kind: str) -> None:
    make, make_input, paths, _ = MODELS[kind]
    x = make_input()
    step = eo.training_step(make(), x)
    again = eo.training_step(make(), x, checkpoint=paths)
    assert again.flops - again.recomputation_flops == step.flops
    assert 0 < again.recomputation_flops < step.forward_flops


def test_rows_and_kinds_add_up() -> None:
    step = eo.training_step(Reader(), torch.randint(0, 50, (2, 7)))
    assert sum(layer.forward.macs for layer in step.layers) == step.forward.macs
    assert sum(layer.backward.macs for layer in step.layers) == step.backward.macs
    assert sum(step.peak_by_kind.values()) == step.peak_bytes
    assert max(point.memory.total for point in step.curve) == step.peak_bytes
    assert step.peak_by_kind["weights"] == sum(F32 * p.numel() for p in Reader().parameters())


def test_a_frozen_layer_has_no_gradient_and_no_state() -> None:
    step = eo.training_step(ConvNet(), (2, 3, 8, 8), frozen=["stem", "blocks"])
    assert step.trained_params == 8 * 4 + 4
    assert step.peak_by_kind["gradients"] <= F32 * 36
    assert all(layer.weight_gradient.macs == 0 for layer in step.layers if layer.path.startswith(("stem", "blocks")))
    assert step.backward_flops == 2 * (2 * 8 * 4)  # the head's weights alone


def test_eight_bit_states_take_a_byte_and_a_scale() -> None:
    # 128 x 64 weights: two moments of one byte, a float32 for every 256; the bias is small and stays in 32 bits
    layer = eo.training_step(nn.Linear(64, 128), (2, 64), optimizer="adamw-8bit").layers[0]
    assert layer.state_bytes == 2 * (8192 + F32 * 8192 // 256) + 2 * F32 * 128


def test_the_model_and_the_random_numbers_are_as_found() -> None:
    model = ConvNet().eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    eo.training_step(model, (2, 3, 8, 8), checkpoint=["blocks.1"])
    with pytest.raises(EdgeOptError):
        eo.training_step(model, (2, 3, 8, 8), loss=lambda output: output)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight.grad is not None and bool((model.head.weight.grad == 1).all())
    assert model.stem.weight.grad is None and not model.training
    assert "forward" not in model.blocks[1].__dict__


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.layer(x))
        z = y * y
        y.add_(1)
        return z


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": lambda y: y.detach().sum()}, "the loss has no gradient"),
        ({"loss": lambda y: y}, "it must be one number"),
        ({"loss": lambda y: 3.0}, "must return a tensor"),
        ({"frozen": ["stem", "blocks", "head"]}, "no parameter of the model is trained"),
        ({"frozen": ["stam"]}, "closest: stem"),
        ({"checkpoint": ["block.0"]}, "closest: blocks.0"),
        ({"checkpoint": ["unused"]}, "the forward never calls"),
        ({"optimizer": "adamm"}, "closest: adam"),
        ({"optimizer": 3}, "optimizer must be a name"),
        ({"optimizer": lambda parameters: None}, "it made a NoneType"),
        ({"optimizer": torch.optim.Muon}, "cannot be made: Muon only supports 2D"),
        ({"autocast": "int8"}, "autocast must be one of"),
        ({"accumulate": 0}, "accumulate"),
        ({"loss": "mse"}, "loss must be a function"),
        ({"frozen": 3}, "frozen must be paths of modules"),
        ({"checkpoint": [nn.ReLU()]}, "checkpoint must be paths of modules"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "no parameter of this model"),
    ],
)
def test_a_mistake_is_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        eo.training_step(ConvNet(), (2, 3, 8, 8), **options)


def test_a_model_without_parameters_cannot_be_trained() -> None:
    with pytest.raises(InvalidInput, match="the model has no parameters"):
        eo.training_step(nn.ReLU(), (2, 4))


def test_what_autograd_refuses_is_told() -> None:
    with pytest.raises(TraceFailed, match="modified by an inplace operation"):
        eo.training_step(Overwrites(), (2, 4))


def test_the_fewest_checkpoints_that_keep_a_budget() -> None:
    block = functools.partial(nn.Sequential, nn.Linear(64, 64), nn.GELU())
    model = nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(4)))
    whole = eo.training_step(model, (512, 64), optimizer="sgd").peak_bytes
    found = fewest_checkpoints(model, (512, 64), budget_mb=0.8 * whole / 2**20, optimizer="sgd")
    assert found.fits and found.before_bytes == whole
    step = eo.training_step(model, (512, 64), optimizer="sgd", checkpoint=found.paths)
    assert (step.peak_bytes, step.flops) == (found.peak_bytes, found.flops)


def test_what_would_help_is_what_it_says() -> None:
    step = eo.training_step(ConvNet(), (4, 3, 8, 8), remedies=True)
    changes = {remedy.change: remedy for remedy in step.remedies}
    sgd = changes['optimizer="sgd"']
    assert sgd.peak_bytes == eo.training_step(ConvNet(), (4, 3, 8, 8), optimizer="sgd").peak_bytes < step.peak_bytes


def test_the_command_prints_and_saves(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(8, 4))\n")
    arguments = ["train-cost", f"{tmp_path}/net.py:net", "-i", "2x8", "--optimizer", "sgd"]
    files = [tmp_path / f"step{ending}" for ending in (".json", ".html", ".md", ".txt")]
    done = CliRunner().invoke(app, [*arguments, *(part for path in files for part in ("-o", str(path)))])
    assert done.exit_code == 0, done.output
    assert "36 of 36 parameters get a gradient" in done.output
    assert json.loads(files[0].read_text())["forward_flops"] == 2 * 2 * 8 * 4
    assert "<svg" in files[1].read_text()
    assert CliRunner().invoke(app, [*arguments, "--budget", "train_peak_memory_mb <= 0.0001"]).exit_code == 1
    assert CliRunner().invoke(app, [*arguments, "--budget-mb", "0.0001"]).exit_code == 1  # the former name
    assert CliRunner().invoke(app, [*arguments, "--optimizer", "sdg"]).exit_code == 2


def test_the_curve_has_sizes_phases_and_the_kinds_that_there_are() -> None:
    step = eo.training_step(
        nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)), (64, 256), optimizer="sgd"
    )
    shown = _curve_svg(step)
    assert f">{units.size(step.peak_bytes)}</text>" in shown and ">0 B</text>" in shown
    assert all(f">{phase}</text>" in shown for phase in ("forward", "backward"))
    # plain SGD has no state, and these layers have no buffers
    assert ">gradients</text>" in shown and "optimizer state" not in shown and "buffers" not in shown


def test_the_largest_batch_of_a_training_step() -> None:
    model = ConvNet()
    limit_bytes = eo.training_step(model, (5, 3, 8, 8), optimizer="sgd").peak_bytes
    fit = eo.fit_batch(
        model, (3, 8, 8), memory_limit_mb=limit_bytes / 2**20, step="train", training={"optimizer": "sgd"}
    )
    assert fit.batch == 5


def test_autocast_keeps_weights_and_narrows_products() -> None:
    model, x = ConvNet().train(), torch.randn(2, 3, 8, 8)
    step = eo.training_step(model, x, optimizer="sgd", autocast="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def real() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = summed(model(x))
        loss.backward()
        optimizer.step()

    assert made_in_step(step)[0] == replay(record_events(real, torch.device("cpu"))).tensor_peak_bytes
    assert step.peak_by_kind["weights"] == sum(F32 * p.numel() for p in model.parameters())
