"""Text made safe for the place where it is shown, under the name that views know it by."""

from edge_opt.text import html, markdown, printable, spreadsheet, xml

__all__ = ["html", "markdown", "printable", "spreadsheet", "xml"]
