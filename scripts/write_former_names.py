"""Write the table of former names into docs/migrating.md; a test checks that the page is up to date."""

from __future__ import annotations

from pathlib import Path

from edge_opt._support import deprecation

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
BEGIN, END = "<!-- former names: begin -->\n", "<!-- former names: end -->"


def former_names_table() -> str:
    """Return all rows as a table in Markdown."""
    lines = ["| former name | write | since | removed in |", "|---|---|---|---|"]
    for row in deprecation.FORMER_NAMES:
        replacement = row.instead or row.new
        write = f"`{replacement}`" if replacement else ""
        write += " (the former name has no effect)" if row.new is None else ""
        lines.append(f"| {row.kind} `{row.old}` | {write.strip()} | {row.since} | {row.removed_in or 'stays'} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with the current table between its two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{former_names_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
