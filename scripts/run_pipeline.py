"""Run the pipeline of a configuration and print its summary as JSON: `edge-opt run CONFIG --json` as published."""

from __future__ import annotations

import argparse
import sys

from edge_opt.cli import app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further arguments are those of `edge-opt run`.")
    parser.add_argument("--config", default="configs/default.yaml", help="the YAML file; configs/default.yaml")
    parser.add_argument(
        "--config-template",
        metavar="FILE",
        nargs="?",
        const="",
        help="the file under its other published name; without FILE, print one with every key and stop",
    )
    known, others = parser.parse_known_args()
    if known.config_template == "":
        from edge_opt.run.config import template

        sys.stdout.write(template())
        return
    config = known.config if known.config_template is None else known.config_template
    printed = [] if "--json" in others else ["--json"]
    app(["run", config, *printed, *others], prog_name="run_pipeline.py")


if __name__ == "__main__":
    sys.exit(main())
