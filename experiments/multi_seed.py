"""scripts/multi_seed.py where the published pipeline has it."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "multi_seed.py"), run_name="__main__")
