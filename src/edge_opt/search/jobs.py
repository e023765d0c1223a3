"""A job: what a sweep does with each candidate."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from edge_opt.errors import InvalidInput
from edge_opt.records import Candidate, TrialMetrics

Phase = Literal["build", "measure"]


class Job(Protocol):
    """The two halves of trying a candidate. Both run in processes of their own, so a job must be picklable.

    What a job refers to by path must be there on every machine that builds; small files are better carried as bytes.
    """

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        """Make the candidate: prune, fine-tune, convert, find its accuracy. Files go to `folder`.

        May run on any machine, beside other builds. The result is what JSON can hold; `measure` gets it back.
        """
        ...

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        """Time what was built; runs on the machine of the sweep, alone."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one half of a job may use; None is no limit. Memory is resident, of the process and its children."""

    memory_bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("memory", self.memory_bytes), ("time", self.seconds)):
            if value is not None and not value > 0:
                raise InvalidInput(f"the {name} limit is {value}; expected a number above 0, or None for no limit")


def packed(job: Job) -> bytes:
    """The job as other processes can receive it, or the reason why they cannot."""
    kind = type(job)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise InvalidInput(
            f"the job's class {kind.__qualname__} cannot be imported by another process; "
            "define it at the top of a module, not in the script that is run or in a function"
        )
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidInput(f"the job {kind.__qualname__} cannot be sent to another process: {error}") from error
