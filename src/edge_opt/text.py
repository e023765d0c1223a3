"""Text from a model's author, made safe for the place where it is shown."""

from __future__ import annotations

import html as html_format
import re
from collections.abc import Iterable, Sequence
from typing import Any

# The wide forms are formulas, too, to a spreadsheet that is set to East Asian text.
_FORMULAS = tuple(
    "=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
)
_MARKDOWN = re.compile(r"[\\`*\[\]<>|&~$#]|(?<!\w)_|_(?!\w)")


def printable(text: str) -> str:
    r"""The text on one line, with what a terminal or a reading direction would act on written out.

    >>> printable("layer\n\x1b[31m0"), printable("\u202eabc")
    ('layer\\n\\x1b[31m0', '\\u202eabc')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def spreadsheet(text: str) -> str:
    """The text as a cell of a CSV file, on one line, that no spreadsheet takes for a formula.

    >>> spreadsheet("=1+1"), spreadsheet("conv1")
    ("'=1+1", 'conv1')
    """
    shown = printable(text)
    return f"'{shown}" if shown.lstrip().startswith(_FORMULAS) else shown


def markdown(text: str) -> str:
    r"""The text as a cell of a Markdown table that shows it literally.

    >>> markdown("a|b <i>"), markdown("layer_norm")
    ('a\\|b \\<i\\>', 'layer_norm')
    """
    return _MARKDOWN.sub(lambda found: "\\" + found[0], printable(text))


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; cells show their text literally.

    >>> markdown_table(["Layer", "MACs"], [["a|b", "12"]])
    ['| Layer | MACs |', '|---|---|', '| a\\\\|b | 12 |']
    """
    lines = [headers, *(list(map(markdown, row)) for row in rows)]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return [first, "|" + "---|" * len(headers), *others]


def html(text: str) -> str:
    """The text as part of an HTML page, in an attribute or between tags, that shows it literally.

    >>> html("</script>")
    '&lt;/script&gt;'
    """
    return html_format.escape(printable(text), quote=True)


def xml(text: str) -> str:
    r"""The text for an XML file: lines stay, characters that XML cannot hold are written out; escaping is still to do.

    >>> xml("a\x00b\nc")
    'a\\x00b\nc'
    """
    return "\n".join(map(printable, text.split("\n")))


def edit_distance(one: list[Any], other: list[Any]) -> int:
    """How many tokens must be inserted, deleted or replaced to turn one row of tokens into another.

    >>> edit_distance("a cat sat here".split(), "the cat sat".split())
    2
    """
    costs = list(range(len(other) + 1))
    for row, token in enumerate(one, 1):
        before, costs[0] = costs[0], row
        for column, wanted in enumerate(other, 1):
            before, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, before + (token != wanted)),
            )
    return costs[-1]
