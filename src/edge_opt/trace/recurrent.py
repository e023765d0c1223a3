"""Bytes alive inside a recurrent operator on the CPU, which runs as many smaller ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class _Meter:
    """What is held now, and the most that ever was."""

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    def take(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def drop(self, nbytes: int) -> None:
        self.held -= nbytes

    def touch(self, nbytes: int) -> None:
        """Take and drop at once."""
        self.peak = max(self.peak, self.held + nbytes)


class RecurrentStack:
    """Layers of a recurrent network by their sizes in bytes. Peaks include the outputs.

    The order of taking and dropping is that of torch's RNN.cpp and mkldnn/RNN.cpp.
    """

    def __init__(
        self, x: torch.Tensor, hidden: torch.Tensor, params: list[torch.Tensor], layers: int, bidirectional: bool,
        batch_first: bool,
    ) -> None:  # fmt: skip
        x = x.transpose(0, 1) if batch_first else x
        self.layers = layers
        self.directions = 2 if bidirectional else 1
        self.time = x.shape[0]
        # The kernels run time-first, on a copy where the input is not.
        self.copy = 0 if x.is_contiguous() else x.numel() * x.itemsize
        self.step = x.shape[1] * hidden.shape[2] * x.itemsize
        self.gates = x.shape[1] * params[1].shape[0] * x.itemsize

    def fused_peak(self, zeros: Sequence[int]) -> int:
        """Of an LSTM in oneDNN: one call per layer and direction, states kept apart until they are stacked.

        `zeros` stand in for the biases of each call.
        """
        sequence = self.time * self.step
        meter = _Meter()
        meter.take(self.copy)
        for layer in range(self.layers):
            for call in range(layer * self.directions, (layer + 1) * self.directions):
                meter.take(zeros[call] + sequence + 2 * self.step)
                # Only now does it replace the last layer's output in this direction.
                meter.drop(zeros[call] + (sequence if layer and self.directions == 2 else 0))
            if self.directions == 2:
                meter.take(2 * sequence)
            if layer:
                meter.drop(self.directions * sequence)
        meter.take(2 * self.layers * self.directions * self.step)
        return meter.peak

    def stepwise_peak(self, gates: int, inside: int, has_cell: bool) -> int:
        """Of a loop over steps: one product over all inputs first; every step's output is kept until they are stacked.

        `inside` is how many states a step holds at its height; `has_cell`: a second state goes from step to step.
        """
        state = self.gates // gates
        cell = state if has_cell else 0
        sequence, product = self.time * self.step, self.time * self.gates
        meter = _Meter()
        for layer in range(self.layers):
            for direction in range(self.directions):
                copy = 0 if layer else self.copy
                meter.take(copy + product)
                # The other direction's product is dropped only when this one is complete.
                meter.drop(copy + (product if direction else 0))
                meter.touch((self.time - 1) * self.step + (cell if self.time > 1 else 0) + inside * state)
                meter.take(sequence + cell + sequence)
            meter.take(2 * sequence if self.directions == 2 else 0)
            # What is left of the layer is its output and its last states.
            meter.drop(product + self.directions * (sequence - self.step))
            meter.drop((2 * sequence if self.directions == 2 else 0) + (self.directions * sequence if layer else 0))
        meter.take(self.layers * self.directions * (self.step + cell))
        return meter.peak
