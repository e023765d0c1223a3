"""Names in fewer columns than they need: what tells one from the others stays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from rich.cells import cell_len

_GAP = "…"
# Where a name may be cut: before a part such as `.q_proj`, `/conv` or ` (call 2)`.
_PART = re.compile(r"(?<=[./\s])(?=[^./\s])")


def shortened(text: str, width: int) -> str:
    """The text in at most `width` columns of a terminal: its last parts whole, where they fit, and its first letters.

    >>> shortened("model.encoder.layers.11.self_attn.q_proj", 24)
    'mode…11.self_attn.q_proj'
    >>> shortened("encoder.layers.11.self_attn", 15)
    'en…11.self_attn'
    """
    if cell_len(text) <= width:
        return text
    cuts = [match.start() for match in _PART.finditer(text)]
    tail = next((text[cut:] for cut in cuts if cell_len(text[cut:]) + len(_GAP) <= width), "")
    return _head(text, width - cell_len(tail) - len(_GAP)) + _GAP + tail if tail else _halved(text, width)


def cut_behind(text: str, width: int) -> str:
    """A sentence in at most `width` columns; its end is left out.

    >>> cut_behind("one two three", 8)
    'one two…'
    """
    return text if cell_len(text) <= width else _head(text, width - len(_GAP)).rstrip() + _GAP


def told_apart(texts: Sequence[str], rooms: Sequence[int]) -> list[str]:
    """Each text in as many columns as it has room for; texts that differ stay different.

    >>> told_apart(["encoder.layers.0.attention.query", "encoder.layers.1.attention.query"], [14, 14])
    ['…0…ntion.query', '…1…ntion.query']
    """
    wanted = list(dict.fromkeys(zip(texts, rooms, strict=True)))
    short = {item: shortened(*item) for item in wanted}
    for clash in _clashes(short):
        before, behind = _common([text for text, _ in clash])
        for text, room in clash:
            short[text, room] = _around(text, before, behind, room)
    # The last resort, in a column too narrow for what differs: a number.
    for clash in _clashes(short):
        for number, (text, room) in enumerate(clash, start=1):
            mark = f"~{number}"
            short[text, room] = (shortened(text, room - len(mark)) if room > len(mark) else "") + mark
    return [short[item] for item in zip(texts, rooms, strict=True)]


def _clashes(short: dict[tuple[str, int], str]) -> list[list[tuple[str, int]]]:
    """Texts that differ and look the same."""
    alike: dict[str, dict[str, tuple[str, int]]] = {}
    for item, shown in short.items():
        alike.setdefault(shown, {})[item[0]] = item
    return [list(found.values()) for found in alike.values() if len(found) > 1]


def _common(texts: Sequence[str]) -> tuple[int, int]:
    """How many parts all texts have in common at their beginnings, and how many at their ends."""
    rows = [_PART.split(text) for text in texts]
    most = min(map(len, rows)) - 1
    before = _alike(zip(*rows, strict=False), most)
    return before, _alike(zip(*map(reversed, rows), strict=False), most - before)


def _alike(columns: Iterable[tuple[str, ...]], most: int) -> int:
    """How many of the first columns hold one text each."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, islice(columns, max(most, 0))))


def _around(text: str, before: int, behind: int, width: int) -> str:
    """What differs, whole if it fits, between what all have in common, cut as it must be."""
    parts = _PART.split(text)
    end = len(parts) - behind
    head, core, tail = "".join(parts[:before]), "".join(parts[before:end]), "".join(parts[end:])
    room = width - len(_GAP) * bool(head)
    if cell_len(core + tail) <= room:
        kept = core + tail
    else:
        short = core.rstrip("./ ")
        if cell_len(short) + len(_GAP) > room:
            return shortened(short, width)
        kept = short + _GAP + _tail(tail, room - cell_len(short) - len(_GAP))
    return (_head(head, room - cell_len(kept)) + _GAP if head else "") + kept


def _head(text: str, width: int) -> str:
    """The first letters that fit."""
    return next((text[:kept] for kept in range(max(width, 0), 0, -1) if cell_len(text[:kept]) <= width), "")


def _tail(text: str, width: int) -> str:
    """The last letters that fit."""
    kept = range(min(len(text), max(width, 0)), 0, -1)
    return next((text[-count:] for count in kept if cell_len(text[-count:]) <= width), "")


def _halved(text: str, width: int) -> str:
    """The first and the last letters of a text without parts."""
    for kept in range(min(len(text), width) - 1, 0, -1):
        short = f"{text[: kept - kept // 2]}{_GAP}{text[len(text) - kept // 2 :]}"
        if cell_len(short) <= width:
            return short
    return _GAP[:width]
