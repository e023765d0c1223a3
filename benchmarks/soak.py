"""Many small candidates on two workers, of which one is killed again and again.

    python benchmarks/soak.py [CANDIDATES] [SECONDS BETWEEN KILLS]

Ends with a row for each candidate, each measured once, and each build that was kept made once.
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
from sweep_control import lines


def main(candidates: int, every_s: float) -> None:
    begun, chance = time.monotonic(), random.Random(0)
    with tempfile.TemporaryDirectory(prefix="edge-opt-soak-") as name:
        sweep = KilledSweep(Path(name) / "soak", chance, workers=2, pause_s=0.0)
        sweep.levels = candidates
        process = sweep._start()
        while process.poll() is None:
            time.sleep(chance.uniform(0.5, 1.5) * every_s)
            victim, _ = sweep._victim(process.pid, "worker")
            if victim is not None:
                sweep._remember()
                victim.kill()
                sweep.kills["worker"] += 1
        assert process.returncode == 0, process.returncode
        sweep.check()
        said = Counter(tuple(line.split()) for line in lines(sweep.log))
        twice = [key for (phase, key), count in said.items() if phase == "measure" and count > 1]
        extra = sum(count - 1 for (phase, _), count in said.items() if phase == "build")
        assert not twice, twice
        assert extra <= sweep.kills.total(), (extra, sweep.kills)
        print(
            f"{candidates} rows, {sweep.kills['worker']} workers killed, {extra} builds cut short and made again, "
            f"none measured twice, {time.monotonic() - begun:.0f} s"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500, float(sys.argv[2]) if len(sys.argv) > 2 else 5.0)
