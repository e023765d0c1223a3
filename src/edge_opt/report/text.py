"""Text from a model's author, made safe for the place where it is shown."""

from __future__ import annotations

import re

_MARKDOWN = re.compile(r"[\\`*\[\]<>|]|(?<!\w)_|_(?!\w)")


def printable(text: str) -> str:
    r"""The text on one line, with what a terminal would act on written out.

    >>> printable("layer\n\x1b[31m0")
    'layer\\n\\x1b[31m0'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def markdown(text: str) -> str:
    r"""The text as a cell of a Markdown table that shows it literally.

    >>> markdown("a|b <i>"), markdown("layer_norm")
    ('a\\|b \\<i\\>', 'layer_norm')
    """
    return _MARKDOWN.sub(lambda found: "\\" + found[0], printable(text))


def spreadsheet(text: str) -> str:
    """The text as a cell that no spreadsheet takes for a formula.

    >>> spreadsheet("=1+1"), spreadsheet("conv1")
    ("'=1+1", 'conv1')
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text
