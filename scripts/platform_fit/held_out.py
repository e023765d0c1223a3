"""Held-out tests of class costs: every net predicted without its family, every board without its chip.

A net is predicted from a prior that never saw its family nor the board's chip, and from what a user would know of the
board: all other nets, a few typed times, or only which core it has. The errors make the intervals that are stated.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from board_priors import fit_prior, fit_shared, outside_share, shrunk
from published_tables import Board

from edge_opt.boards.class_costs import CLASSES, NOISE, Costs, KernelConventions, Spread, Vector, fit_costs
from edge_opt.boards.platforms import OUTSIDE_SHARE

# A time may lie outside its interval one time in ten.
LEVEL = 0.9
# With fewer held-out rows than these, noise and quantile are at least the usual ones.
FEW_TRIALS = 100
FEW_FAMILIES = 8
# With so many families, of so many rows each, it can be told how much families differ.
FEWEST_FAMILIES = 3
FEW_ROWS = 20
USUAL_QUANTILE = 1.8
# Runtimes further apart than this have other kernels: ncnn's for x86 of 2021 take three times those of 2024.
RUNTIME_YEARS = 2.5


@dataclass(frozen=True, slots=True)
class Trial:
    """One net on one board, predicted without its family and the board's chip.

    `known` is what was known of the board: "all" other nets, a number of them, or "core". `log_error` is the
    logarithm of true over predicted time, `variance` what the fit believes of its own part in it. `log_predicted` is
    the predicted ratio, where one is asked for.
    """

    board: int
    net: str
    family: str
    known: str
    log_error: float
    variance: float
    is_outside: bool
    log_predicted: float = 0.0


def hold_out(
    boards: Sequence[Board],
    conventions: KernelConventions,
    folds: int = 4,
    counts: Sequence[int] = (),
    has_cores: bool = False,
    parts: int | None = None,
) -> tuple[Trial, ...]:
    """Every row of every board, predicted without its net's family and the board's chip.

    Args:
        boards: at least three of different chips; those with fewer than two families are only for the prior.
        conventions: how their runtime runs layers.
        folds: parts that chips are divided into; a chip's prior is from the other parts.
        counts: also predict from so many nets of other families, drawn at random but always alike.
        has_cores: also predict from other boards with the same core alone.
        parts: leave out so many parts of all families, one after the other; each family by itself unless given.
    """
    known = {net.name: net.workload.quantities(conventions) for board in boards for net, _ in board.times}
    fold = [zlib.crc32(board.soc.encode()) % folds for board in boards]
    found: list[Trial] = []
    families = list(dict.fromkeys(net.family for board in boards for net, _ in board.times))
    for start in range(parts or len(families)):
        left_out = families[start :: parts or len(families)]
        rows = [_rows(board, known, left_out) for board in boards]
        for part in range(folds):
            asked = [
                number
                for number, board in enumerate(boards)
                if fold[number] == part and any(net.family in left_out for net, _ in board.times)
            ]
            others = [number for number in range(len(boards)) if fold[number] != part and len(rows[number][1])]
            if asked and len(others) >= 3:
                prior, fits = fit_prior([rows[number] for number in others], noise=conventions.noise)
                fitted = dict(zip(others, fits, strict=True))
                fitted |= {
                    n: fit_costs(*rows[n], prior, conventions.noise) for n in range(len(boards)) if fold[n] == part
                }
                for number in asked:
                    pairs = _knowledge(
                        boards, number, rows[number], prior, fitted, counts, has_cores, conventions.noise
                    )
                    for label, costs in pairs:
                        found.extend(_trials(boards[number], number, left_out, known, label, costs, prior))
    return tuple(found)


def hold_out_alone(board: Board, conventions: KernelConventions, prior: Costs, folds: int = 10) -> tuple[Trial, ...]:
    """Every row of a board that has no others of its kind, predicted without its net's family.

    Args:
        board: its rows.
        conventions: how its runtime runs layers.
        prior: costs that are likely before any time is known; it must not come from this board.
        folds: parts that families are divided into where there are more of them.
    """
    known = {net.name: net.workload.quantities(conventions) for net, _ in board.times}
    families = list(dict.fromkeys(net.family for net, _ in board.times))
    part = {family: number % folds for number, family in enumerate(families)}
    found: list[Trial] = []
    for fold in range(min(folds, len(families))):
        kept = [(known[net.name], time) for net, time in board.times if part[net.family] != fold]
        asked = [(net, time) for net, time in board.times if part[net.family] == fold]
        if kept:
            costs = fit_costs(np.array([row for row, _ in kept]), np.array([time for _, time in kept]), prior)
            for net, time in asked:
                row = known[net.name]
                error = float(np.log(time)) - costs.log_time(row)
                is_outside = outside_share(costs, row) >= OUTSIDE_SHARE
                found.append(Trial(0, net.name, net.family, "all", error, costs.variance(row), is_outside))
    return tuple(found)


# Layers that int8 changes alike. ncnn computes 3x3 convolutions of stride 1 in float by Winograd's algorithm, which its
# int8 kernels gain less from; layers without weights stay in float. One ratio for each class would be twenty from the
# five to seven nets that a board has: with these three, the median error on families left out is 11 %, not 14 %.
_WINOGRAD = ("conv3x3_macs", "conv3x3_elements")
_FLOAT = ("elementwise_elements", "pooled_elements", "moved_elements", "detections")
TIED: Vector = np.array(
    [
        [name in _WINOGRAD for name in CLASSES],
        [name not in (*_WINOGRAD, *_FLOAT) for name in CLASSES],
        [name in _FLOAT for name in CLASSES],
    ],
    dtype=float,
)


def relative_rows(
    board: Board, base: Board, costs: Costs, conventions: KernelConventions, left_out: str = ""
) -> tuple[Vector, Vector]:
    """A board's rows in the time that each group of `TIED` takes in another precision: its costs become ratios.

    A net that was timed in both counts with its measured time, so that what is odd about it is in both.

    Args:
        board: in one precision, say int8.
        base: the same board in another.
        costs: those of `base`.
        conventions: how layers are run.
        left_out: a family whose nets are left out; none unless given.
    """
    timed = {net.name: time for net, time in base.times}
    rows, times = [], []
    for net, time in board.times:
        if net.family != left_out:
            parts = net.workload.quantities(conventions) * np.exp(costs.mean)
            # Every group has at least a trace of time, so that its logarithm exists.
            rows.append(TIED @ parts * timed.get(net.name, parts.sum()) / parts.sum() + 1e-9)
            times.append(time)
    return np.array(rows).reshape(-1, len(TIED)), np.array(times)


def hold_out_relative(
    boards: Sequence[Board], bases: Sequence[Board], conventions: KernelConventions, folds: int = 4
) -> tuple[Trial, ...]:
    """Every row of every board, from its costs in another precision and the ratios that other chips have.

    Trials that know "all" are of the time, those that know "ratio" of its ratio to the time in the other precision.

    Args:
        boards: in the precision that is asked for, say int8.
        bases: the same boards, one by one, in the precision that is known, with more nets.
        conventions: how layers are run.
        folds: parts that chips are divided into.
    """
    fold = [zlib.crc32(board.soc.encode()) % folds for board in boards]
    known = {net.name: net.workload.quantities(conventions) for board in (*boards, *bases) for net, _ in board.times}
    found: list[Trial] = []
    for family in dict.fromkeys(net.family for board in boards for net, _ in board.times):
        for part in range(folds):
            others = [number for number in range(len(boards)) if fold[number] != part]
            asked = [number for number in range(len(boards)) if fold[number] == part]
            if len(others) < 3 or not asked:
                continue
            prior, fits = fit_prior([_rows(bases[number], known, [family]) for number in others])
            costs = dict(zip(others, fits, strict=True))
            costs |= {number: fit_costs(*_rows(bases[number], known, [family]), prior) for number in asked}
            rows = {
                number: relative_rows(boards[number], bases[number], costs[number], conventions, family)
                for number in costs
            }
            shared, _ = fit_shared([rows[number] for number in others if len(rows[number][1])])
            for number in asked:
                ratios = fit_costs(*rows[number], shared)
                found.extend(_ratio_trials(boards[number], bases[number], number, family, known, costs[number], ratios))
    return tuple(found)


def _ratio_trials(
    board: Board, base: Board, number: int, family: str, known: Mapping[str, Vector], costs: Costs, ratios: Costs
) -> Iterator[Trial]:
    """The time of each net of a family, and its ratio to the one in the other precision."""
    timed = {net.name: time for net, time in base.times}
    for net, time in board.times:
        if net.family != family:
            continue
        row = TIED @ (known[net.name] * np.exp(costs.mean))
        log_ratio, variance = ratios.log_time(row / row.sum()), ratios.variance(row)
        error = float(np.log(time / row.sum())) - log_ratio
        yield Trial(number, net.name, family, "all", error, variance, False)
        if net.name in timed:
            error = float(np.log(time / timed[net.name])) - log_ratio
            yield Trial(number, net.name, family, "ratio", error, variance, False, log_ratio)


def _rows(board: Board, known: Mapping[str, Vector], left_out: Sequence[str]) -> tuple[Vector, Vector]:
    kept = [(known[net.name], time) for net, time in board.times if net.family not in left_out]
    size = len(next(iter(known.values())))
    return np.array([row for row, _ in kept]).reshape(-1, size), np.array([time for _, time in kept])


def _knowledge(
    boards: Sequence[Board],
    number: int,
    rows: tuple[Vector, Vector],
    prior: Costs,
    fitted: Mapping[int, Costs],
    counts: Sequence[int],
    has_cores: bool,
    noise: float,
) -> Iterator[tuple[str, Costs]]:
    """What may be known of a board, and its costs then."""
    quantities, times = rows
    if len(times):
        yield "all", fitted[number]
    order = np.random.default_rng(number).permutation(len(times))
    for count in counts:
        if count < len(times):
            yield str(count), fit_costs(quantities[order[:count]], times[order[:count]], prior, noise)
    board = boards[number]
    pairs = [(boards[other], fit) for other, fit in fitted.items() if boards[other].device != board.device]
    if not has_cores:
        return
    for label, found in (
        ("core", pairs),
        ("core of another chip", [pair for pair in pairs if pair[0].soc != board.soc]),
    ):
        costs = core_costs(board, found)
        if costs is not None:
            yield label, costs
            for count in counts if label == "core" else ():
                if count < len(times):
                    chosen = order[:count]
                    yield f"core+{count}", fit_costs(quantities[chosen], times[chosen], costs, noise)


def _trials(
    board: Board, number: int, left_out: Sequence[str], known: Mapping[str, Vector], label: str, costs: Costs,
    prior: Costs,
) -> Iterator[Trial]:  # fmt: skip
    for net, time in board.times:
        if net.family in left_out:
            row = known[net.name]
            is_outside = outside_share(prior, row) >= OUTSIDE_SHARE
            error = float(np.log(time)) - costs.log_time(row)
            yield Trial(number, net.name, net.family, label, error, costs.variance(row), is_outside)


def core_costs(board: Board, others: Sequence[tuple[Board, Costs]]) -> Costs | None:
    """Costs of a board of which only the core and its clock are known, from boards with that core; None without any.

    Times are taken to go with the inverse of the clock. Devices count once, with their newest record, and only
    where the runtime is of about the same age. Boards with the same chip, where there are any, are the only ones that
    count.

    Args:
        board: its core, clock, threads and engine, and the day of its runtime.
        others: boards with their costs; those with another core, engine or number of threads are left out.
    """
    alike = [
        (other, costs)
        for other, costs in newest(others)
        if _core_key(other) is not None
        and _core_key(other) == _core_key(board)
        and abs(_year(other) - _year(board)) <= RUNTIME_YEARS
    ]
    # The same chip on another board says more than the same core in another chip: it has the same memory, too.
    alike = [pair for pair in alike if pair[0].soc == board.soc] or alike
    if not alike:
        return None
    groups: dict[str, list[Vector]] = {}
    for other, costs in alike:
        groups.setdefault(other.device, []).append(costs.mean + np.log(_ghz(other) / _ghz(board)))
    means = np.array([np.median(found, axis=0) for found in groups.values()])
    spread = np.mean([costs.covariance for _, costs in alike], axis=0) + within_core(others) * (1 + 1 / len(means))
    return Costs(np.median(means, axis=0), spread, np.ones(means.shape[1]))


def newest(others: Sequence[tuple[Board, Costs]]) -> list[tuple[Board, Costs]]:
    """Of runs of the same platform the newest; of two on one day the later in the table.

    Args:
        others: boards with whatever goes with them.
    """
    found: dict[str, tuple[Board, Costs]] = {}
    for board, costs in others:
        if board.key not in found or board.day >= found[board.key][0].day:
            found[board.key] = (board, costs)
    return list(found.values())


def within_core(others: Sequence[tuple[Board, Costs]]) -> Vector:
    """Covariance of the costs of chips that have one core and number of threads in common, clocks made equal.

    Args:
        others: boards with their costs.
    """
    groups: dict[tuple[object, ...], dict[str, list[Vector]]] = {}
    for board, costs in newest(others):
        key = _core_key(board)
        if key is not None:
            groups.setdefault(key, {}).setdefault(board.soc, []).append(costs.mean + np.log(_ghz(board)))
    size = len(others[0][1].mean)
    total, freedom = np.zeros((size, size)), 0
    for group in groups.values():
        means = np.array([np.mean(found, axis=0) for found in group.values()])
        away = means - means.mean(axis=0)
        total, freedom = total + away.T @ away, freedom + len(means) - 1
    return shrunk(total / max(freedom, 1), freedom) if freedom else np.full((size, size), 0.1) + 0.1 * np.eye(size)


def _core_key(board: Board) -> tuple[object, ...] | None:
    if board.core is None or board.ghz is None:
        return None
    return board.core, board.threads, board.engine, board.precision


def _ghz(board: Board) -> float:
    return board.ghz or 1.0


def _year(board: Board) -> float:
    year, _, rest = board.day.partition("-")
    return float(year) + (int(rest[:2]) - 1) / 12 if rest[:2].isdigit() else float(year or 0)


def calibrated(trials: Sequence[Trial]) -> Spread:
    """Return the spread that gives 90 % intervals.

    `noise` and `trust` are those under which the errors, taken as Student t with four degrees of freedom, are most
    likely; the quantile is then read off the errors.

    Args:
        trials: held-out predictions; those outside the fit are left out.
    """
    kept = [trial for trial in trials if not trial.is_outside]
    errors = np.array([trial.log_error for trial in kept])
    variances = np.array([trial.variance for trial in kept])
    best, chosen = -np.inf, (NOISE, 1.0)
    for noise in np.geomspace(0.05, 0.5, 20):
        for trust in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
            sd = np.sqrt(noise**2 + trust * variances)
            likelihood = float(np.sum(-np.log(sd) - 2.5 * np.log1p((errors / sd) ** 2 / 4)))
            if likelihood > best:
                best, chosen = likelihood, (float(noise), trust)
    if len({trial.family for trial in kept}) < FEW_FAMILIES:
        # The fit's own variance shrinks when all are known, and nothing tells how much of the errors it was.
        chosen = max(chosen[0], float(np.median(np.abs(errors)))), chosen[1]
    if len(kept) < FEW_TRIALS:  # too few, and too much alike, to promise less than usual
        chosen = max(chosen[0], NOISE), max(chosen[1], 1.0)
    sd = np.sqrt(chosen[0] ** 2 + chosen[1] * variances)
    quantile = float(np.quantile(np.abs(errors) / sd, LEVEL))
    families = {
        family: np.array([trial.family == family for trial in kept]) for family in sorted({t.family for t in kept})
    }
    groups = [errors[rows] / sd[rows] for rows in families.values() if rows.sum() >= FEW_ROWS]
    if FEWEST_FAMILIES <= len(groups) < FEW_FAMILIES:
        quantile = max(quantile, new_family_quantile(groups))
    return Spread(*chosen, quantile=max(quantile, USUAL_QUANTILE) if len(kept) < FEW_TRIALS else quantile)


def new_family_quantile(groups: Sequence[Vector], draws: int = 4000) -> float:
    """What nine in ten of the errors of a family that was never seen lie within, in units of their sd.

    Rows of one family err alike, so that few families with many rows are few observations. Family f has errors of the
    scale s_f (root mean square). With K families, log s of a new one is m + t * d * sqrt(1 + 1/K), with m and d the
    mean and the standard deviation of the K values of log s, and t of Student's distribution with K - 1 degrees of
    freedom: the predictive distribution of a normal variable whose mean and variance are not known. Errors over their
    own scale are taken to be alike in all families. With four families, leaving out one, 88 % of ncnn's int8 times lie
    within, and 81 % within the plain quantile of all errors.

    Args:
        groups: errors of each family in units of their sd, at least three families.
        draws: how finely the distribution is drawn; the same numbers each time.
    """
    scales = np.array([np.sqrt(np.mean(group**2)) for group in groups])
    shapes = np.concatenate([np.abs(group) / scale for group, scale in zip(groups, scales, strict=True)])
    generator = np.random.default_rng(0)
    count, logs = len(groups), np.log(scales)
    away = generator.standard_t(count - 1, draws) * logs.std(ddof=1) * np.sqrt(1 + 1 / count)
    found = np.exp(logs.mean() + np.clip(away, -3.0, 3.0))[:, None] * generator.choice(shapes, (draws, 50))
    return float(np.quantile(found, LEVEL))


def noise_ratio(trials: Sequence[Trial], everything: Sequence[Trial], spread: Spread, strength: float = 10.0) -> float:
    """How much noisier one board is than all: its own errors, pulled towards 1 by so many rows.

    Args:
        trials: of one board.
        everything: of all boards of its kind.
        spread: of all boards.
        strength: rows that count for the common noise; ten, as half of what a board usually has.
    """
    usual = float(np.mean(_squares(everything, spread))) if everything else 1.0
    own = _squares(trials, spread) / usual
    return float(np.sqrt((strength + own.sum()) / (strength + len(own))))


def _squares(trials: Sequence[Trial], spread: Spread) -> Vector:
    """Squared errors in units of their intervals; one that is far off counts as twice the interval."""
    ratios = [trial.log_error / spread.width(trial.variance) for trial in trials if not trial.is_outside]
    squares: Vector = np.minimum(np.array(ratios) ** 2, 4.0)
    return squares
