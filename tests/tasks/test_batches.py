"""Batches of any form reach the model: dicts, several inputs, several outputs, a forward of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edge_opt.compress import finetune, sensitivity
from edge_opt.errors import InvalidInput
from edge_opt.pruning.plan import make_plan
from edge_opt.runtimes.torch_runtime import TorchRunner
from edge_opt.tasks.batches import RunnerAsModule, task_of
from edge_opt.trace.inputs import flat_tensors


class Named(nn.Module):
    """Two inputs by name; it answers a dict whose scores are not the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        mean = (self.embedding(input_ids) * attention_mask[..., None]).mean(1)
        return {"hidden": mean, "logits": self.head(mean)}


IDS = torch.arange(12).reshape(4, 3) % 10
BATCH = {
    "labels": torch.tensor([0, 1, 0, 1]),
    "attention_mask": torch.ones(4, 3),
    "idx": torch.arange(4),
    "input_ids": IDS,
}


def test_labels_of_a_mapping_are_split_off_and_unknown_keys_left_out() -> None:
    batch = next(task_of().batches(Named(), [BATCH]))
    assert sorted(batch.kwargs) == ["attention_mask", "input_ids"] and batch.labels is not None


def test_a_stand_in_answers_in_the_model_s_structure() -> None:
    model, task = Named().eval(), task_of()
    call = task.call(model, BATCH)
    names = list(call.kwargs)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(model(**dict(zip(names, tensors, strict=True))).values())

    shuffled = dict(reversed(list(BATCH.items())))
    assert task.score(RunnerAsModule(run, model, call), [shuffled]).value == task.score(model, [BATCH]).value


class Answer(dict[str, torch.Tensor]):
    """A mapping that torch does not know, as many models return."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]


@dataclass(frozen=True)
class Framed:
    hidden: torch.Tensor
    found: Answer


class Own(Named):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        found = super().forward(input_ids, attention_mask)
        return Framed(found["hidden"], Answer(hidden=found["hidden"], logits=found["logits"]))


def right(outputs: Framed, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.found.logits.argmax(1) == targets).float().mean()


def test_answers_of_one_s_own_classes_stay_what_they_are_for_a_metric_over_all_batches() -> None:
    torch.manual_seed(0)  # right and wrong answers
    model, task = Own().eval(), task_of(right, metric_direction="higher")
    call = task.call(model, BATCH)
    names = list(call.kwargs)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # as an exported file answers: hidden twice and the scores, one after the other
        return tuple(flat_tensors(model(**dict(zip(names, tensors, strict=True)))))

    by_model, by_file = (task.score(each, [BATCH, BATCH]) for each in (model, RunnerAsModule(run, model, call)))
    assert by_model.value == by_file.value and by_model.samples == 8
    assert np.array_equal(by_model.resamples, by_file.resamples) and len(set(by_model.resamples)) > 1


def test_inputs_in_a_tuple_are_spread_where_forward_takes_so_many() -> None:
    call = task_of().call(nn.Bilinear(3, 3, 2), ((torch.zeros(4, 3), torch.ones(4, 3)), torch.zeros(4)))
    assert [tuple(value.shape) for value in call.args] == [(4, 3), (4, 3)]


def test_labels_that_are_the_inputs_are_held_against_the_next_token() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    batch = next(task_of("perplexity").batches(nn.Identity(), [{"input_ids": tokens, "labels": tokens.clone()}]))
    assert batch.labels.tolist() == [[2, 3, -100]]


def halved(model: Any, batch: Any) -> Any:
    return model(batch["image"] / 2)[:, 0]


def test_a_forward_of_one_s_own_is_scored_trained_and_probed() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    batches = [{"image": 2 * x, "target": x.sum(1)}]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    options: dict[str, Any] = {"metric": "mae", "forward": halved}
    tuned = finetune(model, batches, epochs=3, learning_rate=1e-2, validate=batches, progress=False, **options)
    scores = [record.score for record in tuned.history if record.score is not None]
    assert tuned.best_epoch == scores.index(min(scores)) > 0
    found = sensitivity(tuned.model, batches, prune=(0.5,), **options)
    assert (found.metric, found.direction) == ("mae", "lower")
    # The worst is the one whose error grew most.
    assert found.worst_first()[0].score_change == max(row.score_change for row in found.rows)
    assert task_of(**options).call(model, batches[0]).args[0].equal(x)


@pytest.mark.parametrize(("name", "value"), [("mse", 4.0), ("l1", 2.0), ("huber", 1.5), ("smooth_l1", 1.5)])
def test_a_loss_of_numbers_has_its_name(name: str, value: float) -> None:
    batch = next(task_of("mae", loss=name).batches(nn.Identity(), [(torch.zeros(3, 1), torch.full((3,), 2.0))]))
    assert float(batch.loss_of(torch.zeros(3, 1))) == value


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"metric": "dice"}, "unknown metric 'dice'; metrics are accuracy, top5"),
        ({"loss": "hinge"}, "unknown loss 'hinge'; losses are cross_entropy"),
        ({"forward": "nowhere.py:f"}, "forward: no file 'nowhere.py'"),
        ({"metric": "mae", "metric_direction": "higher"}, "mae is better when lower"),
    ],
)
def test_words_that_mean_nothing_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        task_of(**options)


def test_variants_are_fitted_to_batches_that_a_forward_of_one_s_own_reads() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    task = task_of(forward=lambda model, batch: model(batch["x"].double().float()))
    loader = [{"x": torch.randn(16, 4), "labels": torch.zeros(16, dtype=torch.int64)}]
    plan = make_plan(model, (1, 4), data=list(task.batches(model, loader)))
    assert plan.build_ratio(0.5, 1)[0].out_features == 4


def test_a_forward_that_never_calls_the_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="forward never calls the model"):
        task_of(forward=lambda model, batch: batch).call(nn.Identity(), (torch.zeros(1), torch.zeros(1)))


def test_collate_makes_a_batch_of_a_list_of_samples() -> None:
    samples = [(torch.full((2,), float(index)), index % 2) for index in range(4)]
    task = task_of(collate=torch.utils.data.default_collate)
    assert next(task.batches(nn.Linear(2, 2), [samples])).labels.tolist() == [0, 1, 0, 1]


def test_a_runner_is_scored_as_its_model_is() -> None:
    model, task = nn.Linear(3, 2), task_of()
    batch = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    stand_in = RunnerAsModule(TorchRunner(model, 1), model, task.call(model, batch))
    assert task.score(stand_in, [batch]).value == task.score(model, [batch]).value
