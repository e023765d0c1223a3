"""Write docs/configuration.md from the declarations of RunConfig; a test fails where the page is stale.

Run it from a checkout: `python scripts/write_configuration_page.py`.
"""

from __future__ import annotations

from pathlib import Path

from edge_opt.run.config import SWEEP_KEYS, RunConfig, default_text, description_of

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

_HEAD = """# Configuration of a run

Every key of `edge-opt run CONFIG.yaml` with its default. `edge-opt init` writes them to a file with comments.
Keys marked *sweep* are also parameters of `eo.sweep(...)` and of `edge-opt sweep --set KEY=VALUE`.

"""


def page() -> str:
    """Return the page."""
    rows = [
        f"| `{key}` | `{default_text(field.default)}` | {description_of(key)} | {'✓' if key in SWEEP_KEYS else ''} |\n"
        for key, field in RunConfig.model_fields.items()
    ]
    return "".join([_HEAD, "| key | default | meaning | sweep |\n", "|---|---|---|:-:|\n", *rows])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
