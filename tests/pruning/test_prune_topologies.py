"""Pruning over any topology: shapes that fit, the right channels, and outputs that prove it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt import compress
from edge_opt.compress import PrunedAttention, apply_spec, load_pruned, prune, save_pruned
from edge_opt.errors import PruningFailed
from edge_opt.model import SmallCNN
from edge_opt.pruning.proof import TOLERANCE
from pruned_nets import NETS, BertLike, Encoder, Grouped, Residual, Shuffled, SuperResolution, TiedLanguageModel, UNet


def random_inputs(model: nn.Module, shape: object) -> torch.Tensor:
    if isinstance(shape, list):
        return torch.randint(0, 50, shape[0][0])
    return torch.randn(shape)


@pytest.mark.parametrize("name", NETS)
def test_half_of_the_channels_can_go(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    factory, shape = NETS[name]
    original = factory()
    pruned = prune(original, shape, 0.5)
    assert pruned.achieved.macs < pruned.achieved.macs_before
    assert pruned.achieved.macs == eo.profile(pruned.model, shape).totals.macs
    assert pruned.achieved.params == sum(parameter.numel() for parameter in pruned.model.parameters())
    assert pruned.check.silenced_error < TOLERANCE
    assert pruned.check.gradients == len(list(original.parameters()))
    for layer in pruned.achieved.layers:
        is_explained = any(fall.path == layer.path for fall in pruned.shortfalls)
        assert layer.after * 2 == layer.before or is_explained, layer
    x = random_inputs(original, shape)
    reloaded = load_pruned(save_pruned(pruned, tmp_path / name), factory)
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(x), pruned.model.eval()(x))
    pruned.model.train()
    pruned.model(x).sum().backward()


def test_channels_of_a_small_cnn_by_hand() -> None:
    pruned = prune(SmallCNN(16, 32), (1, 1, 28, 28), 0.5)
    # conv1: 28x28 outputs x 8 filters x 9 taps; conv2: 14x14 x 16 x (8 x 9); classifier: 16 x 7 x 7 inputs x 10
    assert pruned.achieved.macs == 784 * 8 * 9 + 196 * 16 * 72 + 784 * 10
    assert pruned.achieved.params == 8 * 10 + 16 * 73 + 10 * 785
    assert [(layer.path, layer.before, layer.after) for layer in pruned.achieved.layers] == [
        ("conv1", 16, 8),
        ("conv2", 32, 16),
        ("classifier", 10, 10),
    ]


def test_the_smallest_filters_go_and_the_others_keep_their_weights() -> None:
    torch.manual_seed(1)
    model = SmallCNN(16, 32)
    pruned = prune(model, (1, 1, 28, 28), {"conv1": 0.25}, round_to=1).model
    # squares of what writes a channel and of what reads it
    lengths = model.conv1.weight.square().sum((1, 2, 3)) + model.conv2.weight.square().sum((0, 2, 3))
    kept = lengths.topk(12).indices.sort().values
    assert torch.equal(pruned.conv1.weight, model.conv1.weight[kept])
    assert torch.equal(pruned.conv1.bias, model.conv1.bias[kept])
    assert torch.equal(pruned.conv2.weight, model.conv2.weight[:, kept])
    assert torch.equal(pruned.classifier.weight, model.classifier.weight)


def test_flattened_channels_leave_a_block_of_columns() -> None:
    model = SmallCNN(16, 32)
    pruned = prune(model, (1, 1, 28, 28), {"conv2": 0.5}, round_to=1).model
    # 49 columns of the classifier read a channel: their mean counts as much as its filter
    columns = model.classifier.weight.view(10, 32, 49).square().sum(0).mean(1)
    kept = (model.conv2.weight.square().sum((1, 2, 3)) + columns).topk(16).indices.sort().values
    blocks = model.classifier.weight.view(10, 32, 49)[:, kept].reshape(10, 16 * 49)
    assert torch.equal(pruned.classifier.weight, blocks)


def test_an_addition_makes_its_branches_lose_the_same_channels() -> None:
    torch.manual_seed(0)
    model = Residual(16, 32)
    pruned = prune(model, (1, 3, 16, 16), {"down": 0.5})
    # stem and down are added: both keep the same 8 of 16
    kept = {each.tensor: each.indices for each in pruned.spec.kept if each.dim == 0}
    assert kept["stem.weight"] == kept["down.weight"]
    assert len(kept["stem.weight"]) == 8
    assert "up.weight" not in kept
    # stem 256 x 8 x 27; up 256 x 32 x 8 x 9; down 256 x 8 x 32 x 9; head 8 x 10
    assert pruned.achieved.macs == 256 * (8 * 27 + 32 * 72 + 8 * 288) + 80


@pytest.mark.parametrize("model", [SmallCNN(), Residual()], ids=["chain", "residual"])
def test_the_pruned_model_is_the_original_with_those_channels_at_zero(model: nn.Module) -> None:
    shape = (3, 1, 28, 28) if isinstance(model, SmallCNN) else (3, 3, 16, 16)
    pruned = prune(model, shape, 0.5)
    silenced = copy.deepcopy(model)
    state = dict(silenced.named_parameters())
    with torch.no_grad():
        for each in pruned.spec.kept:
            tensor = state[each.tensor]
            gone = [index for index in range(tensor.shape[each.dim]) if index not in each.indices]
            tensor.index_fill_(each.dim, torch.tensor(gone), 0)
        x = torch.randn(shape)
        assert torch.allclose(pruned.model(x), silenced(x), atol=1e-6)
        assert not torch.allclose(pruned.model(x), model(x), atol=1e-3)


def test_concatenated_branches_are_cut_where_they_stand() -> None:
    pruned = prune(UNet(16), (1, 3, 16, 16), {"up": 0.5, "enter.0": 0.0})
    # join sees up's 8 remaining channels and all 16 of enter
    assert pruned.model.join[0].in_channels == 8 + 16
    columns = next(each for each in pruned.spec.kept if each.tensor == "join.0.weight" and each.dim == 1).indices
    assert columns[8:] == tuple(range(16, 32))


def test_groups_stay_divisible_and_depthwise_convolutions_follow() -> None:
    model = prune(Grouped(), (1, 3, 16, 16), 0.5).model
    assert (model.grouped.in_channels, model.grouped.out_channels, model.grouped.groups) == (16, 32, 4)
    assert model.grouped.weight.shape == (32, 16 // 4, 3, 3)
    assert (model.norm.num_groups, model.norm.num_channels) == (4, 32)
    assert (model.depthwise.groups, model.depthwise.out_channels) == (32, 32)
    # two outputs per input, so 32 groups make 64 channels
    assert (model.doubling.groups, model.doubling.in_channels, model.doubling.out_channels) == (32, 32, 64)


def test_a_grouped_convolution_that_cannot_be_halved_says_why() -> None:
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3, groups=4), nn.Flatten(), nn.Linear(12 * 144, 10))
    pruned = prune(net, (1, 3, 16, 16), 0.5, round_to=1)
    # 4 groups of 3 channels: 2 of the 3 positions stay (1.5 rounds up), in every group
    assert net[1].groups == pruned.model[1].groups
    assert pruned.model[1].out_channels == 8
    reasons = {fall.path: fall.reason for fall in pruned.shortfalls}
    assert reasons["1"] == "grouped convolution: its 4 groups lose channels at the same position, 3 positions in all"


def test_a_pixel_shuffle_takes_four_channels_for_one() -> None:
    pruned = prune(SuperResolution(), (1, 3, 16, 16), {"expand": 0.5})
    assert (pruned.model.expand.out_channels, pruned.model.out.in_channels) == (32, 8)
    kept = next(each for each in pruned.spec.kept if each.tensor == "expand.weight").indices
    assert all(kept[k : k + 4] == tuple(range(kept[k], kept[k] + 4)) for k in range(0, 32, 4))


def test_channels_that_a_reshape_reorders_are_left_alone_and_reported() -> None:
    pruned = prune(Shuffled(), (1, 3, 16, 16), 0.5)
    assert pruned.model.enter.out_channels == 16
    assert pruned.model.next.out_channels == 8
    fall = next(fall for fall in pruned.shortfalls if fall.path == "enter")
    assert fall.reason.startswith("removing channels changes more than those channels")


def test_whole_heads_go_from_multihead_attention() -> None:
    torch.manual_seed(0)
    model = Encoder(32, 4)
    pruned = prune(model, (1, 5, 8), {"layer.self_attn": 0.5})
    attention = pruned.model.layer.self_attn
    assert isinstance(attention, PrunedAttention)
    assert (attention.num_heads, attention.head_dim, attention.embed_dim) == (2, 8, 32)
    assert attention.in_proj_weight.shape == (3 * 2 * 8, 32)
    assert attention.out_proj.weight.shape == (32, 2 * 8)
    layer = next(layer for layer in pruned.achieved.layers if layer.path == "layer.self_attn")
    assert (layer.unit, layer.before, layer.after) == ("heads", 4, 2)
    rows = next(each for each in pruned.spec.kept if each.tensor == "layer.self_attn.in_proj_weight").indices
    heads = sorted({row // 8 for row in rows[:16]})
    assert rows == tuple(32 * part + 8 * head + k for part in range(3) for head in heads for k in range(8))


def test_projections_of_their_own_lose_whole_heads_too() -> None:
    pruned = prune(BertLike(32, 4), [((2, 6), "int64")], {"attention.query": 0.5})
    attention = pruned.model.attention
    assert (attention.num_attention_heads, attention.all_head_size, attention.attention_head_size) == (2, 16, 8)
    assert {layer.out_features for layer in (attention.query, attention.key, attention.value)} == {16}
    kept = next(each for each in pruned.spec.kept if each.tensor == "attention.query.weight").indices
    assert all(kept[k : k + 8] == tuple(range(kept[k], kept[k] + 8)) and kept[k] % 8 == 0 for k in (0, 8))


def test_tied_weights_stay_tied() -> None:
    pruned = prune(TiedLanguageModel(32), [((2, 6), "int64")], 0.5).model
    assert pruned.out.weight is pruned.embedding.weight
    assert pruned.out.weight.shape == (50, 16)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
def test_pruned_attention_answers_as_torch_does(need_weights: bool, batch_first: bool, is_batched: bool) -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
    ours = PrunedAttention(original).eval()
    shape = (5, 16) if not is_batched else (3, 5, 16) if batch_first else (5, 3, 16)
    query, value = torch.randn(shape), torch.randn(shape)
    padding = torch.zeros((3, 5) if is_batched else (5,), dtype=torch.bool)
    padding[..., -1] = True
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
    per_head = torch.randn(12 if is_batched else 4, 5, 5)
    for options in ({}, {"key_padding_mask": padding}, {"attn_mask": mask}, {"attn_mask": per_head}):
        for average in (True, False):
            call = {**options, "need_weights": need_weights, "average_attn_weights": average}
            expected, found = (module(query, value, value, **call) for module in (original, ours))
            assert torch.allclose(expected[0], found[0], atol=1e-6)
            assert (expected[1] is None) == (found[1] is None)
            if need_weights:
                assert torch.allclose(expected[1], found[1], atol=1e-6)


def test_a_recipe_can_be_applied_to_other_weights_of_the_same_model() -> None:
    spec = prune(Residual(), (1, 3, 16, 16), 0.5).spec
    other = Residual()
    kept = list(next(each for each in spec.kept if each.tensor == "up.weight" and each.dim == 0).indices)
    again = apply_spec(other, spec)
    columns = list(next(each for each in spec.kept if each.tensor == "up.weight" and each.dim == 1).indices)
    assert torch.equal(again.up.weight, other.up.weight[kept][:, columns])


class Around(nn.Module):
    """Convolutions and a head around a block of any kind."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block = nn.Conv2d(3, 16, 3, padding=1), block
        self.last, self.head = nn.Conv2d(16, 32, 3, padding=1), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.block(self.first(x)).relu()).mean((2, 3)))

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def test_a_script_module_inside_keeps_its_channels() -> None:
    block = torch.jit.script(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)))
    pruned = prune(Around(block), (1, 3, 8, 8), 0.5)
    assert [(layer.path, layer.after) for layer in pruned.achieved.layers] == [
        ("first", 16),
        ("last", 16),
        ("head", 10),
    ]
    with pytest.raises(PruningFailed, match="no layers that Python calls; pass the model that it was scripted"):
        prune(nn.Sequential(torch.jit.script(SmallCNN())), (1, 1, 28, 28), 0.5)


def test_extra_state_of_modules_is_not_taken_for_tensors(tmp_path) -> None:
    pruned = prune(Around(nn.Conv2d(16, 16, 1)), (1, 3, 8, 8), 0.5, loader=[torch.randn(4, 3, 8, 8)])
    assert pruned.model.epoch == 3
    loaded = load_pruned(save_pruned(pruned, tmp_path), lambda: Around(nn.Conv2d(16, 16, 1)))
    assert torch.equal(loaded.block.weight, pruned.model.block.weight)
    # 16 and 32 channels halved: three convolutions and the head, with biases, of four bytes each
    params = 8 * 3 * 9 + 8 + 8 * 8 + 8 + 16 * 8 * 9 + 16 + 10 * 16 + 10
    assert compress.convert(pruned.model, (1, 3, 8, 8), "bf16", "torch").original_bytes == 4 * params


class Messages(nn.Module):
    """Two rounds of messages along the edges of a graph, and a sum over each of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for _ in range(2):
            h = self.mix(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])).relu() + h
        return self.head(torch.zeros(2, h.shape[1]).index_add_(0, graph, h))


def test_a_graph_network_loses_channels_of_its_nodes() -> None:
    inputs = [torch.randn(10, 8), torch.randint(0, 10, (2, 40)), torch.tensor([0] * 5 + [1] * 5)]
    pruned = prune(Messages(), inputs, 0.5)
    assert [layer.after for layer in pruned.achieved.layers] == [16, 16, 4]


@pytest.mark.slow
def test_layers_beside_operators_that_cannot_be_read_lose_channels() -> None:
    """Longformer reads values, and stores windows of its scores by slices that torch-pruning does not understand."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LongformerConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        attention_window=8, max_position_embeddings=40,
    )  # fmt: skip
    ids = torch.randint(3, 50, (1, 16))
    seen = torch.zeros_like(ids)
    seen[:, 0] = 1
    pruned = prune(transformers.LongformerModel(config), {"input_ids": ids, "global_attention_mask": seen}, 0.5)
    widths = {layer.path: layer.after for layer in pruned.achieved.layers}
    assert widths["encoder.layer.0.intermediate.dense"] == 32
    assert widths["encoder.layer.0.attention.self.query"] == 32
