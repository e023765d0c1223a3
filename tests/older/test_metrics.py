"""collect_metrics: every figure by its definition, any kind of batch, bad input refused, everything left as it was."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edge_opt.metrics
from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.metrics import Metrics, collect_metrics
from zoo import torchvision_models

FIELDS = """accuracy accuracy_ci95_low accuracy_ci95_high latency_ms latency_median_ms latency_std_ms latency_p95_ms
throughput_sps model_memory_mb memory_mb estimated_runtime_memory_mb energy_proxy_j energy_proxy_note""".split()
MIB = 2**20
PACKAGE = Path(edge_opt.metrics.__file__).parent


class Says(nn.Module):
    """Scores of three classes: the class that each sample names, first column first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(x[:, 0].long(), 3) * self.scale


def saying(classes: list[int]) -> torch.Tensor:
    return torch.tensor(classes, dtype=torch.float32).reshape(-1, 1)


def ticking(*durations_s: float) -> Callable[[], float]:
    """A clock under which the trials take these times, in order."""

    def times() -> Iterator[float]:
        now_s = 5.0
        for duration_s in durations_s:
            yield now_s
            now_s += duration_s
            yield now_s

    moments = times()
    return lambda: next(moments)


def collect(model: nn.Module, loader: Any, **changes: Any) -> Metrics:
    arguments: dict[str, Any] = {"device": "cpu", "power_watts": 2.0, "precision": "fp32"}
    return collect_metrics(model, loader, **(arguments | changes))


RIGHT = [(saying([0, 1, 2, 0]), torch.tensor([0, 1, 2, 0]))]


def test_the_record_has_the_published_fields_in_their_order() -> None:
    assert [field.name for field in fields(Metrics)] == FIELDS


def test_accuracy_is_right_answers_over_the_whole_loader() -> None:
    # 3 of 4 in the first batch, 1 of 2 in the second.
    loader = [(saying([0, 1, 2, 0]), torch.tensor([0, 1, 2, 1])), (saying([2, 2]), torch.tensor([2, 0]))]
    assert collect(Says(), loader).accuracy == 4 / 6


def test_the_interval_is_that_of_a_bootstrap() -> None:
    labels = torch.zeros(400, dtype=torch.int64)
    labels[:100] = 1
    metrics = collect(Says(), [(torch.zeros(400, 1), labels)])
    # 1.96 standard errors of 300 in 400: 1.96 x sqrt(0.75 x 0.25 / 400) = 0.0424
    assert metrics.accuracy_ci95_low == pytest.approx(0.75 - 0.0424, abs=0.005)
    assert metrics.accuracy_ci95_high == pytest.approx(0.75 + 0.0424, abs=0.005)
    # Against answers drawn one by one.
    drawn = np.random.default_rng(3).choice(np.arange(400) < 300, (10_000, 400)).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert metrics.accuracy_ci95_low == pytest.approx(low, abs=0.0026)
    assert metrics.accuracy_ci95_high == pytest.approx(high, abs=0.0026)


def test_the_interval_is_the_same_every_time_whatever_was_drawn_before() -> None:
    # So many samples that two unseeded intervals would differ in their last digits.
    labels = torch.arange(300_000) % 4 == 0
    intervals = set()
    for seed in range(3):
        torch.manual_seed(seed)
        np.random.seed(seed)
        metrics = collect(Says(), [(torch.zeros(300_000, 1), labels)])
        intervals.add((metrics.accuracy_ci95_low, metrics.accuracy_ci95_high))
    assert len(intervals) == 1


def test_latency_is_a_statistic_over_trials_of_repeated_forwards() -> None:
    clock = ticking(0.2, 0.4, 0.2, 0.8)
    metrics = collect(Says(), RIGHT, benchmark_repeats=2, benchmark_trials=4, benchmark_warmup=3, clock=clock)
    # Trials of two forwards: 100, 200, 100, 400 ms each.
    assert metrics.latency_ms == pytest.approx((100 + 200 + 100 + 400) / 4)
    assert metrics.latency_median_ms == pytest.approx((100 + 200) / 2)
    assert metrics.latency_std_ms == pytest.approx(((100**2 + 0 + 100**2 + 200**2) / 4) ** 0.5)
    # 95 % of the way from the first to the fourth: 2.85 steps of three.
    assert metrics.latency_p95_ms == pytest.approx(200 + 0.85 * (400 - 200))
    assert metrics.throughput_sps == pytest.approx(4 / 0.2)
    assert metrics.energy_proxy_j == pytest.approx(2.0 * 0.2)
    assert metrics.energy_proxy_note == "a proxy, not a measurement: 2 W given × mean latency of 0.2 s"


def test_the_multiplier_scales_latencies_throughput_and_energy() -> None:
    times = (0.1, 0.3)
    once, thrice = (
        collect(
            Says(),
            RIGHT,
            latency_multiplier=factor,
            benchmark_repeats=1,
            benchmark_trials=2,
            benchmark_warmup=0,
            clock=ticking(*times),
        )
        for factor in (1.0, 3.0)
    )
    for name in ("latency_ms", "latency_median_ms", "latency_std_ms", "latency_p95_ms", "energy_proxy_j"):
        assert getattr(thrice, name) == pytest.approx(3 * getattr(once, name)), name
    assert thrice.throughput_sps == pytest.approx(once.throughput_sps / 3)
    assert (thrice.accuracy, thrice.memory_mb) == (once.accuracy, once.memory_mb)


def test_every_repeat_trial_and_warm_up_is_run_on_the_first_batch() -> None:
    sizes: list[int] = []
    model = Says()
    model.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    loader = [(saying([0, 1]), torch.tensor([0, 1])), (saying([2]), torch.tensor([2]))]
    collect(model, loader, benchmark_repeats=4, benchmark_trials=3, benchmark_warmup=2)
    # Both batches once for accuracy, then 2 + 3 x 4 of the first; one more for the memory estimate.
    assert sizes[: 2 + 14] == [2, 1] + [2] * 14
    assert len(sizes) <= 2 + 14 + 1


def test_memory_is_weights_then_inputs_and_activations() -> None:
    class Branches(nn.Module):
        """Holds `a` to the end without need."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(16, 256, bias=False)
            self.narrow = nn.Linear(256, 256, bias=False)
            self.head = nn.Linear(256, 16, bias=False)
            self.register_buffer("offset", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.wide(x)
            b = self.narrow(a)
            c = self.narrow(b)
            return self.head(c) + self.offset

    batch = (torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64))
    metrics = collect(Branches(), [batch])
    weights = 4 * (16 * 256 + 256 * 256 + 256 * 16 + 16)
    inputs, wide, narrow = 4 * 8 * 16, 4 * 8 * 256, 4 * 8 * 16
    assert metrics.model_memory_mb == weights / MIB
    assert metrics.memory_mb == metrics.model_memory_mb
    # Eager code ends with a, b, c, the product and its sum alive.
    assert metrics.estimated_runtime_memory_mb == (weights + inputs + 3 * wide + 2 * narrow) / MIB


# The published page on bandwidth, "Example Usage", as far as it is about metrics.
PUBLISHED = """
import torch
from edge_opt.model import SmallCNN
from edge_opt.metrics import collect_metrics
from torch.utils.data import DataLoader, TensorDataset

# Setup
model = SmallCNN()
device = torch.device("cpu")
dummy_data = TensorDataset(
    torch.randn(100, 1, 28, 28),
    torch.randint(0, 10, (100,))
)
val_loader = DataLoader(dummy_data, batch_size=32)

# Collect metrics
metrics = collect_metrics(
    model, val_loader, device,
    power_watts=2.0,
    precision="fp32",
    latency_multiplier=1.0,
    benchmark_repeats=5
)
"""


def test_the_published_example_runs_as_written() -> None:
    names: dict[str, Any] = {}
    exec(PUBLISHED, names)
    metrics = names["metrics"]
    assert metrics.latency_ms > 0
    assert metrics.energy_proxy_j == pytest.approx(2.0 * metrics.latency_ms / 1000)
    assert 0 <= metrics.accuracy_ci95_low <= metrics.accuracy <= metrics.accuracy_ci95_high <= 1
    # Inputs, then the outputs of conv1 and its ReLU, which are alive together.
    assert metrics.memory_mb == metrics.model_memory_mb
    beside_weights = metrics.estimated_runtime_memory_mb - metrics.model_memory_mb
    assert beside_weights == pytest.approx(4 * 32 * (28 * 28 + 2 * 16 * 28 * 28) / MIB)
    assert names["model"].training


Pair = namedtuple("Pair", "left right")


class Adds(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot((a + b)[:, 0].long(), 3).float()


class AddsPair(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        a, b = pair.values() if isinstance(pair, dict) else pair
        return nn.functional.one_hot((a + b)[:, 0].long(), 3).float()


class OnlyNamed(nn.Module):
    def forward(self, *, a: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(a[:, 0].long(), 3).float()


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Says(), [saying([0, 1]), [0, 1]]),
        (Says(), (saying([0, 1]), torch.tensor([[0], [1]], dtype=torch.uint8))),
        (Says(), {"x": saying([0, 1]), "y": torch.tensor([0, 1])}),
        (Says(), {"image": saying([0, 1]), "label": torch.tensor([0, 1])}),
        (Says(), ({"x": saying([0, 1])}, torch.tensor([0, 1]))),
        (OnlyNamed(), {"a": saying([0, 1]), "labels": torch.tensor([0, 1])}),
        (Adds(), (saying([0, 0]), saying([0, 1]), torch.tensor([0, 1]))),
        (Adds(), {"b": saying([0, 0]), "a": saying([0, 1]), "labels": torch.tensor([0, 1])}),
        (AddsPair(), (Pair(saying([0, 0]), saying([0, 1])), torch.tensor([0, 1]))),
        (AddsPair(), {"left": saying([0, 0]), "right": saying([0, 1]), "labels": torch.tensor([0, 1])}),
    ],
    ids="list column dict other_name mapping keyword_only two_inputs two_names namedtuple whole_mapping".split(),
)
def test_any_kind_of_batch_is_read(model: nn.Module, batch: Any) -> None:
    metrics = collect(model, [batch], clock=ticking(5, 5, 5))
    assert (metrics.accuracy, metrics.throughput_sps) == (1.0, 2 / 1)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda scores: {"logits": scores, "loss": scores.sum()},
        lambda scores: {"out": scores},
        lambda scores: (scores, scores.sum()),
        lambda scores: namedtuple("Output", "loss logits")(scores.sum(), scores),
    ],
    ids=["logits", "only_one", "tuple", "attribute"],
)
def test_any_kind_of_output_is_read(wrap: Callable[[torch.Tensor], Any]) -> None:
    class Wraps(Says):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    assert collect(Wraps(), RIGHT).accuracy == 1.0


def test_a_transformer_with_its_own_batches_and_outputs() -> None:
    torchvision_models()
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=4
    )
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0]))
    encoding = transformers.BatchEncoding(
        {
            "input_ids": torch.randint(0, 50, (4, 7)),
            "attention_mask": torch.ones(4, 7, dtype=torch.int64),
            "labels": torch.tensor([2, 2, 2, 1]),
        }
    )
    metrics = collect(model, [encoding])
    # The bias alone decides: class 2 for all, right for three of four.
    assert metrics.accuracy == 3 / 4


def test_a_packed_sequence_is_an_input() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, packed: Any) -> torch.Tensor:
            _, last = self.rnn(packed)
            return self.head(last[0])

    packed = nn.utils.rnn.pack_sequence([torch.zeros(5, 3), torch.zeros(2, 3)])
    assert collect(Counts(), [(packed, torch.tensor([0, 0]))]).accuracy in (0.0, 1.0)


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_inputs_are_cast_to_the_precision_of_the_model(precision: str, dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []
    model = Says().to(dtype)
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    metrics = collect(model, RIGHT, precision=precision)
    assert set(seen) == {dtype}
    # One weight of two bytes.
    assert (metrics.accuracy, metrics.model_memory_mb) == (1.0, 2 / MIB)


@pytest.mark.parametrize(
    ("model", "precision", "message"),
    [
        (Says(), "fp16", "'fp16'.*1 of 1.*scale is float32"),
        (Says().half(), "fp32", "scale is float16"),
        (nn.Sequential(nn.Linear(1, 3).bfloat16(), nn.Linear(3, 3)), "bf16", r"2 of 4.*1\.weight"),
        (Says(), "int8", "precision is 'int8'"),
        (Says(), "fp64", "'fp64'.*fp32, fp16, bf16, int8"),
    ],
)
def test_a_precision_that_the_model_is_not_in_is_refused(model: nn.Module, precision: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        collect(model, RIGHT, precision=precision)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_int8_takes_a_quantised_model_and_counts_its_packed_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    batch = (torch.randn(4, 64), torch.tensor([0, 1, 2, 0]))
    metrics = collect(quantised, [batch], precision="int8")
    # Weights of one byte, biases of four; an output scale (4) and zero point (8) in each of two layers.
    assert metrics.model_memory_mb == (64 * 32 + 32 * 3 + 4 * (32 + 3) + 2 * (4 + 8)) / MIB
    with pytest.raises(InvalidInput, match="'fp32'.*2 of 2.*qint8"):
        collect(quantised, [batch])


class Packed(torch.Tensor):
    """A weight that shows float32 and holds int8 with one scale, as torchao's do."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        plain = [arg.values * arg.scale if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def test_int8_weights_inside_a_wrapper_are_seen_as_what_they_are() -> None:
    model = nn.Linear(64, 3, bias=False)
    model.weight = nn.Parameter(Packed(torch.ones(3, 64, dtype=torch.int8), torch.tensor(0.5)), requires_grad=False)
    batch = (torch.randn(4, 64), torch.zeros(4, dtype=torch.int64))
    assert collect(model, [batch], precision="int8").model_memory_mb == (3 * 64 + 4) / MIB
    with pytest.raises(InvalidInput, match="'fp32'.*1 of 2.*int8"):
        collect(model, [batch])


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("mps")])
def test_a_gpu_that_is_not_there_is_replaced_with_a_warning(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.warns(UserWarning, match=str(device)) as caught:
        assert collect(Says(), RIGHT, device=device).accuracy == 1.0
    assert Path(caught[0].filename).name == Path(__file__).name


class Failing(Says):
    """Fails at one call, counted from 1."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("out of luck\n  at layer 3")
        return super().forward(x)


class Gives(nn.Module):
    """Returns the same, whatever it gets."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        return self.output


FOUR = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("model", "loader", "changes", "error", "message"),
    [
        (Says(), [], {}, InvalidInput, "the loader has no batches"),
        (Says(), [torch.zeros(4, 1)], {}, InvalidInput, "batch 0 is a Tensor, without labels"),
        (Says(), [(torch.zeros(4, 1),)], {}, InvalidInput, "batch 0 is a tuple, without labels"),
        (Says(), [{"x": saying([0])}], {}, InvalidInput, "batch 0 is a mapping of x, without labels"),
        (Says(), [(saying([0]), ["cat"])], {}, InvalidInput, "labels are not numbers"),
        (
            Says(),
            [(saying([0]), torch.tensor([0.0]))],
            {},
            InvalidInput,
            "torch.float32 do not fit accuracy",
        ),
        (
            Says(),
            [(saying([0, 1]), FOUR)],
            {},
            InvalidInput,
            r"outputs \(2, 3\) and labels \(4,\) of torch.int64 do not fit",
        ),
        (
            Says(),
            [*RIGHT, (saying([0]), torch.tensor([7]))],
            {},
            InvalidInput,
            "a label is 7, and the outputs have 3",
        ),
        (Says(), [(saying([0]), torch.tensor([-1]))], {}, MeasurementFailed, "accuracy is nan"),
        (
            Says(),
            [(torch.zeros(0, 1), torch.tensor([], dtype=torch.int64))],
            {},
            InvalidInput,
            "the loader has no batches",
        ),
        (Gives(torch.zeros(4, 1)), RIGHT, {}, InvalidInput, r"outputs \(4, 1\) .* do not fit accuracy"),
        (Gives(torch.zeros(4, 3, 8, 8)), RIGHT, {}, InvalidInput, r"outputs \(4, 3, 8, 8\) and labels \(4,\)"),
        (Gives(None), RIGHT, {}, InvalidInput, "NoneType"),
        (Gives({"a": FOUR, "b": FOUR}), RIGHT, {}, InvalidInput, r"outputs \(4,\) .* do not fit accuracy"),
        (Gives(torch.full((4, 3), torch.nan)), RIGHT, {}, MeasurementFailed, "outputs of batch 0 are NaN"),
        (Failing(at=2), [*RIGHT, *RIGHT], {}, MeasurementFailed, "the model failed on batch 1: out of luck$"),
        # One call for accuracy and three of warm-up come before the third timed one.
        (Failing(at=1 + 3 + 3), RIGHT, {}, MeasurementFailed, "failed at repeat 6: RuntimeError: out of luck$"),
        (Says(), RIGHT, {"clock": lambda: 1.0}, MeasurementFailed, "clock.*5"),
        (Says(), RIGHT, {"power_watts": 0}, InvalidInput, "power_watts is 0"),
        (Says(), RIGHT, {"power_watts": -1.5}, InvalidInput, "power_watts is -1.5"),
        (Says(), RIGHT, {"power_watts": float("nan")}, InvalidInput, "power_watts is nan"),
        (Says(), RIGHT, {"latency_multiplier": 0.0}, InvalidInput, "latency_multiplier is 0.0"),
        (Says(), RIGHT, {"latency_multiplier": "2"}, InvalidInput, "latency_multiplier is '2'"),
        (Says(), RIGHT, {"benchmark_repeats": 0}, InvalidInput, "benchmark_repeats is 0; .* at least 1"),
        (Says(), RIGHT, {"benchmark_trials": -1}, InvalidInput, "benchmark_trials is -1; .* at least 1"),
        (Says(), RIGHT, {"benchmark_trials": True}, InvalidInput, "benchmark_trials is True"),
        (Says(), RIGHT, {"benchmark_warmup": -1}, InvalidInput, "benchmark_warmup is -1; .* at least 0"),
        (Says(), RIGHT, {"benchmark_warmup": 1.5}, InvalidInput, "benchmark_warmup is 1.5"),
        (Says(), RIGHT, {"device": "toaster"}, InvalidInput, "device is 'toaster'"),
        (Says(), RIGHT, {"device": "meta"}, InvalidInput, "device is 'meta'"),
        (Says().to("meta"), RIGHT, {}, InvalidInput, "weights are on the meta device"),
        (Says, RIGHT, {}, InvalidInput, r"torch\.nn\.Module.*type"),
    ],
)
def test_bad_input_is_one_clear_error(
    model: Any, loader: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        collect(model, loader, **changes)


class Untidy(nn.Module):
    """Counts, draws and keeps in forward, and changes its buffers even in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.steps += 1
        self.last = x
        self.cache = x[0] * torch.rand(3) * random.random() * np.random.rand()
        self.register_buffer("made_in_forward", torch.ones(2))
        if self.calls == 9 and x[0, 0] > 0:
            raise RuntimeError("gave up")
        return self.drop(self.norm(x))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_and_the_process_are_as_they_were(fails: bool, training: bool) -> None:
    model = Untidy().train(training)
    model.norm.train(not training)
    loader = DataLoader(
        TensorDataset(torch.full((6, 3), float(fails)), torch.zeros(6, dtype=torch.int64)), batch_size=2
    )

    def state() -> list[Any]:
        return [
            {name: tensor.tolist() for name, tensor in model.state_dict().items()},
            [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
            [module.training for module in model.modules()],
            [sorted(module.__dict__) for module in model.modules()],
            model.calls,
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()),
            (torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()),
        ]

    before = state()
    if fails:
        with pytest.raises(MeasurementFailed, match="repeat 6: RuntimeError: gave up"):
            collect(model, loader)
    else:
        collect(model, loader)
    assert state() == before


def test_models_run_in_eval_mode_without_gradients() -> None:
    seen: set[tuple[bool, bool]] = set()
    model = Says().train()
    model.register_forward_hook(lambda module, args, out: seen.add((module.training, torch.is_grad_enabled())))
    collect(model, RIGHT)
    assert seen == {(False, False)}


def test_a_script_module_is_measured_and_restored() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.5)).train())
    assert 0 <= collect(scripted, RIGHT).accuracy <= 1
    assert scripted.training
