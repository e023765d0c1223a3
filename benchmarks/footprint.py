"""What edge_opt adds to a process: CPU time of the import over torch's, and resident memory of a profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from timing import save

_IMPORT = """
import time, torch
start = time.process_time()
import edge_opt
print((time.process_time() - start) * 1e3)
"""

_MEMORY = """
import sys
sys.path.insert(0, {folder!r})
import json, psutil, torch
from subjects import MODELS
import edge_opt as eo
build, call = MODELS[{name!r}]
model, kwargs = build(), call()
process = psutil.Process()
before = process.memory_info().rss
eo.profile(model, kwargs=kwargs)
first = process.memory_info().rss
for _ in range(20):
    eo.profile(model, kwargs=kwargs)
print(json.dumps([first - before, process.memory_info().rss - before]))
"""


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    import_ms = min(float(_run(_IMPORT)) for _ in range(5))
    print(f"import edge_opt, over import torch: {import_ms:.1f} ms of CPU")
    rows = []
    for name in ("resnet50", "vit_b_16"):
        first, after_21 = json.loads(
            _run(_MEMORY.format(folder=str(Path(__file__).parent), name=name)).splitlines()[-1]
        )
        rows.append({"model": name, "first_profile_rss_bytes": first, "after_21_profiles_rss_bytes": after_21})
        sizes = f"{first / 2**20:.1f} MiB at the first profile, {after_21 / 2**20:.1f} after 21"
        print(f"{name}: resident memory grows by {sizes}")
    print(f"written: {save('footprint', rows, import_cpu_ms=round(import_ms, 2)).name}")


if __name__ == "__main__":
    main()
