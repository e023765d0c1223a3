"""Declare a record: each field with its description and, where its name does not tell them, its title and unit.

    @record
    class PeakMemory(Shown):
        \"\"\"Highest sum of live activation bytes in an eager run.\"\"\"

        live_bytes: int = field("The peak in bytes.")
        op_index: int | None = field("Operator at the peak; None where no operator ran.", default=None)

The declaration is the only place that describes the field: `help()`, the API page, tables and notebooks read it.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    # Type checkers alone need the marker, and `typing` has it from Python 3.11 on.
    def dataclass_transform(**_: Any) -> Any:
        return lambda decorator: decorator


@overload
def field(description: str, *, compare: bool = True) -> Any: ...


@overload
def field(description: str, *, default: T, compare: bool = True) -> T: ...


def field(description: str, *, default: Any = dataclasses.MISSING, compare: bool = True) -> Any:
    """Declare one field of a record.

    Args:
        description: What the value is, in a sentence; with its unit unless the name has it, and with the meaning of
            None.
        default: The value of a record that was made without it, also of a file that was written before the field
            existed.
        compare: Whether two records that differ here are different.
    """
    return dataclasses.field(default=default, compare=compare, metadata={"description": description})


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots of a class, and list its fields in the docstring.

    Type checkers understand the decorator as `dataclass(frozen=True)`.

    Args:
        cls: The class; every field is declared with `field`.
    """
    frozen: type[T] = dataclasses.dataclass(frozen=True, slots=True)(cls)
    lines = (f"    {item.name}: {item.metadata['description']}\n" for item in dataclasses.fields(cast(Any, frozen)))
    frozen.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{''.join(lines)}"
    return frozen
