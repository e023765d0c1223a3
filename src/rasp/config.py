"""CFG: the settings that `rasp.stat` reads when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge_opt.cost.conventions.rasp import RELEASES, Release
from edge_opt.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its default, which values it takes, and those values in words."""

    default: Any
    allows: Callable[[Any], bool]
    expected: str


def _whole(default: int, least: int) -> Setting:
    def allows(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return Setting(default, allows, f"an integer of at least {least}")


def _switch() -> Setting:
    return Setting(False, lambda value: isinstance(value, bool), "True or False")


def _only(default: str) -> Setting:
    return Setting(default, lambda value: value == default, f"{default!r}, the only one there is")


def _options() -> Setting:
    return Setting((), lambda value: isinstance(value, (Mapping, list, tuple)), "a list or a mapping")


# The settings of the published tool. Those that say so are accepted and change nothing here.
SECTIONS: Mapping[str, Mapping[str, Setting]] = {
    "frontend": {
        "type": _only("pytorch"),
        "args": _options(),  # without effect
        "stat_mem": _switch(),  # as memory=True in every call
        "mark_updated": _switch(),  # without effect
        "reset_max_mem": _switch(),  # without effect: a row's peak is always its own
    },
    "profile": {
        "batch_size": _whole(1, 1),
        "num_batches": _whole(100, 1),
        "warmup_batches": _whole(10, 0),
        "timing_max_depth": _whole(-1, -1),
        "compute_max_depth": _whole(-1, -1),
        "verbose": _switch(),
    },
    "device": {"type": _only("frontend"), "args": _options()},  # without effect
    "analysis": {"regress_model": _only("linear")},  # without effect
}


class Section:
    """Some settings under one name. A wrong name or value is refused when it is set."""

    __slots__ = ("_name", "_values")
    _name: str
    _values: dict[str, Any]

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_values", {key: setting.default for key, setting in SECTIONS[name].items()})

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in self._values:
            raise AttributeError(f"rasp.CFG.{self._name} has no setting {key!r}; it has {', '.join(self._values)}")
        return self._values[key]

    def __setattr__(self, key: str, value: Any) -> None:
        setting = SECTIONS[self._name].get(key)
        if setting is None:
            raise InvalidInput(f"rasp.CFG.{self._name} has no setting {key!r}; it has {', '.join(self._values)}")
        if not setting.allows(value):
            raise InvalidInput(f"rasp.CFG.{self._name}.{key} is {value!r}; it must be {setting.expected}")
        self._values[key] = value

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._values.items())

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{key}={value!r}' for key, value in self)})"


class Config:
    """All settings, by section. Sections are changed in place, never replaced.

    `counting` is the rule of flops and bytes: "latest", or "2020" for that of the first release, which the published
    table of 34 models follows: one operation a product, convolutions without rounding their output size down, and a
    square pooling kernel as if it had one side only.

    >>> Config().counting, Config().profile.batch_size
    ('latest', 1)
    """

    __slots__ = ("counting", *SECTIONS)
    counting: Release
    frontend: Section
    profile: Section
    device: Section
    analysis: Section

    def __init__(self) -> None:
        object.__setattr__(self, "counting", "latest")
        for name in SECTIONS:
            object.__setattr__(self, name, Section(name))

    def __setattr__(self, key: str, value: Any) -> None:
        if key != "counting":
            names = [f"rasp.CFG.{name}.{setting}" for name, settings in SECTIONS.items() for setting in settings]
            raise InvalidInput(f"rasp.CFG.{key} cannot be set; set one of rasp.CFG.counting, {', '.join(names)}")
        if value not in RELEASES:
            raise InvalidInput(f"rasp.CFG.counting is {value!r}; it must be one of {', '.join(map(repr, RELEASES))}")
        object.__setattr__(self, key, value)

    def __repr__(self) -> str:
        sections = ", ".join(repr(getattr(self, name)) for name in SECTIONS)
        return f"Config(counting={self.counting!r}, {sections})"


CFG = Config()


def get_config() -> Config:
    """The settings in force: `rasp.CFG` itself, so that setting one of them sets it there.

    >>> get_config().profile.batch_size
    1
    """
    return CFG


def set_config(config: Config | Mapping[str, Any]) -> None:
    """Set some settings at once; those that are not named stay. Nothing is set where one of them is refused.

    Args:
        config: Sections with their settings, such as `{"profile": {"num_batches": 20}}`, and `counting`; or another
            `Config`.

    >>> set_config({"profile": {"num_batches": 100}})
    """
    if isinstance(config, Config):
        config = {"counting": config.counting, **{name: dict(getattr(config, name)) for name in SECTIONS}}
    given = {name: values for name, values in config.items() if name != "counting"} if _is_mapping(config) else None
    if given is None or not all(map(_is_mapping, given.values())):
        raise InvalidInput(f"the settings are {config!r}; write sections, as in {{'profile': {{'num_batches': 20}}}}")
    counting = config.get("counting", CFG.counting)
    Config().counting = counting
    for name, values in given.items():
        if name not in SECTIONS:
            raise InvalidInput(f"rasp.CFG has no section {name!r}; it has {', '.join(SECTIONS)}")
        trial = Section(name)
        for key, value in values.items():
            setattr(trial, key, value)
    CFG.counting = counting
    for name, values in given.items():
        for key, value in values.items():
            setattr(getattr(CFG, name), key, value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)
