"""Profile two bundled models and write their tables to out/demo."""

from __future__ import annotations

from pathlib import Path

from resnet import resnet50

import edge_opt as eo
from edge_opt.hardware import estimate_layerwise_stats
from edge_opt.model import SmallCNN

OUT = Path("out/demo")


def main() -> None:
    small = eo.profile(SmallCNN(), (32, 1, 28, 28))
    large = eo.profile(resnet50(), (1, 3, 224, 224))
    print(small)
    print(estimate_layerwise_stats(SmallCNN(), batch_size=32).to_string(index=False))
    print()
    print(large)
    written = [
        profile.save(OUT / f"{profile.name.lower()}{suffix}")
        for profile in (small, large)
        for suffix in (".json", ".csv", ".md")
    ]
    print("written:")
    for path in written:
        print(f"  {path}")


if __name__ == "__main__":
    main()
