"""Write docs/cli.md from the commands themselves; the tests hold that the page is up to date."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import typer

from edge_opt.cli import app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
_WORD = r"""(?:[^\s"']|"[^"]*"|'[^']*')+"""
_WIDTH = 76  # and a backslash
_HEAD = """# Command line

Results go to stdout, messages and progress to stderr. `--json` prints for machines. Exit code 0: done; 1: a condition
does not hold; 2: wrong use, with one sentence that says what to do. `--debug` shows the traceback behind it.
`edge-opt --install-completion` completes commands and options in your shell.
"""


def page() -> str:
    """The whole page."""
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    return _HEAD + "".join(_section(name, command) for name, command in sorted(commands.items()))


def _section(name: str, command: Any) -> str:
    arguments = [item.metavar or item.name.upper() for item in command.params if item.param_type_name == "argument"]
    first, _, rest = inspect.cleandoc(command.help or "").partition("\n")
    examples = [line for line in rest.splitlines() if line.startswith("edge-opt ")]
    prose = "\n".join(line for line in rest.splitlines() if line != "\b" and line not in examples).strip()
    blocks = [f"\n## edge-opt {name}\n", first]
    if prose:
        blocks.append(f"\n{prose}")
    usage = " ".join(["edge-opt", name, *arguments, "[OPTIONS]"])
    shown = [usage, *([""] if examples else []), *map(wrapped, examples)]
    blocks.append("\n```text\n" + "\n".join(shown) + "\n```\n")
    options = [item for item in command.params if item.param_type_name == "option" and not item.hidden]
    blocks += ["| option | meaning |", "|---|---|", *map(_row, options)]
    return "\n".join(blocks) + "\n"


def wrapped(command: str) -> str:
    """A command in lines that fit the page; none is cut inside quotes, or between an option and its value.

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


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    meaning = (option.help or "").replace("|", "\\|")
    default = option.default
    shown = default is not None and default is not False and not callable(default) and not option.multiple
    return f"| {names} | {meaning}{f' Default: `{default}`.' if shown else ''} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
