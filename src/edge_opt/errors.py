"""All exceptions of edge_opt; each message names the cause and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class EdgeOptError(Exception):
    """Anything edge_opt refuses; the command line prints it as one sentence and exits with `exit_code`."""

    exit_code = 2


class InvalidInput(EdgeOptError, ValueError):
    """An argument that cannot be used: its value, what was expected, what to write instead."""


class ModelNotFound(EdgeOptError):
    """A model reference that leads nowhere, or whose factory failed."""


class TraceFailed(EdgeOptError):
    """The model refused its inputs; names the module and the shapes it got."""


class UnreadableProfile(EdgeOptError):
    """A file that is not an edge_opt profile, or has a format that this version does not read."""


class UnreadableSweep(EdgeOptError):
    """A file that is not an edge_opt sweep, or has a format that this version does not read."""


class RuleError(EdgeOptError):
    """A cost rule that is registered twice, or that does not fit its operator."""


class MissingExtra(EdgeOptError):
    """An optional package that is absent or broken, with the command that installs it."""


class MeasurementFailed(EdgeOptError):
    """A run that could not be measured, or whose results are not usable."""


class MeterFailed(MeasurementFailed):
    """An energy meter that cannot be used here, or that stopped in mid-run; names the sensor."""


class UnknownDevice(EdgeOptError):
    """A device that neither the catalog nor a file of the user describes; names the closest ones."""


class InvalidDevice(EdgeOptError):
    """A device file that cannot be used: the file, the key, and what to write there."""


class InvalidConfig(EdgeOptError):
    """A configuration that cannot be used: the key, its value, and what is allowed."""


class DataNotFound(EdgeOptError):
    """Data that is missing, damaged or of another kind; names the file and what to do."""


_LONGEST_LINE = 500


def message_of(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has no message.

    TorchScript has the message behind a traceback, and loses it while operators are recorded.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]
    if line == "RuntimeError:":
        line = "TorchScript does not say why; check the shapes; use the module before torch.jit.optimize_for_inference"
    # torch lists a million sizes where a file asks for them.
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    kind, message = type(error).__name__, message_of(error)
    return kind if message == kind else f"{kind}: {message}"


class BudgetError(InvalidInput):
    """A budget that does not parse: the text, with a caret under the character, and what was expected there."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        # One column per character, so that the caret stands where it belongs.
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
        super().__init__(f"invalid budget: {problem}\n  {shown}\n  {' ' * position}^")
        self.text = text
        self.position = position
        self.problem = problem

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, str]]:
        return BudgetError, (self.text, self.position, self.problem)


class FolderInUse(EdgeOptError):
    """A folder that another process sweeps in; names the process."""


class OtherSettings(EdgeOptError):
    """A folder that holds a sweep made with other settings; names each with its old and new value."""


class UnreadableStore(EdgeOptError):
    """A file of trials that this version cannot read."""


class SweepInterrupted(EdgeOptError):
    """A sweep that was ended by hand; everything finished is kept. 130 is what shells expect after Ctrl-C."""

    exit_code = 130


class PruningFailed(EdgeOptError):
    """A model that could not be pruned, or whose pruned copy failed the proof; names the layer."""


class TrainingFailed(EdgeOptError):
    """A training run that could not go on; names the epoch and the step."""


class UnreadableModel(EdgeOptError):
    """A file that is not an edge_opt model or weights, is cut off, or has a format that this version does not read."""


class NotSaved(EdgeOptError, OSError):
    """A file that could not be written, such as on a full disk; nothing half-written is left."""


class ConversionFailed(EdgeOptError):
    """A conversion that failed, changed nothing, or whose outputs are not usable; nothing else is returned instead."""


class Disagrees(ConversionFailed):
    """A converted model whose outputs are not the original's; names the batch size, the bound and the layer."""


class ExportFailed(ConversionFailed):
    """A model that cannot be exported; names the line or the operator, and a way around it."""


class CalibrationMissing(EdgeOptError):
    """A prediction needs a calibration that does not exist; says how to make it."""


class InvalidCalibration(EdgeOptError):
    """A file that is not a calibration, is cut off, or has a version that is not read here."""


@contextmanager
def translated(
    message: str,
    kind: type[EdgeOptError] = ConversionFailed,
    *,
    remedy: str = "",
    describe: Callable[[BaseException], str] = first_line,
    passed: tuple[type[Exception], ...] = (OSError,),
) -> Iterator[None]:
    """Raise what a library raises inside as one of our errors: its classes differ by version and have no common base.

    Args:
        message: What failed; the library's own words follow.
        kind: The class to raise.
        remedy: What to do, behind the library's words.
        describe: Returns the library's words.
        passed: Errors that are raised as they are, beside ours: a full disk is not a fault of the library.

    >>> with translated("cannot read '2x'"):
    ...     int("2x")
    Traceback (most recent call last):
    edge_opt.errors.ConversionFailed: cannot read '2x': ValueError: invalid literal for int() with base 10: '2x'
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (EdgeOptError, *passed)):
            raise
        raise kind(f"{message}: {describe(error)}{remedy}") from error
