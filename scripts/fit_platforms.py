"""Fit class costs to published tables of times, and write one small file per platform and one of priors.

    python scripts/fit_platforms.py ../shared/published

Tables are other people's measurements and stay where they are; what is written are fitted figures, with their source.
Without timm, or with --timm-every 0, the platform of timm's table is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent / "platform_fit"))

from board_priors import IN_ORDER_INT8, broad_prior, fit_prior, fit_shared
from held_out import (
    FEW_TRIALS,
    TIED,
    Trial,
    calibrated,
    hold_out,
    hold_out_alone,
    hold_out_relative,
    newest,
    noise_ratio,
    relative_rows,
    within_core,
)
from published_tables import AI_HUB, Board, Net, named, read_tables, timm_rows

from edge_opt.boards.class_costs import NOISE, Costs, KernelConventions, ModelWork, Vector, fit_costs, rows_with_class
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.platform_file import (
    CHIPS,
    FOLDER,
    PRIORS,
    SIBLINGS,
    Platform,
    PlatformFamily,
    costs_lines,
    matrix_lines,
    platform_text,
)

# Cores with arithmetic in fp16, which ncnn uses for "float" unless told otherwise.
FP16_CORES = (
    "cortex-a55", "cortex-a75", "cortex-a76", "cortex-a78", "cortex-x1", "cortex-a720", "neoverse-n2", "oryon",
    "firestorm", "carmel", "taishan-v110",
)  # fmt: skip
# Numbers of typed times that the intervals of own boards are tested with.
TYPED = (8, 5, 3, 1)
SAME_CHIP = "another board with this chip may differ by one common factor of 4 to 30 %; one typed time corrects it"


@dataclass(frozen=True, eq=False)
class Group:
    """Boards that are fitted together: `base` is their prior, None to find it from themselves.

    `parts`: intervals are for nets of which so many parts were never seen; None: for one family that was not.
    """

    name: str
    boards: tuple[Board, ...]
    conventions: KernelConventions
    base: Costs | None
    source: str
    parts: int | None = None


@dataclass(frozen=True, eq=False)
class Fitted:
    """A group with its kind, and each board's costs and held-out trials."""

    group: Group
    kind: PlatformFamily
    costs: tuple[Costs, ...]
    trials: tuple[tuple[Trial, ...], ...]


def groups(tables: Sequence[Board]) -> list[Group]:
    """The boards of all tables, by what they have in common; XNNPACK's start from ncnn's prior (`fit_all`)."""

    def some(runtime: str, precision: str, engine: str, rows: int, least: int = 1, most: int = 4) -> tuple[Board, ...]:
        return tuple(
            board
            for board in tables
            if (board.runtime, board.precision, board.engine) == (runtime, precision, engine)
            and len(board.times) >= rows
            and least <= (board.threads or 1) <= most
        )

    ncnn = "ncnn's benchmark table"
    broad = broad_prior(class_sd=0.5)
    in_order = broad_prior(class_sd=0.35, typical=IN_ORDER_INT8)
    return [
        Group("ncnn-cpu", some("ncnn", "fp32", "cpu", 10), KernelConventions(), None, ncnn),
        Group("ncnn-cpu-many-threads", some("ncnn", "fp32", "cpu", 10, 5, 16), KernelConventions(), None, ncnn),
        Group("ncnn-cpu-int8", some("ncnn", "int8", "cpu", 5), KernelConventions(), None, ncnn),
        Group("ncnn-vulkan", some("ncnn-vulkan", "fp32", "gpu", 10, 1, 99), KernelConventions(), None, ncnn),
        Group("xnnpack", some("xnnpack", "fp32", "cpu", 3), KernelConventions(), broad, "XNNPACK's table"),
        Group("xnnpack-int8", some("xnnpack", "int8", "cpu", 2), KernelConventions(), broad, "XNNPACK's table"),
        Group("tflite", some("tflite", "fp32", "cpu", 10), KernelConventions(0.0, False), broad, "HW-NAS-Bench"),
        Group(
            "st-mcu-int8",
            some("st-edge-ai", "int8", "cpu", 10),
            KernelConventions(0.0, False, flash_weights=2e6),  # two megabytes on an STM32H747
            in_order,
            "ST's model zoo",
        ),
        Group(
            "mcu-int8",
            tuple(board for board in tables if board.source.startswith("mlcommons") and len(board.times) == 4),
            KernelConventions(0.0, False),
            in_order,
            "MLPerf Tiny",
        ),
        Group(
            "tflite-int8", some("tflite", "int8", "cpu", 10), KernelConventions(0.0, False), in_order, "ST's model zoo"
        ),
        *(
            Group(
                f"qualcomm-npu-{precision}",
                tuple(
                    board
                    for board in tables
                    if (board.source, board.precision) == (AI_HUB, precision) and len(board.times) >= 5
                ),
                KernelConventions(2e6, False, lanes=32, call_layers=30, free=free, noise=0.2),
                None,
                "Qualcomm's AI Hub",
                parts=4,
            )
            # In int8, parts of a concatenation are scaled anew, and an activation is a table in the layer before it.
            for precision, free in (("fp16", ("join",)), ("int8", ("activation",)), ("w8a16", ()))
        ),
        Group(
            "st-npu-int8",
            some("st-edge-ai", "int8", "npu", 10) + some("openvx", "int8", "npu", 10),
            KernelConventions(0.0, False),
            broad,
            "ST's model zoo",
        ),
    ]


def fit_group(group: Group, base: Costs | None, partners: Fitted | None = None) -> Fitted:
    """Costs of every board of a group, and how far held-out times lie from predictions.

    With `partners`, the same boards in float, costs are ratios to theirs: ncnn times seven nets in int8, too few to
    tell twenty costs, and 23 in float.
    """
    rows = [_rows(board, group.conventions) for board in group.boards]
    if partners is not None:
        group, prior, costs, trials = _relative(group, partners)
    elif base is None:
        prior, costs = fit_prior(rows, noise=group.conventions.noise)
        found = hold_out(group.boards, group.conventions, counts=TYPED, parts=group.parts)
        trials = tuple(tuple(trial for trial in found if trial.board == number) for number in range(len(group.boards)))
    else:
        prior = base
        costs = tuple(fit_costs(*pair, prior) for pair in rows)
        trials = tuple(hold_out_alone(board, group.conventions, prior) for board in group.boards)
    typed = [trial for board in trials for trial in board if trial.known not in ("all", "ratio")]
    ratios = [trial for board in trials for trial in board if trial.known == "ratio"]
    trials = tuple(tuple(trial for trial in board if trial.known == "all") for board in trials)
    spread = calibrated([trial for board in trials for trial in board])
    kind = PlatformFamily(
        name=group.name,
        conventions=group.conventions,
        prior=Costs(prior.mean, prior.covariance, families_seen(group, costs)),
        same_core=within_core(list(zip(group.boards, costs, strict=True))),
        spread=spread,
        typed_spread=calibrated(typed) if len(typed) >= FEW_TRIALS else spread,
        boards=len(group.boards),
        source=group.source,
        ratio_spread=calibrated(ratios) if ratios else None,
    )
    return Fitted(group, kind, costs, trials)


def _relative(group: Group, partners: Fitted) -> tuple[Group, Costs, tuple[Costs, ...], tuple[tuple[Trial, ...], ...]]:
    """Boards that have a partner in float, their prior and costs, and their trials."""
    known = {same_run(board): number for number, board in enumerate(partners.group.boards)}
    boards = tuple(board for board in group.boards if same_run(board) in known)
    numbers = [known[same_run(board)] for board in boards]
    bases = [partners.costs[number] for number in numbers]
    floats = [partners.group.boards[number] for number in numbers]
    rows = [
        relative_rows(board, base, costs, group.conventions)
        for board, base, costs in zip(boards, floats, bases, strict=True)
    ]
    shared, ratios = fit_shared(rows)
    float_prior = partners.kind.prior
    prior = Costs(
        float_prior.mean + shared.mean @ TIED, float_prior.covariance + TIED.T @ shared.covariance @ TIED, shared.seen
    )
    costs = tuple(
        Costs(base.mean + own.mean @ TIED, TIED.T @ own.covariance @ TIED, rows_with_class(quantities, base.mean))
        for base, own, (quantities, _) in zip(
            bases, ratios, (_rows(board, group.conventions) for board in boards), strict=True
        )
    )
    found = hold_out_relative(boards, floats, group.conventions)
    trials = tuple(tuple(trial for trial in found if trial.board == number) for number in range(len(boards)))
    return replace(group, boards=boards), prior, costs, trials


def families_seen(group: Group, costs: Sequence[Costs]) -> Vector:
    """How many families have at least 3 % of the time of one of their nets in each class, on any board."""
    found: dict[str, NDArray[np.bool_]] = {}
    for board, own in zip(group.boards, costs, strict=True):
        for net, _ in board.times:
            has = own.shares(net.workload.quantities(group.conventions)) >= 0.03
            found[net.family] = found.get(net.family, np.zeros(len(has), bool)) | has
    counts: Vector = np.sum(list(found.values()), axis=0).astype(float)
    return counts


def same_run(board: Board) -> tuple[object, ...]:
    """What two precisions of one run have in common."""
    return board.title, board.device, board.threads, board.cores, board.day


def _rows(board: Board, conventions: KernelConventions) -> tuple[Vector, Vector]:
    rows = np.array([net.workload.quantities(conventions) for net, _ in board.times])
    return rows, np.array([time for _, time in board.times])


def platforms(fitted: Fitted) -> list[Platform]:
    """The platforms of a group that are worth a file: the newest run of each."""
    pairs = newest(list(zip(fitted.group.boards, fitted.costs, strict=True)))
    numbers = {id(board): number for number, board in enumerate(fitted.group.boards)}
    return [
        _platform(fitted, board, costs, fitted.trials[numbers[id(board)]])
        for board, costs in pairs
        if "-run-" not in board.device and "llvmpipe" not in board.device
    ]


def _platform(fitted: Fitted, board: Board, costs: Costs, trials: Sequence[Trial]) -> Platform:
    inside = [trial for trial in trials if not trial.is_outside]
    everything = [trial for found in fitted.trials for trial in found]
    errors = np.array([trial.log_error for trial in inside])
    is_fp16 = board.runtime == "ncnn" and board.precision == "fp32" and board.core in FP16_CORES
    notes = [*([SAME_CHIP] if board.engine == "cpu" else []), *board.notes]
    if fitted.kind.name == "ncnn-cpu-int8":
        notes.append("ratios to this board's costs in float, from seven nets: convolutions and linear layers only")
    return Platform(
        name=board.key, device=board.device, title=board.title, engine=board.engine, cores=board.cores,
        runtime=board.runtime, day=board.day, precision=board.precision, threads=board.threads, core=board.core,
        ghz=board.ghz, kind=fitted.kind.name, costs=costs, rows=len(board.times),
        error=float(np.median(np.abs(np.expm1(-errors)))) if len(errors) >= 5 else None,
        factor=float(np.exp(np.quantile(np.abs(errors), 0.9))) if len(errors) >= 5 else None,
        noise_ratio=noise_ratio(inside, everything, fitted.kind.spread), source=board.source, notes=tuple(notes),
        computes_in="fp16" if is_fp16 else None,
    )  # fmt: skip


def _npu_tables(folder: Path) -> tuple[Board, ...]:
    """Boards of Qualcomm's table, whose nets have to be traced; none where their packages cannot be had."""
    try:
        declare_operators()
        from npu_table import npu_boards

        return npu_boards(folder)
    except ImportError as error:
        print(f"Qualcomm's table is left out: {error}", file=sys.stderr)
        return ()


def timm_group(folder: Path, every: int) -> Group | None:
    """timm's nets on one laptop, traced; None where timm cannot be had."""
    try:
        import torch

        declare_operators()
        import timm
    except Exception as error:  # a broken torchvision raises anything
        print(f"timm is left out: {error}", file=sys.stderr)
        return None
    import edge_opt

    times: list[tuple[Net, float]] = []
    for name, size, time_ms in timm_rows(folder, every):
        try:
            with torch.device("meta"):
                model = timm.create_model(name).eval()
            found: ModelWork = model_work(edge_opt.profile(model, (1, 3, size, size)))
        except Exception as error:  # one net less of some hundreds
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        times.append((Net(name, re.split(r"[_\d]", name)[0], found), time_ms))
    board = replace(
        named("i7_12700h"), title="Intel Core i7-12700H", runtime="torch-compile", day="2024 (torch 2.4)",
        source="huggingface/pytorch-image-models results, Apache-2.0", times=tuple(times),
    )  # fmt: skip
    return Group("torch-compile", (board,), KernelConventions(0.0, False), broad_prior(class_sd=0.7), "timm's results")


def declare_operators() -> None:
    """Name the two operators that torchvision's import asks for, where its compiled ones do not fit this torch."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARIES.append(library)


# A library that is collected takes its operators away again.
_LIBRARIES: list[object] = []


def family_lines(kind: PlatformFamily) -> list[str]:
    """A kind's entry in the file of priors."""
    return [
        f"[{kind.name}]",
        f"boards = {kind.boards}",
        f'source = "{kind.source}"',
        f"habits = {{ cache_elements = {kind.conventions.cache_elements:g}, "
        f"splits_groups = {str(kind.conventions.splits_groups).lower()}"
        + (f", flash_weights = {kind.conventions.flash_weights:g}" if kind.conventions.flash_weights else "")
        + (f", lanes = {kind.conventions.lanes}" if kind.conventions.lanes > 1 else "")
        + (f", call_layers = {kind.conventions.call_layers}" if kind.conventions.call_layers else "")
        + (f", free = {list(kind.conventions.free)}" if kind.conventions.free else "")
        + (f", noise = {kind.conventions.noise:g}" if kind.conventions.noise != NOISE else "")
        + " }",
        f"spread = {{ noise = {kind.spread.noise:.4f}, trust = {kind.spread.trust:g}, "
        f"quantile = {kind.spread.quantile:.4f} }}",
        f"typed_spread = {{ noise = {kind.typed_spread.noise:.4f}, trust = {kind.typed_spread.trust:g}, "
        f"quantile = {kind.typed_spread.quantile:.4f} }}",
        *(
            []
            if kind.ratio_spread is None
            else [
                f"ratio_spread = {{ noise = {kind.ratio_spread.noise:.4f}, trust = {kind.ratio_spread.trust:g}, "
                f"quantile = {kind.ratio_spread.quantile:.4f} }}"
            ]
        ),
        *matrix_lines("same_core", kind.same_core),
        *costs_lines(kind.prior, f"{kind.name}."),
        "",
    ]


def write(out: Path, fitted: Sequence[Fitted]) -> int:
    """Write every platform and the priors; files of platforms that are no longer there are removed."""
    out.mkdir(parents=True, exist_ok=True)
    found = [platform for group in fitted for platform in platforms(group)]
    names = {platform.name.replace("/", "_") + ".toml": platform for platform in found}
    for path in out.glob("*.toml"):
        if path.name not in (PRIORS, SIBLINGS, CHIPS, *names):
            path.unlink()
    for name, platform in names.items():
        (out / name).write_text(platform_text(platform), encoding="utf-8")
    head = "# What platforms of one kind have in common, and how far times lie from predictions.\n"
    lines = [line for group in fitted for line in family_lines(group.kind)]
    (out / PRIORS).write_text(head + "\n".join(lines), encoding="utf-8")
    return len(names)


def fit_all(folder: Path, every: int = 0) -> list[Fitted]:
    """Every group of the tables in a folder; timm's, which has to be traced, with `every` so many rows only."""
    tables = (*read_tables(folder), *_npu_tables(folder))
    done: dict[str, Fitted] = {}
    for group in groups(tables):
        base = group.base
        if group.name.startswith("xnnpack"):
            base = done["ncnn-cpu-int8" if group.name.endswith("int8") else "ncnn-cpu"].kind.prior
        if group.boards:
            partners = done["ncnn-cpu"] if group.name == "ncnn-cpu-int8" else None
            done[group.name] = fit_group(group, base, partners)
            print(f"{group.name}: {len(group.boards)} boards, {done[group.name].kind.spread}", file=sys.stderr)
    timm = timm_group(folder, every) if every else None
    if timm is not None:
        done[timm.name] = fit_group(timm, timm.base)
    return list(done.values())


def main() -> None:
    """Read the tables, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of the published tables")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where to write the files")
    parser.add_argument("--timm-every", type=int, default=4, help="trace one in so many of timm's nets; 0 for none")
    options = parser.parse_args()
    count = write(options.out, fit_all(options.tables, options.timm_every))
    print(f"{count} platforms in {options.out}")


if __name__ == "__main__":
    main()
