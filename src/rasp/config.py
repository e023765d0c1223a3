"""CFG: the settings that `rasp.stat` reads when it is called."""

from __future__ import annotations

from typing import Any

from edge_opt.errors import InvalidInput

_LEAST = {"batch_size": 1, "num_batches": 1, "warmup_batches": 0}


class ProfileConfig:
    """How a model is profiled. A wrong name or value is refused when it is set.

    >>> ProfileConfig(batch_size=8)
    ProfileConfig(batch_size=8, num_batches=100, warmup_batches=10)
    """

    __slots__ = ("batch_size", "num_batches", "warmup_batches")
    batch_size: int
    num_batches: int
    warmup_batches: int

    def __init__(self, batch_size: int = 1, num_batches: int = 100, warmup_batches: int = 10) -> None:
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.warmup_batches = warmup_batches

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in _LEAST:
            raise InvalidInput(f"rasp.CFG.profile has no setting {key!r}; it has {', '.join(_LEAST)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST[key]:
            raise InvalidInput(f"rasp.CFG.profile.{key} is {value!r}; it must be an integer of at least {_LEAST[key]}")
        object.__setattr__(self, key, value)

    def __repr__(self) -> str:
        return f"ProfileConfig({', '.join(f'{key}={getattr(self, key)}' for key in _LEAST)})"


class Config:
    """All settings, by section. Sections are changed in place, never replaced."""

    __slots__ = ("profile",)
    profile: ProfileConfig

    def __init__(self) -> None:
        object.__setattr__(self, "profile", ProfileConfig())

    def __setattr__(self, key: str, value: Any) -> None:
        raise InvalidInput(f"rasp.CFG.{key} cannot be set; set one of rasp.CFG.profile.{{{', '.join(_LEAST)}}}")

    def __repr__(self) -> str:
        return f"Config(profile={self.profile!r})"


CFG = Config()
