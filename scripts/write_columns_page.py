"""Write docs/columns.md from the declarations of the columns; a test fails where the page is stale.

Run it from a checkout: `python scripts/write_columns_page.py`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from edge_opt.records.profiles import Level
from edge_opt.records.sweeps import TRIAL_COLUMNS
from edge_opt.report.table import LEVELS, columns

PAGE = Path(__file__).parent.parent / "docs" / "columns.md"

_HEAD = """# Columns, units, schema

Files use bytes, seconds, joules and counts. Names with another unit say so: `latency_ms`, `memory_mb` (1 MB is 2²⁰
bytes). An empty cell means *not known* or *not defined*; zero means *known to be zero*.
"""

_PROFILES = """
## Columns of a profile

`to_dataframe(level)` and `save("x.csv", level)` have these columns, with the title of tables in brackets. Levels: one
row per leaf call (`leaves`), per module with everything below it (`modules`), per operator call (`operators`), or one
for the whole model (`root`). [Counting](counting.md) explains MACs, FLOPs and bytes.
"""

_SWEEPS = """
## Columns of a sweep

`sweep_results.csv` and `sweep_dataframe` have one row per candidate. Columns in **bold** can be limited by a
budget, such as `latency_ms <= 20`. The ends of 95 % intervals are columns of their own, such as
`accuracy_ci95_low` and `accuracy_ci95_high`. The name of another metric replaces `accuracy`.

"""

_JSON = """
## JSON

`profile.save("x.json")` writes everything: the trace, costs, layers, totals, peak, and measured and predicted values.
The document names its schema and version. Truncated files and unknown schemas are refused.

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
    return "".join([_HEAD, _PROFILES, *_profile_items(), _SWEEPS, *_sweep_items(), _JSON])


def _profile_items() -> Iterator[str]:
    """Yield the columns, grouped by the levels that have them."""
    every = dict.fromkeys(column for level in LEVELS for column in columns(level))
    groups: dict[str, list[str]] = {}
    for column in every:
        title = f" ({column.title})" if column.title else ""
        groups.setdefault(_levels(column.levels), []).append(_item(f"`{column.name}`{title}: {column.help}"))
    for levels, items in groups.items():
        yield f"\n### {levels.capitalize()}\n\n{''.join(items)}"


def _sweep_items() -> Iterator[str]:
    ends = {name for column in TRIAL_COLUMNS for name in (column.low, column.high)}
    for column in TRIAL_COLUMNS:
        if column.name not in ends:
            name = f"**`{column.name}`**" if column.metric else f"`{column.name}`"
            yield _item(f"{name}: {_in_unit(column.help, column.name)}{' With an interval.' if column.low else ''}")


def _in_unit(meaning: str, name: str) -> str:
    """Return a description of a field, in seconds and bytes, in the unit of its column.

    >>> _in_unit("Median seconds per batch.", "latency_ms")
    'Median milliseconds per batch.'
    """
    unit, scaled = {"ms": ("seconds", "milliseconds"), "mb": ("bytes", "MiB")}.get(name[-2:], ("", ""))
    return re.sub(rf"\b{unit}\b", scaled, meaning, flags=re.IGNORECASE) if unit else meaning


def _levels(levels: Sequence[Level]) -> str:
    return "all levels" if set(levels) == set(LEVELS) else ", ".join(levels)


def _item(text: str) -> str:
    lines = textwrap.wrap(f"- {text}", 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
