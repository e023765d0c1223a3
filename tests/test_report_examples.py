"""The examples in the docstrings of report, cli and units are true."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import edge_opt.cli
import edge_opt.report

MODULES = [
    "edge_opt.units",
    *(f"{package.__name__}.{found.name}" for package in (edge_opt.report, edge_opt.cli)
      for found in pkgutil.iter_modules(package.__path__) if found.name != "__main__"),
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    # `edge_opt.cli.profile` is a module and, in its package, a command; the module is meant.
    assert doctest.testmod(import_module(name)).failed == 0
