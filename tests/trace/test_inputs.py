"""What users pass as inputs, and what they are told when it cannot be used."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput, TraceFailed


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 8)
        self.right = nn.Linear(6, 8)

    def forward(self, x, y=None, *, scale: float = 1.0, twice: bool = False):
        out = self.left(x) * scale
        if y is not None:
            out = out + self.right(y)
        return {"out": out, "again": (self.left(x), [out])} if twice else out


LEFT, RIGHT = 2 * 4 * 8, 2 * 6 * 8


def test_shapes_tensors_and_keywords_say_the_same() -> None:
    model = TwoInputs()
    x, y = torch.zeros(2, 4), torch.zeros(2, 6)
    for profile in (
        eo.profile(model, [(2, 4), (2, 6)]),
        eo.profile(model, (x, y)),
        eo.profile(model, [x, (2, 6)]),
        eo.profile(model, inputs={"x": x, "y": (2, 6)}),
        eo.profile(model, x, kwargs={"y": y}),
        eo.profile(model, kwargs={"x": ((2, 4), "float32"), "y": eo.InputSpec((2, 6))}),
        eo.profile(model, OrderedDict(x=x, y=y), kwargs={"scale": 2.0}),
    ):
        assert profile.totals.macs == LEFT + RIGHT
        assert profile.totals.input_bytes == 4 * (8 + 12)


def test_keyword_only_and_non_tensor_arguments_reach_forward() -> None:
    profile = eo.profile(TwoInputs(), (2, 4), kwargs={"twice": True})
    assert profile.totals.macs == 2 * LEFT
    # nested outputs: a dict with a tensor, and a tuple with a list
    assert profile.layers[0].call.output_shapes == ((2, 8), (2, 8), (2, 8))


def test_integers_in_keyword_arguments_stay_integers() -> None:
    class Pools(nn.Module):
        def forward(self, x, output_size):
            return nn.functional.adaptive_avg_pool2d(x, output_size)

    for size in ([2, 3], (2, 3)):
        profile = eo.profile(Pools(), (1, 1, 8, 8), kwargs={"output_size": size})
        assert profile.layers[0].call.output_shapes == ((1, 1, 2, 3),)


def test_a_mapping_that_forward_does_not_know_by_name_is_one_argument() -> None:
    class TakesDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 8)

        def forward(self, batch):
            return self.layer(batch["pixels"])

    assert eo.profile(TakesDict(), {"pixels": (2, 4)}).totals.macs == LEFT


def test_named_tuples_and_dataclasses_pass_through() -> None:
    Pair = namedtuple("Pair", "first second")

    @dataclass
    class Batch:
        pixels: torch.Tensor
        label: str

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 8)

        def forward(self, pair, batch):
            assert batch.label == "cat"
            return self.layer(pair.first) + self.layer(batch.pixels)

    x = torch.zeros(2, 4)
    assert eo.profile(Takes(), [Pair(x, None), Batch(x, "cat")]).totals.macs == 2 * LEFT


def test_dtype_can_be_named() -> None:
    model = nn.Embedding(10, 4)
    for spec in (eo.InputSpec((2, 3), "int64"), ((2, 3), "int64"), ((2, 3), torch.int64)):
        profile = eo.profile(model, [spec])
        assert profile.totals.bytes_written == 2 * 3 * 4 * 4
        assert profile.totals.input_bytes == 6 * 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: eo.profile(nn.Linear(4, 2)), "no inputs given"),
        (lambda: eo.profile(nn.Linear(4, 2), []), "inputs is empty"),
        (lambda: eo.profile(nn.Linear(4, 2), (0, 4)), r"\(0, 4\).*at least 1"),
        (lambda: eo.profile(nn.Linear(4, 2), (-1, 4)), r"\(-1, 4\).*-1.*at least 1"),
        (lambda: eo.profile(nn.Linear, (1, 4)), "the class Linear; call it first"),
        (lambda: eo.profile([nn.Linear(4, 2)], (1, 4)), "this is a list"),
        (lambda: eo.profile(nn.Sequential(), (1, 4)), "empty: a Sequential with no layers"),
        (lambda: eo.profile(nn.Linear(4, 2), (1, 4), mode="test"), "mode is 'test'.*one of eval, train"),
        (lambda: eo.profile(nn.LazyLinear(2), (1, 4)), "lazy parameters"),
        (lambda: eo.profile(nn.Linear(4, 2), (10**400, 4)), r"more elements than 2\^50"),
        (lambda: eo.training_step(nn.Linear(4, 2), (1, 4), accumulate=10**400), r"below 2\^63"),
        (lambda: eo.InputSpec((1, 4), "float33"), "unknown dtype 'float33'"),
        (lambda: eo.profile(TwoInputs(), {"x": (2, 4)}, kwargs={"x": (2, 4)}), "'x' is given twice"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_wrong_shape_names_the_module_and_what_it_got() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(99, 10))
    with pytest.raises(TraceFailed, match=r"module '2' \(Linear\) refused its input \(1, 288\)"):
        eo.profile(model, (1, 3, 8, 8))
    with pytest.raises(TraceFailed, match=r"module '0' \(Conv2d\) refused its input \(1, 4, 8, 8\)"):
        eo.profile(model, (1, 4, 8, 8))


def test_a_shape_without_its_batch_and_a_tuple_given_as_a_tensor_are_told_the_cure() -> None:
    class Unpacks(nn.Module):
        def forward(self, pair):
            first, second = pair
            return first + second

    with pytest.raises(TraceFailed, match=r"got 3D input\)\. The first number of a shape is the batch: 1x3x8x8"):
        eo.profile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (3, 8, 8))
    with pytest.raises(TraceFailed, match=r"A tuple or a dict of tensors comes from Python: .*-i file\.py:inputs"):
        eo.profile(Unpacks(), (1, 4))


def test_a_wrong_shape_is_refused_the_same_when_the_memory_is_warm() -> None:
    eo.profile(nn.Linear(8, 4), (2, 8))
    for _ in range(2):
        with pytest.raises(TraceFailed, match=r"refused its input \(2, 9\)"):
            eo.profile(nn.Linear(8, 4), (2, 9))


def test_missing_arguments_are_reported_as_forward_says_it() -> None:
    with pytest.raises(TraceFailed, match="missing 1 required positional argument: 'x'"):
        eo.profile(TwoInputs(), kwargs={"y": eo.InputSpec((2, 6))})


def test_errors_of_forward_keep_their_cause() -> None:
    class Raises(nn.Module):
        def forward(self, x):
            raise KeyError("no such head")

    with pytest.raises(TraceFailed, match="no such head") as error:
        eo.profile(Raises(), (1, 4))
    assert isinstance(error.value.__cause__, KeyError)


def test_attributes_of_a_user_s_model_are_its_own_business() -> None:
    class Noted(nn.Linear):
        input_dtype = "float16"

    profile = eo.profile(Noted(8, 4), (2, 8))
    assert profile.totals.macs == 2 * 8 * 4
    assert profile.trace.input_bytes == 2 * 8 * 4  # float32, as its weights
