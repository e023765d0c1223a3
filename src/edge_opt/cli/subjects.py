"""A PROFILE or a MODEL of the command line, turned into a profile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from edge_opt.cli.inputs import read_arguments, with_example
from edge_opt.cli.models import load_model

if TYPE_CHECKING:
    from edge_opt.records import ModelProfile


def is_profile(reference: str) -> bool:
    """Whether it names a file that `edge-opt profile -o` wrote, rather than a model."""
    return reference.lower().endswith(".json")


def read_profile(
    reference: str,
    inputs: Sequence[str] = (),
    kwargs: Sequence[str] = (),
    batch: int | None = None,
    measure: bool | dict[str, Any] = False,
) -> ModelProfile:
    """The profile that a reference names: a saved one, or that of a model with its inputs."""
    import edge_opt as eo

    if is_profile(reference):
        return eo.load(reference)
    # Whatever the user's own code prints goes to stderr, so that stdout holds results only.
    with redirect_stdout(sys.stderr):
        arguments = read_arguments(inputs, kwargs, batch)
        loaded = load_model(reference)
        positional, named = with_example(arguments, loaded.example, loaded.name)
        return eo.profile(loaded.model, positional or None, kwargs=named, name=loaded.name, measure=measure)
