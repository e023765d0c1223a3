"""Run the pipeline with several seeds and put the results together: `edge-opt run CONFIG --seeds 1 2 3`."""

from __future__ import annotations

import argparse
import sys

from edge_opt.cli import app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further arguments are those of `edge-opt run`.")
    parser.add_argument(
        "--config", "--config-template", dest="config", default="configs/default.yaml", help="the YAML file"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one run for each")
    parser.add_argument("--output-dir", help="where everything goes, instead of the file's output_dir")
    known, others = parser.parse_known_args()
    output = [] if known.output_dir is None else ["--output", known.output_dir]
    app(["run", known.config, "--seeds", *map(str, known.seeds), *output, *others], prog_name="multi_seed.py")


if __name__ == "__main__":
    sys.exit(main())
