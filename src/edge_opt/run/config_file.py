"""Read a configuration from YAML, options and keywords, and explain every mistake in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from edge_opt._support.deprecation import current_keywords, former_names
from edge_opt._support.extras import missing_extra
from edge_opt.errors import InvalidConfig
from edge_opt.run.config import SWEEP_KEYS, RunConfig, SmallCNNConfig

try:
    import yaml
    from pydantic import BaseModel, ValidationError
except ModuleNotFoundError as error:
    raise missing_extra("this needs", error.name or "pydantic", "run") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML without code, where a key that stands twice is an error and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# YAML 1.1 takes 1e-3 for text, because it has no point; nobody means that.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_config(path: str | Path | None = None, settings: Sequence[str] = ()) -> RunConfig:
    """The configuration in a file, or the default one, with single keys set as `key=value`.

    >>> read_config(settings=["epochs=3", "model.conv1_channels=8"]).model_reference
    'edge_opt.model:SmallCNN(conv1_channels=8, conv2_channels=32, num_classes=10)'
    """
    content: dict[str, Any] = {} if path is None else _file(Path(path))
    return validated(read_settings(settings, content), "" if path is None else f"{path}: ")


def read_settings(settings: Sequence[str], content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keys set one by one as `key=value`, on top of what is there."""
    merged = dict(content or {})
    for setting in settings:
        _set(merged, setting)
    return merged


def validated(content: Mapping[str, Any], where: str = "") -> RunConfig:
    """The configuration that a mapping describes; every fault in it is one sentence of one error."""
    try:
        return RunConfig.model_validate(current_keywords(content, former_names("configuration key"), stacklevel=4))
    except ValidationError as error:
        faults = [{**fault, "loc": _named(fault["loc"])} for fault in error.errors() if not _is_other_form(fault)]
        sentences = dict.fromkeys(map(_sentence, faults))
        raise InvalidConfig("\n".join(f"{where}{sentence}" for sentence in sentences)) from error


def sweep_settings(settings: Mapping[str, Any]) -> RunConfig:
    """The settings of a sweep, checked as a configuration is; keys of a run that mean nothing here are refused.

    >>> sweep_settings({"round_to": 8}).round_to
    8
    """
    known: dict[str, Any] = {}
    for key, value in current_keywords(settings, former_names("parameter", "sweep"), stacklevel=4).items():
        if key not in SWEEP_KEYS:
            raise InvalidConfig(unknown_key(key, SWEEP_KEYS))
        known[key] = _as_lists(value)
    return validated(known)


def _as_lists(value: Any) -> Any:
    """Tuples as the lists that YAML would give."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, (tuple, list)) else value


def _is_other_form(fault: Any) -> bool:
    """A mapping under `model` is not meant to be text, and a list not the word "auto": the other fault says it all."""
    if len(fault["loc"]) > 1 and str(fault["loc"][1]).startswith("literal["):
        return not isinstance(fault["input"], str)
    return fault["loc"] == ("model", "str") and isinstance(fault["input"], Mapping)


def _named(place: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where a fault is, without the names of the forms that a value may have."""
    return tuple(part for part in place if not str(part).startswith(("list[", "constrained-")))


def _file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        cure = "`edge-opt init` writes one to start from"
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}; {cure}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} is not a text file in UTF-8; a configuration is YAML") from error
    content = _yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} holds a {type(content).__name__}; a configuration is lines of `key: value`")
    return {str(key): value for key, value in content.items()}


def _yaml(text: str, where: str) -> Any:
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader: it builds plain values only
        if _written_out(content, {}) > _MOST_VALUES:
            raise InvalidConfig(f"{where} holds more than {_MOST_VALUES} values; a configuration has about a hundred")
        return content
    except RecursionError as error:
        raise InvalidConfig(f"{where} is nested deeper than a configuration can be, or holds itself") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise InvalidConfig(f"{where} is not YAML{line}: {getattr(error, 'problem', None) or error}") from error


_MOST_VALUES = 10_000


def _written_out(value: Any, known: dict[int, int]) -> int:
    """How many values there are where every alias is written out; a few lines of YAML can stand for billions."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        items = [*value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_written_out(item, known) for item in items)
    return known[id(value)]


def _set(content: dict[str, Any], setting: str) -> None:
    """Put `a.b=value` into the mapping; the value is read as YAML."""
    key, equals, text = setting.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        raise InvalidConfig(f"--set {setting!r} cannot be read; write key=value, such as epochs=3 or precisions=[int8]")
    # A layer's path has dots of its own: only the first is ours.
    steps = [steps[0], ".".join(steps[1:])] if steps[0] == "layer_pruning" and len(steps) > 1 else steps
    place = content
    for step in steps[:-1]:
        inner = place.get(step)
        place[step] = dict(inner) if isinstance(inner, Mapping) else {}
        place = place[step]
    place[steps[-1]] = _yaml(text, f"--set {setting!r}")


_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a mapping of keys and values",
    "model_type": "a mapping of keys and values",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "too_short": "a list of at least {min_length}",
    "literal_error": "one of {expected}",
}


def _sentence(fault: Any) -> str:
    """One fault of a validation: the key, its value, and what is allowed."""
    # `model` may be text or a mapping: pydantic names which of the two it tried.
    steps = [step for step in fault["loc"] if step not in ("str", "SmallCNNConfig")]
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    if fault["type"] == "extra_forbidden":
        return unknown_key(key, _known_keys(steps[:-1]))
    if fault["type"] == "value_error":
        problem = str(fault["ctx"]["error"])
        if problem.startswith("must be"):
            return f"{key} is {_short(fault['input'])}; it {problem}"
        return f"{key}: {problem}" if key else problem
    allowed = _ALLOWED.get(fault["type"])
    expected = allowed.format(**fault.get("ctx", {})) if allowed else fault["msg"]
    if steps == ["model"]:
        expected = "a reference such as file.py:factory, or the widths of the bundled network"
    return f"{key} is {_short(fault['input'])}; it must be {expected}"


def _short(value: Any) -> str:
    shown = "null" if value is None else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _known_keys(steps: Sequence[Any]) -> Iterable[str]:
    section: type[BaseModel] = SmallCNNConfig if list(steps) == ["model"] else RunConfig
    return section.model_fields


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say about a key that there is not: the closest ones."""
    names = list(known)
    close = get_close_matches(key.rpartition(".")[2], names, n=3, cutoff=0.5)
    return f"unknown key {key!r}; {'closest: ' + ', '.join(close) if close else 'keys are ' + ', '.join(names)}"
