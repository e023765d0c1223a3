"""Run the pipeline with several seeds and put the results together: `edge-opt run CONFIG --seeds 1 2 3`."""

from __future__ import annotations

import argparse
import sys

from edge_opt.cli import app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further arguments are those of `edge-opt run`.")
    parser.add_argument("--config", default="configs/default.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    known, others = parser.parse_known_args()
    app(["run", known.config, "--seeds", *map(str, known.seeds), *others], prog_name="multi_seed.py")


if __name__ == "__main__":
    sys.exit(main())
