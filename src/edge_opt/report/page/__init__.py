"""The HTML page: everything known about a model or a sweep, in one file that needs no network."""

from edge_opt.report.page.page import runs_in, write_page, write_report, write_runs

__all__ = ["runs_in", "write_page", "write_report", "write_runs"]
