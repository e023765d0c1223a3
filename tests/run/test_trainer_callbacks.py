"""Callbacks of trainers: figures are noted, and a model over budget is not trained."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from edge_opt.errors import MissingExtra, TrainingFailed
from edge_opt.trainer_callbacks import lightning_callback, trainer_callback


def test_a_missing_trainer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(MissingExtra, match="needs lightning, which is not installed"):
        lightning_callback((1, 8))


def test_the_callback_itself_notes_and_refuses() -> None:
    """What the trainer calls, where the trainer itself cannot run."""
    pytest.importorskip("transformers")
    state = SimpleNamespace(log_history=[])
    trainer_callback((3, 8)).on_train_begin(None, state, None, model=nn.Linear(8, 2))
    assert state.log_history[0]["cost/macs"] == 3 * 8 * 2
    with pytest.raises(TrainingFailed, match="a budget is not kept"):
        trainer_callback((3, 8), budgets=["macs <= 1"]).on_train_begin(None, state, None, model=nn.Linear(8, 2))
