"""The HTML page: everything known about a model or a sweep, in one file that needs no network."""

from edge_opt.report.page.page import write_page, write_report

__all__ = ["write_page", "write_report"]
