"""A sweep as a process of its own, for tests that end it: `sweep_process.py FOLDER LOG PAUSE WORKERS [OPTIONS]`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from edge_opt.errors import EdgeOptError
from edge_opt.search.space import Space
from edge_opt.search.sweep import run_sweep
from edge_opt.search.sweep_progress import progress
from sweep_jobs import Arithmetic

SPACE = Space((0.0, 0.2, 0.4, 0.6), ("fp32", "int8"), ("torch", "onnxruntime"))
CONSTRAINTS = ("latency_ms <= 3", "accuracy_drop <= 2%")


def space_of(levels: int | None) -> Space:
    """The usual twelve candidates, or so many that differ in pruning alone."""
    return SPACE if levels is None else Space([level / levels for level in range(levels)], ("fp32",), ("torch",))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("log", type=Path)
    parser.add_argument("pause", type=float)
    parser.add_argument("workers", type=int)
    parser.add_argument("--levels", type=int)
    parser.add_argument("--scheduler")
    given = parser.parse_args()
    # A shell that runs tests in the background has its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with progress("plain") as listener:
            run_sweep(
                Arithmetic(given.log, given.pause),
                space_of(given.levels),
                folder=given.folder,
                constraints=CONSTRAINTS,
                workers=given.workers,
                scheduler=given.scheduler,
                insecure=given.scheduler is not None,
                on_event=listener,
            )
    except EdgeOptError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
