"""Profiles as a terminal shows them."""

from __future__ import annotations

from typing import Any

from edge_opt.records.profiles import ModelProfile
from edge_opt.report.profile_text import profile_sheet
from edge_opt.report.sheets import sheet_text


def render(profile: ModelProfile, width: int | None = None, *, color: bool = False, **options: Any) -> str:
    """Return the text of a profile, with the options of `profile_sheet`."""
    return sheet_text(profile_sheet(profile, **options), width, color=color)
