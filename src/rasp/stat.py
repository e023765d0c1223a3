"""stat(): a model and its inputs in, a table of what each module costs out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

import edge_opt
from edge_opt.errors import InvalidInput
from rasp.columns import Need, choose_columns, split_names
from rasp.config import CFG
from rasp.measuring import measured
from rasp.report import REPORT_TYPES, build_report
from rasp.table import check_save_path, dataframe, render_text, save, total_values
from rasp.tree import build_tree

_RESULTS = ("data", "tree", "sum")
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

    `input_shape` of at most three numbers is one sample: `CFG.profile.batch_size` is put in front. `inputs` are your
    own: a tensor, a list with one entry per argument, or a mapping by name. Figures are of inference, whatever the
    model's mode. `rasp.report.build_report` explains `report_type`; None: no report.

    `timing` runs the model `CFG.profile.num_batches` times on `device`, after `warmup_batches` untimed runs, and adds
    `lat` (ms, the median), `net_lat` (ms from the start of the forward to the end of the module), `lat[%]` and `FLOPS`.
    `memory` adds device memory in bytes, weights and inputs apart: `net_dev_mem` in use before the module,
    `dev_mem_alloc` allocated by it and kept, `dev_max_mem_alloc` most in use during it.

    `returns` is any of `data` (the table as a DataFrame), `tree` (the module calls, nested) and `sum` (the figures of
    the last row by column; of the whole model where there is no report), several as a tuple in that order.
    With `keep_tree` the DataFrame has the tree in `.attrs["tree"]`.

    `report_fields` replaces the columns, `includes` adds some, `excludes` takes some away and wins. `compute=False`
    leaves out flops, macc and memory traffic. `save_path` is a .csv, .json, .md or .txt file, or a folder.

    >>> stat(nn.Linear(3, 2), (4, 3, 3), print_stat=False, returns="sum")["params"]
    8
    """
    wanted = _allowed("returns", split_names(returns), _RESULTS)
    if report_type is not None:
        _allowed("report_type", (report_type,), REPORT_TYPES, " or None")
    elif save_path is not None or "data" in wanted:
        raise InvalidInput("report_type=None makes no report to save or return as data; choose a report_type")
    switches: tuple[tuple[Need, bool], ...] = (("compute", compute), ("timing", timing), ("memory", memory))
    on = {need for need, is_on in switches if is_on}
    columns = choose_columns(on, report_fields, includes, excludes)
    if save_path is not None:
        check_save_path(save_path)
    place = _usable_device(device)

    given = _model_inputs(input_shape, inputs)
    profile = edge_opt.profile(model, given)
    found = measured(model, given, profile, place, timing, memory)
    tree = build_tree(profile, found)
    report = build_report(profile, tree, report_type, include_root, found.whole_s)

    if save_path is not None:
        save(report, columns, save_path)
    if print_stat and report_type is not None:
        print(render_text(report, columns))
    results: dict[str, Any] = {"tree": tree, "sum": total_values(report, columns)}
    if "data" in wanted:
        results["data"] = dataframe(report, columns)
        if keep_tree:
            results["data"].attrs["tree"] = tree
    asked = tuple(results[name] for name in wanted)
    return None if not asked else asked[0] if len(asked) == 1 else asked


def _allowed(argument: str, names: tuple[str, ...], allowed: tuple[str, ...], more: str = "") -> tuple[str, ...]:
    for name in names:
        if name not in allowed:
            raise InvalidInput(f"{argument} has {name!r}; allowed are {', '.join(allowed)}{more}")
    return names


def _model_inputs(input_shape: Sequence[int] | None, inputs: Any) -> Any:
    if (input_shape is None) == (inputs is None):
        given = "neither" if inputs is None else "both"
        raise InvalidInput(f"{given} of input_shape and inputs is given; pass input_shape=(1, 3, 224, 224) or inputs=x")
    if input_shape is None:
        return inputs
    dims = tuple(input_shape) if isinstance(input_shape, Sequence) and not isinstance(input_shape, str) else ()
    if not dims or any(isinstance(dim, bool) or not isinstance(dim, int) or dim < 1 for dim in dims):
        raise InvalidInput(f"input_shape is {input_shape!r}; it must be positive integers such as (1, 3, 224, 224)")
    return dims if len(dims) > _UNBATCHED_DIMS else (CFG.profile.batch_size, *dims)


def _usable_device(device: str | torch.device | None) -> torch.device:
    """The device that was asked for; the CPU, with a warning, where CUDA is asked for and absent."""
    try:
        wanted = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device is {device!r}; it must be 'cpu', 'cuda' or a torch.device") from error
    if wanted.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        warnings.warn(f"device {str(device)!r} is not available here; the CPU is used", stacklevel=3)
        return torch.device("cpu")
    return wanted
