"""Profile more than 100 models twice, in two fresh processes, in random order: all profiles must be equal.

    python benchmarks/same_profiles.py

No model of the table computes outside torch, so none of the totals may be a lower bound because of that.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from model_zoo import ALL_NETS, ZooNet, _torchvision

import edge_opt as eo
from edge_opt.errors import EdgeOptError

_VIDEO = ("mc3_18", "r2plus1d_18", "s3d", "swin3d_t", "mvit_v2_s")


def table() -> dict[str, ZooNet]:
    """Return the models that others are compared on and models of video."""
    frames = {"s3d": (1, 3, 16, 224, 224), "swin3d_t": (1, 3, 8, 64, 64), "mvit_v2_s": (1, 3, 16, 224, 224)}
    video = {
        f"torchvision:{name}": ZooNet(
            _torchvision(name, part="video").build, lambda name=name: (frames.get(name, (1, 3, 8, 32, 32)), {})
        )
        for name in _VIDEO
    }
    return {**ALL_NETS, **video}


def profiles(seed: int) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name, a digest and what was computed outside torch, of every model twice in random order."""
    models = table()
    names = sorted(models) * 2
    random.Random(seed).shuffle(names)
    for name in names:
        torch.manual_seed(0)
        model = models[name].build()
        inputs, named = models[name].inputs()
        try:
            profile = eo.profile(model, inputs, kwargs=named or None)
        except EdgeOptError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        text = repr((profile.totals, profile.peak, profile.layers, profile.unpriced))
        outside = [item.op for item in profile.unpriced if item.op.startswith("outside")]
        yield name, hashlib.sha256(text.encode()).hexdigest(), outside


def main() -> None:
    """Run two processes one after the other and compare them."""
    digests: defaultdict[str, set[str]] = defaultdict(set)
    outside: set[str] = set()
    for seed in ("1", "2"):
        command = [sys.executable, __file__, seed]
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]]),
        }
        lines = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
        for line in lines.splitlines():
            if line.startswith("["):
                name, digest, computed = json.loads(line)
                digests[name].add(digest)
                outside |= {f"{name}: {op}" for op in computed}
    different = sorted(name for name, versions in digests.items() if len(versions) > 1)
    print(f"{len(digests)} models, 4 profiles each: {len(different)} differ {different}")
    print(f"lower bounds because of work outside torch: {sorted(outside)}")
    sys.exit(bool(different or outside))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for row in profiles(int(sys.argv[1])):
            print(json.dumps(row), flush=True)
    else:
        main()
