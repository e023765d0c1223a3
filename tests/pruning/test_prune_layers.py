"""Layers that a graph of operators cannot follow: recurrent ones, joint projections, token mixers, shuffles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edge_opt.compress import load_pruned, prune, save_pruned
from edge_opt.pruning.proof import TOLERANCE


class Recurrent(nn.Module):
    """A recurrent layer between linear ones; its last state or its last output is classified."""

    def __init__(self, kind: type[nn.RNNBase], reads_state: bool = False, **options: object) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.cell = kind(16, 32, batch_first=True, **options)
        self.reads_state = reads_state
        self.head = nn.Linear(64 if options.get("bidirectional") else 32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, state = self.cell(torch.relu(self.enter(x)))
        if self.reads_state:
            return self.head((state[0] if isinstance(state, tuple) else state)[-1])
        return self.head(out[:, -1])


class JointAttention(nn.Module):
    """One layer for query, key and value, as timm's vision transformers have it."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = heads, width // heads, width
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split.unbind(0))
        return self.proj(mixed.transpose(1, 2).reshape(*x.shape[:2], self.attn_dim))


class GroupedQueries(nn.Module):
    """Two query heads for each key and value, as recent language models have it."""

    def __init__(self, width: int = 32, heads: int = 8, groups: int = 4) -> None:
        super().__init__()
        self.head_dim, self.repeats = width // heads, heads // groups
        self.q_proj = nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(width, groups * self.head_dim) for _ in range(2))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (each.repeat_interleave(self.repeats, dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class Conv1D(nn.Module):
    """A linear layer that keeps its weight as (in, out), under the name it has in GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class TransposedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(64, 32), Conv1D(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class TokenMixer(nn.Module):
    """A layer over the tokens: channels stand still."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.tokens = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)


class Around(nn.Module):
    """A residual stream of 32 channels around one part, with a head."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.enter, self.part, self.head = nn.Linear(8, 32), part, nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        return self.head((x + self.part(x)).mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2),
    "lstm, both ways": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm, last state": lambda: Recurrent(nn.LSTM, reads_state=True),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN, reads_state=True),
    "joint attention": lambda: Around(JointAttention()),
    "grouped queries": lambda: Around(GroupedQueries()),
    "transposed linear": lambda: Around(TransposedMLP()),
}
SHAPE = (2, 6, 8)


@pytest.mark.parametrize("name", NETS)
def test_half_goes_and_the_proof_holds(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    original = NETS[name]()
    pruned = prune(original, SHAPE, 0.5)
    assert pruned.check.silenced_error < TOLERANCE
    assert pruned.check.gradients == len(list(original.parameters()))
    # All layers but the one that writes the output lose half.
    whole = {layer.path for layer in pruned.achieved.layers if layer.after == layer.before}
    assert whole <= {"head"}
    x = torch.randn(SHAPE)
    reloaded = load_pruned(save_pruned(pruned, tmp_path / "saved"), NETS[name])
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(x), pruned.model.eval()(x))
    pruned.model.train()(x).sum().backward()


def test_gates_of_an_lstm_lose_the_same_hidden_units() -> None:
    pruned = prune(Recurrent(nn.LSTM, num_layers=2), SHAPE, {"cell": 0.5}, round_to=1)
    cell = pruned.model.cell
    assert (cell.input_size, cell.hidden_size) == (16, 16)
    # four gates of 16 units; the second layer reads the 16 of the first
    assert cell.weight_ih_l0.shape == (4 * 16, 16)
    assert cell.weight_hh_l1.shape == cell.weight_ih_l1.shape == (4 * 16, 16)
    rows = next(each.indices for each in pruned.spec.kept if (each.tensor, each.dim) == ("cell.weight_ih_l0", 0))
    assert rows == tuple(32 * gate + unit for gate in range(4) for unit in rows[:16])


def test_a_joint_projection_loses_a_head_of_query_key_and_value() -> None:
    pruned = prune(Around(JointAttention(32, 4)), SHAPE, {"part.qkv": 0.5})
    attention = pruned.model.part
    assert (attention.num_heads, attention.head_dim, attention.attn_dim) == (2, 8, 16)
    rows = next(each.indices for each in pruned.spec.kept if each.tensor == "part.qkv.weight")
    heads = sorted({row // 8 for row in rows[:16]})
    assert rows == tuple(32 * part + 8 * head + k for part in range(3) for head in heads for k in range(8))


def test_a_key_goes_with_all_queries_that_share_it() -> None:
    attention = prune(Around(GroupedQueries(32, 8, 4)), SHAPE, {"part.k_proj": 0.5}).model.part
    # 2 of 4 keys stay, each of 4 channels, with two query heads of 4 channels
    assert (attention.k_proj.out_features, attention.v_proj.out_features) == (2 * 4, 2 * 4)
    assert (attention.q_proj.out_features, attention.o_proj.in_features) == (2 * 2 * 4, 2 * 2 * 4)


def test_channels_through_a_token_mixer_are_not_pruned_and_the_layers_say_so() -> None:
    pruned = prune(Around(TokenMixer()), SHAPE, 0.5)
    assert (pruned.model.enter.out_features, pruned.model.part.tokens[2].out_features) == (32, 6)
    reasons = {fall.path: fall.reason for fall in pruned.shortfalls}
    assert all(reasons[path].startswith("removing channels breaks") for path in ("enter", "part.tokens.2"))


def test_flattened_features_that_are_concatenated_keep_their_own_channels() -> None:
    class TwoSources(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.numbers, self.head = nn.Linear(5, 16), nn.Linear(32, 3)

        def forward(self, image: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([self.image(image), self.numbers(numbers)], dim=1))

    pruned = prune(TwoSources(), [torch.randn(2, 3, 8, 8), torch.randn(2, 5)], {"image.0": 0.5})
    assert (pruned.model.image[0].out_channels, pruned.model.numbers.out_features) == (8, 16)
    assert pruned.model.head.in_features == 8 + 16


def test_a_lone_recurrent_layer_is_refused_in_one_sentence() -> None:
    from edge_opt.errors import PruningFailed

    with pytest.raises(PruningFailed, match="nothing in LSTM can be pruned"):
        prune(nn.LSTM(8, 16), (5, 2, 8), 0.5)
