"""A sweep of 40 candidates under a latency budget, with and without skipping what is predicted to miss it.

    python benchmarks/skipping.py

Both sweeps are of the bundled network on its digits, for a Raspberry Pi 4, without timing on this machine. Prints the
winner, the seconds of each, training of the baseline included, and how right the skipping was; writes
benchmarks/results/skipping.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import save

import edge_opt as eo

LEVELS = [round(0.045 * step, 3) for step in range(20)]


def swept(folder: Path, skip: bool, limit_ms: float, epochs: int) -> dict[str, Any]:
    start = time.perf_counter()
    done = eo.run(
        {
            "epochs": 2,
            "fine_tune_epochs": epochs,
            "pruning_levels": LEVELS,
            "target": "raspberry-pi-4",
            "host_timing": False,
            "runtimes": ["onnxruntime"],
            "budgets": [f"target_latency_ms <= {limit_ms}", "accuracy_drop <= 5%"],
            "skip": skip,
        },
        folder,
    )
    result = done.result
    best = None if result.best is None else result.trial(result.best).candidate.label
    seconds = time.perf_counter() - start
    return {"winner": best, "trials": len(result.trials), "seconds": seconds, "skipping": result.skipping}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-ms", type=float, default=0.4)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            name: swept(Path(folder) / name, skip, options.limit_ms, options.epochs)
            for name, skip in (("skipping", True), ("all", False))
        }
    for name, row in rows.items():
        print(f"{name}: {row['winner']}, {row['trials']} built, {row['seconds']:.0f} s; {row['skipping']}")
    print(f"time: {rows['skipping']['seconds'] / rows['all']['seconds']:.2f}")
    save("skipping", [{"sweep": name, **row} for name, row in rows.items()], limit_ms=options.limit_ms)


if __name__ == "__main__":
    main()
