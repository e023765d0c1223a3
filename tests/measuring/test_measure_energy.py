"""Energy meters on replayed sensors: joules per forward, sources, refusals, and sensors that go away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput, MeterFailed
from edge_opt.measuring.energy import (
    NvmlMeter,
    PowerIntegral,
    gpu_of,
    in_thread,
    measure_energy,
    meters,
)
from edge_opt.records.measurements import Interval, Latency
from replay import RecordedNvml, Replay

PACKAGE = "sys/class/powercap/intel-rapl:0/energy_uj"
CORE = "sys/class/powercap/intel-rapl:0:0/energy_uj"
DRAM = "sys/class/powercap/intel-rapl:0:2/energy_uj"
PSYS = "sys/class/powercap/intel-rapl:1/energy_uj"
AGAIN = "sys/class/powercap/intel-rapl-mmio:0/energy_uj"


def latency_of(seconds: float, batch_size: int = 1) -> Latency:
    return Latency(
        samples_s=(seconds,) * 3,
        cpu_samples_s=(seconds,) * 3,
        minimum_s=seconds,
        median_s=seconds,
        mean_s=seconds,
        std_s=0.0,
        p90_s=seconds,
        p95_s=seconds,
        p99_s=seconds,
        median_interval_s=Interval(seconds, seconds),
        cpu_minimum_s=seconds,
        cpu_median_s=seconds,
        batch_size=batch_size,
        is_noisy=False,
        is_contended=False,
        remarks=(),
    )


@pytest.fixture
def laptop(tmp_path: Path) -> Replay:
    """20 W in the package, 15 of them in its cores, 3 W in memory, 30 W in all; idle 4 + 1 W."""
    machine = Replay(tmp_path, "rapl_laptop", forward_s=0.05)
    machine.load = {PACKAGE: 20, CORE: 15, DRAM: 3, PSYS: 30, AGAIN: 20}
    machine.idle = {PACKAGE: 4, CORE: 1, DRAM: 1, PSYS: 12}
    return machine


def test_rapl_adds_package_and_memory_and_nothing_twice(laptop: Replay) -> None:
    energy, refusals = laptop.metered(laptop.run, latency_of(0.05))
    assert energy is not None
    assert energy.joules == pytest.approx((20 + 3) * 0.05)
    assert (energy.source, energy.idle_watts, refusals) == ("rapl", None, ())
    assert "RAPL counters dram + package-0" in energy.note


def test_idle_power_is_measured_before_and_subtracted_on_request(laptop: Replay) -> None:
    energy, _ = laptop.metered(laptop.run, latency_of(0.05), subtract_idle=True)
    assert energy is not None
    assert energy.idle_watts == pytest.approx(4 + 1)
    assert energy.joules == pytest.approx((23 - 5) * 0.05)
    assert "5 W idle subtracted" in energy.note


def test_counters_that_wrap_around_count_on(tmp_path: Path) -> None:
    # 5 J before its end, the first package gets 100 J/s for a second; its memory is 1 J before the end and gets 10 J/s.
    machine = Replay(tmp_path, "rapl_server", forward_s=0.05)
    zones = "sys/class/powercap/intel-rapl:"
    machine.load = {
        f"{zones}0/energy_uj": 100,
        f"{zones}0:0/energy_uj": 10,
        f"{zones}1/energy_uj": 50,
        f"{zones}1:0/energy_uj": 5,
    }
    energy, _ = machine.metered(machine.run, latency_of(0.05))
    assert energy is not None
    assert energy.joules == pytest.approx((100 + 10 + 50 + 5) * 0.05)
    assert int((tmp_path / zones).with_name("intel-rapl:0").joinpath("energy_uj").read_text()) < 200e6


def test_a_counter_that_is_reset_is_not_taken_for_a_wrap_around(laptop: Replay) -> None:
    def run() -> None:
        laptop.run()
        if laptop.runs == 10:
            (laptop.root / PACKAGE).write_text("0")

    with pytest.raises(MeterFailed, match="went back from .* not a wrap-around"):
        laptop.metered(run, latency_of(0.05), energy="rapl")


def test_work_lasts_as_long_as_the_resolution_asks(laptop: Replay) -> None:
    # At least min_time_s; a block of a tenth of it may come on top.
    laptop.metered(laptop.run, latency_of(0.05), min_time_s=2.0)
    assert 40 <= laptop.runs <= 44
    # 61 µJ steps at 2 % ask for 3.05 mJ: 3.05 s at 1 mW.
    laptop.load, laptop.runs = {PACKAGE: 1e-3}, 0
    energy, _ = laptop.metered(laptop.run, latency_of(0.05))
    assert energy is not None
    assert 61 <= laptop.runs <= 66
    assert energy.joules == pytest.approx(1e-3 * 0.05, rel=0.02)


def test_a_counter_that_does_not_move_is_an_error_not_zero(laptop: Replay) -> None:
    laptop.load = {}
    with pytest.raises(MeterFailed, match="moved by 0 J in .* s of work; it is stuck"):
        laptop.metered(laptop.run, latency_of(0.05), energy="rapl")


def test_work_below_idle_power_is_an_error_not_negative(laptop: Replay) -> None:
    laptop.idle = {PACKAGE: 40}
    with pytest.raises(MeterFailed, match="took 23 W under work and 40 W before it; the machine was not idle"):
        laptop.metered(laptop.run, latency_of(0.05), energy="rapl", subtract_idle=True)


def test_permission_denied_names_the_cure(laptop: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    readable = Path.read_text

    def read(path: Path) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return readable(path)

    with monkeypatch.context() as patches:
        patches.setattr(Path, "read_text", read)
        energy, refusals = laptop.metered(laptop.run, latency_of(0.05))
    assert energy is None
    assert refusals[0].meter == "rapl"
    assert "readable by root alone" in refusals[0].reason
    assert "sudo chmod a+r" in refusals[0].reason


def test_a_memory_zone_without_data_is_left_out_and_not_named(laptop: Replay) -> None:
    (laptop.root / DRAM).unlink()
    energy, _ = laptop.metered(laptop.run, latency_of(0.05))
    assert energy is not None
    assert energy.joules == pytest.approx(20 * 0.05)
    assert "dram" not in energy.note


def test_a_sensor_that_disappears_in_mid_run_is_an_error(laptop: Replay) -> None:
    laptop.lost, laptop.lost_at_s = PACKAGE, laptop.now_s + 0.5
    with pytest.raises(MeterFailed, match="energy_uj cannot be read"):
        laptop.metered(laptop.run, latency_of(0.05), energy="rapl")


def test_a_sensor_that_disappears_is_a_refusal_in_auto_mode_and_the_next_meter_is_taken(laptop: Replay) -> None:
    laptop.lost, laptop.lost_at_s = PACKAGE, laptop.now_s + 0.5
    energy, refusals = laptop.metered(laptop.run, latency_of(0.05), power_watts=5)
    assert energy is not None
    assert (energy.source, energy.joules) == ("proxy", pytest.approx(5 * 0.05))
    assert [refusal.meter for refusal in refusals] == ["rapl", "nvml", "jetson"]
    assert "energy_uj cannot be read" in refusals[0].reason


@pytest.mark.parametrize("recording", ["jetson_xavier_nx", "jetson_agx_orin", "jetson_nano"])
def test_jetson_power_is_sampled_over_the_rails_that_feed_the_module(tmp_path: Path, recording: str) -> None:
    machine = Replay(tmp_path, recording, forward_s=0.02)
    hwmon = "sys/class/hwmon/hwmon"
    # Current in mA at the recorded voltage; the Nano shows mW.
    loads = {
        "jetson_xavier_nx": ({f"{hwmon}6/curr1_input": 2000, f"{hwmon}6/curr2_input": 1200}, 2.0 * 5),
        "jetson_agx_orin": (
            {f"{hwmon}3/curr1_input": 500, f"{hwmon}3/curr2_input": 100, f"{hwmon}4/curr2_input": 300},
            0.5 * 20 + 0.1 * 20 + 0.6 * 5,
        ),
        "jetson_nano": ({"sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input": 7500}, 7.5),
    }
    machine.load, watts = loads[recording]
    energy, refusals = machine.metered(machine.run, latency_of(0.02))
    assert energy is not None
    assert energy.source == "jetson"
    # The first sample still shows the recorded, idle power: half a period of 50 ms in at least 2.5 s.
    assert energy.joules == pytest.approx(watts * 0.02, rel=0.02)
    assert [refusal.meter for refusal in refusals] == ["rapl", "nvml"]
    assert machine.ticks == []


def test_jetson_reads_power_files_where_a_driver_has_them(tmp_path: Path) -> None:
    machine = Replay(tmp_path, "jetson_xavier_nx", forward_s=0.02)
    (tmp_path / "sys/class/hwmon/hwmon6/power1_input").write_text("9000000")
    energy, _ = machine.metered(machine.run, latency_of(0.02), energy="jetson", device="cuda")
    assert energy is not None
    assert energy.joules == pytest.approx(9 * 0.02)


def test_a_jetson_rail_that_disappears_between_samples_is_reported(tmp_path: Path) -> None:
    machine = Replay(tmp_path, "jetson_xavier_nx", forward_s=0.02)
    machine.lost, machine.lost_at_s = "sys/class/hwmon/hwmon6/curr1_input", machine.now_s + 0.6
    with pytest.raises(MeterFailed, match="curr1_input cannot be read"):
        machine.metered(machine.run, latency_of(0.02), energy="jetson")
    assert machine.ticks == []


def test_rails_of_an_unknown_board_are_named_not_guessed(tmp_path: Path) -> None:
    machine = Replay(tmp_path, "jetson_xavier_nx")
    (tmp_path / "sys/class/hwmon/hwmon6/in1_label").write_text("VDD_FUTURE")
    with machine.in_place():
        refusal = {meter.name: meter.refusal for meter in meters()}["jetson"]
    assert refusal == "which of the rails VDD_CPU_GPU_CV, VDD_FUTURE, VDD_SOC add up to this board is not known"


def test_nvml_reads_the_energy_counter_of_the_gpu(tmp_path: Path) -> None:
    machine = Replay(tmp_path, forward_s=0.004)
    library = RecordedNvml(machine, watts=250)
    energy, refusals = machine.metered(machine.run, latency_of(0.004), device="cuda:1", nvml=library)
    assert energy is not None
    assert energy.joules == pytest.approx(250 * 0.004, rel=1e-4)
    assert energy.source == "nvml"
    assert "NVML energy counter of Tesla V100" in energy.note
    assert [refusal.meter for refusal in refusals] == ["rapl"]
    assert set(library.asked) == {1}
    # A reading that is 0.1 s old is 2 % of 5 s.
    assert machine.now_s - 100 >= 5
    assert library.sessions == 0


def test_nvml_samples_power_where_there_is_no_counter(tmp_path: Path) -> None:
    machine = Replay(tmp_path, forward_s=0.004)
    library = RecordedNvml(machine, watts=60, has_counter=False)
    energy, _ = machine.metered(machine.run, latency_of(0.004), device="cuda", nvml=library)
    assert energy is not None
    assert energy.joules == pytest.approx(60 * 0.004)
    assert "sampled" in energy.note
    assert (library.sessions, machine.ticks) == (0, [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_driver": False}, r"NVML does not start \(Driver Not Loaded\)"),
        ({"has_counter": False, "has_power": False}, "Tesla V100 tells NVML neither its energy nor its power"),
        ({"lost_at_s": 101.0}, r"the GPU stopped answering NVML \(GPU is lost\)"),
    ],
)
def test_nvml_says_why_not(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    machine = Replay(tmp_path, forward_s=0.004)
    library = RecordedNvml(machine, watts=60)
    for name, value in change.items():
        setattr(library, name, value)
    with pytest.raises(MeterFailed, match=reason):
        machine.metered(machine.run, latency_of(0.004), energy="nvml", device="cuda", nvml=library)
    assert library.sessions == 0


def test_a_gpu_is_asked_for_by_uuid_or_refused(tmp_path: Path) -> None:
    machine = Replay(tmp_path)
    library = RecordedNvml(machine, watts=60)
    with machine.in_place(library):
        NvmlMeter("GPU-8932f937").available()
        assert library.asked == ["GPU-8932f937"]
        with pytest.raises(MeterFailed, match="NVML has no GPU 5"):
            NvmlMeter(5).available()
    assert (gpu_of("cpu"), library.sessions) == (0, 0)


def test_meters_blind_to_the_device_are_passed_over(laptop: Replay) -> None:
    library = RecordedNvml(laptop, watts=100)
    energy, refusals = laptop.metered(laptop.run, latency_of(0.05), device="cuda", nvml=library)
    assert energy is not None
    assert energy.source == "nvml"
    assert refusals[0].reason == "it counts the energy of cpu alone, and the model runs on cuda"
    by_name, _ = laptop.metered(laptop.run, latency_of(0.05), device="cuda", energy="rapl")
    assert by_name is not None
    assert by_name.note.endswith("it counts the energy of cpu alone, and the model runs on cuda")


def test_the_proxy_is_power_times_median_latency_and_says_so(tmp_path: Path) -> None:
    machine = Replay(tmp_path)
    energy, refusals = machine.metered(machine.run, latency_of(0.25), power_watts=2)
    assert energy is not None
    assert energy.joules == 2 * 0.25
    assert energy.note == "proxy, not measured: 2 W given × median latency of 0.25 s"
    assert len(refusals) == 3
    assert machine.runs == 0


def test_the_proxy_owns_up_that_idle_power_is_in(tmp_path: Path) -> None:
    machine = Replay(tmp_path)
    energy, _ = machine.metered(machine.run, latency_of(0.25), energy="proxy", power_watts=2, subtract_idle=True)
    assert energy is not None
    assert energy.idle_watts is None
    assert "idle power is not known and not subtracted" in energy.note


def test_without_any_meter_there_is_no_figure_but_a_reason_each(tmp_path: Path) -> None:
    machine = Replay(tmp_path)
    energy, refusals = machine.metered(machine.run, latency_of(0.25))
    assert energy is None
    assert [refusal.meter for refusal in refusals] == ["rapl", "nvml", "jetson", "proxy"]
    assert "no package counter" in refusals[0].reason
    assert "no INA3221 monitor" in refusals[2].reason
    assert "pass power_watts=" in refusals[3].reason


def test_no_energy_asked_no_energy_sought(laptop: Replay) -> None:
    assert laptop.metered(laptop.run, latency_of(0.05), energy=None) == (None, ())
    assert laptop.runs == 0


def test_the_model_of_energy_prices_operations_and_bytes() -> None:
    profile = eo.profile(nn.Linear(16, 8, bias=False), (4, 16))
    energy, _ = measure_energy(lambda: None, latency_of(1), energy="model", profile=profile)
    assert energy is not None
    macs, moved_bytes = 4 * 16 * 8, 4 * (4 * 16 + 16 * 8 + 4 * 8)
    # 0.8 x 1.25 pJ from cache and 0.2 x 160 pJ from DRAM are 33 pJ a byte.
    assert energy.joules == pytest.approx((macs * (0.9 + 3.7) + moved_bytes * 33) * 1e-12)
    assert energy.source == "model"
    assert "Horowitz" in energy.note
    assert "33 pJ" in energy.note


def test_the_model_of_energy_follows_each_operators_type() -> None:
    half = eo.profile(nn.Linear(16, 8, bias=False).half(), torch.zeros(4, 16, dtype=torch.float16))
    energy, _ = measure_energy(lambda: None, latency_of(1), energy="model", profile=half)
    assert energy is not None
    macs, moved_bytes = 4 * 16 * 8, 2 * (4 * 16 + 16 * 8 + 4 * 8)
    assert energy.joules == pytest.approx((macs * (0.4 + 1.1) + moved_bytes * 33) * 1e-12)


def test_the_model_of_energy_names_what_it_cannot_price() -> None:
    brain = eo.profile(nn.Linear(16, 8).bfloat16(), torch.zeros(4, 16, dtype=torch.bfloat16))
    with pytest.raises(MeterFailed, match="no energy for MACs in bfloat16; it has float32"):
        measure_energy(lambda: None, latency_of(1), energy="model", profile=brain)

    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    whole = eo.profile(Counts(), torch.zeros(5, dtype=torch.int64))
    energy, _ = measure_energy(lambda: None, latency_of(1), energy="model", profile=whole)
    assert energy is not None
    assert energy.joules == pytest.approx(2 * 5 * 8 * 33e-12)
    assert "without 5 operations in int64, which have no figure" in energy.note


@pytest.mark.parametrize("name", ["rapl", "nvml", "jetson", "proxy", "model"])
def test_a_meter_asked_for_by_name_works_or_raises(tmp_path: Path, name: str) -> None:
    machine = Replay(tmp_path)
    library = RecordedNvml(machine, watts=60, has_counter=False, has_power=False)
    with pytest.raises(MeterFailed, match=f"the meter '{name}' cannot be used: "):
        machine.metered(lambda: None, latency_of(1), library, energy=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"energy": "wattmeter"}, "energy is 'wattmeter'; it must be 'auto', None or one of rapl, nvml, jetson"),
        ({"power_watts": 0}, "power_watts is 0"),
        ({"power_watts": -2.0}, "power_watts is -2.0"),
        ({"power_watts": float("nan")}, "power_watts is nan"),
        ({"power_watts": "2"}, "power_watts is '2'"),
        ({"min_time_s": 0}, "min_time_s is 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        measure_energy(lambda: None, latency_of(1), **arguments)


def test_an_error_of_the_model_passes_through_and_sampling_ends(tmp_path: Path) -> None:
    machine = Replay(tmp_path, "jetson_nano", forward_s=0.02)

    def run() -> None:
        machine.run()
        if machine.runs == 3:
            raise RuntimeError("forward gave up")

    with pytest.raises(RuntimeError, match="forward gave up"):
        machine.metered(run, latency_of(0.02))
    assert machine.ticks == []


def test_the_sampling_thread_ticks_until_the_block_ends() -> None:
    before = threading.active_count()
    third = threading.Event()
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            third.set()

    with in_thread(tick, period_s=1e-4):
        assert third.wait(timeout=30)
    assert threading.active_count() == before


def test_power_is_integrated_by_trapezoids(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([(0.0, 10.0), (1.0, 20.0), (3.0, 20.0), (3.5, 10.0)])
    now_s, now_watts = 0.0, 0.0

    def watts() -> float:
        nonlocal now_s, now_watts
        now_s, now_watts = next(samples)
        return now_watts

    # The first time is taken before the first sample, all others after theirs.
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    integral = PowerIntegral(watts)
    integral.sample()
    integral.sample()
    assert integral.joules() == 15 * 1 + 20 * 2 + 15 * 0.5


def test_every_meter_is_listed_with_its_reason(laptop: Replay) -> None:
    with laptop.in_place():
        listed = {meter.name: meter.refusal for meter in meters()}
    assert list(listed) == ["rapl", "nvml", "jetson", "proxy", "model"]
    assert listed["rapl"] is None
    assert all(listed[name] for name in ("jetson", "proxy", "model"))
