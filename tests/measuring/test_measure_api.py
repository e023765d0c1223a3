"""measure(): what it hands back, what it refuses, and that it leaves everything as it was."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from awkward import Awkward, same, state
from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.measuring.machine import CPU, device_count
from edge_opt.measuring.session import Caller, first_dimension, writes_parameters
from edge_opt.records.measurements import Energy, Latency, Measurement, Refusal
from edge_opt.trace import trace
from edge_opt.trace.inputs import CallArguments, call_on, on_device

SHORT: dict[str, Any] = {"min_time_s": 0.01, "max_time_s": 0.02, "threads": 1, "memory": False, "energy": None}
# For models that end it themselves.
LONG = SHORT | {"min_time_s": 60.0, "max_time_s": 60.0}


class Failing(nn.Module):
    """Gives up at its `at`-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.at, self.calls = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("no more")
        return self.linear(x)


def test_a_measurement_has_what_was_asked_for() -> None:
    found = eo.measure(nn.Linear(4, 4), (6, 4), **SHORT)
    assert isinstance(found, Measurement)
    assert (found.memory, found.energy, found.energy_refusals) == (None, None, ())
    assert found.latency.batch_size == 6
    assert found.latency.throughput == 6 / found.latency.median_s
    assert (found.environment.threads, found.environment.device) == (1, "cpu")
    assert eo.measure(nn.Linear(4, 4), (6, 4), layers=False, **SHORT).layers is None


@pytest.mark.parametrize(
    ("model", "inputs", "kwargs"),
    [
        (nn.Linear(4, 4), (2, 4), None),
        (nn.Linear(4, 4), torch.zeros(2, 4), None),
        (nn.Bilinear(4, 4, 2), [(2, 4), (2, 4)], None),
        (nn.Linear(4, 4), {"input": (2, 4)}, None),
        (nn.Embedding(8, 4), [((2, 3), "int64")], None),
        (nn.Linear(4, 4), None, {"input": torch.zeros(2, 4)}),
        (nn.Linear(4, 4).double(), (2, 4), None),
    ],
    ids=["shape", "tensor", "list", "mapping", "dtype", "keywords", "double"],
)
def test_inputs_are_written_as_for_a_profile(model: nn.Module, inputs: Any, kwargs: Any) -> None:
    assert eo.measure(model, inputs, kwargs=kwargs, **SHORT).latency.batch_size == 2


def test_the_batch_can_be_told_where_it_is_not_in_front() -> None:
    assert eo.measure(nn.LSTM(4, 4), (5, 3, 4), batch_size=3, **SHORT).latency.batch_size == 3
    assert first_dimension(call_on(nn.ReLU(), [torch.tensor(1.0)], None, "cpu")) == 1


@pytest.mark.parametrize(("measure", "least"), [(True, 0.5), ({"min_time_s": 0.01}, 0.005)])
def test_a_profile_holds_the_measurement_beside_its_estimates(
    monkeypatch: pytest.MonkeyPatch, measure: Any, least: float
) -> None:
    asked: list[dict[str, Any]] = []

    def fake(model: nn.Module, inputs: Any, **options: Any) -> Measurement:
        asked.append(options)
        return found

    model = nn.Linear(4, 4)
    found = eo.measure(model, (2, 4), **SHORT)
    monkeypatch.setattr("edge_opt.measuring.session.measure", fake)
    profile = eo.profile(model, (2, 4), measure=measure)
    assert profile.measurement is found
    assert replace(profile, measurement=None) == eo.profile(model, (2, 4))
    assert asked[0]["profile"] == eo.profile(model, (2, 4))
    assert asked[0].get("min_time_s", 1.0) >= least


def test_a_profile_measures_for_real() -> None:
    found = eo.profile(nn.Linear(4, 4), (2, 4), measure=SHORT).measurement
    assert found is not None
    assert [row.kind for row in found.layers.layers] == ["Linear"]
    assert eo.profile(nn.Linear(4, 4), (2, 4)).measurement is None


@pytest.mark.parametrize("looks", [False, True], ids=["meta", "real"])
@pytest.mark.parametrize("at", [None, 1, 3, 10])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_everything_is_as_it_was(looks: bool, at: int | None, mode: str) -> None:
    class Stopping(Awkward):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.calls + 1 == at and not x.is_meta and ready_to_fail:
                raise RuntimeError("no more")
            return super().forward(x)

    ready_to_fail = False
    model = Stopping(fails=False, looks=looks).train(mode == "eval")
    x = torch.randn(2, 4)  # the model keeps it in a cache of two rows
    x_before = x.clone()
    profile = eo.profile(model, x, mode=mode)
    ready_to_fail = True
    before, collects = state(model), gc.isenabled()
    options = (SHORT if at is None else LONG) | {"threads": torch.get_num_threads() + 1}
    if at is None:
        eo.measure(model, x, mode=mode, profile=profile, **options)
    else:
        with pytest.raises(MeasurementFailed, match=f"failed at repeat {at}: RuntimeError: no more"):
            eo.measure(model, x, mode=mode, profile=profile, **options)
    after = state(model)
    for key in before:
        assert same(before[key], after[key]), key
    assert torch.equal(x, x_before)
    assert gc.isenabled() == collects


def test_weights_written_by_forward_are_restored_and_others_are_not_copied() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.weight.data.mul_(0.5)
            return self.linear(x)

    model = Scaling()
    before = model.linear.weight.clone()
    assert writes_parameters(trace(model, (2, 4)))
    eo.measure(model, (2, 4), **SHORT)
    assert torch.equal(model.linear.weight, before)
    assert not writes_parameters(trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), (2, 4)))


def test_a_model_that_fails_at_the_third_repeat_says_so() -> None:
    with pytest.raises(MeasurementFailed, match="the model failed at repeat 3: RuntimeError: no more") as caught:
        eo.measure(Failing(at=3), (2, 4), **LONG)
    assert isinstance(caught.value, eo.EdgeOptError)


def test_repeats_are_counted_across_recorded_and_plain_runs() -> None:
    model = Failing(at=200)
    with pytest.raises(MeasurementFailed, match="repeat 200:"):
        eo.measure(model, (2, 4), **LONG)


def test_nan_in_the_output_is_remarked() -> None:
    found = eo.measure(nn.Linear(4, 4), torch.full((2, 4), float("nan")), **SHORT)
    assert found.latency.remarks[-1] == "1 of 1 output tensors have NaN; check the weights and inputs"
    assert not any("NaN" in remark for remark in eo.measure(nn.Linear(4, 4), (2, 4), **SHORT).latency.remarks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_time_s": 0}, "min_time_s is 0"),
        ({"min_time_s": -1}, "min_time_s is -1"),
        ({"max_time_s": 0.001}, "max_time_s is 0.001"),
        ({"target_precision": 0}, "target_precision is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -2}, "batch_size is -2"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"threads": True}, "threads is True"),
        ({"mode": "test"}, "mode is 'test'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_bad_options_are_refused_before_the_model_runs(options: dict[str, Any], words: str) -> None:
    model = Failing(at=1)
    with pytest.raises(InvalidInput, match=words):
        eo.measure(model, (2, 4), **(SHORT | options))
    assert model.calls == 0


def test_cuda_where_there_is_none_is_refused() -> None:
    here = device_count("cuda")
    words = "there is only cuda:0" if here else "finds no cuda here; use device='cpu'"
    with pytest.raises(InvalidInput, match=words):
        eo.measure(nn.Linear(4, 4), (2, 4), device=f"cuda:{here}", **SHORT)


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(InvalidInput, match="meta device"):
        eo.measure(nn.Linear(4, 4, device="meta"), (2, 4), **SHORT)
    with pytest.raises(InvalidInput, match=r"must be a torch.nn.Module"):
        eo.measure(lambda x: x, (2, 4), **SHORT)
    with pytest.raises(InvalidInput, match="the profile is of mode 'train'"):
        eo.measure(nn.Linear(4, 4), (2, 4), profile=eo.profile(nn.Linear(4, 4), (2, 4), mode="train"), **SHORT)


def test_a_model_elsewhere_is_copied_and_one_in_place_is_not() -> None:
    model = nn.Linear(4, 4)
    assert on_device(model, "cpu") is model
    elsewhere = replace(CPU, torch_name="meta")
    assert on_device(model, elsewhere.torch_name) is not model
    assert model.weight.device.type == "cpu"


def test_a_cache_among_the_arguments_is_fresh_for_each_repeat() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[torch.Tensor] = []

    lengths: set[tuple[int, int]] = set()

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, cache: Cache, seen: list[int]) -> torch.Tensor:
            lengths.add((len(cache.keys), len(seen)))
            cache.keys.append(self.layer(x))
            seen.append(1)
            return cache.keys[-1]

    cache, seen = Cache(), ["kept"]
    eo.measure(Caching(), [(2, 4), cache, seen], **SHORT)
    assert lengths == {(0, 1)}
    assert (cache.keys, seen) == ([], ["kept"])


def test_arguments_that_forward_cannot_write_to_are_passed_as_they_are() -> None:
    x, seen = torch.zeros(2), []

    class Looking(nn.Module):
        def forward(self, *values: Any) -> None:
            seen.append(values)

    Caller(Looking(), CallArguments((x, (1.0, "a", None)), {})).runner().once()
    assert seen[0][0] is x


def test_forward_runs_without_gradients_in_the_mode_asked_for() -> None:
    seen: set[tuple[bool, bool, bool]] = set()

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.is_meta:
                seen.add((self.drop.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return self.drop(x)

    eo.measure(Looking(), (2, 4), **SHORT)
    assert seen == {(False, False, True)}
    seen.clear()
    eo.measure(Looking().eval(), (2, 4), mode="train", **SHORT)
    # The latency is that of a forward; the step that is timed beside it has a backward, and so gradients.
    assert seen == {(True, False, False), (True, True, False)}


def test_a_thread_count_is_used_and_given_back() -> None:
    seen: set[int] = set()

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.is_meta:
                seen.add(torch.get_num_threads())
            return x + 1

    found = torch.get_num_threads()
    measured = eo.measure(Looking(), (2, 4), **SHORT | {"threads": found + 2})
    assert seen == {found + 2} == {measured.environment.threads}
    assert torch.get_num_threads() == found


def test_the_fast_path_of_the_caller_is_what_is_measured() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        found = eo.measure(model, (1, 3, 8), **SHORT).layers
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert len(found.layers) > 5


def test_energy_gets_a_run_of_the_model_and_its_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure_energy(run: Any, latency: Latency, **options: Any) -> tuple[Energy, tuple[Refusal, ...]]:
        asked.update(options, latency=latency, calls=model.calls)
        run()
        asked["calls"] = model.calls - asked["calls"]
        return Energy(2.0, "proxy", "a note"), (Refusal("rapl", "none here"),)

    fake = ModuleType("edge_opt.measuring.energy")
    fake.measure_energy = measure_energy
    monkeypatch.setitem(sys.modules, "edge_opt.measuring.energy", fake)
    model = Failing(at=0)
    found = eo.measure(model, (2, 4), **SHORT | {"energy": "auto", "power_watts": 5.0, "subtract_idle": True})
    assert (found.energy, found.energy_refusals) == (Energy(2.0, "proxy", "a note"), (Refusal("rapl", "none here"),))
    assert asked["latency"] == found.latency
    assert asked["calls"] == 1
    assert (asked["energy"], asked["power_watts"], asked["subtract_idle"]) == ("auto", 5.0, True)


def test_memory_gets_the_arguments_and_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    fake = ModuleType("edge_opt.measuring.memory")
    fake.measure_memory = lambda *arguments: asked.extend(arguments)
    monkeypatch.setitem(sys.modules, "edge_opt.measuring.memory", fake)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    profile = eo.profile(model, x)
    eo.measure(model, x, profile=profile, **SHORT | {"memory": True})
    assert asked[0] is model
    assert torch.equal(asked[1][0], x)
    assert asked[2:] == [{}, profile.trace, "cpu", False]


def test_progress_is_told() -> None:
    told: list[tuple[float, str]] = []
    eo.measure(nn.Linear(4, 4), (2, 4), progress=lambda done, note: told.append((done, note)), **SHORT)
    assert told[0] == (0.0, "warming up")
    assert 0 < told[-1][0] <= 1
