"""Every benchmark, one after the other."""

from __future__ import annotations

import compress_speed
import footprint
import layer_overhead
import static_speed


def main() -> None:
    static_speed.main()
    footprint.main()
    layer_overhead.main()
    compress_speed.main()


if __name__ == "__main__":
    main()
