"""Training steps of transformers against closed forms of others, and a Llama's against its real step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.measuring.memory import record_events, replay
from edge_opt.serving.model_source import import_transformers

F32, BF16 = 4, 2
BATCH, TOKENS, WIDTH, HEADS, LAYERS, WORDS = 2, 16, 32, 4, 3, 64


class Block(nn.Module):
    """A layer as in the papers: attention and an MLP of four times the width, no biases, no dropout."""

    def __init__(self, width: int, heads: int, is_fused: bool) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, shape = self.before(x), (*x.shape[:2], self.heads, -1)
        query, key, value = (layer(y).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if self.is_fused:
            seen = nn.functional.scaled_dot_product_attention(query, key, value)
        else:
            seen = torch.softmax(query @ key.transpose(2, 3), -1) @ value
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_fused", [False, True])
def test_flops_are_palms_closed_form(is_fused: bool) -> None:
    # PaLM, appendix B: 6·N + 12·L·H·Q·T FLOPs per token. It leaves out the table that is looked up, norms, GELU and
    # softmax, which are no products, and so do we; N are the parameters of products. It takes every pair of positions.
    blocks = (Block(WIDTH, HEADS, is_fused) for _ in range(LAYERS))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS, bias=False))
    step = eo.training_step(model, [((BATCH, TOKENS), "int64")], optimizer="sgd")
    params = LAYERS * (4 + 4 + 4) * WIDTH * WIDTH + WORDS * WIDTH
    assert step.flops == BATCH * TOKENS * (6 * params + 12 * LAYERS * WIDTH * TOKENS)


@pytest.mark.parametrize("is_fused", [False, True])
def test_activations_are_megatrons_closed_form(is_fused: bool) -> None:
    # Korthikanti et al., 2022: s·b·h·(34 + 5·a·s/h) bytes per layer in 16 bits. Without dropout its masks (2·sbh and
    # a·s²·b) and its output (2·a·s²·b) are not there: 32·sbh + 2·a·s²·b. What the form leaves out is the statistics of
    # norms, mean and deviation of each row in 32 bits.
    def kept(layers: int) -> int:
        model = nn.Sequential(*(Block(WIDTH, HEADS, is_fused) for _ in range(layers))).bfloat16()
        x = torch.zeros(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16)
        return sum(layer.kept_bytes for layer in eo.training_step(model, x, optimizer="sgd").layers)

    rows, scores = TOKENS * BATCH, HEADS * TOKENS**2 * BATCH
    statistics = 2 * 2 * rows * F32
    # A fused kernel keeps one number per row of scores, in 32 bits, instead of the scores.
    of_scores = HEADS * TOKENS * BATCH * F32 if is_fused else scores * BF16
    assert kept(3) - kept(2) == 32 * rows * WIDTH + of_scores + statistics


def test_a_small_llama_with_adamw_is_its_real_step_to_the_byte() -> None:
    pytest.importorskip("transformers")
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).train(), torch.randint(0, 64, (2, 12))
    step = eo.training_step(model, {"input_ids": ids, "labels": ids}, optimizer="adamw")
    optimizer = torch.optim.AdamW(model.parameters())

    def real() -> None:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()

    before = step.peak.memory.weights + step.peak.memory.buffers + step.peak.memory.inputs
    assert step.first_peak_bytes - before == replay(record_events(real, torch.device("cpu"))).tensor_peak_bytes


def test_a_norm_in_eval_mode_stays_so() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)).train()
    model[1].eval()
    x = torch.randn(2, 3, 8, 8)
    step = eo.training_step(model, x, optimizer="sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def real() -> None:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()

    before = step.peak.memory.weights + step.peak.memory.buffers + step.peak.memory.inputs
    assert step.peak_bytes - before == replay(record_events(real, torch.device("cpu"))).tensor_peak_bytes
    assert [module.training for module in model] == [True, False, True]
    in_training = eo.training_step(model.train(), x, optimizer="sgd")
    assert in_training.peak_bytes > step.peak_bytes  # statistics of the batch are kept as well
