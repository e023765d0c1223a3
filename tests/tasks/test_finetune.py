"""Fine-tuning: deterministic, on a copy, with the best epoch kept."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from edge_opt.compress import accuracy, finetune, prune
from edge_opt.errors import InvalidInput, TrainingFailed
from edge_opt.measuring.machine import needs_reduced_range
from edge_opt.model import SmallCNN
from edge_opt.quantization.fake_quantization import quantized_weight


def striped(count: int, seed: int) -> TensorDataset:
    """Ten classes, each a bright stripe at a place of its own: a few epochs learn them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    images = 0.3 * torch.randn(count, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 2 * label + 2 : 2 * label + 4] += 1.5
    return TensorDataset(images, labels)


TRAIN, TEST = striped(200, 0), striped(100, 1)


def loader(data: TensorDataset = TRAIN) -> DataLoader:
    return DataLoader(data, batch_size=25, shuffle=data is TRAIN)


def net() -> SmallCNN:
    torch.manual_seed(3)
    return SmallCNN(8, 8)


def test_training_learns_and_the_best_epoch_is_kept() -> None:
    model = net()
    tuned = finetune(model, loader(), epochs=4, learning_rate=3e-3, validate=loader(TEST), progress=False)
    scores = [record.score for record in tuned.history]
    assert [record.epoch for record in tuned.history] == [0, 1, 2, 3, 4]
    assert tuned.history[0].loss is None
    assert tuned.history[-1].loss < tuned.history[1].loss
    assert scores[tuned.best_epoch] == max(scores) > 0.8 > scores[0]
    assert accuracy(tuned.model, loader(TEST)) == max(scores)


def test_pruning_is_healed() -> None:
    trained = finetune(net(), loader(), epochs=4, learning_rate=3e-3, progress=False).model
    pruned = prune(trained, (1, 1, 28, 28), 0.75, round_to=1).model
    tuned = finetune(pruned, loader(), epochs=4, learning_rate=3e-3, teacher=trained, validate=loader(TEST))
    assert accuracy(tuned.model, loader(TEST)) > accuracy(pruned, loader(TEST))


def test_the_same_seed_gives_the_same_weights_and_the_process_keeps_its_numbers() -> None:
    torch.manual_seed(11)
    numbers = torch.get_rng_state(), random.getstate()
    runs = [finetune(net(), loader(), epochs=1, learning_rate=1e-3, seed=seed).model for seed in (5, 5, 6)]
    weights = [run.conv1.weight for run in runs]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    torch.manual_seed(11)
    before = net()
    torch.manual_seed(11)
    state = torch.get_rng_state()
    finetune(before, loader(), epochs=1, learning_rate=1e-3)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers[1]


def test_a_model_that_only_gets_worse_stays_as_it_came() -> None:
    trained = finetune(net(), loader(), epochs=4, learning_rate=3e-3, validate=loader(TEST)).model
    worse = [(images, 9 - labels) for images, labels in loader()]
    tuned = finetune(trained, worse, epochs=2, learning_rate=3e-3, validate=loader(TEST))
    assert tuned.best_epoch == 0
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), tuned.model.parameters(), strict=True))


def test_the_model_the_teacher_and_frozen_layers_are_untouched() -> None:
    model, teacher = net(), net()
    model.conv1.requires_grad_(False)
    model.eval()
    teacher.train()
    before = [parameter.clone() for parameter in (*model.parameters(), *teacher.parameters())]
    tuned = finetune(model, loader(), epochs=1, learning_rate=1e-2, teacher=teacher).model
    after = [*model.parameters(), *teacher.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (model.training, teacher.training, tuned.training) == (False, True, False)
    assert torch.equal(tuned.conv1.weight, model.conv1.weight)
    assert not torch.equal(tuned.conv2.weight, model.conv2.weight)
    assert not tuned.conv1.weight.requires_grad


def test_distillation_alone_follows_the_teacher_not_the_labels() -> None:
    teacher = finetune(net(), loader(), epochs=4, learning_rate=3e-3).model
    wrong = [(images, (labels + 1) % 10) for images, labels in loader()]
    student = finetune(net(), wrong, epochs=4, learning_rate=3e-3, teacher=teacher, distillation_weight=1.0).model
    assert accuracy(student, loader(TEST)) > 0.8


def test_a_function_can_validate() -> None:
    scores = iter([0.1, 0.5, 0.4])
    tuned = finetune(net(), loader(), epochs=2, learning_rate=1e-3, validate=lambda model: next(scores))
    assert (tuned.best_epoch, [record.score for record in tuned.history]) == (1, [0.1, 0.5, 0.4])


def test_a_loss_that_is_not_finite_stops_with_its_place() -> None:
    batches = [*loader(), (torch.full((4, 1, 28, 28), math.nan), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(TrainingFailed, match="the loss is nan in epoch 1, step 9; lower the learning rate"):
        finetune(net(), batches, epochs=2, learning_rate=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": -1}, "epochs is -1"),
        ({"learning_rate": 0}, "learning_rate is 0; it must be a number above 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"distillation_weight": 1.5}, "distillation_weight is 1.5; it must be a number from 0 to 1"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        finetune(net(), loader(), **{"epochs": 1, "learning_rate": 1e-3, **arguments})


def test_bad_data_is_refused() -> None:
    def tune(data: list) -> None:
        finetune(net(), data, epochs=1, learning_rate=1e-3)

    with pytest.raises(InvalidInput, match="the loader has no batches"):
        tune([])
    with pytest.raises(InvalidInput, match="batch 0 is a Tensor, without labels"):
        tune([torch.zeros(4, 1, 28, 28)])
    with pytest.raises(InvalidInput, match=r"outputs \(4, 10\) and labels \(3,\) of torch.int64 do not fit"):
        tune([(torch.zeros(4, 1, 28, 28), torch.zeros(3, dtype=torch.int64))])
    with pytest.raises(InvalidInput, match="every parameter of the model is frozen"):
        finetune(net().requires_grad_(False), loader(), epochs=1, learning_rate=1e-3)
    with pytest.raises(InvalidInput, match=r"the teacher answers \(25, 5\), the model \(25, 10\)"):
        finetune(net(), loader(), epochs=1, learning_rate=1e-3, teacher=SmallCNN(num_classes=5))


def test_inputs_by_name_are_passed_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.layer(features)}

    data = [{"features": torch.randn(8, 4), "labels": torch.zeros(8, dtype=torch.int64)}]
    assert finetune(Named(), data, epochs=3, learning_rate=0.1, validate=data).history[-1].score == 1.0


def test_the_rate_falls_at_every_step_of_a_single_epoch() -> None:
    model = nn.Linear(1, 2, bias=False)
    batch = torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)
    # With the same batch each time AdamW moves a weight by about the rate: the moves are the rates.
    moved, previous = [], model.weight.detach()
    for steps in (1, 2, 3, 4):
        weight = _after(model, [batch] * 4, steps)
        moved.append(float((weight - previous).abs().max()))
        previous = weight
    expected = [0.01 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert moved == pytest.approx(expected, rel=0.1)


def _after(model: nn.Module, batches: list, steps: int) -> torch.Tensor:
    """The weights after so many steps of an epoch of all batches; the rest has labels that are learned nothing from."""

    class Stopping(list):
        def __iter__(self):
            yield from list.__iter__(self[:steps])

    return finetune(model, Stopping(batches), epochs=1, learning_rate=0.01, progress=False).model.weight.detach()


def test_training_for_int8_sees_the_rounded_weights_and_moves_the_whole_ones() -> None:
    largest = 64 if needs_reduced_range() else 127
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float(largest), 0.4]]))
    batch = [(torch.tensor([[0.0, 10.0]]), torch.tensor([[10.0]]))]
    options = {"epochs": 1, "learning_rate": 0.2, "metric": "mae", "loss": "mse", "progress": False}
    tuned = finetune(model, batch, precision="int8", **options)
    # The scale is 1, so 0.4 rounds to 0: 0 instead of 10 is a loss of 100; in float 4 would be one of 36.
    assert tuned.history[1].loss == pytest.approx(100.0)
    # One step of AdamW is the rate itself, up: 0.6, which rounds to 1, and 1 * 10 is what is wanted.
    assert quantized_weight(tuned.model.weight, 0, largest)[0, 1].item() == pytest.approx(1.0, abs=0.01)
    assert finetune(model, batch, **options).history[1].loss == pytest.approx(36.0)
    assert list(tuned.model.state_dict()) == ["weight"] and "weight" not in vars(tuned.model)


def test_training_for_int8_rounds_weights_that_are_computed() -> None:
    # as wav2vec2 has them in the convolution of its positions
    largest = 64 if needs_reduced_range() else 127
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float(largest), 0.4]]))
    model = weight_norm(model)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = [(torch.tensor([[0.0, 10.0]]), torch.tensor([[10.0]]))]
    options = {"epochs": 1, "learning_rate": 0.2, "metric": "mae", "loss": "mse", "progress": False}
    # As above: 0.4 rounds to 0, and 0 instead of 10 is a loss of 100; in float it is one of 36.
    tuned = finetune(model, batch, precision="int8", **options)
    assert tuned.history[1].loss == pytest.approx(100.0, rel=1e-4)
    assert finetune(model, batch, **options).history[1].loss == pytest.approx(36.0, rel=1e-4)
    assert list(tuned.model.state_dict()) == list(kept)
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        # In float again: what the copy computes is its whole weight, not a rounded one.
        assert tuned.model(torch.tensor([[0.0, 1.0]])).item() % 1 != 0


def test_training_is_for_int8_only_and_needs_layers_that_round() -> None:
    batch = [(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(InvalidInput, match="precision is 'int4'"):
        finetune(nn.Linear(3, 2), batch, epochs=1, learning_rate=1e-3, precision="int4")
    with pytest.raises(InvalidInput, match="no convolution or linear layer"):
        finetune(nn.LayerNorm(3), batch, epochs=1, learning_rate=1e-3, precision="int8")


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 4, 3), nn.Linear(4 * 26 * 26, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).view(len(x), -1))


def test_code_that_refuses_channels_last_is_trained_as_it_is() -> None:
    batch = torch.randn(4, 1, 28, 28), torch.arange(4)
    model = Viewing()
    tuned = finetune(model, [batch], epochs=2, learning_rate=1e-3, progress=False)
    assert tuned.history[2].loss < tuned.history[1].loss
    for net in (tuned.model, finetune(SmallCNN(), [batch], epochs=1, learning_rate=1e-3, progress=False).model):
        assert all(parameter.is_contiguous() for parameter in net.parameters())
