"""Write the table of former names into docs/migrating.md; a test checks that the page is up to date."""

from __future__ import annotations

from pathlib import Path

from edge_opt._support.deprecation import former_names_table

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
BEGIN, END = "<!-- former names: begin -->\n", "<!-- former names: end -->"


def page() -> str:
    """Return the page with the current table between its two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{former_names_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
