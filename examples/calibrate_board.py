"""Calibrate this machine, then predict a model without running it. Takes two minutes; `--seconds 10` is shorter."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from resnet import resnet50

import edge_opt as eo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "calibration.json")
    options = parser.parse_args()
    eo.calibrate(seconds=options.seconds, path=options.output)
    prediction = eo.profile(resnet50(), (1, 3, 224, 224), target=options.output).prediction
    print(
        f"resnet50: {prediction.seconds * 1e3:.0f} ms, from {prediction.low * 1e3:.0f} to {prediction.high * 1e3:.0f}"
    )
    print(f"the calibration is in {options.output}; carry it anywhere and use it as a target")


if __name__ == "__main__":
    main()
