"""What several processes say together of the finalists."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from edge_opt.measuring.statistics import log_batch_minima
from edge_opt.records.sweeps import Candidate, SweepResult, Trial
from edge_opt.run.config import RunConfig
from edge_opt.run.job import Baseline, PipelineJob
from edge_opt.run.model_and_data import ModelAndData, ScoreSummary
from edge_opt.run.time_finalists import FinalistTimer, Session, by_speed, finals_of, merged
from edge_opt.search.choose import speedup_of
from edge_opt.search.isolation import Outcome
from edge_opt.search.store import Built, Store
from sweep_jobs import figures

BASELINE, WINNER = Candidate(0.0, "fp32", "torch"), Candidate(0.5, "fp32", "onnxruntime")


def process(slow_ms: float, fast_ms: float, lost: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> Session:
    """A process in which the fastest block of the baseline and of the winner took so long; others took twice that."""
    logs = {
        BASELINE.key: (math.log(2e-3 * slow_ms), math.log(1e-3 * slow_ms)),
        WINNER.key: (math.log(1e-3 * fast_ms), math.log(2e-3 * fast_ms)),
    }
    for key in without:
        del logs[key]
    spread = dict.fromkeys(logs, 1e-4)
    return Session(logs, logs, spread, spread, False, False, lost, ("samples scatter",))


def test_a_batch_is_known_by_its_fastest_sample() -> None:
    # 20 samples are ten batches of two; the clock must have moved in all of them
    assert log_batch_minima([2.0, 1.0] * 10) == (0.0,) * 10
    assert log_batch_minima([0.0, 1.0]) == () == log_batch_minima([])


def test_each_process_is_one_sample_and_a_slower_machine_is_left_out() -> None:
    # Three processes: 10, 10 and 10.1 times; a fourth ran while the machine was half as fast, and says 14.
    quiet = [process(10.0, 1.0), process(10.1, 1.01), process(10.2, 1.01)]
    busy = process(28.0, 2.0)
    assert by_speed([busy, *quiet]) == ([*quiet, busy], 3) and by_speed([]) == ([], 0)
    together = merged([busy, *quiet])
    assert together.wall[BASELINE.key] == pytest.approx([math.log(seconds) for seconds in (0.010, 0.0101, 0.0102)])
    assert not together.is_disturbed and together.remarks == ()
    finals = finals_of(together, (BASELINE, WINNER), 1, 1, 4)
    assert finals is not None
    speedup = speedup_of(finals, BASELINE, WINNER)
    assert speedup is not None
    assert speedup.whole.ratio == pytest.approx((10.0 * 10.0 * 10.2 / 1.01) ** (1 / 3))
    assert speedup.whole.low < 10.0 and 10.2 < speedup.whole.high < 14.0


def test_where_no_three_processes_agree_the_comparison_is_disturbed() -> None:
    together = merged([process(10.0, 1.0), process(15.0, 1.2), process(20.0, 1.4), process(30.0, 2.0)])
    [cause] = together.remarks
    assert together.is_disturbed and cause.startswith("only 1 of 4 processes ran within 3% of the fastest; no other")
    busy = [replace(process(ms, ms / 10), is_contended=True) for ms in (10.0, 15.0, 20.0)]
    assert merged(busy).remarks == ("only 1 of 3 processes ran within 3% of the fastest; samples scatter",)
    # the three fastest decide
    assert together.wall[WINNER.key] == pytest.approx([math.log(seconds) for seconds in (0.0010, 0.0012, 0.0014)])


def test_a_variant_that_one_process_could_not_time_is_left_out_by_name() -> None:
    sentence = "prune 0.5 could not be timed: no memory"
    together = merged([process(10.0, 1.0), process(10.0, 1.0, (sentence,), (WINNER.key,))])
    assert list(together.wall) == [BASELINE.key]
    assert together.lost == (sentence,)


def test_one_process_stays_as_it_is() -> None:
    alone = process(10.0, 1.0)
    assert merged([alone]) is alone


class Compared:
    """Stands in for the processes that compare: counts them, and lets each tell what it is given."""

    def __init__(self, told: Session) -> None:
        self.told, self.count = told, 0

    def run(self, *_: Any) -> Outcome:
        self.count += 1
        return Outcome(asdict(self.told), None, "", 0.1)


@pytest.mark.usefixtures("own_machine")
def test_finals_are_kept_for_the_same_builds_and_taken_again_after_new_ones_or_noise(tmp_path: Path) -> None:
    source = ModelAndData(nn.ReLU(), {}, RunConfig(min_time_s=0.1))
    job = PipelineJob(source, tmp_path, Baseline(ScoreSummary(0.9, 0.9, 0.9, 9), 1, 1))
    timer = FinalistTimer(job, tmp_path, lambda _: None)
    rows = tuple(Trial(entry, "done", figures(entry), None, "", (), 1.0, 1) for entry in (BASELINE, WINNER))
    result = SweepResult("net", rows[0], rows, (), (), WINNER.key, "")
    processes = Compared(process(10.0, 1.0))

    def compared() -> int:
        """Processes that it takes to know the finals now."""
        before, found = processes.count, timer(result, cast("Any", processes), store)
        assert found is not None and found.of(WINNER) is not None
        return processes.count - before

    with closing(Store.open(tmp_path, {})) as store:
        store.save_build(WINNER, Built({"file": "net.onnx"}, 1.0))
        assert (compared(), compared()) == (1, 0)
        # built again, of other code: the same candidate, and another variant
        store.save_build(WINNER, Built({"file": "net.onnx"}, 1.5))
        assert (compared(), compared()) == (1, 0)
        store.save_build(WINNER, Built({"file": "net.onnx"}, 2.0))
        processes.told = replace(process(10.0, 1.0), is_disturbed=True)
        assert (compared(), compared()) == (1, 1)
