"""Energy of microcontrollers against MLPerf Tiny: power × published time, and power × predicted time.

    python benchmarks/mcu_energy.py ../shared/published

Rows of the table with µJ and ST's engine. "left out" is the power that the board would get without its own µJ: of the
other boards with its core, where the M4 and the M7 count as one, and the xG24 (v1.0, 0.136 mW per MHz) is another M33.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "platform_fit"))

from published_tables import _mlperf_net, rows_of

from edge_opt.boards.estimate import working_power
from edge_opt.boards.platform_file import platform_family
from edge_opt.boards.targets import resolve_target

# Watts per hertz of the other boards: of the M7 for the M4, of the M4 for the M7, of the xG24 for the M33.
LEFT_OUT = {"nucleo-l4r5zi": 0.1246 / 280e6, "nucleo-h7a3zi-q": 0.042 / 120e6, "nucleo-u575zi-q": 0.01062 / 78e6}


def main() -> None:
    """Print rows and medians."""
    errors: dict[str, list[float]] = {"published time": [], "predicted time": [], "predicted time, board left out": []}
    for row in rows_of(Path(sys.argv[1]), "mlperf_tiny"):
        match = re.search(r"power=([\d.]+)uJ", row["note"])
        if match is None or not float(match[1]) or not row["runtime"].startswith("X-CUBE-AI"):
            continue
        target = resolve_target(row["board"].lower(), "int8", runtime="st-edge-ai")
        platform, power, clock = target.platform, working_power(target.spec), target.spec.clock_hz
        assert platform is not None and power is not None and clock is not None
        conventions = platform_family(platform.kind).conventions
        quantities = _mlperf_net(row["model"], "st-edge-ai").quantities(conventions)
        seconds = float(np.exp(platform.costs.log_time(quantities))) / 1e3
        joules, watts = float(match[1]) / 1e6, power.figure.value
        without = LEFT_OUT[target.spec.name] * clock.value
        found = (watts * float(row["latency_ms"]) / 1e3, watts * seconds, without * seconds)
        for label, energy in zip(errors, found, strict=True):
            errors[label].append(energy / joules - 1)
        shown = ", ".join(f"{label} {values[-1]:+.0%}" for label, values in errors.items())
        print(f"{row['board']:16} {row['model']:4} {joules * 1e6:7.0f} µJ: {shown}")
    for label, values in errors.items():
        print(f"{label}: median error {np.median(np.abs(values)):.1%}, worst {max(values, key=abs):+.0%}")


if __name__ == "__main__":
    main()
