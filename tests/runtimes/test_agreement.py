"""A ruined model never passes: agreement is checked at several batch sizes, and it decides."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from convertible import Residual
from edge_opt import compress
from edge_opt.errors import Disagrees, InvalidInput
from edge_opt.model import SmallCNN
from edge_opt.quantization.onnx_files import Tensors, sample_remarks
from edge_opt.records.conversions import Agreement
from edge_opt.runtimes.agreement import ReferenceModel, agreement, bound_of, first_violation
from edge_opt.runtimes.model_call import LabeledBatches, ModelCall, flat_call, model_call
from edge_opt.runtimes.torch_runtime import TorchRunner

SHAPE = (1, 1, 28, 28)
PICTURES = [torch.randn(16, 1, 28, 28)]
# Ranges found on inputs a thousand times too small cut off nearly every value.
FAINT = [0.001 * PICTURES[0]]


def test_ranges_of_the_wrong_data_raise_with_the_layer_where_it_begins(tmp_path: Path) -> None:
    with pytest.raises(Disagrees, match=r"int8 on onnxruntime disagrees .* is allowed.* begins at 'conv1' \(Conv\)"):
        compress.convert(SmallCNN(), SHAPE, "int8", calibration=FAINT, verify_on=PICTURES, output=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_allow_takes_it_as_it_is_and_the_record_says_how_bad_it_is() -> None:
    done = compress.convert(SmallCNN(), SHAPE, "int8", calibration=FAINT, verify_on=PICTURES, max_difference=True)
    assert max(entry.difference or 0.0 for entry in done.agreement.by_batch) > bound_of("int8", None)
    with pytest.raises(InvalidInput, match="max_difference is -1; it is a share"):
        compress.convert(SmallCNN(), SHAPE, "int8", calibration=FAINT, max_difference=-1)
    assert math.isinf(bound_of("int8", True))


def test_one_sample_the_batches_given_and_a_large_batch_are_compared() -> None:
    done = compress.convert(SmallCNN(), SHAPE, "int8", calibration=PICTURES)
    assert [entry.samples for entry in done.agreement.by_batch] == [1, 16, 512]
    assert all(entry.output == 0 and not entry.refused for entry in done.agreement.by_batch)


def compared_on(call: ModelCall, runner: TorchRunner, batches: list[Tensors], fixed_batch: int | None) -> Agreement:
    labeled = LabeledBatches(batches, [None] * len(batches), "a test")
    return agreement(ReferenceModel(call), runner, labeled, fixed_batch)


class Off(nn.Module):
    """A little off everywhere, which is much where outputs are near zero."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + 0.005,)


def test_small_calls_are_judged_together() -> None:
    x = torch.ones(16, 4)
    x[0] = 0.01
    model = nn.Identity()
    batches = [(x[place : place + 1],) for place in range(16)]
    found = compared_on(model_call(model, (1, 4)), TorchRunner(Off(), 1), batches, 1)
    # 0.005 over a mean of (15 + 0.01) / 16; of the first sample alone it would be 0.5
    assert [entry.samples for entry in found.by_batch] == [1]
    assert found.by_batch[0].difference == pytest.approx(0.005 / (15.01 / 16), rel=1e-3)


class TenthMore(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (1.12 * x,)


def test_outputs_are_their_own_scale_however_small_they_are() -> None:
    x = 1e-8 * torch.ones(16, 4)
    found = compared_on(model_call(nn.Identity(), (1, 4)), TorchRunner(TenthMore(), 1), [(x,)], 16)
    assert found.relative_difference == pytest.approx(0.12, rel=1e-3)
    assert first_violation(found, 0.1) is not None and first_violation(found, 0.13) is None


class FirstOff(nn.Module):
    """Of positive scores twice as much; of the first of the negative ones, the order changed."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if bool((x > 0).all()):
            return (2 * x,)
        return (torch.cat([x[:1].flip(1), x[1:]]),)


def test_the_batch_that_differs_most_is_not_hidden_by_one_with_more_other_answers() -> None:
    scores = torch.tensor([[1.0, 3.0]] * 20)
    batches = [(scores,), (-scores,)]
    found = compared_on(model_call(nn.Identity(), (1, 2)), TorchRunner(FirstOff(), 1), batches, 20)
    # doubled: off by its own mean. One of twenty flipped: off by (2 + 2) / (20 * 4)
    assert [(entry.samples, entry.difference, entry.flips) for entry in found.by_batch] == [(20, 1.0, 0.05)]


def test_ranges_of_few_samples_are_remarked_upon() -> None:
    assert sample_remarks([(torch.zeros(16, 3),), (torch.zeros(16, 3),)]) == ()
    assert sample_remarks([(torch.zeros(2, 3),), (torch.zeros(2, 3),)]) == (
        "ranges come from 4 samples: others may leave them; calibrate on 32 or more",
    )


class WrongBeyond(nn.Module):
    """Right for small batches, as a runtime with a broken kernel for large ones is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        scores = self.model(x)
        return (scores.flip(1) if len(x) > 100 else scores,)


def test_a_large_batch_that_goes_wrong_is_found() -> None:
    model = Residual().eval()
    subject = model_call(model, (1, 3, 12, 12))
    found = compared_on(subject, TorchRunner(WrongBeyond(model), 1), [(torch.randn(8, 3, 12, 12),)], None)
    trouble = first_violation(found, 0.1)
    assert trouble is not None and trouble.entry is not None and trouble.entry.samples == 512
    assert [entry.difference for entry in found.by_batch[:2]] == pytest.approx([0.0, 0.0], abs=1e-5)


def test_labels_behind_the_inputs_give_accuracy_before_and_after() -> None:
    model = SmallCNN().eval()
    with torch.no_grad():
        labels = model(PICTURES[0]).argmax(1)
    # the original is right on all but the four samples whose label is moved on by one
    labels[:4] = (labels[:4] + 1) % 10
    done = compress.convert(model, SHAPE, "fp32", "torch", verify_on=[(PICTURES[0], labels)])
    assert done.agreement.accuracy_before == done.agreement.accuracy == 12 / 16


def test_near_ties_that_rounding_decides_anew_are_not_clear_answers() -> None:
    class Ties(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[:, 0] * 0 + 1.0, x[:, 0] * 0 + 1.0001, x[:, 0] * 0], 1)

    class OtherTies(Ties):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
            return (super().forward(x)[:, [1, 0, 2]],)

    subject = model_call(Ties(), (4, 2))
    found = compared_on(subject, TorchRunner(OtherTies(), 1), [subject.tensors], None)
    assert found.top1 == 0.0 and found.by_batch[-1].flips is None
    assert first_violation(found, 0.01) is None


def test_of_two_classes_a_near_tie_is_no_clear_answer_either() -> None:
    class Swapped(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.cat([x[:4].flip(1), x[4:]]),)

    # Four of twenty are ahead by 0.1, the others by 1. The spread of two scores is half of what is between them, so
    # that every one is ahead by half of its own; half of the mean spread is (4 x 0.05 + 16 x 0.5) / 20 / 2 = 0.205.
    scores = torch.tensor([[0.0, 0.1]] * 4 + [[0.0, 1.0]] * 16)
    subject = model_call(nn.Identity(), (1, 2))
    found = compared_on(subject, TorchRunner(Swapped(), 1), [(scores,)], 20)
    assert found.top1 == 16 / 20 and found.by_batch[0].flips == 0.0
    far = compared_on(subject, TorchRunner(Swapped(), 1), [(10 * scores[4:],)], 16)
    assert far.by_batch[0].flips == 4 / 16


class Flipping(nn.Module):
    """The scores as they are; every fourth call swaps the two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls += 1
        return (x.flip(1) if self.calls % 4 == 0 else x,)


def test_changed_answers_are_judged_over_all_calls_of_a_small_batch() -> None:
    # forty calls of one sample, ten of which get the other class: a quarter, and a tenth is allowed
    batches = [(torch.tensor([[0.0, 1.0]]),) for _ in range(40)]
    compared = compared_on(model_call(nn.Identity(), (1, 2)), TorchRunner(Flipping(), 1), batches, 1)
    [entry] = compared.by_batch
    assert (entry.samples, entry.compared, entry.flips) == (1, 40, 0.25)
    violation = first_violation(compared, 2.0, 10.0)
    assert violation is not None and violation.entry is entry
    assert violation.text.startswith("at batch 1 25.0% of the samples with a clear answer get another one")


class OfOne(nn.Module):
    """A classifier that takes one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != 1:
            raise ValueError("one sample at a time")
        return self.layer(x)


def test_labels_stay_with_their_samples_where_the_batch_of_a_file_is_fixed() -> None:
    torch.manual_seed(0)
    model, x = OfOne().eval(), torch.randn(6, 4)
    labels = model.layer(x).argmax(1)
    labels[0] = (labels[0] + 1) % 3
    done = compress.convert(model, (1, 4), "fp32", verify_on=[(x, labels)])
    # one of six labels is another class
    assert done.agreement.accuracy_before == done.agreement.accuracy == pytest.approx(5 / 6)
    assert (done.agreement.batches, done.agreement.samples) == (6, 6)


class Calls(nn.Module):
    """Doubles samples, or adds up those before each, and counts samples of its calls."""

    def __init__(self, adds_up: bool) -> None:
        super().__init__()
        self.adds_up, self.counts = adds_up, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts.append(len(x))
        return x.cumsum(0) if self.adds_up else 2 * x


@pytest.mark.parametrize(("adds_up", "calls"), [(False, 2), (True, 8)])
def test_rows_of_a_batch_stand_for_samples_alone_unless_samples_depend_on_each_other(adds_up: bool, calls: int) -> None:
    model = Calls(adds_up)
    original = ReferenceModel(flat_call(model, (torch.rand(1, 4),), ("x",)))
    batch = (torch.rand(8, 4),)
    original.outputs(batch)
    alone = [sample for sample in original.other_sizes([batch]) if len(sample[0]) == 1]
    assert len(alone) == 8 and model.counts.count(1) == calls
    for row, sample in enumerate(alone):
        assert torch.equal(original.outputs(sample)[0], batch[0][row : row + 1] * (1 if adds_up else 2))
