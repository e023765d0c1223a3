"""Examples in docstrings as code on the pages: sessions that start with >>> are fenced before they are rendered."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SESSION = re.compile(r"^(?P<indent> *)>>> .*?(?=\n\s*\n(?! *>>>)|\Z)", re.MULTILINE | re.DOTALL)


class FencedExamples(griffe.Extension):
    """Put a fence around every doctest session."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SESSION.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
