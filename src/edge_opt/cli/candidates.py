"""RUN#CANDIDATE on the command line: candidates of sweeps, found and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_opt.errors import InvalidInput

if TYPE_CHECKING:
    from edge_opt.records import ModelComparison, Trial

FORM = "RUN#CANDIDATE"


def is_candidate(reference: str) -> bool:
    """Whether it names a candidate of a run; a file may have a # in its own name."""
    return "#" in reference and not Path(reference.partition(":")[0]).exists()


def compare_candidates(references: Sequence[str]) -> ModelComparison:
    """The candidates against the first of them; those of several runs are called by their run, too."""
    import edge_opt as eo

    other = next((reference for reference in references if not is_candidate(reference)), None)
    if other is not None:
        raise InvalidInput(f"{other!r} is no candidate of a sweep, and those have no layers; write {FORM} for each")
    trials = [_trial(reference) for reference in references]
    runs = [reference.rpartition("#")[0] for reference in references]
    labels = [trial.candidate.label for trial in trials]
    names = [f"{run}#{label}" for run, label in zip(runs, labels, strict=True)]
    return eo.compare(*trials, names=names if len(set(runs)) > 1 else labels)


def _trial(reference: str) -> Trial:
    from edge_opt.compare.trials import find_trial
    from edge_opt.report.sweeps import load_sweep

    run, _, name = reference.rpartition("#")
    return find_trial(load_sweep(run), name)
