"""Recurrent layers in closed form: every weight matrix is used once per row and step."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from edge_opt.cost.registry import Work, cost_rule
from edge_opt.records import TensorInfo

aten = torch.ops.aten

# Element-wise work per hidden unit and step, beside the gates' own sums: activations (sigmoid 4, tanh 1) and updates.
_LSTM_OPS = 3 * 4 + 1 + 1 + 3 + 1  # three sigmoids, two tanhs, c = f·c + i·g, h = o·tanh(c)
_GRU_OPS = 2 * 4 + 1 + 1 + 4  # two sigmoids, tanh, r·n, h = (1 − z)·n + z·h
_RNN_OPS = 1


def _gated(rows: int, weights: tuple[TensorInfo, ...], ops_per_unit: int) -> Work:
    """`rows` steps of a layer stack; each matrix is a MAC per element, each gate sum and bias one operation."""
    matrices = [weight for weight in weights if len(weight.shape) == 2]
    biases = [weight for weight in weights if len(weight.shape) == 1]
    # Matrices come as input and hidden weights, then a projection if there is one; gate rows are 4, 3 or 1 per unit.
    gates = {_LSTM_OPS: 4, _GRU_OPS: 3, _RNN_OPS: 1}[ops_per_unit]
    hidden = [matrix for matrix in matrices if not _is_projection(matrix, matrices, gates)]
    cells = len(hidden) // 2
    units = hidden[0].shape[0] // gates
    sums = sum(matrix.shape[0] for matrix in hidden) // 2 + sum(bias.elements for bias in biases)
    return Work(
        macs=rows * sum(prod(matrix.shape) for matrix in matrices),
        other_ops=rows * (sums + cells * units * ops_per_unit),
    )


def _is_projection(matrix: TensorInfo, matrices: list[TensorInfo], gates: int) -> bool:
    """Whether a matrix is an LSTM's hidden projection: its columns, not its rows, are the hidden units."""
    return matrix.shape[0] != matrices[0].shape[0] and matrix.shape[1] * gates == matrices[0].shape[0]


def _rows(x: TensorInfo) -> int:
    """Steps times batch; packed data are already flat."""
    return prod(x.shape[:-1])


def _weights(args: tuple[Any, ...]) -> tuple[TensorInfo, ...]:
    """The layer's parameters: the last list of tensors among the arguments, after input, lengths and state."""
    lists = [value for value in args if isinstance(value, tuple) and value and isinstance(value[0], TensorInfo)]
    return lists[-1]


@cost_rule(aten.lstm, kind="recurrent")
def lstm(out: Any, x: TensorInfo, *args: Any) -> Work:
    """All layers and directions, with projections."""
    return _gated(_rows(x), _weights(args), _LSTM_OPS)


@cost_rule(aten.gru, kind="recurrent")
def gru(out: Any, x: TensorInfo, *args: Any) -> Work:
    """All layers and directions."""
    return _gated(_rows(x), _weights(args), _GRU_OPS)


@cost_rule(aten.rnn_tanh, aten.rnn_relu, kind="recurrent")
def rnn(out: Any, x: TensorInfo, *args: Any) -> Work:
    """All layers and directions."""
    return _gated(_rows(x), _weights(args), _RNN_OPS)


@cost_rule(aten.lstm_cell, kind="recurrent")
def lstm_cell(out: Any, x: TensorInfo, state: Any, *weights: Any) -> Work:
    """One step."""
    return _gated(_rows(x), _given(weights), _LSTM_OPS)


@cost_rule(aten.gru_cell, kind="recurrent")
def gru_cell(out: Any, x: TensorInfo, state: Any, *weights: Any) -> Work:
    """One step."""
    return _gated(_rows(x), _given(weights), _GRU_OPS)


@cost_rule(aten.rnn_tanh_cell, aten.rnn_relu_cell, kind="recurrent")
def rnn_cell(out: Any, x: TensorInfo, state: Any, *weights: Any) -> Work:
    """One step."""
    return _gated(_rows(x), _given(weights), _RNN_OPS)


def _given(weights: tuple[Any, ...]) -> tuple[TensorInfo, ...]:
    return tuple(weight for weight in weights if isinstance(weight, TensorInfo))
