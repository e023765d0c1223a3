"""CFG: the settings that `rasp.stat` reads when it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edge_opt._support.checks import is_whole
from edge_opt.cost.conventions.rasp import RELEASES, Release
from edge_opt.errors import InvalidInput

# The settings of the published tool with their defaults, which also say what kind of value each takes: a text is the
# only one that is allowed. Those that say so are accepted and change nothing here.
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "frontend": {
        "type": "pytorch",
        "args": (),  # without effect
        "stat_mem": False,  # as memory=True in every call
        "mark_updated": False,  # without effect
        "reset_max_mem": False,  # without effect: a row's peak is always its own
    },
    "profile": {
        "batch_size": 1,
        "num_batches": 100,
        "warmup_batches": 10,
        "timing_max_depth": -1,
        "compute_max_depth": -1,
        "verbose": False,
    },
    "device": {"type": "frontend", "args": ()},  # without effect
    "analysis": {"regress_model": "linear"},  # without effect
}
_MINIMUM = {"batch_size": 1, "num_batches": 1, "warmup_batches": 0, "timing_max_depth": -1, "compute_max_depth": -1}


def _check(section: str, key: str, value: Any) -> None:
    """Refuse a setting that does not exist, or a value that it does not take."""
    settings = SECTIONS[section]
    if key not in settings:
        raise InvalidInput(f"rasp.CFG.{section} has no setting {key!r}; it has {', '.join(settings)}")
    default = settings[key]
    if isinstance(default, bool):
        is_allowed, expected = isinstance(value, bool), "True or False"
    elif isinstance(default, int):
        is_allowed, expected = is_whole(value, _MINIMUM[key]), f"an integer of at least {_MINIMUM[key]}"
    elif isinstance(default, str):
        is_allowed, expected = value == default, f"{default!r}, the only one there is"
    else:
        is_allowed, expected = isinstance(value, (Mapping, list, tuple)), "a list or a mapping"
    if not is_allowed:
        raise InvalidInput(f"rasp.CFG.{section}.{key} is {value!r}; it must be {expected}")


class Section:
    """The settings under one name. A wrong name or value is refused when it is set."""

    def __init__(self, name: str) -> None:
        vars(self).update({"_name": name, **SECTIONS[name]})

    def __getattr__(self, key: str) -> Any:
        # Python asks here only for what is not set; private names before `_name` is there, as when it is copied.
        if key.startswith("_"):
            raise AttributeError(key)
        raise AttributeError(f"rasp.CFG.{self._name} has no setting {key!r}; it has {', '.join(SECTIONS[self._name])}")

    def __setattr__(self, key: str, value: Any) -> None:
        _check(self._name, key, value)
        vars(self)[key] = value

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((key, vars(self)[key]) for key in SECTIONS[self._name])

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

    counting: Release
    frontend: Section
    profile: Section
    device: Section
    analysis: Section

    def __init__(self) -> None:
        vars(self).update({"counting": "latest", **{name: Section(name) for name in SECTIONS}})

    def __setattr__(self, key: str, value: Any) -> None:
        if key != "counting":
            names = [f"rasp.CFG.{name}.{setting}" for name, settings in SECTIONS.items() for setting in settings]
            raise InvalidInput(f"rasp.CFG.{key} cannot be set; set one of rasp.CFG.counting, {', '.join(names)}")
        if value not in RELEASES:
            raise InvalidInput(f"rasp.CFG.counting is {value!r}; it must be one of {', '.join(map(repr, RELEASES))}")
        vars(self)[key] = value

    def __repr__(self) -> str:
        sections = ", ".join(repr(getattr(self, name)) for name in SECTIONS)
        return f"Config(counting={self.counting!r}, {sections})"


CFG = Config()


def get_config() -> Config:
    """Return the settings in force: `rasp.CFG` itself, so that setting one of them sets it there.

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
    sections = {**config} if isinstance(config, Mapping) else {"": config}
    counting = sections.pop("counting", CFG.counting)
    if not all(isinstance(values, Mapping) for values in sections.values()):
        raise InvalidInput(f"the settings are {config!r}; write sections, as in {{'profile': {{'num_batches': 20}}}}")
    Config().counting = counting
    for name, values in sections.items():
        if name not in SECTIONS:
            raise InvalidInput(f"rasp.CFG has no section {name!r}; it has {', '.join(SECTIONS)}")
        for key, value in values.items():
            _check(name, key, value)
    CFG.counting = counting
    for name, values in sections.items():
        vars(getattr(CFG, name)).update(values)
