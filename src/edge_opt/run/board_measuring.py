"""Measure the candidates of a sweep on a board, over ssh."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_opt._support.json import to_plain
from edge_opt.errors import InvalidInput
from edge_opt.measuring.ssh_board import Board, BoardUnavailable
from edge_opt.records.sweeps import Candidate, Failure
from edge_opt.run.job import PipelineJob
from edge_opt.search.isolation import Outcome

# Runtimes that the script on the board knows.
BOARD_RUNTIMES = ("onnxruntime", "litert")


@dataclass(frozen=True)
class BoardMeasurer:
    """Measures candidates on a board; one that cannot be measured is a row with the reason, and the sweep goes on."""

    board: Board
    job: PipelineJob

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> Outcome:
        """Time one candidate, and return its metrics or why it could not be timed."""
        begun = time.monotonic()

        def failed(failure: Failure, error: Exception) -> Outcome:
            return Outcome(None, failure, str(error), time.monotonic() - begun)

        try:
            order, files, inputs = self.job.board_order(folder, built)
            timed = self.board.time(order, files, inputs)
            return Outcome(to_plain(self.job.board_metrics(built, timed)), None, "", time.monotonic() - begun)
        except (InvalidInput, BoardUnavailable) as error:
            return failed("raised", error)
        except TimeoutError as error:
            return failed("timed out", error)
        except ChildProcessError as error:
            return failed("crashed", error)
