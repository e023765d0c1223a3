"""Sampling: which candidates to try next, given what became of those before."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from edge_opt._support.extras import import_optional
from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import Candidate, Trial
from edge_opt.search.choose import span
from edge_opt.search.space import SamplerName, Space

if TYPE_CHECKING:
    import optuna

# Candidates proposed at a time. A constant, so that the proposals do not depend on how many workers there are.
ROUND = 8
# A grid beyond this is a mistake, or a matter for a sampler.
LARGEST_GRID = 10_000
# How often in a row a sampler may propose what was tried before it is helped out.
_REPEATS = 16

Round = tuple[Candidate, ...]


class Sampling:
    """Candidates to try, a round at a time. What comes depends on the seed and on earlier trials only.

    A sweep that was interrupted therefore proposes the same again when it is given the same trials again; nothing
    else need be remembered. `excesses` says by how much a trial is beyond each constraint.
    """

    def __init__(
        self,
        space: Space,
        sampler: SamplerName,
        trials: int | None,
        seed: int,
        objectives: Sequence[str],
        excesses: Callable[[Trial], list[float]],
    ) -> None:
        if sampler not in get_args(SamplerName):
            raise InvalidInput(f"unknown sampler {sampler!r}; expected {' or '.join(get_args(SamplerName))}")
        if trials is not None and trials < 1:
            raise InvalidInput(f"trials is {trials}; expected 1 or more, or none for the whole space")
        if trials is None and space.size > LARGEST_GRID:
            raise InvalidInput(
                f"the space holds {space.size} candidates; say how many to try with `trials`, best with `nsga2`"
            )
        self.count = space.size if trials is None else min(trials, space.size)
        self._space = space
        self._sampler = sampler
        self._seed = seed
        self._objectives = objectives
        self._excesses = excesses

    def rounds(self) -> Generator[Round, Sequence[Trial], None]:
        """Each round is to be answered with its trials; no candidate comes twice.

        A space that is tried as a whole is enumerated, in one round, whatever the sampler.
        """
        if self.count == self._space.size:
            yield tuple(self._space)
        elif self._sampler == "grid":
            yield self._space.sample(self.count, self._seed)
        else:
            yield from self._proposed()

    def _proposed(self) -> Generator[Round, Sequence[Trial], None]:
        study = _study(self._sampler, self._seed, len(self._objectives))
        known: dict[str, Trial] = {}
        while len(known) < self.count:
            asked, fresh = self._ask(study, known, min(ROUND, self.count - len(known)))
            finished = yield fresh
            known.update((trial.candidate.key, trial) for trial in finished)
            for proposal, candidate in asked:
                self._tell(study, proposal, known[candidate.key])

    def _ask(
        self, study: optuna.Study, known: Mapping[str, Trial], size: int
    ) -> tuple[list[tuple[optuna.Trial, Candidate]], Round]:
        """The proposals of a round, and its candidates. What was tried before is told at once, and asked again."""
        asked: list[tuple[optuna.Trial, Candidate]] = []
        fresh: dict[str, Candidate] = {}
        repeats = 0
        while len(fresh) < size and repeats < _REPEATS:
            with _quiet():
                proposal = study.ask()
                candidate = _choose(proposal, self._space)
            if candidate.key in known:
                self._tell(study, proposal, known[candidate.key])
                repeats += 1
            else:
                repeats = repeats + 1 if candidate.key in fresh else 0
                asked.append((proposal, candidate))
                fresh[candidate.key] = candidate
        others = self._strangers({*known, *fresh})
        while len(fresh) < size:
            candidate = next(others)
            fresh[candidate.key] = candidate
        return asked, tuple(fresh.values())

    def _strangers(self, seen: set[str]) -> Iterator[Candidate]:
        """Candidates not seen, drawn at random while that is quick, and then in order."""
        draw = random.Random(f"{self._seed} {len(seen)}")
        for _ in range(_REPEATS * ROUND):
            candidate = self._space[draw.randrange(self._space.size)]
            if candidate.key not in seen:
                seen.add(candidate.key)
                yield candidate
        yield from (candidate for candidate in self._space if candidate.key not in seen)

    def _tell(self, study: optuna.Study, proposal: optuna.Trial, trial: Trial) -> None:
        import optuna

        spans = [] if trial.metrics is None else [span(trial.metrics, name) for name in self._objectives]
        values = [item.value for item in spans if item is not None]
        with _quiet():
            if len(values) < len(self._objectives):
                study.tell(proposal, state=optuna.trial.TrialState.FAIL)
            else:
                proposal.set_user_attr("excesses", self._excesses(trial))
                study.tell(proposal, values)


def _choose(proposal: optuna.Trial, space: Space) -> Candidate:
    """Levels are numbers in order to a sampler; the pair of precision and runtime is one of several."""
    *levels, pairs = space.radices
    digits = [proposal.suggest_int(f"level {axis}", 0, radix - 1) for axis, radix in enumerate(levels)]
    return space.at((*digits, proposal.suggest_categorical("pair", tuple(range(pairs)))))


def _study(sampler: SamplerName, seed: int, objectives: int) -> optuna.Study:
    import_optional("optuna", f"the sampler {sampler} needs", "run")
    import optuna

    def constraints(frozen: Any) -> list[float]:
        return list(frozen.user_attrs["excesses"])

    with _quiet():
        chosen: optuna.samplers.BaseSampler
        if sampler == "tpe":
            # The liar keeps the proposals of one round apart.
            chosen = optuna.samplers.TPESampler(
                seed=seed, constraints_func=constraints, constant_liar=True, n_startup_trials=ROUND, multivariate=True
            )
        else:
            chosen = optuna.samplers.NSGAIISampler(seed=seed, constraints_func=constraints, population_size=2 * ROUND)
        return optuna.create_study(directions=["minimize"] * objectives, sampler=chosen)


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna says nothing, and its verbosity is as found afterwards."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
