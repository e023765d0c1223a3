"""Estimates against published times that they never saw: nets held out by family, boards by chip.

    python benchmarks/boards.py ../shared/published [--timm-every 4]

Every row is predicted from a prior that saw neither the net's family nor the board's chip, and from what a user would
know: all other nets of the board, a few typed times, or only its core. Intervals are calibrated on one half of the
families and tested on the other; of fewer than eight families each is left out in turn.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "platform_fit"))

from board_priors import fit_prior
from fit_platforms import declare_operators, groups, same_run, timm_group
from held_out import (
    FEW_FAMILIES,
    Trial,
    calibrated,
    hold_out,
    hold_out_alone,
    hold_out_relative,
    newest,
    noise_ratio,
)
from published_tables import Board, ncnn_nets, read_tables

from edge_opt.boards.catalog import devices
from edge_opt.boards.class_costs import CLASSES, Costs, KernelConventions, ModelWork, fit_costs
from edge_opt.boards.estimate import (
    CALL_OPERATIONS,
    DENSE,
    DEPTHWISE,
    ELEMENTWISE,
    GROUPED,
    INTERVAL_FACTOR,
    PAPER_BANDWIDTH,
    share_of_peak,
)
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.roofline import used_bandwidth
from edge_opt.records.devices import DeviceSpec

COUNTS = (8, 5, 3, 1)
# torchvision's nets, and what ncnn calls the same.
ALIKE = {
    "efficientnet_b0": "efficientnet_b0",
    "mnasnet1_0": "mnasnet",
    "regnet_y_400mf": "regnety_400m",
    "vgg16": "vgg16",
    "shufflenet_v2_x1_0": "shufflenet_v2",
}
NAMED = ("raspberry-pi-zero-2-w", "raspberry-pi-4", "raspberry-pi-5", "rk3588")


def line(label: str, trials: Sequence[Trial], holds: float | None = None) -> None:
    """Print one row of the table: rows, median error, share within 20 %, 90 % factor, share that intervals hold."""
    inside = [trial for trial in trials if not trial.is_outside]
    if not inside:
        print(f"{label:58} none inside the fit")
        return
    errors = np.array([trial.log_error for trial in inside])
    relative = np.abs(np.expm1(-errors))
    held = "" if holds is None else f"{holds:7.1%}"
    print(
        f"{label:58} {len(errors):5} {np.median(relative):7.1%} {np.mean(relative <= 0.2):7.1%} "
        f"{np.exp(np.quantile(np.abs(errors), 0.9)):6.2f} {held}"
    )


def coverage(trials: Sequence[Trial], has_boards: bool = True) -> float:
    """Share of rows within intervals that were calibrated, board by board, on the other half of the families.

    Of few families all but one are needed to tell how much families differ; then each is left out in turn.
    """
    kept = [trial for trial in trials if not trial.is_outside]
    found: list[bool] = []
    families = sorted({trial.family for trial in kept})
    parts = 2 if len(families) >= FEW_FAMILIES else len(families)
    part_of = {family: number % parts for number, family in enumerate(families)}
    for part in range(parts):
        known = [trial for trial in kept if part_of[trial.family] != part]
        asked = [trial for trial in kept if part_of[trial.family] == part]
        if not known or not asked:
            continue
        spread = calibrated(known)
        for board in {trial.board for trial in asked}:
            own = [trial for trial in known if trial.board == board] if has_boards else []
            ratio = noise_ratio(own, known, spread) if own else 1.0
            found += [
                abs(trial.log_error) <= spread.width(trial.variance, ratio) for trial in asked if trial.board == board
            ]
    return float(np.mean(found)) if found else float("nan")


def ncnn_cpu(boards: Sequence[Board]) -> None:
    """ncnn on CPUs with up to four threads: every kind of knowledge, and the boards that people ask for."""
    trials = hold_out(boards, KernelConventions(), counts=COUNTS, has_cores=True)
    by = {
        label: [trial for trial in trials if trial.known == label] for label in dict.fromkeys(t.known for t in trials)
    }
    line("ncnn CPU, up to 4 threads, all other nets timed", by["all"], coverage(by["all"]))
    for count in COUNTS:
        line(f"  {count} typed times", by[str(count)], coverage(by[str(count)], False))
    for count in COUNTS:
        line(f"  {count} typed times and its core", by[f"core+{count}"], coverage(by[f"core+{count}"], False))
    current = {id(board) for board, _ in newest([(board, _nothing()) for board in boards])}
    for label in ("core", "core of another chip"):
        rows = [trial for trial in by[label] if id(boards[trial.board]) in current]
        line(f"  no time, the {label} (newest runtimes)", rows, coverage(rows, False))
        line(f"  no time, the {label} (all runtimes)", by[label], coverage(by[label], False))
    for device in NAMED:
        rows = [trial for trial in by["all"] if boards[trial.board].device == device]
        line(f"  {device}", rows)
    outside = [trial for trial in by["all"] if trial.is_outside]
    errors = np.abs([trial.log_error for trial in outside])
    print(f"  outside the fit: {len(outside)} rows of {sorted({trial.net for trial in outside})}, "
          f"nine in ten within {np.exp(np.quantile(errors, 0.9)) if len(errors) else 1:.1f}")  # fmt: skip


def _nothing() -> Costs:
    return Costs(np.zeros(0), np.zeros((0, 0)), np.zeros(0))


def nasbench(boards: Sequence[Board], ncnn: Sequence[Board]) -> None:
    """NAS-Bench-201 nets: from other cells, and from ncnn's costs of the same board with and without typed times."""
    conventions = KernelConventions(0.0, False)
    group = next(group for group in groups(boards) if group.name == "tflite")
    for board in group.boards:
        trials = hold_out_alone(board, conventions, group.base or _nothing())
        line(f"NAS-Bench-201, {board.key}, other cells timed", trials, coverage(trials, False))
    pi = next((board for board in group.boards if board.device == "raspberry-pi-4"), None)
    same = [board for board in ncnn if board.device == "raspberry-pi-4" and board.threads == 1]
    if pi is None or not same:
        return
    known = {net.name: net.workload.quantities(KernelConventions()) for net, _ in pi.times}
    rows = [(np.array([net.workload.quantities(KernelConventions()) for net, _ in board.times]),
             np.array([time for _, time in board.times])) for board in ncnn]  # fmt: skip
    prior, fits = fit_prior(rows)
    base = fits[list(ncnn).index(same[-1])]
    order = np.random.default_rng(0).permutation(len(pi.times))
    for count in (0, 1, 5):
        chosen = [pi.times[number] for number in order[:count]]
        like = Costs(base.mean, base.covariance + 0.3 * prior.covariance, base.seen)
        costs = like
        if chosen:
            costs = fit_costs(np.array([known[net.name] for net, _ in chosen]), np.array([t for _, t in chosen]), like)
        trials = [
            Trial(0, net.name, net.name, "typed", float(np.log(time)) - costs.log_time(known[net.name]),
                  costs.variance(known[net.name]), False)
            for net, time in (pi.times[number] for number in order[5:])
        ]  # fmt: skip
        line(f"  from ncnn's costs of the Pi 4, 1 thread, and {count} times", trials)


def by_net(board: Board) -> Board:
    """The board with nets held out one by one; the same net in two trainings is one."""
    return replace(
        board,
        times=tuple(
            (replace(net, family=re.sub("_fft|_tfs|_int8.*?tflite", "", net.name)), t) for net, t in board.times
        ),
    )


def others(tables: Sequence[Board], folder: Path, every: int) -> None:
    """Every other group of the tables, held out alike."""
    found = {group.name: group for group in groups(tables)}
    int8 = {same_run(board): board for board in found["ncnn-cpu-int8"].boards}
    bases = [board for board in found["ncnn-cpu"].boards if same_run(board) in int8]
    held_out = hold_out_relative([int8[same_run(board)] for board in bases], bases, KernelConventions())
    trials: Sequence[Trial] = [trial for trial in held_out if trial.known == "all"]
    line(f"ncnn-cpu-int8, {len(bases)} boards, their float times known", trials, coverage(trials))
    for name in ("ncnn-cpu-many-threads", "ncnn-cpu-int8", "ncnn-vulkan"):
        trials = hold_out(found[name].boards, found[name].conventions)
        line(f"{name}, {len(found[name].boards)} boards", trials, coverage(trials))
    for name in ("st-mcu-int8", "tflite-int8", "st-npu-int8"):
        for board in found[name].boards:
            base = found[name].base or _nothing()
            line(f"{board.key}, by net", hold_out_alone(by_net(board), found[name].conventions, base, 99))
            line(f"{board.key}, by family", hold_out_alone(board, found[name].conventions, base))
    mcus = found["mcu-int8"]
    # Each of the four has a class that no other has, so that most count as outside; none is left out here.
    four_nets = [
        replace(trial, is_outside=False)
        for board in mcus.boards
        for trial in hold_out_alone(board, mcus.conventions, mcus.base or _nothing())
    ]
    line(f"MLPerf Tiny, {len(mcus.boards)} Cortex-M boards of four nets, by net", four_nets)
    ncnn = found["ncnn-cpu"].boards
    rows = [(np.array([net.workload.quantities(KernelConventions()) for net, _ in board.times]),
             np.array([time for _, time in board.times])) for board in ncnn]  # fmt: skip
    prior, _ = fit_prior(rows)
    trials = [trial for board in found["xnnpack"].boards for trial in hold_out_alone(board, KernelConventions(), prior)]
    line("XNNPACK's boards, by family", trials)
    timm = timm_group(folder, every) if every else None
    if timm is not None:
        trials = list(hold_out_alone(timm.boards[0], timm.conventions, timm.base or _nothing()))
        line("i7-12700H, torch compiled, timm's nets by family", trials, coverage(trials, False))


def rooflines(boards: Sequence[Board]) -> None:
    """Rooflines of the catalogue's CPU boards against ncnn's times: nothing is fitted to them."""
    errors = []
    for board in boards:
        spec = {spec.name: spec for spec in devices()}.get(board.device)
        if spec is None or spec.cores is None or spec.peak("cpu", "fp32") is None or board.cores == "little":
            continue
        if (board.engine, board.precision) == ("cpu", "fp32") and len(board.times) >= 5:
            errors += [
                np.log(ms / 1000 / roofline_seconds(net.workload, spec, board.threads)) for net, ms in board.times
            ]
    found = np.array(errors)
    print(
        f"{'rooflines of CPU boards, one thread or all':58}{len(found):7}{np.median(np.abs(np.expm1(-found))):9.1%}"
        f"{np.mean(np.abs(np.expm1(-found)) <= 0.2):9.1%}{np.exp(np.quantile(np.abs(found), 0.9)):8.2f}"
        f"{np.mean(np.abs(found) <= np.log(INTERVAL_FACTOR)):7.1%}"
    )


def roofline_seconds(work: ModelWork, spec: DeviceSpec, threads: int | None) -> float:
    """A net's layers, norms and activations fused, under the roof that `estimate` uses."""
    cores = int(spec.cores.value) if spec.cores is not None else 1
    peak, used = spec.peak("cpu", "fp32"), used_bandwidth(spec, "cpu")
    assert peak is not None and used is not None
    one = peak.value * share_of_peak(spec, 1, cores)
    rate = peak.value * share_of_peak(spec, min(threads or cores, cores), cores)
    bandwidth = used.bytes_per_s * (PAPER_BANDWIDTH if used.method in ("datasheet", "quoted") else 1.0)
    seconds = 0.0
    for layer in work.works:
        efficiency = DENSE if layer.macs else ELEMENTWISE
        if layer.kind == "conv" and layer.groups > 1:
            efficiency = DEPTHWISE if layer.channels <= 2 else GROUPED
        computing = (2 * layer.macs or layer.writes) / (rate * efficiency)
        moving = 4 * (layer.reads + layer.writes + layer.weights) / bandwidth
        seconds += max(computing, moving) + CALL_OPERATIONS / one
    return seconds


def count_alike(folder: Path) -> None:
    """Nets that ncnn and torchvision have alike must have the same quantities; stop where one has not."""
    declare_operators()
    from torchvision import models

    import edge_opt

    theirs = ncnn_nets(folder)
    for name, other in ALIKE.items():
        model = getattr(models, name)()
        ours = model_work(edge_opt.profile(model, (1, 3, 224, 224))).quantities(KernelConventions())
        for class_name, one, two in zip(
            CLASSES, ours, theirs[other].workload.quantities(KernelConventions()), strict=True
        ):
            # ncnn ends in a softmax of 1000 elements: one layer, and nothing to speak of
            if abs(one - two) > max(0.005 * two, 1.0 if class_name == "layers" else 0.01):
                sys.exit(f"{name} has {one:g} of {class_name}, and ncnn's {other} has {two:g}")
    print(f"{len(ALIKE)} nets that ncnn and torchvision have alike count alike")


def main() -> None:
    """Print every held-out error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of the published tables")
    parser.add_argument("--timm-every", type=int, default=0, help="also trace one in so many of timm's nets")
    options = parser.parse_args()
    count_alike(options.tables)
    tables = read_tables(options.tables)
    print(f"{'':58} {'rows':>5} {'median':>7} {'in 20 %':>7} {'90 %':>6} {'holds':>7}")
    ncnn = next(group.boards for group in groups(tables) if group.name == "ncnn-cpu")
    rooflines([board for board in tables if board.runtime == "ncnn"])
    ncnn_cpu(ncnn)
    nasbench(tables, ncnn)
    others(tables, options.tables, options.timm_every)


if __name__ == "__main__":
    main()
