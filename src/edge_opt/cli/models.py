"""MODEL references, as every command takes them."""

from __future__ import annotations

from edge_opt.loading.models import Loaded, load_model
from edge_opt.loading.references import FORMS

__all__ = ["FORMS", "Loaded", "load_model"]
