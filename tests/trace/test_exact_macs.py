"""MACs of every kind of model, from dimensions. Nothing here is compared with what a tool printed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import edge_opt as eo
from edge_opt.records.profiles import ModelProfile


def macs(model: nn.Module, inputs: object, **kwargs: object) -> int:
    profile = eo.profile(model, inputs, **kwargs)
    assert profile.coverage == 1.0, profile.unpriced
    assert sum(layer.cost.macs for layer in profile.layers) == profile.totals.macs
    return profile.totals.macs


def ops_of(profile: ModelProfile) -> list[str]:
    return [operator.op for operator in profile.operators]


class Function(nn.Module):
    """A model whose forward is one expression over its inputs."""

    def __init__(self, function, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


# Convolutions: outputs x taps per output


def test_convolution() -> None:
    # 2 images x 6 filters x 8x8 outputs x (4 channels x 3x3)
    assert macs(nn.Conv2d(4, 6, 3, padding=1), (2, 4, 8, 8)) == 2 * 6 * 64 * 4 * 9


def test_grouped_convolution_sees_only_its_group() -> None:
    assert macs(nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 8, 8)) == 2 * 6 * 64 * 2 * 9


def test_depthwise_convolution() -> None:
    assert macs(nn.Conv2d(8, 8, 5, groups=8, padding=2), (1, 8, 10, 12)) == 8 * 120 * 25


def test_dilated_strided_convolution() -> None:
    # reach 1 + 2x2 = 5, so (11 - 5) // 2 + 1 = 4 outputs each way
    assert macs(nn.Conv2d(3, 5, 3, stride=2, dilation=2), (1, 3, 11, 11)) == 5 * 16 * 3 * 9


def test_convolution_with_same_padding() -> None:
    assert macs(nn.Conv2d(3, 5, 3, padding="same"), (1, 3, 7, 9)) == 5 * 63 * 27


def test_one_and_three_dimensional_convolutions() -> None:
    assert macs(nn.Conv1d(4, 8, 5), (2, 4, 20)) == 2 * 8 * 16 * 4 * 5
    assert macs(nn.Conv3d(2, 3, (1, 2, 3)), (1, 2, 4, 5, 6)) == 3 * (4 * 4 * 4) * 2 * 6


def test_unbatched_convolution() -> None:
    assert macs(nn.Conv2d(3, 4, 3), (3, 8, 8)) == 4 * 36 * 27


def test_transposed_convolution_follows_the_input() -> None:
    # each of 2 x 4 x 5x5 inputs meets 6 filters x 3x3 taps
    assert macs(nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)) == 2 * 4 * 25 * 6 * 9
    assert macs(nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5)) == 2 * 4 * 25 * 3 * 9
    assert macs(nn.ConvTranspose1d(4, 6, 4), (1, 4, 7)) == 4 * 7 * 6 * 4
    assert macs(nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 3, 3)) == 2 * 27 * 3 * 8


def test_functional_convolution_is_counted_under_its_caller() -> None:
    model = Function(lambda self, x: F.conv2d(x, self.w, padding=1), w=torch.zeros(6, 4, 3, 3))
    profile = eo.profile(model, (1, 4, 8, 8))
    assert profile.totals.macs == 6 * 64 * 36
    assert profile.layers[0].call.path == ""
    assert profile.layers[0].cost.macs == 6 * 64 * 36


# Products


def test_linear_keeps_inner_dimensions() -> None:
    assert macs(nn.Linear(16, 8), (2, 3, 5, 16)) == 2 * 3 * 5 * 16 * 8


def test_linear_on_a_vector() -> None:
    assert macs(nn.Linear(16, 8), (16,)) == 16 * 8


def test_bare_parameter_product() -> None:
    assert macs(Function(lambda self, x: x @ self.w, w=torch.zeros(16, 8)), (4, 16)) == 4 * 16 * 8


def test_broadcast_matmul() -> None:
    # (2, 3, 4, 5) @ (3, 5, 6)
    model = Function(lambda self, x, y: torch.matmul(x, y))
    assert macs(model, [(2, 3, 4, 5), (3, 5, 6)]) == 2 * 3 * 4 * 5 * 6


def test_matrix_vector_and_dot_products() -> None:
    assert macs(Function(lambda self, x, y: x @ y), [(4, 5), (5,)]) == 20
    assert macs(Function(lambda self, x, y: torch.dot(x, y)), [(7,), (7,)]) == 7


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("bij,bkj->bik", [(2, 3, 4), (2, 5, 4)], 2 * 3 * 5 * 4),
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)], 2 * 3 * 4 * 6 * 5),
        ("i,j->ij", [(3,), (4,)], 0),  # an outer product is element-wise: nothing is accumulated
        ("bsd,dhe->bshe", [(2, 3, 4), (4, 5, 6)], 2 * 3 * 4 * 5 * 6),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]], expected: int) -> None:
    assert macs(Function(lambda self, *xs: torch.einsum(equation, *xs)), shapes) == expected


def test_batched_products() -> None:
    assert macs(Function(lambda self, x, y: torch.bmm(x, y)), [(2, 3, 4), (2, 4, 5)]) == 2 * 3 * 4 * 5
    model = Function(lambda self, b, x, y: torch.baddbmm(b, x, y))
    assert macs(model, [(2, 3, 5), (2, 3, 4), (2, 4, 5)]) == 2 * 3 * 4 * 5
    model = Function(lambda self, b, x, y: torch.addmm(b, x, y))
    assert macs(model, [(5,), (3, 4), (4, 5)]) == 3 * 4 * 5


def test_bilinear() -> None:
    # x W_k: 4x5 MACs, then 5 for the product with y, for 3 outputs and 2 rows
    assert macs(nn.Bilinear(4, 5, 3), [(2, 4), (2, 5)]) == 2 * 3 * (4 * 5 + 5)


# Attention: scores and values


def attention_macs(batch: int, heads: int, length: int, keys: int, width: int) -> int:
    return 2 * batch * heads * length * keys * width


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_attention_is_one_operator_and_full_under_a_causal_mask(options: dict[str, bool]) -> None:
    model = Function(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, **options))
    profile = eo.profile(model, [(2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)])
    assert profile.totals.macs == attention_macs(2, 4, 6, 6, 8)
    assert ops_of(profile) == ["aten.scaled_dot_product_attention"]


def test_attention_with_masks_and_other_widths() -> None:
    model = Function(lambda self, q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m))
    # scores use the query's width 8, values their own 3
    assert macs(model, [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 3), (5, 7)]) == 2 * 5 * 7 * (8 + 3)


def test_grouped_query_attention_counts_query_heads() -> None:
    model = Function(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert macs(model, [(1, 8, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16)]) == attention_macs(1, 8, 5, 5, 16)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_in_both_modes(need_weights: bool, training: bool) -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    x = torch.zeros(2, 5, 16)
    # four projections of 10 rows, and attention
    expected = 4 * 10 * 16 * 16 + attention_macs(2, 4, 5, 5, 4)
    mode = "train" if training else "eval"
    assert macs(model, (x, x, x), kwargs={"need_weights": need_weights}, mode=mode) == expected


def test_cross_attention_with_other_widths() -> None:
    model = nn.MultiheadAttention(16, 4, kdim=6, vdim=10, batch_first=True)
    inputs = [(2, 5, 16), (2, 7, 6), (2, 7, 10)]
    projections = 10 * 16 * 16 + 14 * 6 * 16 + 14 * 10 * 16 + 10 * 16 * 16
    assert macs(model, inputs) == projections + attention_macs(2, 4, 5, 7, 4)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_transformer_encoder_despite_its_fast_path(mode: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).eval()
    rows = 2 * 5
    expected = 3 * (4 * rows * 16 * 16 + attention_macs(2, 4, 5, 5, 4) + 2 * rows * 16 * 32)
    profile = eo.profile(model, (2, 5, 16), mode=mode)
    assert profile.totals.macs == expected
    assert "layers.2.linear2" in [layer.call.path for layer in profile.layers if layer.cost.macs]


def test_transformer_with_decoder() -> None:
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    encoder = 4 * 6 * 256 + attention_macs(1, 4, 6, 6, 4) + 2 * 6 * 16 * 32
    own = 4 * 5 * 256 + attention_macs(1, 4, 5, 5, 4)
    cross = (2 * 5 + 2 * 6) * 256 + attention_macs(1, 4, 5, 6, 4)
    assert macs(model, [(1, 6, 16), (1, 5, 16)]) == encoder + own + cross + 2 * 5 * 16 * 32


# Recurrent layers: every weight once per row and step


def test_lstm_layers_directions_and_projections() -> None:
    # 7 steps x 3 rows; first layer sees 5 inputs, the second both directions of the first
    assert macs(nn.LSTM(5, 4), (7, 3, 5)) == 21 * 16 * (5 + 4)
    assert macs(nn.LSTM(5, 4, 2), (7, 3, 5)) == 21 * (16 * (5 + 4) + 16 * (4 + 4))
    assert macs(nn.LSTM(5, 4, 2, bidirectional=True), (7, 3, 5)) == 21 * 2 * (16 * (5 + 4) + 16 * (8 + 4))
    assert macs(nn.LSTM(5, 4, proj_size=2), (7, 3, 5)) == 21 * (16 * (5 + 2) + 4 * 2)


def test_gru_and_rnn() -> None:
    assert macs(nn.GRU(5, 4, batch_first=True), (3, 7, 5)) == 21 * 12 * (5 + 4)
    assert macs(nn.RNN(5, 4, nonlinearity="relu"), (7, 3, 5)) == 21 * 4 * (5 + 4)
    assert macs(nn.RNN(5, 4), (7, 5)) == 7 * 4 * (5 + 4)


def test_cells_in_a_loop() -> None:
    class Loop(nn.Module):
        def __init__(self, cell: nn.Module) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = None
            for step in x:
                state = self.cell(step, state)
            return state

    assert macs(Loop(nn.LSTMCell(5, 4)), (7, 3, 5)) == 21 * 16 * (5 + 4)
    assert macs(Loop(nn.GRUCell(5, 4)), (7, 3, 5)) == 21 * 12 * (5 + 4)
    assert macs(Loop(nn.RNNCell(5, 4)), (7, 3, 5)) == 21 * 4 * (5 + 4)


def test_packed_sequence_counts_real_steps_only() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
            out, _ = self.lstm(packed)
            return nn.utils.rnn.pad_packed_sequence(out)[0]

    profile = eo.profile(Packed(), (torch.zeros(7, 3, 5), torch.tensor([7, 4, 2])))
    assert profile.totals.macs == (7 + 4 + 2) * 16 * (5 + 4)


# Structure


def test_shared_module_is_counted_at_every_call_and_its_weights_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.again = self.layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.layer(x))

    profile = eo.profile(Twice(), (2, 8))
    assert profile.totals.macs == 2 * (2 * 8 * 8)
    assert profile.totals.params == 8 * 8 + 8
    assert [layer.call.call_number for layer in profile.layers if layer.call.path == "layer"] == [1, 2]
    assert sum(layer.call.params for layer in profile.layers) == 8 * 8 + 8


def test_tied_weights_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 100, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    profile = eo.profile(Tied(), eo.InputSpec((2, 5), "int64"))
    assert profile.totals.params == 1600
    assert profile.totals.macs == 10 * 16 * 100


def test_parameters_of_uncalled_modules_stay_in_the_total() -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True)  # its out_proj is used, but never called
    profile = eo.profile(model, [(1, 5, 16)] * 3)
    assert profile.totals.params == 4 * 16 * 16 + 4 * 16 == sum(layer.call.params for layer in profile.layers)


def test_frozen_parameters_are_not_trainable() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    totals = eo.profile(model, (1, 4)).totals
    assert (totals.params, totals.trainable_params) == (20 + 10, 10)


def test_embedding_and_bag_multiply_nothing() -> None:
    assert macs(nn.Embedding(50, 8), eo.InputSpec((2, 3), "int64")) == 0
    assert macs(nn.EmbeddingBag(50, 8), eo.InputSpec((2, 3), "int64")) == 0


def test_twice_the_batch_is_twice_the_macs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    assert macs(model, (4, 3, 8, 8)) == 4 * macs(model, (1, 3, 8, 8))


def test_compiled_modules_are_traced_as_the_original() -> None:
    inner = torch.compile(nn.Linear(8, 4))
    outer = nn.Sequential(inner, nn.Linear(4, 2))
    outer[1].compile()
    assert macs(outer, (3, 8)) == 3 * (32 + 8)
    assert macs(torch.compile(nn.Linear(8, 4)), (3, 8)) == 3 * 32


def test_half_precision_weights_give_a_half_precision_input() -> None:
    profile = eo.profile(nn.Linear(8, 4).half(), (3, 8))
    assert profile.totals.macs == 3 * 32
    assert profile.totals.param_bytes == 2 * (32 + 4)
    assert profile.totals.activation_bytes == 2 * 12
