"""Measure what channels contribute to the next layers on real inputs, and fit kept channels to replace removed ones.

A layer that reads channels x computes W x. Without the channels R it can still see the kept ones, K, and the best guess
of x_R from x_K is linear regression. What is lost is the part of x_R that no kept channel predicts, weighted by W. No
labels are needed: only the inputs of layers, seen while calibration batches run through the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from edge_opt.pruning.coupling import NONE, ChannelMap, Group
from edge_opt.pruning.layer_kinds import is_depthwise
from edge_opt.tasks.batches import eval_mode, input_calls

# Batches that statistics are taken from, and rows (pixels, tokens) of one input that are looked at.
MOST_BATCHES = 16
MOST_ROWS = 4096
# With more columns, the joint statistics of a layer's inputs take too long; then each column is treated alone.
MOST_COLUMNS = 2048
# Channels of a group are removed in at most this many steps; each step starts from the result of the previous one.
MOST_STEPS = 256
# Added to the variances, as a share of their mean (ridge regression). Covariances of a few thousand rows are singular
# where channels are nearly equal, or dead; 1e-2 bounds the condition number at about 100 times the largest eigenvalue
# over the mean, and regression then shrinks directions that the calibration batches hardly show.
DAMPING = 1e-2


def reestimate_norms(model: nn.Module, loader: Iterable[Any]) -> None:
    """Estimate the statistics of batch norms again, in place, on calibration batches.

    A copy runs, with all other layers in eval mode, so that nothing has to be restored where a batch does not fit.
    """
    copied = copy.deepcopy(model)
    pairs = [
        (norm, twin)
        for norm, twin in zip(model.modules(), copied.modules(), strict=True)
        if isinstance(norm, _BatchNorm) and isinstance(twin, _BatchNorm) and norm.running_mean is not None
    ]
    with eval_mode(copied), torch.no_grad():
        for _, twin in pairs:
            twin.reset_running_stats()
            twin.momentum = None  # the mean over all batches
            twin.train()
        for call in input_calls(copied, loader, MOST_BATCHES) if pairs else ():
            copied(*call.args, **call.kwargs)
        for norm, twin in pairs:
            norm.running_mean.copy_(twin.running_mean)  # type: ignore[union-attr,arg-type]
            norm.running_var.copy_(twin.running_var)  # type: ignore[union-attr,arg-type]


@dataclass(slots=True)
class InputMoments:
    """Mean and covariance of a layer's inputs, channel by channel, added up over batches."""

    is_joint: bool
    rows: int = 0
    # Tensors from the first batch on.
    total: Any = 0.0
    squares: Any = 0.0

    def add(self, rows: torch.Tensor) -> None:
        exact = rows.double()
        self.total = self.total + exact.sum(0)
        self.squares = self.squares + (exact.T @ exact if self.is_joint else exact.square().sum(0))
        self.rows += len(rows)

    @property
    def mean(self) -> np.ndarray:
        mean: np.ndarray = (self.total / self.rows).cpu().numpy()
        return mean

    @property
    def covariance(self) -> np.ndarray:
        """The covariance of each pair of channels, or the variance of each one where there are too many."""
        mean, squares = self.mean, (self.squares / self.rows).cpu().numpy()
        covariance: np.ndarray = squares - (np.outer(mean, mean) if self.is_joint else mean**2)
        return covariance


def is_reader(module: nn.Module) -> bool:
    """Return whether a layer mixes its input channels by weights: a linear layer, or a convolution but depthwise."""
    if isinstance(module, _ConvNd):
        return not is_depthwise(module) and not (module.transposed and module.groups > 1)
    return isinstance(module, nn.Linear)


def readers_of(model: nn.Module, channel_map: ChannelMap) -> dict[str, np.ndarray]:
    """Return the layers that read channels which can go, each with the units of its input channels."""
    refused = np.ones(channel_map.units, dtype=bool)
    for group in channel_map.groups:
        refused[group.units] = group.refused is not None
    return {
        path: owner
        for (path, side), owner in channel_map.layers.items()
        if side == "in" and is_reader(model.get_submodule(path)) and ((owner != NONE) & ~refused[owner]).any()
    }


def input_moments(model: nn.Module, paths: Iterable[str], loader: Iterable[Any]) -> dict[str, InputMoments]:
    """Return the moments of what goes into these layers while calibration batches run through the model."""
    moments: dict[str, InputMoments] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            rows = _rows(module, args[0])
            moments.setdefault(path, InputMoments(rows.shape[1] <= MOST_COLUMNS)).add(rows)

    handles = [model.get_submodule(path).register_forward_pre_hook(partial(note, path)) for path in paths]
    try:
        with torch.no_grad():
            for call in input_calls(model, loader, MOST_BATCHES):
                model(*call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return moments


def _rows(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the input as rows of channels, evenly chosen where there are many."""
    if isinstance(module, _ConvNd):
        x = x.movedim(-len(module.kernel_size) - 1, -1)
    rows = x.reshape(-1, x.shape[-1])
    return rows[:: max(len(rows) // MOST_ROWS, 1)]


def column_weights(module: nn.Module) -> torch.Tensor:
    """Return a layer's weights as (outputs and taps, input channels), with zeros where a group does not read."""
    groups = module.get_parameter("weight").detach().chunk(getattr(module, "groups", 1))
    dim = 0 if isinstance(module, _ConvNd) and module.transposed else 1
    parts = [weight.movedim(dim, -1).reshape(-1, weight.shape[dim]) for weight in groups]
    columns: torch.Tensor = parts[0] if len(parts) == 1 else torch.block_diag(*parts)  # type: ignore[no-untyped-call]
    return columns


@dataclass(slots=True)
class RemovalLoss:
    """The error of one layer as units of one group are removed and kept channels replace them by least squares.

    The inputs x have the covariance C, and the layer computes W x. Let P = C⁻¹ over the channels still there, and
    G = WᵀW. For jointly Gaussian x, and for linear regression in general:

    1. The part of x_B that the other channels do not predict has the covariance S = C_BB - C_BK C_KK⁻¹ C_KB, the Schur
       complement of C_KK. By block inversion S = (P_BB)⁻¹, so no other matrix has to be inverted.
    2. Dropping the block B therefore costs E|W_B (x_B - x̂_B)|² = trace(G_BB S) = trace(G_BB P_BB⁻¹).
    3. The others predict x̂_B = -P_BB⁻¹ P_BK x_K. With A = P_BB⁻¹ P_B: the remaining layer reads W - W_B A, so
       G becomes G - G_:B A - Aᵀ G_B: + Aᵀ G_BB A.
    4. The inverse of C_KK is P_KK - P_KB P_BB⁻¹ P_BK (the Schur complement again), so P becomes P - P_:B A.

    Attributes:
        precision: P; a vector of 1 / variance where there are too many channels for a matrix.
        weights: G; its diagonal in that case.
        blocks: The input channels of each unit.
        total: What the layer computes in all, for shares.
    """

    precision: np.ndarray
    weights: np.ndarray
    blocks: list[np.ndarray]
    total: float

    @classmethod
    def of(cls, module: nn.Module, moments: InputMoments, owner: np.ndarray, units: np.ndarray) -> RemovalLoss:
        columns = column_weights(module).double().cpu().numpy()
        covariance = moments.covariance
        variance = np.diag(covariance) if moments.is_joint else covariance
        damping = DAMPING * max(float(variance.mean()), 1e-30)
        blocks = [np.flatnonzero(owner == unit) for unit in units]
        if not moments.is_joint:
            lengths = np.square(columns).sum(0)
            return cls(1 / (variance + damping), lengths, blocks, float(lengths @ variance))
        products = columns.T @ columns
        damped = covariance + damping * np.eye(len(covariance))
        return cls(np.linalg.inv(damped), products, blocks, float((products * covariance).sum()))

    def costs(self, units: np.ndarray) -> np.ndarray:
        """Return what each of these units would cost now, as a share of all that the layer computes."""
        blocks = [self.blocks[unit] for unit in units]
        costs: np.ndarray
        if self.precision.ndim == 1:
            costs = np.array([float((self.weights[block] / self.precision[block]).sum()) for block in blocks])
        elif all(len(block) == 1 for block in blocks):
            index = np.concatenate(blocks)
            costs = self.weights[index, index] / np.maximum(self.precision[index, index], 1e-30)
        else:
            squares = [np.ix_(block, block) for block in blocks]
            costs = np.array([np.trace(np.linalg.solve(self.precision[at], self.weights[at])) for at in squares])
        return costs / max(self.total, 1e-30)

    def drop(self, units: np.ndarray) -> None:
        """Remove these units for good: steps 3 and 4 of the derivation."""
        block = np.concatenate([self.blocks[unit] for unit in units])
        if self.precision.ndim == 1 or not len(block):
            return
        explained = np.linalg.solve(self.precision[np.ix_(block, block)], self.precision[block])
        self.precision -= self.precision[:, block] @ explained
        mixed = self.weights[:, block] @ explained
        inner = explained.T @ self.weights[np.ix_(block, block)] @ explained
        self.weights += inner - mixed - mixed.T
        # Rows of removed channels are zero but for rounding; a one on the diagonal keeps later inversions well defined.
        self.precision[block], self.precision[:, block] = 0, 0
        self.precision[block, block] = 1


def reconstruction_scores(
    model: nn.Module, channel_map: ChannelMap, loader: Iterable[Any], fallback: np.ndarray
) -> np.ndarray:
    """Return a score per unit: what the layers behind it would lose, where the least costly goes first.

    `fallback` holds for groups that no layer reads whose inputs could be seen.
    """
    owners = readers_of(model, channel_map)
    moments = input_moments(model, owners, loader)
    scores = fallback.copy()
    for group in channel_map.groups:
        if group.refused or len(group.units) < 2:
            continue
        losses = [
            RemovalLoss.of(model.get_submodule(path), moments[path], owner, group.units)
            for path, owner in owners.items()
            if path in moments and np.isin(group.units, owner).all() and len(moments[path].mean) == len(owner)
        ]
        if losses:
            scores[group.units] = _greedy(group, losses)
    return scores


def _greedy(group: Group, losses: list[RemovalLoss]) -> np.ndarray:
    """Return scores that rise in the order in which units go; each step sees what the steps before have left."""
    count = len(group.units)
    remaining = np.arange(count)
    scores = np.zeros(count)
    at_once = -(-count // MOST_STEPS)
    reached = 0.0
    while len(remaining):
        costs = np.sum([loss.costs(remaining) for loss in losses], axis=0)
        cheapest = np.argsort(costs, kind="stable")[:at_once]
        for index in cheapest:
            # Later units never score less: the order itself is the result.
            reached = max(reached * (1 + 1e-9), float(costs[index]))
            scores[remaining[index]] = reached
        for loss in losses:
            loss.drop(remaining[cheapest])
        remaining = np.delete(remaining, cheapest)
    mean = scores.mean()
    return scores / mean if mean > 0 else scores


def fold_removed_channels(
    model: nn.Module, channel_map: ChannelMap, removed: np.ndarray, loader: Iterable[Any]
) -> None:
    """Let kept channels replace the removed ones, in place, before the cut.

    For each layer that reads both, x_R ≈ m_R + A (x_K - m_K) with A from least squares on calibration batches, so
    W_K + W_R A takes the place of W_K, and W_R (m_R - A m_K) is added to the bias where there is one.
    """
    owners = {
        path: owner for path, owner in readers_of(model, channel_map).items() if removed[owner[owner != NONE]].any()
    }
    moments = input_moments(model, owners, loader)
    for path, owner in owners.items():
        module = model.get_submodule(path)
        if path not in moments or not moments[path].is_joint or getattr(module, "groups", 1) > 1:
            continue
        gone = (owner != NONE) & removed[owner]
        kept, lost = np.flatnonzero(~gone), np.flatnonzero(gone)
        if not len(kept) or len(moments[path].mean) != len(owner):
            continue
        covariance, mean = moments[path].covariance, moments[path].mean
        inner = covariance[np.ix_(kept, kept)]
        damping = DAMPING * max(float(np.diag(inner).mean()), 1e-30) * np.eye(len(kept))
        slopes = np.linalg.solve(inner + damping, covariance[np.ix_(kept, lost)]).T
        _fold(module, kept, lost, slopes, mean[lost] - slopes @ mean[kept])


def _fold(module: nn.Module, kept: np.ndarray, lost: np.ndarray, slopes: np.ndarray, offset: np.ndarray) -> None:
    weight = module.get_parameter("weight")
    dim = 0 if isinstance(module, _ConvNd) and module.transposed else 1
    with torch.no_grad():
        mixing, shift = (torch.from_numpy(each).to(weight) for each in (slopes, offset))
        columns = weight.movedim(dim, -1)
        lost_columns = columns[..., torch.from_numpy(lost).to(weight.device)]
        at = torch.from_numpy(kept).to(weight.device)
        bias = getattr(module, "bias", None)
        if bias is not None and dim == 1:
            taps = lost_columns @ shift
            if isinstance(module, _ConvNd):
                # (outputs, taps...): every tap sees the mean, but at the border.
                taps = taps.flatten(1).sum(1)
            bias += taps
        columns[..., at] += lost_columns @ mixing
