"""Inputs as they are typed: shapes, names, dtypes, batch, values and references."""

from __future__ import annotations

import pytest

import edge_opt as eo
from edge_opt.cli.arguments import read_arguments
from edge_opt.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "name", "spec"),
    [
        ("1x3x224x224", None, eo.InputSpec((1, 3, 224, 224))),
        ("7", None, eo.InputSpec((7,))),
        ("1X3", None, eo.InputSpec((1, 3))),
        ("1\N{MULTIPLICATION SIGN}3", None, eo.InputSpec((1, 3))),
        ("1x128:int64", None, eo.InputSpec((1, 128), "int64")),
        ("ids:1x128", "ids", eo.InputSpec((1, 128))),
        ("ids:1x128:int64", "ids", eo.InputSpec((1, 128), "int64")),
        ("x:1x2", "x", eo.InputSpec((1, 2))),
        ("scalar:int64", None, eo.InputSpec((), "int64")),
        ("step:scalar:int64", "step", eo.InputSpec((), "int64")),
    ],
)
def test_the_grammar_of_an_input(text: str, name: str | None, spec: eo.InputSpec) -> None:
    found = read_arguments([text])
    assert found.has_inputs
    assert (found.positional, found.named) == (([], {name: spec}) if name else ([spec], {}))


def test_inputs_keep_their_order() -> None:
    found = read_arguments(["1x2", "flag=true", "mask:3", "4x5"])
    assert [spec.shape for spec in found.positional] == [(1, 2), (4, 5)]
    assert list(found.named) == ["mask", "flag"]


def test_batch_replaces_the_first_dimension_of_every_input() -> None:
    found = read_arguments(["1x3x8", "mask:1x8:bool", "step:scalar"], batch=16)
    assert found.positional[0].shape == (16, 3, 8)
    assert found.named["mask"].shape == (16, 8)
    assert found.named["step"].shape == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("use_cache=false", False),
        ("use_cache=False", False),
        ("x=null", None),
        ("x=0.5", 0.5),
        ("x='text'", "text"),
        ('x="text"', "text"),
        ("x=[1.5, 2]", [1.5, 2]),
        ("x=(1.5, 2)", (1.5, 2)),
        ('x={"a": 1}', {"a": 1}),
    ],
)
def test_keywords_are_json_or_python_literals(text: str, value: object) -> None:
    found = read_arguments([text])
    assert list(found.named.values()) == [value]
    assert not found.has_inputs


@pytest.mark.parametrize(
    ("inputs", "batch", "sentence"),
    [
        (["0x3"], None, "--inputs '0x3'"),
        (["-1x3"], None, "--inputs '-1x3'"),
        (["1x3xa"], None, "--inputs '1x3xa'"),
        (["1x3.5"], None, "--inputs '1x3.5'"),
        (["1,3,8"], None, "[NAME:]DIMxDIM"),
        (["1xx3"], None, "--inputs '1xx3'"),
        (["image"], None, "--inputs 'image'"),
        ([""], None, "--inputs ''"),
        (["1x3:"], None, "--inputs '1x3:'"),
        (["a:1:int64:b"], None, "cannot be read"),
        (["2a:1x3:int64"], None, "cannot be read"),
        (["1x3:flout32"], None, "--inputs '1x3:flout32': unknown dtype 'flout32'; use a torch name such as float32"),
        (["1x3:nn"], None, "unknown dtype 'nn'"),
        (["a:1x3", "a:1x4"], None, "the argument 'a' is given twice"),
        (["a:1x3", "a=1"], None, "the argument 'a' is given twice"),
        (["1x3", "1=2"], None, "--inputs '1=2'"),
        (["1x3", "x=a=b"], None, "'a=b' is neither JSON nor a Python literal"),
        (["1x3", "mode=fast"], None, "put quotes around text: --inputs \"mode='fast'\""),
        (["1x3", "x=__import__('os')"], None, "is neither JSON nor a Python literal"),
        (["1x3", "size=[7, 7]"], None, "would be taken for a shape"),
        (["1x3", "net.py:make"], None, "drop --batch and the other --inputs"),
        (["net.py:make"], 4, "drop --batch and the other --inputs"),
        (["1x3"], 0, "--batch is 0; it must be at least 1"),
        (["1x3"], -4, "--batch is -4; it must be at least 1"),
    ],
)
def test_a_mistake_says_exactly_what_is_wrong(inputs: list[str], batch: int | None, sentence: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        read_arguments(inputs, batch)
    assert sentence in str(refusal.value)
