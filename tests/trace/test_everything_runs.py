"""Branches, loops, scans, sparse, nested and jagged tensors, exported programs, and inputs of every form."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt.cli import app
from edge_opt.errors import InvalidInput, TraceFailed
from needed import needed
from zoo import torchvision_models

ROWS = 4
ONE = ROWS * 8 * 8  # MACs of Linear(8, 8) on four rows


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)


class Branch(Net):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.first(x), lambda x: self.second(self.first(x)), (x,))


@pytest.mark.parametrize(("value", "layers"), [(1.0, 1), (-1.0, 2)])
def test_a_branch_counts_what_its_values_take(value: float, layers: int) -> None:
    profile = eo.profile(Branch(), torch.full((ROWS, 8), value))
    assert profile.totals.macs == layers * ONE
    assert profile.trace.used_real_tensors


class Loop(Net):
    def forward(self, x):
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, self.first(x)), (torch.tensor(0), x))[1]


def test_a_loop_is_counted_as_often_as_it_runs() -> None:
    profile = eo.profile(Loop(), (ROWS, 8))
    assert profile.totals.macs == 5 * ONE
    assert not profile.trace.used_real_tensors


class Scan(Net):
    def forward(self, x):
        return scan(lambda carry, x: (torch.tanh(self.first(carry) + x), carry.clone()), x[0], x)[1]


def test_a_scan_is_unrolled() -> None:
    # One row of eight for each of the four positions.
    assert eo.profile(Scan(), (ROWS, 8)).totals.macs == ROWS * 8 * 8


class Products(nn.Module):
    def forward(self, x):
        return associative_scan(torch.mul, x, 0, combine_mode="generic")


def test_an_associative_scan_counts_its_products() -> None:
    profile = eo.profile(Products(), (ROWS, 8))
    # Pairs, then the two halves, then the odd one between them: 2 + 1 + 1 rows of eight.
    assert profile.totals.other_ops == 4 * 8


class Flex(nn.Module):
    def forward(self, q):
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))


def test_flex_attention_counts_both_products() -> None:
    # Two heads, 32 x 32 scores of 16 channels, and as much for the values.
    assert eo.profile(Flex(), (1, 2, 32, 16)).totals.macs == 2 * 2 * 32 * 32 * 16


class Ragged(Net):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x):
        rows = torch.nested.nested_tensor([x[:2], x[:3]], layout=self.layout)
        return self.first(rows).to_padded_tensor(0.0)


@contextmanager
def another_thread() -> Iterator[None]:
    end = threading.Event()
    waiting = threading.Thread(target=end.wait)
    waiting.start()
    try:
        yield
    finally:
        end.set()
        waiting.join()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_count_their_rows(layout: torch.layout) -> None:
    with another_thread():  # rows are made past the tape, and a notebook has threads that only wait
        profile = eo.profile(Ragged(layout), (ROWS, 8))
    assert profile.totals.macs == (2 + 3) * 8 * 8
    json.loads(json.dumps([list(call.input_shapes) for call in profile.trace.modules]))  # plain numbers


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_rows_run() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.eye(8).to_sparse_csr())

        def forward(self, x):
            return (self.edges @ x.T).T

    assert eo.profile(Graph(), (ROWS, 8)).totals.macs == 8 * ROWS  # eight stored elements


def llama(device: str) -> nn.Module:
    torchvision_models()  # transformers imports it
    transformers = needed("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device(device):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).eval()


@pytest.mark.parametrize("batch", [1, 64])
def test_a_language_model_on_meta_may_look_at_its_mask(batch: int) -> None:
    ids, mask = torch.zeros(batch, 128, dtype=torch.int64), torch.ones(batch, 128, dtype=torch.int64)
    profile = eo.profile(llama("meta"), kwargs={"input_ids": ids, "attention_mask": mask})
    one = eo.profile(llama("meta"), kwargs={"input_ids": ids[:1], "attention_mask": mask[:1]})
    assert profile.totals.macs == batch * one.totals.macs
    assert not profile.trace.used_real_tensors


def test_the_largest_batch_of_a_language_model_on_meta() -> None:
    found = eo.fit_batch(llama("meta"), [((1, 128), "int64")], memory_limit_mb=64)
    assert found.batch > 32


def test_an_exported_program_is_profiled_with_its_own_inputs() -> None:
    program = torch.export.export(nn.Linear(8, 8), (torch.zeros(ROWS, 8),))
    assert eo.profile(program).totals.macs == ONE
    assert eo.profile(program, torch.zeros(ROWS, 8)).totals.macs == ONE


@pytest.mark.parametrize("empty", [(), []], ids=str)
def test_empty_inputs_beside_keywords(empty: object) -> None:
    assert eo.profile(nn.Linear(8, 8), empty, kwargs={"input": torch.zeros(ROWS, 8)}).totals.macs == ONE
    with pytest.raises(InvalidInput, match="inputs is empty"):
        eo.profile(nn.Linear(8, 8), empty)


class Nested(nn.Module):
    def forward(self, batch, pair=None):
        return batch["image"]["left"] + batch["image"]["right"][0] + (pair[0] if pair is not None else 0)


def test_shapes_stand_at_any_depth() -> None:
    shapes = {"image": {"left": (2, 3), "right": [(2, 3), ((2,), "int64")]}}
    # Two float inputs of six, one of two integers; the sum takes six operations.
    profile = eo.profile(Nested(), {"batch": shapes})
    assert profile.totals.input_bytes == 2 * 6 * 4 + 2 * 8
    assert profile.totals.other_ops == 6 + 6  # and six for adding zero
    assert eo.profile(Nested(), [shapes], kwargs={"pair": [((2, 3), "float32")]}).totals.input_bytes == 64 + 24


def test_a_wrong_dtype_says_which_one_to_write() -> None:
    with pytest.raises(TraceFailed, match=r"name its dtype: ids:1x16:int64, in Python \(\(1, 16\), 'int64'\)"):
        eo.profile(nn.Sequential(nn.Embedding(4, 8)), (1, 16))


MAKER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x, cache):
        return self.layer(x) + cache[0]["key"]

def make_inputs():
    return {"x": torch.zeros(4, 8), "cache": [{"key": torch.zeros(4, 8)}]}

in_order = [(4, 8), [{"key": (4, 8)}]]
"""


@pytest.mark.parametrize("name", ["make_inputs", "in_order"])
def test_inputs_of_any_kind_on_the_command_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "net.py"
    file.write_text(MAKER)
    reference = f"{file}:{name}"
    done = CliRunner().invoke(app, ["profile", f"{file}:Net", "--inputs", reference, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["totals"]["macs"] == ONE
    check = ["check", f"{file}:Net", "--inputs", reference, "--budget", "macs <= 1k"]
    assert CliRunner().invoke(app, check).exit_code == 0
    compare = ["compare", f"{file}:Net", f"{file}:Net", "--inputs", reference]
    assert CliRunner().invoke(app, compare).exit_code == 0
    wrong = CliRunner().invoke(app, ["profile", f"{file}:Net", "--inputs", reference, "-i", "4x8"])
    assert wrong.exit_code == 2 and "the other --inputs" in wrong.output


def test_a_batch_for_an_exported_file(tmp_path: Path) -> None:
    dynamic = {"input": {0: torch.export.Dim("batch", min=1, max=64)}}
    program = torch.export.export(nn.Linear(8, 8), (torch.zeros(2, 8),), dynamic_shapes=dynamic)
    file = tmp_path / "net.pt2"
    torch.export.save(program, file)
    done = CliRunner().invoke(app, ["profile", str(file), "-b", "4", "--json", "--trust"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["totals"]["macs"] == ONE
    without = CliRunner().invoke(app, ["profile", "edge_opt.model:SmallCNN", "-b", "4"])
    assert without.exit_code == 2 and "there is none; add -i SHAPE" in without.output
