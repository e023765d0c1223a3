"""The measuring loop on replayed time: warm-up, blocks, turns, ends. Nothing here looks at a real clock."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable

import pytest

from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.measuring.latency import Clock, TimedCall, interleaved, measure_latency
from edge_opt.measuring.machine import Device
from timings import environment


class Machine:
    """Time that passes only when something runs, or a clock is read."""

    def __init__(self, read_s: float = 1e-7) -> None:
        self.wall_s = self.cpu_s = self.others_s = 0.0
        self.read_s = read_s
        self.log: list[str] = []
        self.clock = Clock(self._wall, self._cpu, lambda: self.cpu_s + self.others_s)
        self.device = Device("fake", "a fake", True, lambda: self.log.append("synchronize"))

    def _wall(self) -> float:
        self.wall_s += self.read_s
        self.log.append("wall")
        return self.wall_s

    def _cpu(self) -> float:
        self.log.append("cpu")
        return self.cpu_s

    def work(self, seconds: Callable[[int], float], name: str = "run", share: float = 1.0) -> Callable[[], None]:
        """A run whose n-th call takes `seconds(n)`, of which the CPU works a share."""
        calls = 0

        def run() -> None:
            nonlocal calls
            took = seconds(calls)
            calls += 1
            self.wall_s += took
            self.cpu_s += took * share
            self.log.append(name)

        return run


def test_a_steady_run_is_measured_exactly_and_for_the_least_time() -> None:
    machine = Machine(read_s=0.0)
    found = measure_latency(machine.work(lambda n: 0.25, share=0.5), min_time_s=2.0, clock=machine.clock, batch_size=4)
    assert found.median_s == 0.25
    assert found.cpu_median_s == 0.125
    assert len(found.samples_s) == 8  # 2 s of 0.25 s each
    assert found.throughput == 16


@pytest.mark.parametrize(
    ("run_s", "least", "most"),
    [
        (0.1, 1, 1),
        (1e-5, 500, 1000),  # a two-hundredth of the second to be measured is 500 runs
        (1e-6, 5000, 10_000),
    ],
)
def test_short_runs_share_a_block_and_slow_ones_have_their_own(run_s: float, least: int, most: int) -> None:
    machine = Machine()
    counts: list[int] = []
    runner = TimedCall(machine.work(lambda n: run_s), collect=counts.append)
    measure_latency(runner, min_time_s=1.0, clock=machine.clock)
    assert least <= counts[-1] <= most


def test_a_block_is_a_thousand_times_longer_than_reading_the_clock() -> None:
    machine = Machine(read_s=1e-4)
    counts: list[int] = []
    found = measure_latency(TimedCall(machine.work(lambda n: 1e-3), collect=counts.append), clock=machine.clock)
    assert counts[-1] >= 50  # half of a tenth of a second at least
    assert found.median_s == pytest.approx(1e-3, rel=0.002)


def test_the_first_slow_runs_are_not_samples() -> None:
    machine = Machine()
    found = measure_latency(machine.work(lambda n: 1.0 if n < 3 else 0.01), min_time_s=10.0, clock=machine.clock)
    assert max(found.samples_s) == pytest.approx(0.01, rel=1e-3)


def test_warm_up_goes_on_while_runs_get_faster() -> None:
    machine = Machine()
    found = measure_latency(machine.work(lambda n: max(0.01, 0.5 * 0.9**n)), min_time_s=20.0, clock=machine.clock)
    # 0.9**n falls below 0.01 / 0.5 after 38 runs; a window of three later it is over.
    assert found.samples_s[0] == pytest.approx(0.01, rel=0.05)


def test_warm_up_ends_when_its_time_is_over() -> None:
    machine = Machine()
    found = measure_latency(machine.work(lambda n: 0.999**n), min_time_s=1.0, max_time_s=2.0, clock=machine.clock)
    assert found.samples_s[0] > 0.99  # one warm-up run of a second was allowed


def test_noise_is_measured_for_longer_but_not_for_ever() -> None:
    machine = Machine()
    numbers = random.Random(0)
    noisy = machine.work(lambda n: numbers.choice([0.01, 0.03]))
    found = measure_latency(noisy, min_time_s=1.0, max_time_s=3.0, target_precision=1e-6, clock=machine.clock)
    assert 3.0 <= sum(found.samples_s) <= 3.1
    assert found.is_noisy


def test_a_precise_median_ends_it_before_the_longest_time() -> None:
    machine = Machine()
    numbers = random.Random(0)
    run = machine.work(lambda n: numbers.gauss(0.01, 0.001))
    found = measure_latency(run, min_time_s=0.1, max_time_s=100.0, target_precision=0.01, clock=machine.clock)
    interval = found.median_interval_s
    assert (interval.high - interval.low) / 2 / found.median_s <= 0.01
    assert sum(found.samples_s) < 20


def test_candidates_take_turns_in_no_fixed_order() -> None:
    machine = Machine()
    runs = {name: machine.work(lambda n: 0.05, name) for name in "ab"}
    found = interleaved(runs, min_time_s=2.0, clock=machine.clock)
    assert len(found["a"].samples_s) == len(found["b"].samples_s) == 40
    turns = "".join(word for word in machine.log if word in "ab")[-80:]
    rounds = {turns[i : i + 2] for i in range(0, 80, 2)}
    assert rounds == {"ab", "ba"}


def test_a_machine_that_slows_down_slows_all_candidates_alike() -> None:
    machine = Machine()
    runs = {
        name: machine.work(lambda n, cost=cost: cost * (1 + machine.wall_s), name)
        for name, cost in (("a", 0.01), ("b", 0.02))
    }
    found = interleaved(runs, min_time_s=1.0, max_time_s=1.0, clock=machine.clock)
    assert found["b"].median_s / found["a"].median_s == pytest.approx(2.0, rel=0.05)


def test_the_device_is_waited_for_before_each_look_at_the_clock() -> None:
    machine = Machine()
    measure_latency(machine.work(lambda n: 0.5), min_time_s=1.0, clock=machine.clock, device=machine.device)
    block = ["synchronize", "cpu", "wall", "run", "synchronize", "wall", "cpu"]
    assert machine.log[-len(block) - 2 : -2] == block  # the last two looks are at the whole session


def test_a_busy_gpu_is_no_contention() -> None:
    machine = Machine()
    run = machine.work(lambda n: 0.1, share=0.01)
    assert not measure_latency(run, clock=machine.clock, device=machine.device).is_contended
    assert measure_latency(run, clock=machine.clock).is_contended


@pytest.mark.parametrize(("others", "is_contended"), [(0.0, False), (0.1, False), (1.5, True)])
def test_other_programs_on_the_machine_are_contention(others: float, is_contended: bool) -> None:
    machine = Machine()

    def seconds(n: int) -> float:
        machine.others_s += 0.1 * others
        return 0.1

    found = measure_latency(machine.work(seconds), clock=machine.clock, environment=environment(load_1min=9.0))
    assert found.is_contended == is_contended  # the load of the minute before is not asked where the present is known
    assert found.remarks == (("other programs kept 1.5 of 2 cores busy meanwhile",) if is_contended else ())


def test_where_the_machine_does_not_tell_the_load_before_is_asked() -> None:
    machine = Machine()
    clock = Clock(machine.clock.wall, machine.clock.cpu, lambda: None)
    run = machine.work(lambda n: 0.1)
    assert measure_latency(run, clock=clock, environment=environment(load_1min=9.0)).is_contended
    assert not measure_latency(run, clock=clock, environment=environment(load_1min=1.0)).is_contended


def test_preparation_and_collection_are_not_timed() -> None:
    machine = Machine(read_s=0.0)

    def slowly(count: int) -> None:
        machine.wall_s += 100.0
        machine.log.append(f"around {count}")

    runner = TimedCall(machine.work(lambda n: 0.25), slowly, slowly)
    assert measure_latency(runner, clock=machine.clock).median_s == 0.25
    assert machine.log[-9:-2] == ["around 1", "cpu", "wall", "run", "wall", "cpu", "around 1"]


def test_a_run_that_fails_says_at_which_repeat() -> None:
    machine = Machine()

    def seconds(n: int) -> float:
        if n == 2:
            raise RuntimeError("the buffer is full\nand more")
        return 0.1

    with pytest.raises(MeasurementFailed, match=r"failed at repeat 3: RuntimeError: the buffer is full$") as caught:
        measure_latency(machine.work(seconds), clock=machine.clock)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failure_inside_a_block_counts_the_repeats_before_it() -> None:
    machine = Machine()

    def seconds(n: int) -> float:
        if n == 99:
            raise ValueError
        return 1e-4

    with pytest.raises(MeasurementFailed, match="failed at repeat 100: ValueError$"):
        measure_latency(machine.work(seconds), clock=machine.clock)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_waits_for_the_end_of_a_block_and_collection_is_left_as_found(is_enabled: bool) -> None:
    machine = Machine()
    seen: set[bool] = set()

    def seconds(n: int) -> float:
        seen.add(gc.isenabled())
        if n == 20:
            raise RuntimeError("stop")
        return 0.1

    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(MeasurementFailed):
            measure_latency(machine.work(seconds), min_time_s=5.0, clock=machine.clock)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert seen == {False}


def test_progress_grows_to_one() -> None:
    machine = Machine()
    told: list[float] = []
    measure_latency(
        machine.work(lambda n: 0.1 + 0.1 * (n % 3)),
        min_time_s=0.5,
        max_time_s=2.0,
        target_precision=1e-9,
        clock=machine.clock,
        progress=lambda done, note: told.append(done),
    )
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)


def test_a_coarse_clock_gets_longer_blocks() -> None:
    machine = Machine(read_s=0.0)
    coarse = Clock(lambda: machine.clock.wall() // 0.015 * 0.015, lambda: 0.0, lambda: None)
    found = measure_latency(machine.work(lambda n: 1e-4), min_time_s=1.0, clock=coarse)
    assert found.mean_s == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_time_s": 0}, "min_time_s is 0"),
        ({"min_time_s": -1.0}, "min_time_s is -1.0"),
        ({"min_time_s": math.nan}, "min_time_s is nan"),
        ({"min_time_s": math.inf}, "min_time_s is inf"),
        ({"min_time_s": 2.0, "max_time_s": 1.0}, "max_time_s is 1.0; it must be at least min_time_s"),
        ({"max_time_s": math.inf}, "max_time_s is inf"),
        ({"target_precision": 0.0}, "target_precision is 0.0"),
        ({"target_precision": math.nan}, "target_precision is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_times_that_make_no_sense_are_refused_before_anything_runs(options: dict[str, float], words: str) -> None:
    machine = Machine()
    with pytest.raises(InvalidInput, match=words):
        measure_latency(machine.work(lambda n: 0.1), clock=machine.clock, **options)
    assert machine.log == []


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(InvalidInput, match="runs is empty"):
        interleaved({})


def test_a_fixed_number_of_repeats_is_kept_to_the_letter() -> None:
    runs: list[None] = []
    found = interleaved({"a": lambda: runs.append(None)}, repeats=7, warmup=3)["a"]
    assert len(found.samples_s) == 7
    # reading the clock is timed on runs of its own
    assert len(runs) == 3 + 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repeats": 0}, "repeats is 0; it must be a whole number of at least 1"),
        ({"repeats": -2}, "repeats is -2"),
        ({"repeats": True}, "repeats is True"),
        ({"repeats": 2.5}, "repeats is 2.5"),
        ({"repeats": 3, "warmup": -1}, "warmup is -1; it must be a whole number of at least 0"),
    ],
)
def test_repeat_counts_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    runs: list[None] = []
    with pytest.raises(InvalidInput, match=words):
        interleaved({"a": lambda: runs.append(None)}, **options)
    assert not runs
