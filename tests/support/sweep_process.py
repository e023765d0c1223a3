"""A sweep as a process of its own, for tests that end it: `sweep_process.py FOLDER LOG PAUSE WORKERS`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from edge_opt.errors import SweepInterrupted
from edge_opt.search.progress import progress
from edge_opt.search.space import Space
from edge_opt.search.sweep import run_sweep
from sweep_jobs import Arithmetic

SPACE = Space((0.0, 0.2, 0.4, 0.6), ("fp32", "int8"), ("torch", "onnxruntime"))
CONSTRAINTS = ("latency_ms <= 3", "accuracy_drop <= 2%")

if __name__ == "__main__":
    folder, log, pause, workers = sys.argv[1:]
    # A shell that runs tests in the background has its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with progress("plain") as listener:
            run_sweep(
                Arithmetic(Path(log), float(pause)),
                SPACE,
                folder=folder,
                constraints=CONSTRAINTS,
                workers=int(workers),
                on_event=listener,
            )
    except SweepInterrupted as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
