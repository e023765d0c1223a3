"""Spaces of candidates: counted, enumerated, sampled."""

from __future__ import annotations

import pytest

from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import Candidate
from edge_opt.search.space import Space

SPACE = Space((0.0, 0.25, 0.5), ("fp32", "int8"), ("torch", "onnxruntime"), {"conv1": (0.0, 0.1), "conv2": (0.0, 0.3)})


def test_every_combination_is_counted_once() -> None:
    # 3 levels x 2 x 2 levels of layers x (4 pairs - int8 on torch)
    assert SPACE.size == 3 * 2 * 2 * 3 == len({candidate.key for candidate in SPACE})


def test_what_is_enumerated_is_in_the_space_and_nothing_else() -> None:
    assert all(candidate in SPACE for candidate in SPACE)
    assert Candidate(0.1, "fp32", "torch", (("conv1", 0.0), ("conv2", 0.0))) not in SPACE
    assert Candidate(0.0, "int8", "torch", (("conv1", 0.0), ("conv2", 0.0))) not in SPACE
    assert Candidate(0.0, "fp32", "torch") not in SPACE


def test_impossible_pairs_are_listed_with_their_reason() -> None:
    (excluded,) = SPACE.excluded
    assert (excluded.precision, excluded.runtime) == ("int8", "torch")
    assert "onnxruntime" in excluded.reason


def test_the_order_is_the_same_each_time() -> None:
    assert list(SPACE) == [SPACE[index] for index in range(SPACE.size)]
    assert SPACE[0] == Candidate(0.0, "fp32", "torch", (("conv1", 0.0), ("conv2", 0.0)))


def test_a_sample_has_no_candidate_twice_and_follows_its_seed() -> None:
    huge = Space([i / 100 for i in range(90)], ("fp32",), ("torch",), {f"conv{i}": (0.0, 0.25, 0.5) for i in range(20)})
    assert huge.size == 90 * 3**20
    drawn = huge.sample(50, seed=1)
    assert len({candidate.key for candidate in drawn}) == 50
    assert drawn == huge.sample(50, seed=1) != huge.sample(50, seed=2)
    assert SPACE.sample(1000, seed=0) == tuple(SPACE)


@pytest.mark.parametrize(
    ("levels", "precisions", "runtimes", "problem"),
    [
        ((), ("fp32",), ("torch",), "pruning_levels is empty"),
        ((0.0, 0.0), ("fp32",), ("torch",), "names a value twice"),
        ((1.0,), ("fp32",), ("torch",), "holds 1.0; expected shares"),
        ((0.0,), ("int4",), ("torch",), "unknown precision 'int4'"),
        ((0.0,), ("int8",), ("torch",), "nothing to try: torch"),
    ],
)
def test_an_unusable_space_is_refused(
    levels: tuple[float, ...], precisions: tuple[str, ...], runtimes: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        Space(levels, precisions, runtimes)  # type: ignore[arg-type]
