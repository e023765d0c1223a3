"""Docstrings for the pages: examples are fenced, keys of a configuration are parameters, fields are described."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import griffe

_SESSION = re.compile(r"^(?P<indent> *)>>> .*?(?=\n\s*\n(?! *>>>)|\Z)", re.MULTILINE | re.DOTALL)


# Its keywords are those of a configuration, written into it when it is imported; the source alone shows none.
_CONFIGURED = "edge_opt.run.pipeline.sweep"


class FencedExamples(griffe.Extension):
    """Put a fence around every doctest session, and write out the parameters of a sweep and the fields of records."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.path == _CONFIGURED and isinstance(obj, griffe.Function):
            _write_out(obj)
        if isinstance(obj, griffe.Attribute) and isinstance(obj.value, griffe.ExprCall):
            _describe(obj, obj.value)
        if obj.docstring is not None:
            obj.docstring.value = _SESSION.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def _describe(attribute: griffe.Attribute, call: griffe.ExprCall) -> None:
    """Make the description that a record's field is declared with its docstring; the source is not imported."""
    if call.function.canonical_path == "edge_opt.records.fields.field":
        description = ast.literal_eval(str(call.arguments[0]))
        attribute.docstring = griffe.Docstring(description, parent=attribute)
        attribute.value = None


def _write_out(function: griffe.Function) -> None:
    from edge_opt.run.pipeline import sweep

    parameters = inspect.signature(sweep).parameters.values()
    for name in [item.name for item in function.parameters]:
        if name not in {item.name for item in parameters}:
            del function.parameters[name]
    for item in parameters:
        if item.name not in function.parameters:
            kind = griffe.ParameterKind.keyword_only
            function.parameters.add(griffe.Parameter(item.name, kind=kind, default=repr(item.default)))
    function.docstring = griffe.Docstring(inspect.getdoc(sweep) or "", parent=function)
