"""Former names that still work: one table, and the functions that serve each kind of name from it.

To rename something public, add a row to former_names.csv and run `python scripts/write_former_names.py`. Rows for

- modules need nothing else: importing the old path imports the new one;
- functions (any attribute of a module) need `__getattr__ = former_attributes(__name__)` in the old module;
- parameters need `@accept_former_parameters` on the function;
- commands, options and configuration keys need nothing else: the command line and `read_config` look them up.

A row is removed in the version that it names, together with the old name; a test fails until that is done.
"""

from __future__ import annotations

import csv
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar, cast

from edge_opt.errors import InvalidInput

if TYPE_CHECKING:
    from types import ModuleType

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Kind = Literal["module", "function", "parameter", "command", "option", "configuration key"]


class FormerName(NamedTuple):
    """A name that was public in an earlier version."""

    kind: Kind
    # Modules and functions by their full path, parameters as "function(parameter)", options as "command --option", or
    # "command --option=VALUE" where the command no longer knows that a value follows.
    old: str
    # In the same form as `old`; of commands and options the words to use instead, with {} for the value. None: the name
    # is accepted and has no effect; `instead` then says what has.
    new: str | None
    since: str
    # None: documents that we promised to follow use the name, so it stays.
    removed_in: str | None
    instead: str = ""

    @property
    def message(self) -> str:
        """One line: the new name, and until when the old one works."""
        name = f"the {self.kind} {self.old}"
        verb = "has no effect" if self.new is None else "is deprecated"
        replacement = self.instead or self.new
        end = f"; it is removed in {self.removed_in}" if self.removed_in else ""
        return f"{name} {verb} since {self.since}{f', use {replacement}' if replacement else ''}{end}"


with (Path(__file__).parent / "former_names.csv").open(encoding="utf-8", newline="") as table:
    _, *rows = csv.reader(table)
    FORMER_NAMES = tuple(
        FormerName(cast("Kind", kind), old, new or None, since, removed_in or None, instead)
        for kind, old, new, since, removed_in, instead in rows
    )


class FormerNameWarning(FutureWarning):
    """A former name was used. A FutureWarning, because Python hides a DeprecationWarning from most people."""


_warned: set[FormerName] = set()


def warn_once(row: FormerName, stacklevel: int = 2) -> None:
    """Warn about a former name at its first use in this process.

    Args:
        stacklevel: As in `warnings.warn`: 1 is the function that calls this one, 2 its caller.
    """
    if row not in _warned:
        _warned.add(row)
        warnings.warn(row.message, FormerNameWarning, stacklevel=stacklevel + 1)


def former_names(kind: Kind, owner: str = "") -> dict[str, FormerName]:
    """Return the rows of one kind by their old name, without the module, function or command that owns it."""
    rows = [(row, *_split(row.old, kind)) for row in FORMER_NAMES if row.kind == kind]
    return {name: row for row, row_owner, name in rows if row_owner == owner}


def _split(name: str, kind: Kind) -> tuple[str, str]:
    """Split a name of the table into its owner and the rest."""
    if kind == "function":
        owner, _, rest = name.rpartition(".")
    elif kind == "parameter":
        owner, _, rest = name.removesuffix(")").partition("(")
    elif kind == "option":
        owner, _, rest = name.partition("=")[0].rpartition(" ")
    else:
        owner, rest = "", name
    return owner, rest


def former_attributes(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that serves the functions which the table lists for it."""

    def __getattr__(name: str) -> Any:  # noqa: N807  # it becomes the module's
        return former_attribute(module, name, stacklevel=3)

    return __getattr__


def former_attribute(module: str, name: str, stacklevel: int = 2) -> Any:
    """Return what a former name of a module stands for; raise AttributeError where the table does not list it."""
    row = former_names("function", module).get(name)
    if row is None or row.new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_once(row, stacklevel)
    home, _, new = row.new.rpartition(".")
    return getattr(import_module(home), new)


def accept_former_parameters(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function take the former names of its parameters; its signature shows the new names only."""
    rows = former_names("parameter", function.__name__)

    @wraps(function)
    def accepting(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return function(*args, **current_keywords(kwargs, rows, stacklevel=3))  # type: ignore[arg-type]  # renamed

    return accepting


def current_keywords(values: Mapping[str, Any], rows: Mapping[str, FormerName], stacklevel: int = 2) -> dict[str, Any]:
    """Return values by name under their current names; who receives them still accepts those without effect."""
    current = {name: value for name, value in values.items() if name not in rows}
    for name in [name for name in values if name in rows]:
        row = rows[name]
        warn_once(row, stacklevel)
        new = name if row.new is None else _split(row.new, row.kind)[1]
        if new in current:
            raise InvalidInput(f"{new} is given twice, once under its former name {name}; keep {new}")
        current[new] = values[name]
    return current


def current_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, the command first, with the current names of command and options."""
    command, *rest = words
    rest = current_options(command, rest)
    row = former_names("command").get(command)
    if row is None or row.new is None:
        return [command, *rest]
    warn_once(row)
    return [*shlex.split(row.new), *rest]


def current_options(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command with the current names of its options; `--` ends them."""
    rows = {**former_names("option"), **former_names("option", command)}
    current: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == "--":
            return [*current, word, *remaining]
        name, equals, value = word.partition("=")
        row = rows.get(name)
        if row is None:
            current.append(word)
            continue
        warn_once(row)
        takes_value = "=" in row.old or "{}" in (row.new or "")
        if takes_value and not equals:
            value = next(remaining, "")
        if row.new is not None:
            # The first word is the command, unless the option is one of all commands.
            new = [part.replace("{}", value) for part in shlex.split(row.new)][not row.new.startswith("-") :]
            current += new if takes_value else [*new[:-1], f"{new[-1]}{equals}{value}"]
    return current


class _MovedModule(Loader):
    def __init__(self, new: str) -> None:
        self._new = new

    def exec_module(self, module: ModuleType) -> None:
        # importlib returns what stands in sys.modules after this, so both paths are one and the same module. To return
        # the new module from `create_module` instead would overwrite its `__spec__`.
        sys.modules[module.__name__] = import_module(self._new)


def spec_of_former_module(path: str) -> ModuleSpec | None:
    """Return a spec that loads the new module in place of the old one, or None where the table does not list it."""
    row = former_names("module").get(path)
    if row is None or row.new is None:
        return None
    warn_once(row, stacklevel=3)
    return ModuleSpec(path, _MovedModule(row.new))
