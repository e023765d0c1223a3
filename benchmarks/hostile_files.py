"""Damaged and crafted files: each ends in an answer or in one sentence, within limits, and executes nothing.

    python benchmarks/hostile_files.py [COUNT] [SEED] [KIND]

COUNT files of each kind of damage (default 100), and all crafted ones; KIND is a part of a kind's name. Everything is
made in a temporary folder. Every file is read in a process of its own, whose memory and time are limited. The table
shows how each kind ended; below it stands each file that took too long, too much memory, or ended in a traceback.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import hostile


def main(count: int, seed: int, kind: str) -> None:
    hostile.preload()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="edge-opt-hostile-") as name:
        folder = Path(name)
        for file in hostile.files(folder, count, seed):
            if kind in file.kind:
                outcomes.append(outcome := hostile.run(file, folder, folder / "watched"))
                if outcome.problems:
                    last = (outcome.output.strip().splitlines() or [""])[-1][:300]
                    print(
                        f"{file.kind}, {file.name}: {', '.join(outcome.problems)}: {last!r}",
                        file=sys.stderr,
                        flush=True,
                    )
    print(hostile.table(outcomes))
    slowest, largest = max(outcomes, key=lambda o: o.seconds), max(outcomes, key=lambda o: o.mib)
    print(
        f"\nlongest {slowest.seconds:.1f} s ({slowest.file.name}), largest {largest.mib:.0f} MiB ({largest.file.name})"
    )
    raise SystemExit(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:3] + ["100", "0"][len(sys.argv[1:3]) :])), kind="".join(sys.argv[3:4]))  # type: ignore[misc]
