"""Write docs/configuration.md from the declarations of RunConfig; a test fails where the page is stale.

Run it from a checkout: `python scripts/write_configuration_page.py`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from edge_opt._support import deprecation
from edge_opt.run.config import SWEEP_KEYS, RunConfig, default_text, description_of

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
FORMER = {row.old for row in deprecation.FORMER_NAMES if row.kind == "configuration key"}

_HEAD = """# Configuration of a run

The keys of `edge-opt run CONFIG.yaml` with their defaults. `edge-opt init` writes them to a file with comments. Keys in
**bold** are also parameters of `eo.sweep(...)`, and of `edge-opt sweep --set KEY=VALUE`.

"""


def page() -> str:
    """Return the page. Keys that are read only for older files are on the page of former names."""
    return _HEAD + "".join(_item(key, field) for key, field in RunConfig.model_fields.items() if key not in FORMER)


def _item(key: str, field: Any) -> str:
    name = f"**`{key}`**" if key in SWEEP_KEYS else f"`{key}`"
    text = f"- {name} (`{default_text(field.default)}`): {description_of(key)}"
    lines = textwrap.wrap(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
