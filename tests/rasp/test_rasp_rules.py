"""The rules of the project, for rasp: quiet imports, public names only, examples that run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rasp

PACKAGE = Path(rasp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [".".join(("rasp", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in FILES]

FRESH = """
import pandas
options = pandas.options.display.width, pandas.options.display.max_columns, pandas.options.display.max_rows
import rasp
from edge_opt.errors import InvalidInput
from torch import nn
try:
    rasp.stat(nn.Linear(2, 2), (1, 1, 1, 2), includes=["energy"])
except InvalidInput as error:
    assert "import rasp.addons.energy" in str(error), error
else:
    raise SystemExit("energy is known before its add-on is imported")
import rasp.addons.energy
assert "energy" in rasp.stat(nn.Linear(2, 2), (1, 1, 1, 2), includes=["energy"], print_stat=False, returns="data")
now = pandas.options.display.width, pandas.options.display.max_columns, pandas.options.display.max_rows
assert options == now
"""


def test_import_is_quiet_and_energy_comes_with_its_add_on() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
