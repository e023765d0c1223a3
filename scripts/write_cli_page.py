"""Write docs/cli.md from the commands themselves; a test checks that the page is up to date."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from edge_opt.cli import app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
# An option that this many commands have, with the same help and default, is explained once for all of them.
_SHARED_FROM = 3
_WORD = r"""(?:[^\s"']|"[^"]*"|'[^']*')+"""
_WIDTH = 76  # and a backslash
_HEAD = """# Command line

Results go to stdout, messages and progress to stderr. Exit codes: 0 done; 1 a condition does not hold, such as a
budget; 2 wrong use, with a message that says what to do. Every command takes

- `--json`: Print the result as JSON ([formats](json.md)).
- `--trust`: Open `.pt2` files. They can execute code: check their origin.
- `--debug`: Show the traceback of an error.

`edge-opt --install-completion` completes commands and options in your shell.
"""


def page() -> str:
    """Return the whole page."""
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    shown = {name: command for name, command in sorted(commands.items()) if not command.hidden}
    counts = Counter(_item(option) for command in shown.values() for option in _options(command))
    shared = [item for item, count in counts.items() if count >= _SHARED_FROM]
    blocks = [_HEAD, "\n## Shared options\n\n", *shared]
    blocks += [_section(name, command, set(shared)) for name, command in shown.items()]
    return "".join(blocks)


def _section(name: str, command: Any, shared: set[str]) -> str:
    arguments = [item.metavar or item.name.upper() for item in command.params if item.param_type_name == "argument"]
    first, _, rest = inspect.cleandoc(command.help or "").partition("\n")
    paragraphs = [part.strip("\n") for part in rest.split("\n\n")]
    examples = [line for part in paragraphs if part.startswith("\b") for line in part.splitlines()[1:]]
    prose = " ".join([first, *(" ".join(part.split()) for part in paragraphs if not part.startswith("\b"))])
    usage = " ".join(["edge-opt", name, *arguments, "[OPTIONS]"])
    lines = [usage, *map(wrapped, examples)]
    items = [_item(option) for option in _options(command)]
    also = [re.findall(r"`([^`]+)`", item)[0] for item in items if item in shared]
    blocks = [f"\n## edge-opt {name}\n\n", _wrapped_text(prose), "\n```text\n", *(f"{line}\n" for line in lines)]
    blocks += ["```\n\n", *(item for item in items if item not in shared)]
    if also:
        blocks.append(_wrapped_text(f"- Shared: {', '.join(f'`{option}`' for option in also)}.", "  "))
    return "".join(blocks)


def _options(command: Any) -> list[Any]:
    return [item for item in command.params if item.param_type_name == "option" and not item.hidden]


def wrapped(command: str) -> str:
    """Break a command into lines that fit the page, never inside quotes or between an option and its value.

    >>> print(wrapped("edge-opt check a.json " + '--budget "macs <= 600M" ' * 3))
    edge-opt check a.json --budget "macs <= 600M" --budget "macs <= 600M" \\
        --budget "macs <= 600M"
    """
    lines, line = [], ""
    for word in re.findall(rf"-+[\w-]+ (?!-){_WORD}|{_WORD}", command):
        if len(line) + len(word) > _WIDTH:
            lines.append(f"{line} \\")
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def _item(option: Any) -> str:
    """Return the item of an option: its names, its help, and its default where the help does not state it."""
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len, reverse=True))
    default = option.default
    is_shown = default is not None and default is not False and not callable(default) and not option.multiple
    is_shown &= "efault" not in (option.help or "")
    return _wrapped_text(f"- {names}: {option.help or ''}{f' Default: `{default}`.' if is_shown else ''}", "  ")


def _wrapped_text(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
