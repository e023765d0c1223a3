"""Compare three devices for one model: does it fit, how long would it take, what limits it."""

from __future__ import annotations

from resnet import resnet50

import edge_opt as eo


def main() -> None:
    print(eo.compare_targets(resnet50(), (1, 3, 224, 224), ["raspberry-pi-4", "raspberry-pi-5", "jetson-nano"]))


if __name__ == "__main__":
    main()
