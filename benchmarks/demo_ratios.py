"""The demo again and again: whether its headline ratio says the same each time.

    python benchmarks/demo_ratios.py            # ten runs; `--runs 4` for fewer
    python benchmarks/demo_ratios.py --keep     # train once, and only compare again: about a quarter of the time

Every run is a process of its own in a folder of its own. With `--keep` the first run's folder is copied, and what it
kept of the last comparison is dropped, so that the same files are timed again in a new process. Each run's ratio should
lie within every other run's interval.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Headline(NamedTuple):
    """What one run says of its winner."""

    label: str
    ratio: float
    low: float
    high: float
    runtime_alone: float
    is_disturbed: bool


def demo(folder: Path) -> Headline:
    """Run the demo in a folder and read its headline from `summary.json`."""
    command = [sys.executable, "-m", "edge_opt.cli", "run", "configs/default.yaml", "--output", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return headline(json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def headline(summary: dict[str, Any]) -> Headline:
    """The winner's speedup in a summary."""
    found = summary["best"]["speedup"]
    return Headline(
        summary["best"]["label"],
        found["ratio"],
        found["low"],
        found["high"],
        found["runtime_alone"],
        found["disturbed"],
    )


def forget_comparison(folder: Path) -> None:
    """Drop what a run kept of its last comparison, so that the next run compares again."""
    with closing(sqlite3.connect(folder / "sweep.sqlite")) as connection, connection:
        connection.execute("DELETE FROM facts WHERE name = 'finals'")


def agree(found: list[Headline]) -> bool:
    """Whether the ratio of each lies within the interval of every other that has the same winner."""
    return all(other.low <= one.ratio <= other.high for one in found for other in found if one.label == other.label)


def main() -> int:
    """Print one line per run, and whether they agree; 1 where they do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="train once, and only compare again")
    asked = parser.parse_args()
    found: list[Headline] = []
    with tempfile.TemporaryDirectory() as name:
        first = Path(name) / "run-0"
        print("| run | winner | times as fast | 95 % | runtime alone | disturbed |\n|---|---|---|---|---|---|")
        for number in range(asked.runs):
            folder = Path(name) / f"run-{number}"
            if asked.keep and number:
                shutil.copytree(first, folder)
                forget_comparison(folder)
            one = demo(folder)
            found.append(one)
            print(
                f"| {number + 1} | {one.label} | {one.ratio:.2f} | {one.low:.2f} to {one.high:.2f} | "
                f"{one.runtime_alone:.2f} | {'yes' if one.is_disturbed else 'no'} |",
                flush=True,
            )
            if number:
                shutil.rmtree(folder)
    is_agreed = agree(found)
    print(f"\n{'all' if is_agreed else 'NOT all'} ratios lie within each other's intervals")
    return 0 if is_agreed else 1


if __name__ == "__main__":
    sys.exit(main())
