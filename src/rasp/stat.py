"""stat(): trace, count and measure a model, and report it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

import edge_opt
from edge_opt._support.checks import check_one_of, is_whole
from edge_opt.errors import InvalidInput
from rasp import table
from rasp.config import CFG
from rasp.tree import build_tree, measured

_RESULTS = ("data", "tree", "sum", "totals")
_UNBATCHED_DIMS = 3


def stat(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    inputs: Any = None,
    device: str | torch.device | None = None,
    compute: bool = True,
    timing: bool = False,
    memory: bool = False,
    print_stat: bool = True,
    returns: str | Iterable[str] | None = None,
    report_type: str | None = "tape",
    include_root: bool = False,
    report_fields: str | Iterable[str] | None = None,
    includes: str | Iterable[str] | None = None,
    excludes: str | Iterable[str] | None = None,
    save_path: str | os.PathLike[str] | None = None,
    keep_tree: bool = False,
) -> Any:
    """Print what each module of `model` costs, and return what `returns` asks for.

    Figures are of inference, whatever the model's mode. `rasp.table.build_report` explains the rows.

    Args:
        model: Any module; it is not modified.
        input_shape: The shape of its input; of at most three numbers it is one sample, and `CFG.profile.batch_size`
            is put in front.
        inputs: Your own instead of a shape: a tensor, a list with one entry per argument, or a mapping by name.
        device: Where it runs, "cpu" (the default) or "cuda". Without CUDA the CPU is timed, with a warning, and CUDA's
            memory is simulated, which the notes say.
        compute: Whether flops, macc and memory traffic are counted; on, as nothing need be run for it.
        timing: Whether to run it `CFG.profile.num_batches` times after `warmup_batches` untimed runs; off, as that
            takes a while. It gives the columns `lat` (ms, the median, of a module with its children), `net_lat`
            (without them), `lat[%]` and `FLOPS` (both of `net_lat`), and on request `end_lat` (ms from the start of
            the forward to the end of the module).
        memory: Whether to add device memory in bytes, weights and inputs apart: `net_dev_mem` in use before the
            module, `dev_mem_alloc` allocated by it and kept, `dev_max_mem_alloc` most in use during it. Off, unless
            `CFG.frontend.stat_mem` is on.
        print_stat: Whether the table is printed; on, as most callers want to read it.
        returns: Any of `data` (the table as a DataFrame), `tree` (the module calls, nested), `sum` (the printed text)
            and `totals` (the figures of the last row by column); several come as a list. None, the default: nothing.
        report_type: "tape" (the default: calls of leaf modules in order of execution), "leaves", "all", "nodes",
            "node", "root", or None for no report.
        include_root: Whether the first row is the model itself; off, because the last row has its totals.
        report_fields: The columns, instead of the usual ones.
        includes: Columns to add, such as macc; in the order of the published table.
        excludes: Columns to leave out; it wins over the other two.
        save_path: A .csv, .json, .md or .txt file, or a folder; None: nothing is saved.
        keep_tree: Whether the DataFrame has the tree in `.attrs["tree"]`; off, as few ask for both.

    >>> stat(nn.Linear(3, 2), (4, 3, 3), print_stat=False, returns="totals")["params"]
    8
    """
    wanted = _wanted_results(returns, report_type, is_saved=save_path is not None)
    memory = memory or CFG.frontend.stat_mem
    switches: tuple[tuple[table.Need, bool], ...] = (("compute", compute), ("timing", timing), ("memory", memory))
    on = {need for need, is_on in switches if is_on}
    columns = table.choose_columns(on, report_fields, includes, excludes)
    if save_path is not None:
        table.report_file(save_path, "")  # a wrong suffix is refused before any work is done
    run_on, is_simulated = _usable_device(device, is_warned=timing or not memory)

    model_inputs = _model_inputs(input_shape, inputs)
    profile = edge_opt.profile(model, model_inputs)
    figures = measured(model, model_inputs, profile, run_on, timing=timing, memory=memory, is_simulated=is_simulated)
    tree = build_tree(profile, figures)
    report = table.build_report(profile, tree, figures, columns, report_type, include_root)

    if save_path is not None:
        table.save(report, save_path)
    text = table.render_text(report)
    if print_stat and report_type is not None:
        print(text)
    totals = {column.name: report.total[column.name] for column in columns if not column.is_label}
    results: dict[str, Any] = {"tree": tree, "sum": text, "totals": totals}
    if "data" in wanted:
        results["data"] = table.dataframe(report)
        if keep_tree:
            results["data"].attrs["tree"] = tree
    asked = [results[name] for name in wanted]
    return None if not asked else asked[0] if len(asked) == 1 else asked


def _wanted_results(returns: str | Iterable[str] | None, report_type: str | None, is_saved: bool) -> tuple[str, ...]:
    """Return the names in `returns`; refuse an unknown report type, or one that lacks what they need."""
    wanted = table.split_names(returns)
    for name in wanted:
        check_one_of("returns", name, _RESULTS)
    if report_type is not None:
        check_one_of("report_type", report_type, table.REPORT_TYPES)
    elif is_saved or "data" in wanted:
        raise InvalidInput("report_type=None makes no report to save or return as data; choose a report_type")
    return wanted


def _model_inputs(input_shape: Sequence[int] | None, inputs: Any) -> Any:
    if (input_shape is None) == (inputs is None):
        which = "neither" if inputs is None else "both"
        raise InvalidInput(f"{which} of input_shape and inputs is given; pass input_shape=(1, 3, 224, 224) or inputs=x")
    if input_shape is None:
        return inputs
    dims = tuple(input_shape) if isinstance(input_shape, Sequence) and not isinstance(input_shape, str) else ()
    if not dims or not all(map(is_whole, dims)):
        raise InvalidInput(f"input_shape is {input_shape!r}; it must be positive integers such as (1, 3, 224, 224)")
    return dims if len(dims) > _UNBATCHED_DIMS else (CFG.profile.batch_size, *dims)


def _usable_device(device: str | torch.device | None, is_warned: bool) -> tuple[torch.device, bool]:
    """Return where to run, and whether that is the CPU in place of CUDA, which was asked for and is absent.

    `is_warned`: what runs there is more than memory, which is simulated and says so itself.
    """
    try:
        wanted = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device is {device!r}; it must be 'cpu', 'cuda' or a torch.device") from error
    if wanted.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        if is_warned:
            warnings.warn(f"device {str(device)!r} is not available here; the CPU is used", stacklevel=3)
        return torch.device("cpu"), True
    return wanted, False
