"""The status of a sweep, from its folder alone."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from edge_opt.budget import TRIAL_METRICS, parse_budget, violations
from edge_opt.records import SweepStatus, Trial
from edge_opt.search.locks import owner
from edge_opt.search.recommending import recommend
from edge_opt.search.store import Store


def status(folder: str | Path) -> SweepStatus:
    """How far the sweep in a folder is, who runs it, and the best candidate so far; disturbs nobody."""
    root = Path(folder)
    with closing(Store.look(root)) as store:
        plan = store.fact("plan") or {"name": "", "total": None, "constraints": []}
        budgets = [parse_budget(text, TRIAL_METRICS) for text in plan["constraints"]]
        unfinished = tuple(candidate.label for candidate in store.unfinished())
        trials = [
            trial if trial.metrics is None else replace(trial, violations=violations(trial.metrics, budgets))
            for trial in store.trials().values()
        ]
    best, sentence = recommend(trials)
    running = owner(root)
    return SweepStatus(
        folder=str(root),
        name=plan["name"],
        total=plan["total"],
        done=_count(trials, "done"),
        failed=_count(trials, "failed"),
        accepted=sum(trial.is_accepted for trial in trials),
        pid=None if running is None else running.pid,
        host=None if running is None else running.host,
        unfinished=unfinished,
        best=best,
        recommendation=sentence,
    )


def _count(trials: list[Trial], wanted: str) -> int:
    return sum(trial.status == wanted for trial in trials)
