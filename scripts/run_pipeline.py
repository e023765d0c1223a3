"""Run the pipeline of a configuration: `edge-opt run CONFIG` under its published name."""

from __future__ import annotations

import argparse
import sys

from edge_opt.cli import app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further arguments are those of `edge-opt run`.")
    parser.add_argument("--config", default="configs/default.yaml")
    known, others = parser.parse_known_args()
    app(["run", known.config, *others], prog_name="run_pipeline.py")


if __name__ == "__main__":
    sys.exit(main())
