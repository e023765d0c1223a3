"""Write the list of former names into docs/migrating.md; a test checks that the page is up to date."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from edge_opt._support import deprecation

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
BEGIN, END = "<!-- former names: begin -->\n", "<!-- former names: end -->"


def former_names() -> str:
    """Return all rows as lists in Markdown, one for each pair of versions."""
    groups: dict[str, list[str]] = defaultdict(list)
    for row in deprecation.FORMER_NAMES:
        end = f"removed in {row.removed_in}" if row.removed_in else "they stay"
        replacement = row.instead or row.new
        write = f" → `{replacement}`" if replacement else ""
        effect = " (without effect)" if row.new is None else ""
        groups[f"Since {row.since}, {end}:"].append(f"- {row.kind} `{row.old}`{effect}{write}")
    return "\n\n".join("\n".join([title, "", *rows]) for title, rows in groups.items())


def page() -> str:
    """Return the page with the current list between its two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{former_names()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
