"""Configurations as people write them: YAML, single keys on the command line, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from edge_opt.config.schema import RunConfig
from edge_opt.errors import InvalidConfig


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
    for setting in settings:
        _set(content, setting)
    return validated(content, "" if path is None else f"{path}: ")


def validated(content: Mapping[str, Any], where: str = "") -> RunConfig:
    """The configuration that a mapping describes; every fault in it is one sentence of one error."""
    try:
        return RunConfig.model_validate(dict(content))
    except ValidationError as error:
        faults = [fault for fault in error.errors() if not _is_other_form(fault)]
        sentences = dict.fromkeys(map(_sentence, faults))
        raise InvalidConfig("\n".join(f"{where}{sentence}" for sentence in sentences)) from error


def _is_other_form(fault: Any) -> bool:
    """A mapping under `model` is not meant to be text: what is wrong inside it is all there is to say."""
    return fault["loc"] == ("model", "str") and isinstance(fault["input"], Mapping)


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
        return yaml.load(text, _Loader)  # a SafeLoader: it builds plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise InvalidConfig(f"{where} is not YAML{line}: {getattr(error, 'problem', None) or error}") from error


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
    from edge_opt.config.schema import SmallCNNConfig

    found: type[BaseModel] = SmallCNNConfig if list(steps) == ["model"] else RunConfig
    return found.model_fields


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say about a key that there is not: the closest ones."""
    names = list(known)
    close = get_close_matches(key.rpartition(".")[2], names, n=3, cutoff=0.5)
    return f"unknown key {key!r}; {'closest: ' + ', '.join(close) if close else 'keys are ' + ', '.join(names)}"
