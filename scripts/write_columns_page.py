"""Write docs/columns.md from the declarations of the columns; a test fails where the page is stale.

Run it from a checkout: `python scripts/write_columns_page.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_opt.records.profiles import Level
from edge_opt.records.sweeps import TRIAL_COLUMNS
from edge_opt.report.table import LEVELS, columns

PAGE = Path(__file__).parent.parent / "docs" / "columns.md"

_HEAD = """# Columns, units, schema

All files use bytes, seconds, joules and counts. Scaled units appear only where people read, and in names that say
so (`latency_ms`, `memory_mb`). MB in a name means 2²⁰ bytes, as in the older API. An empty cell means *not known* or
*not defined*; a zero means *known to be zero*. This page is written by `scripts/write_columns_page.py` from the
declarations of the columns.
"""

_PROFILES = """
## Columns of a profile

`to_dataframe(level)` and `save("x.csv", level)` have these columns. Levels: one row per leaf call (`leaves`), per
module with everything below it (`modules`), per operator call (`operators`), or one for the whole model (`root`). See
[counting](counting.md) for what MACs, FLOPs and bytes include. The `predicted_*` columns need a target.
"""

_SWEEPS = """
## Figures of a sweep

`sweep_results.csv` and `sweep_dataframe` have these columns for each candidate; others say what it is and its status.
The last part of a name is the unit in files (`_ms`, `_mb`); the meaning is that of the record's field, in seconds and
bytes. A figure with a name in the third column can be limited by a constraint, such as `latency_ms <= 20`. Where
another metric than accuracy is scored, its name replaces `accuracy`.
"""

_JSON = """
## JSON

`profile.save("x.json")` writes everything: the trace (modules, operator signatures, operator calls, storages),
prices, layers, totals, peak, unpriced operators, and what was measured and predicted. The document names its schema
and version; a file of a schema that this version does not read is refused, and so is a truncated one.

```python
import json

import edge_opt as eo
from edge_opt.model import SmallCNN

eo.profile(SmallCNN(), (1, 1, 28, 28)).save("small.json")
document = json.load(open("small.json"))
assert document["schema_version"] == 1
assert eo.load("small.json").totals.macs == document["totals"]["macs"]
```
"""


def page() -> str:
    """Return the page."""
    profiles = _table(["column", "title", "levels", "meaning"], _profile_rows())
    sweeps = _table(["column", "title", "constraint", "meaning"], _sweep_rows())
    return _HEAD + _PROFILES + profiles + _SWEEPS + sweeps + _JSON


def _profile_rows() -> list[list[str]]:
    every = dict.fromkeys(column for level in LEVELS for column in columns(level))
    return [[f"`{column.name}`", column.title, _levels(column.levels), column.help] for column in every]


def _sweep_rows() -> list[list[str]]:
    return [
        [f"`{it.name}`", it.title, f"`{it.metric}`" if it.metric else "", it.help.replace("|", "\\|")]
        for it in TRIAL_COLUMNS
    ]


def _levels(levels: Sequence[Level]) -> str:
    return "all" if set(levels) == set(LEVELS) else ", ".join(levels)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
