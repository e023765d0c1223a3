"""Imported by the process that exports are forked from: the exporter is started in it, and children inherit that."""

from __future__ import annotations

from edge_opt.compress.exporter_start import start_exporter

start_exporter()
