"""Text from models and files, escaped for the format in which it is shown."""

from __future__ import annotations

import html as html_format
import re
from collections.abc import Callable, Iterable, Sequence

# A spreadsheet that is set to East Asian text takes the wide forms for formulas as well.
_FORMULAS = tuple(
    "=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
)
_MARKDOWN = re.compile(r"[\\`*\[\]<>|&~$#]|(?<!\w)_|_(?!\w)")


def printable(text: str) -> str:
    r"""Return the text on one line, with control characters and changes of direction written out.

    >>> printable("layer\n\x1b[31m0"), printable("\u202eabc")
    ('layer\\n\\x1b[31m0', '\\u202eabc')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, width: int, measure: Callable[[str], int] = len, *, cuts_end: bool = False) -> str:
    """Return the text within a width, with an ellipsis in its first half: the end of a path tells layers apart.

    >>> shorten("encoder.layers.11.self_attn.q_proj", 28)
    'encode…s.11.self_attn.q_proj'
    >>> shorten("rejected (mae <= 5, measured 10.39)", 20, cuts_end=True)
    'rejected (mae <= 5,…'

    Args:
        text: The text.
        width: The largest width.
        measure: The width of a text, such as its columns on a terminal; by default its characters.
        cuts_end: Whether the end is left out instead, as of a sentence.
    """
    if measure(text) <= width:
        return text
    for kept in range(min(len(text), width) - 1, 0, -1):
        before = kept if cuts_end else max(kept // 4, 1)
        short = f"{text[:before]}…{text[len(text) - kept + before :]}"
        if measure(short) <= width:
            return short
    return "…"[:width]


def spreadsheet(text: str) -> str:
    """Return the text as a cell of a CSV file, on one line, that no spreadsheet takes for a formula.

    >>> spreadsheet("=1+1"), spreadsheet("conv1")
    ("'=1+1", 'conv1')
    """
    shown = printable(text)
    return f"'{shown}" if shown.lstrip().startswith(_FORMULAS) else shown


def markdown(text: str) -> str:
    r"""Return the text as a cell of a Markdown table that shows it literally.

    >>> markdown("a|b <i>"), markdown("layer_norm")
    ('a\\|b \\<i\\>', 'layer_norm')
    """
    return _MARKDOWN.sub(lambda match: "\\" + match[0], printable(text))


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table whose cells show their text literally.

    >>> markdown_table(["Layer", "MACs"], [["a|b", "12"]])
    ['| Layer | MACs |', '|---|---|', '| a\\\\|b | 12 |']
    """
    lines = [headers, *(list(map(markdown, row)) for row in rows)]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return [first, "|" + "---|" * len(headers), *others]


def html(text: str) -> str:
    """Return the text escaped for HTML, in an attribute or between tags.

    >>> html("</script>")
    '&lt;/script&gt;'
    """
    return html_format.escape(printable(text), quote=True)


def lines(text: str) -> str:
    r"""Return the text with characters that a terminal obeys or XML cannot hold written out; lines stay.

    >>> lines("a\x00b\nc")
    'a\\x00b\nc'
    """
    return "\n".join(map(printable, text.split("\n")))
