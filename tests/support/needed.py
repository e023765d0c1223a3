"""Packages that a test cannot do without: where one is missing, the test fails and says what installs it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def needed(name: str) -> Any:
    """The module of that name, imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.fail(f"{name} cannot be imported ({error}); `make test` installs what the tests need", pytrace=False)
