"""Kill -9 at random moments: the sweep, a fork server, a forked child, the scheduler.

    python benchmarks/kills.py [KILLS] [SEED]

Small jobs of twelve candidates, one folder after the other, until so many processes were killed. After each folder:
every candidate has its row, none has failed, no stored result was computed again, and no process is left.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from kills import KilledSweep

ROLES = ("parent", "fork_server", "child")


def main(wanted: int, seed: int) -> None:
    chance, begun, total, rows = random.Random(seed), time.monotonic(), Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="edge-opt-kills-") as name:
        number = 0
        while total.total() < wanted:
            number += 1
            workers = 2 * (number % 2)
            sweep = KilledSweep(Path(name) / str(number), chance, workers=workers)
            left = wanted - total.total()
            if number % 4 == 0:
                sweep.run_until_scheduler_is_killed()
            sweep.run(ROLES, min(left, 12))
            total += sweep.kills
            rows += 12
            shown = ", ".join(f"{role} {count}" for role, count in sorted(total.items()))
            print(f"{total.total():4} kills ({shown}) in {number} sweeps, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{rows} rows, none lost, none failed, nothing kept was run again, no process left")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
