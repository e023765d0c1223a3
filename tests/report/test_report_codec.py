"""The codec: records to JSON values and back, exactly."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_opt._support.json import from_plain, to_plain
from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.records.costs import OpCost, OpSignature, StorageInfo, TensorInfo


@dataclass(frozen=True, slots=True)
class Inner:
    shape: tuple[int, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    inner: Inner | None
    pairs: tuple[tuple[str, Any], ...]
    is_set: bool = False


tensors = st.builds(
    TensorInfo, st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from(["float32", "bool"]), st.integers(0)
)
arguments = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | tensors,
    lambda inside: st.lists(inside, max_size=3).map(tuple),
    max_leaves=8,
)
pairs = st.lists(st.tuples(st.text(), arguments), max_size=3).map(tuple)


@given(
    st.builds(
        OpSignature,
        st.text(),
        st.lists(st.text(), max_size=3).map(tuple),
        st.lists(arguments, max_size=4).map(tuple),
        pairs,
        st.lists(tensors, max_size=2).map(tuple),
        st.booleans(),
        st.integers(),
    )
)
def test_any_signature_comes_back_equal_with_the_same_types(signature: OpSignature) -> None:
    again = from_plain(OpSignature, json.loads(json.dumps(to_plain(signature), allow_nan=False)))
    assert again == signature
    assert repr(again) == repr(signature)  # 1, 1.0 and True are equal, and are not the same


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_lacks_are_written_out(value: float) -> None:
    plain = to_plain(Outer("x", "a", Inner((1,), value), (("fill", value),)))
    assert plain["inner"]["share"] == {"float": repr(value)}
    again = from_plain(Outer, json.loads(json.dumps(plain, allow_nan=False)))
    assert again.inner is not None
    assert repr((again.inner.share, again.pairs[0][1])) == repr((value, value))


def test_none_defaults_and_whole_floats() -> None:
    assert from_plain(Outer, {"name": "x", "kind": "b", "inner": None, "pairs": []}) == Outer("x", "b", None, ())
    assert from_plain(Inner, {"shape": [], "share": 1}) == Inner((), 1.0)
    assert from_plain(StorageInfo, to_plain(StorageInfo(4, "input", None, 3))) == StorageInfo(4, "input", None, 3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": 3}, "name is 3; expected text"),
        ({"kind": "c"}, "kind is 'c'; expected one of 'a', 'b'"),
        ({"inner": []}, "inner is []; expected a Inner"),
        ({"inner": {"shape": [1, "2"], "share": 0.5}}, "inner.shape[1] is '2'; expected a whole number"),
        ({"inner": {"shape": [True], "share": 0.5}}, "inner.shape[0] is True; expected a whole number"),
        ({"inner": {"shape": [1.0], "share": 0.5}}, "inner.shape[0] is 1.0; expected a whole number"),
        ({"inner": {"shape": [1], "share": "half"}}, "inner.share is 'half'; expected a number"),
        ({"inner": {"shape": [1]}}, "inner has no field 'share'"),
        ({"pairs": [["a"]]}, "pairs[0] is ['a']; expected a list of 2"),
        ({"pairs": {}}, "pairs is {}; expected a list"),
        ({"pairs": [["a", {"shape": []}]]}, "pairs[0][1] has no field 'dtype'"),
        ({"is_set": 1}, "is_set is 1; expected true or false"),
        ({"extra": 1}, "the document has the unknown field 'extra'"),
        ({"name": ["x" * 99]}, "name is ['" + "x" * 35 + "...; expected text"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_place(change: dict[str, Any], sentence: str) -> None:
    plain = to_plain(Outer("x", "a", Inner((1,), 0.5), (("k", 1),))) | change
    with pytest.raises(UnreadableProfile) as refusal:
        from_plain(Outer, plain)
    assert str(refusal.value) == sentence


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a set"):
        to_plain(Outer("x", "a", None, (("k", {1}),)))
    with pytest.raises(InvalidInput, match="no JSON form for the type"):
        to_plain({1: 2})
    with pytest.raises(InvalidInput, match="no JSON form for the type"):
        from_plain(set, [])  # type: ignore[type-var]
    with pytest.raises(UnreadableProfile, match="3.*OpCost"):
        from_plain(OpCost, 3)
