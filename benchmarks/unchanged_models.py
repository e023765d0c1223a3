"""Models of torchvision, timm and Hugging Face: is the output before and after a profile the same, bit by bit?"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from itertools import chain, islice
from typing import Any

import subjects  # noqa: F401  the tests' helpers become importable
import torch
from timing import save

from zoo_outputs import hugging_face, timm_families, torchvision_zoo, verdict


def measure(most: int | None) -> list[dict[str, Any]]:
    rows = []
    zoos = (torchvision_zoo(), timm_families(), hugging_face(100))
    for name, build, call in chain.from_iterable(islice(zoo, most) for zoo in zoos):
        rows.append({"model": name, "verdict": verdict(build, call)})
        print(f"{rows[-1]['model']:44} {rows[-1]['verdict']}", flush=True)
    return rows


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = measure(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    counts = Counter(row["verdict"].partition(":")[0] for row in rows)
    print(dict(counts))
    print(f"written: {save('unchanged_models', rows, counts=dict(counts)).name}")


if __name__ == "__main__":
    main()
