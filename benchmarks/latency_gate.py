"""False alarms and misses of the latency gate: one net against itself, and against one that is 5 % slower.

Each trial is what `check(..., baseline=model, max_increase={"latency": "2%"})` does: both models, timed interleaved.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch import nn

import edge_opt as eo


def net(extra: float = 0.0) -> nn.Module:
    """Convolutions; `extra` is the share of channels of work added by a second branch whose result is dropped."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(20)))
            self.more = nn.Conv2d(32, 32, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.body(x)
            for _ in range(round(20 * extra)):
                self.more(x)
            return found

    return Net().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--min-time", type=float, default=0.5)
    parser.add_argument("--limit", default="2%")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, extra in (("unchanged", 0.0), ("5 % slower", 0.05)):
        before, after = net(), net(extra)
        found = Counter(
            eo.check(
                after, inputs=(1, 32, 24, 24), baseline=before, max_increase={"latency": given.limit},
                measure={"min_time_s": given.min_time, "max_time_s": 2 * given.min_time},
            ).budgets[0].outcome
            for _ in range(given.trials)
        )  # fmt: skip
        print(f"{name}: {found['broken']} of {given.trials} alarm; {dict(found)}", flush=True)


if __name__ == "__main__":
    main()
