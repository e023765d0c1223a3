"""Common operators that once had no cost rule: out=, views in place, transforms, quantized layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from operator_calls import Call, other_ops, priced, profiled, tensor


@pytest.mark.parametrize(
    ("function", "macs", "ops"),
    [
        (lambda x: torch.add(x, x, out=torch.empty_like(x)), 0, 16),
        (lambda x: torch.mm(x, x, out=torch.empty_like(x)), 64, 0),
        (lambda x: torch.matmul(x, x, out=torch.empty_like(x)), 64, 0),
        (lambda x: torch.addmm(x, x, x, out=torch.empty_like(x)), 64, 16),
        (lambda x: torch.sum(x, 0, out=torch.empty_like(x[0])), 0, 16),
        (lambda x: torch.sort(x, out=(torch.empty_like(x), torch.empty_like(x, dtype=torch.long))), 0, 16 * 2),
        (lambda x: torch.linalg.inv(x, out=torch.empty_like(x)), 0, 2 * 64),
        (lambda x: torch.cat([x, x], out=x.new_empty(8, 4)), 0, 0),
    ],
)
def test_a_result_that_is_provided_is_written_and_not_read(function: Callable[..., Any], macs: int, ops: int) -> None:
    profile = profiled(function, torch.eye(4))
    assert (profile.totals.macs, profile.totals.other_ops) == (macs, ops)


def test_bytes_of_a_provided_result() -> None:
    cost = profiled(lambda x: torch.add(x, x, out=torch.empty_like(x)), (4, 4)).operators[-1].cost
    assert (cost.bytes_read, cost.bytes_written) == (2 * 64, 64)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.add(1).transpose_(0, 1),
        lambda x: x.add(1).t_(),
        lambda x: x.add(1).unsqueeze_(0).squeeze_(0),
        lambda x: x.add(1).swapaxes_(0, 1),
        lambda x: x.add(1).view_as(torch.empty(16)),
        lambda x: x.add(1).expand_as(torch.empty(2, 4, 4)),
    ],
)
def test_views_cost_nothing_also_in_place(function: Callable[..., Any]) -> None:
    assert other_ops(function, (4, 4)) == 16  # the addition


def test_logic_in_place() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        found = x > 0
        found &= x < 1
        found |= x > 2
        return found

    assert other_ops(both, (4, 4)) == 5 * 16


def test_a_copy_that_could_have_been_a_view_moves_bytes() -> None:
    cost = profiled(lambda x: x.t().ravel(), (4, 8)).operators[-1].cost
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (0, 128, 128)


def test_short_time_fourier_transform_and_back() -> None:
    window = torch.ones(16)

    def there(x: torch.Tensor) -> torch.Tensor:
        return torch.stft(x, 16, hop_length=4, window=window, return_complex=True)

    def and_back(x: torch.Tensor) -> torch.Tensor:
        return torch.istft(there(x), 16, hop_length=4, window=window)

    # 17 frames of 16: a product with the window, and half of 5 n log2 n for a real transform.
    frames, points = 17, 17 * 16
    assert other_ops(there, torch.ones(64)) == points + 5 * points * 4 // 2
    assert profiled(and_back, torch.ones(64)).totals.other_ops > 2 * 5 * points * 4 // 2
    assert frames == 1 + 64 // 4


@pytest.mark.parametrize(("p", "ops"), [(1.0, 3), (0.0, 3), (float("inf"), 3), (3.0, 4)])
def test_distances_of_all_pairs(p: float, ops: int) -> None:
    roots = 20 if p == 3.0 else 0
    assert other_ops(lambda x, y: torch.cdist(x, y, p=p), (4, 6), (5, 6)) == 4 * 5 * 6 * ops + roots


def test_many_distances_are_a_product() -> None:
    # |x|² + |y|² - 2xy: rows of 6 with two columns more.
    assert profiled(torch.cdist, (30, 6), (30, 6)).totals.macs == 30 * 30 * (6 + 2)


def test_ctc_loss() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        targets = torch.ones(2, 5, dtype=torch.long)
        return nn.functional.ctc_loss(x, targets, (10, 8), (5, 3), reduction="none")

    # 13 operations for each step and state; a blank between all labels, and at both ends.
    assert other_ops(loss, torch.zeros(10, 2, 7)) == 13 * (10 * 11 + 8 * 7)


def test_fake_quantisation() -> None:
    # Scale, round, zero point, two sides of the clamp; zero point and scale back.
    assert other_ops(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), torch.ones(4, 8)) == 7 * 32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no int8 engine in this torch")
def test_dynamically_quantised_linear() -> None:
    model = nn.Sequential(nn.Linear(16, 8))
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    profile = eo.profile(small, inputs=torch.ones(4, 16))
    assert profile.totals.macs == 4 * 16 * 8
    # The input is observed (2) and quantised (5), the result scaled with its bias (2).
    assert profile.totals.other_ops == 4 * 16 * 7 + 4 * 8 * 2
    assert profile.totals.bytes_read == 4 * 16 * 4 + 16 * 8  # weights in one byte each


def test_non_maximum_suppression_compares_every_pair() -> None:
    found = priced("torchvision.nms", (tensor(8, 4), tensor(8), 0.5), tensor(3, dtype="int64"))
    assert found.other_ops == 8 * 3 + 3 * 8 + 13 * (8 * 7 // 2)


def test_roi_align() -> None:
    boxes, out = tensor(5, 5), tensor(5, 3, 7, 7)
    found = priced("torchvision.roi_align", (tensor(1, 3, 32, 32), boxes, 0.25, 7, 7, 2, False), out)
    points = 4  # two by two in a bin, four taps each
    assert found.other_ops == out.elements * points * (7 + 1) + 5 * 49 * points * 14


def test_boxes_that_decide_the_work_are_not_guessed() -> None:
    with pytest.raises(AssertionError):
        priced("torchvision.roi_align", (tensor(1, 3, 32, 32), tensor(5, 5), 0.25, 7, 7, -1, False), tensor(5, 3, 7, 7))


def test_deformable_convolution() -> None:
    x, weight, out = tensor(2, 4, 8, 8), tensor(6, 4, 3, 3), tensor(2, 6, 6, 6)
    offset, mask, bias = tensor(2, 18, 6, 6), tensor(2, 9, 6, 6), tensor(6)
    options = (1, 1, 0, 0, 1, 1, 1, 1, True)
    found = priced("torchvision.deform_conv2d", (x, weight, offset, mask, bias, *options), out)
    positions = 2 * 36
    assert found.macs == positions * 6 * 4 * 9
    assert found.other_ops == positions * 9 * 4 * (7 + 1) + positions * 9 * 14 + positions * 6


def test_a_rule_may_say_that_it_does_not_know() -> None:
    library = torch.library.Library("everyday", "DEF")
    library.define("guess(Tensor x) -> Tensor")
    library.impl("guess", lambda x: x.clone(), "CompositeExplicitAutograd")

    @eo.cost_rule("everyday::guess")
    def guess(out: Any, x: Any) -> None:
        return None

    profile = eo.profile(Call(torch.ops.everyday.guess), (4, 4))
    assert [item.op for item in profile.unpriced] == ["everyday.guess"]
    assert profile.totals.is_lower_bound
