"""TFLM's arena and flash as we compute them, beside figures measured on emulated cores and by its own interpreter.

    python benchmarks/tflm_arena.py ../shared/published/tflm

Prints, for each core and kernels, how many models are equal to the byte, how many lie below the need, and the error of
the code of operator sets.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import defaultdict
from pathlib import Path
from statistics import median

import edge_opt as eo
from edge_opt.errors import EdgeOptError
from edge_opt.model_files.tflm_support import code_size


def rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def arenas(folder: Path) -> None:
    equal: dict[tuple[str, str], list[tuple[bool, bool]]] = defaultdict(list)
    refused = {"by both": 0, "by us alone": 0, "by TFLM alone": 0}
    for row in rows(folder / "arena.csv.gz"):
        path = folder / "models" / row["model"]
        if not path.exists() or row["status"].startswith("not run"):
            continue
        is_accepted = row["status"] == "ok"
        try:
            memory = eo.mcu_memory(path, core=row["core"], kernels=row["kernels"])  # type: ignore[arg-type]
        except EdgeOptError as error:
            refused["by us alone" if is_accepted else "by both"] += 1
            if is_accepted:
                print(f"{row['model']}: {error}")
            continue
        if not is_accepted:
            refused["by TFLM alone"] += 1
            print(f"{row['model']}: {row['status']}")
            continue
        if row["core"] == "x86-64":
            ours, theirs = memory.arena_used_bytes, int(row["rec_total"])
        else:
            ours, theirs = memory.arena_bytes, int(row["arena_minimum"])
        equal[row["core"], row["kernels"]].append((ours == theirs, ours < theirs))
    print(f"\n{'core':22} {'kernels':10} models   equal   below the need")
    for (core, kernels), outcomes in equal.items():
        same, below = (sum(part) for part in zip(*outcomes, strict=True))
        print(f"{core:22} {kernels:10} {len(outcomes):6}  {same:6}  {below:6}")
    print("refused:", ", ".join(f"{count} {who}" for who, count in refused.items()))


def flash(folder: Path) -> None:
    table = [row for row in rows(folder / "operator_flash.csv.gz") if row["optimisation"] == "core -Os, kernels -O2"]
    base = {(row["core"], row["kernels"]): int(row["flash"]) for row in table if row["kind"] == "base"}
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in table:
        if row["kind"] == "set":
            build = row["core"], row["kernels"]
            ours = code_size(row["operator"].split(), row["kernels"], row["core"] == "cortex-m55")  # type: ignore[arg-type]
            errors[build].append(ours.nbytes / (int(row["flash"]) + base[build]) - 1)
    print(f"\n{'core':22} {'kernels':10} sets  median error of the code   worst")
    for (core, kernels), values in errors.items():
        typical, worst = median(map(abs, values)), max(values, key=abs)
        print(f"{core:22} {kernels:10} {len(values):4}  {typical:24.2%}  {worst:+.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder with arena.csv.gz, operator_flash.csv.gz and models")
    tables = parser.parse_args().tables
    if not (tables / "arena.csv.gz").exists():
        raise SystemExit(f"no arena.csv.gz in {tables}; the tables are not part of the project")
    arenas(tables)
    flash(tables)
