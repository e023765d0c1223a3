"""Figures reach TensorBoard and MLflow, and read back from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput
from edge_opt.records.profiles import ModelProfile


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return eo.profile(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), (4, 16))


def test_figures_read_back_from_tensorboard(profile: ModelProfile, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        profile.log_to(writer, step=3, prefix="cost/")
    events = EventAccumulator(str(tmp_path)).Reload()
    (macs,) = events.Scalars("cost/macs")
    assert (macs.step, macs.value) == (3, 4 * 16 * 8)
    (weights,) = events.Scalars("cost/param_mb")
    assert weights.value == pytest.approx(4 * (16 * 8 + 8) / 2**20)
    assert "cost/latency_ms" not in events.Tags()["scalars"]  # not known, so not written
    (table,) = events.Tensors("cost/profile/text_summary")
    assert b"Linear" in table.tensor_proto.string_val[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "client"])
def test_figures_read_back_from_mlflow(
    how: str, profile: ModelProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    try:
        experiment = mlflow.create_experiment("costs", artifact_location=(tmp_path / "artifacts").as_uri())
        if how == "module":
            with mlflow.start_run(experiment_id=experiment) as run:
                profile.log_to(mlflow, step=3)
        else:
            client = mlflow.MlflowClient()
            run = client.create_run(experiment)
            profile.log_to((client, run.info.run_id), step=3)
        found = mlflow.MlflowClient().get_metric_history(run.info.run_id, "macs")
        assert [(metric.step, metric.value) for metric in found] == [(3, 4 * 16 * 8)]
        (saved,) = (tmp_path / "artifacts").rglob("profile.txt")
        assert saved.read_text(encoding="utf-8") == str(profile)
    finally:
        mlflow.set_tracking_uri(None)


def test_weights_and_biases_gets_figures_and_the_table(profile: ModelProfile) -> None:
    class Run:
        """What a run of Weights & Biases offers; the package is too large for the tests."""

        def __init__(self) -> None:
            self.summary: dict[str, str] = {}
            self.logged: list[tuple[dict[str, float], int]] = []

        def log(self, data: dict[str, float], step: int) -> None:
            self.logged.append((data, step))

    run = Run()
    profile.log_to(run, step=3, prefix="cost/")
    [(figures, step)] = run.logged
    assert (figures["cost/macs"], step) == (4 * 16 * 8, 3)
    assert run.summary == {"cost/profile": str(profile)}


def test_anything_else_is_refused(profile: ModelProfile) -> None:
    with pytest.raises(InvalidInput, match="list.*SummaryWriter.*mlflow"):
        profile.log_to([])
