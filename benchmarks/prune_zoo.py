"""Which models lose channels, how much is left, and which layers stay whole for what reason.

    python benchmarks/prune_zoo.py [PART OF A NAME ...]

A model counts as pruned where at least a tenth of its MACs or of its parameters goes at half of the channels, with the
proof that it is the original with those channels silenced.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import torch
from model_zoo import NETS, ZooNet
from timing import save

from edge_opt.compress import prune
from edge_opt.errors import EdgeOptError

RATIO = 0.5
AT_LEAST = 0.1


def row(name: str, net: ZooNet) -> dict[str, Any]:
    """What half of the channels leave of one model."""
    torch.manual_seed(0)
    inputs, kwargs = net.inputs()
    start = time.process_time()
    try:
        pruned = prune(net.build(), inputs, RATIO, kwargs=kwargs)
    except EdgeOptError as error:
        return {"model": name, "pruned": False, "reason": str(error), "cpu_s": time.process_time() - start}
    achieved = pruned.achieved
    reasons = Counter(fall.reason for fall in pruned.shortfalls)
    gone = 1 - min(achieved.macs_ratio, achieved.params_ratio)
    return {
        "model": name,
        "pruned": gone >= AT_LEAST,
        "macs_left": round(achieved.macs_ratio, 3),
        "params_left": round(achieved.params_ratio, 3),
        "channels_left": round(achieved.channels_ratio, 3),
        "silenced_error": pruned.check.silenced_error,
        "whole_layers": len([layer for layer in achieved.layers if layer.after == layer.before]),
        "layers": len(achieved.layers),
        "reasons": [f"{count} x {reason}" for reason, count in reasons.most_common(5)],
        "cpu_s": round(time.process_time() - start, 1),
    }


def main(parts: list[str]) -> None:
    torch.set_num_threads(1)
    rows = []
    for name, net in NETS.items():
        if parts and not any(part in name for part in parts):
            continue
        rows.append(found := row(name, net))
        if "macs_left" in found:
            print(
                f"{'yes' if found['pruned'] else 'NO ':3} {name:42} MACs {found['macs_left']:5.1%} "
                f"params {found['params_left']:5.1%} whole {found['whole_layers']}/{found['layers']} "
                f"{found['cpu_s']:.0f} s",
                flush=True,
            )
            for reason in found["reasons"]:
                print(f"      {reason[:150]}")
        else:
            print(f"NO  {name:42} {found['reason'][:300]}", flush=True)
    print(f"{sum(found['pruned'] for found in rows)} of {len(rows)} are pruned")
    if not parts:
        print(f"saved {save('prune_zoo', rows).name}")


if __name__ == "__main__":
    main(sys.argv[1:])
