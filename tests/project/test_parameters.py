"""Every parameter, every field of a record and every option of a command says what it means."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import typer

import edge_opt
from edge_opt import compress, measuring, pytest_plugin
from edge_opt.cli import app
from edge_opt.data import Splits, load_splits
from edge_opt.loading import Loaded, load_model
from edge_opt.report.page import write_page
from record_kinds import record_kinds

# The published older names: all of a module's, or these.
OLDER_NAMES: dict[str, tuple[str, ...]] = {
    "edge_opt.hardware": (),
    "edge_opt.metrics": ("Metrics", "collect_metrics"),
    "edge_opt.model": (),
    "edge_opt.pruning": (),
    "edge_opt.stream": (),
    "rasp": (),
}

ENTRY = re.compile(r"\*{0,2}(\w+): +\S")


def explained(docstring: str | None, *blocks: str) -> set[str]:
    """The names that a docstring explains, `name: sentence.` in a block of one of these titles."""
    names, title = set(), ""
    for line in inspect.cleandoc(docstring or "").splitlines():
        if line and not line.startswith(" "):
            title = line.removesuffix(":") if line.endswith(":") else ""
        elif title in blocks and (found := ENTRY.match(line.removeprefix("    "))):
            names.add(found[1])
    return names


def unexplained(function: Callable[..., Any], docstring: str | None = None) -> list[str]:
    """Parameters of a function that its docstring, or the one given instead, does not explain."""
    known = explained(docstring or function.__doc__, "Args")
    return [name for name in inspect.signature(function).parameters if name not in known | {"self", "cls"}]


def field_names(kind: type) -> list[str]:
    """Fields of a record, a named tuple or a protocol."""
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    is_tuple_or_protocol = issubclass(kind, tuple) or getattr(kind, "_is_protocol", False)
    return list(inspect.get_annotations(kind)) if is_tuple_or_protocol else []


def unexplained_in(kind: type) -> Iterator[str]:
    """What a class leaves unexplained: fields, or parameters of its constructor, and those of its methods."""
    if names := field_names(kind):
        known = explained(kind.__doc__, "Attributes")
        yield from (name for name in names if name not in known)
    elif inspect.isfunction(constructor := vars(kind).get("__init__")):
        yield from unexplained(constructor, kind.__doc__)
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and not name.startswith("_"):
            yield from (f"{name}({missing})" for missing in unexplained(function))


def faults_of(name: str, thing: Any) -> list[str]:
    if isinstance(thing, type):
        return [f"{name}: {missing}" for missing in unexplained_in(thing)]
    return [f"{name}({missing})" for missing in unexplained(thing)] if inspect.isroutine(thing) else []


def public(module: ModuleType) -> dict[str, Any]:
    """The names that a module offers: those of its `__all__`, else what it defines without an underscore."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: value for name, value in own.items() if getattr(value, "__module__", None) == module.__name__}


def options(command: Any, path: str) -> Iterator[tuple[str, str | None]]:
    """Every parameter of a command and of the commands below it, with its help text."""
    for parameter in command.params:
        yield f"{path} {parameter.opts[0]}", getattr(parameter, "help", None)
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, f"{path} {name}")


def test_every_parameter_of_a_public_name_is_explained() -> None:
    found = [
        fault
        for module in (edge_opt, compress, measuring)
        for name, thing in public(module).items()
        if not isinstance(thing, ModuleType)
        for fault in faults_of(f"{module.__name__}.{name}", thing)
    ]
    for thing in (Loaded, Splits, load_model, load_splits, write_page):
        found += faults_of(thing.__name__, thing)
    found += unexplained(pytest_plugin._check, inspect.unwrap(pytest_plugin.model_budget).__doc__)
    assert not found


def test_every_field_of_a_record_is_explained() -> None:
    kinds = record_kinds()
    assert len(kinds) > 80
    assert not [fault for kind in kinds for fault in faults_of(kind.__name__, kind)]


def test_nothing_is_explained_that_is_not_there() -> None:
    things = {**public(edge_opt), **public(compress), **public(measuring)}
    things |= {kind.__name__: kind for kind in record_kinds()}
    found = []
    for name, thing in things.items():
        if inspect.isfunction(thing):
            known, there = explained(thing.__doc__, "Args"), set(inspect.signature(thing).parameters)
        elif isinstance(thing, type) and field_names(thing):
            known, there = explained(thing.__doc__, "Attributes"), set(field_names(thing))
        else:
            continue
        # `sweep` shows its settings one by one, and says where they begin.
        found += [f"{name}: {surplus}" for surplus in known - there - {"settings"}]
    assert not found


def test_every_option_of_a_command_is_explained() -> None:
    found = dict(options(typer.main.get_command(app), "edge-opt"))
    assert len(found) > 100
    assert not [name for name, text in found.items() if not text]


def test_every_parameter_of_an_older_name_is_explained() -> None:
    found = [
        fault
        for home, names in OLDER_NAMES.items()
        for name, thing in public(importlib.import_module(home)).items()
        if name in (names or (name,))
        for fault in faults_of(f"{home}.{name}", thing)
    ]
    assert not found
