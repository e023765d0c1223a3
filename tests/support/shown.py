"""One of each record that people meet, small and with deep names, for tests of how records show themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

import edge_opt as eo
from calibrations import imaginary
from edge_opt import compress
from edge_opt.model_comparison import compare
from edge_opt.records.conversions import Agreement, Converted, Kernel, LayerPrecision, RunnerProfile
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.serving import ServingComparison
from edge_opt.records.sweeps import SweepStatus
from sweeps import small_sweep

WIDTH = 8
SHAPE = (1, 4, WIDTH)
TARGETS = ("raspberry-pi-4", "jetson-nano", "raspberry-pi-5", "coral-usb", "rp2040")


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        scores = torch.softmax(self.q_proj(x) @ self.k_proj(x).transpose(-1, -2), -1)
        return self.out_proj(scores @ self.v_proj(x))


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = Attention(width)
        self.mlp = nn.ModuleDict({"dense_in": nn.Linear(width, hidden), "dense_out": nn.Linear(hidden, width)})
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layer_norm(x + self.self_attn(x))
        return x + self.mlp["dense_out"](torch.relu(self.mlp["dense_in"](x)))


class Encoder(nn.Module):
    """Names as Hugging Face has them: `model.encoder.layers.3.self_attn.q_proj`."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        layers = nn.ModuleList(Layer(WIDTH, hidden) for _ in range(4))
        self.model = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": layers})})
        self.classifier = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.model["encoder"]["layers"]:  # type: ignore[index]
            x = layer(x)
        return self.classifier(x.mean(1))


@cache
def profiled(hidden: int = 16, is_measured: bool = False, target: str | None = None) -> ModelProfile:
    measure: Any = {"min_time_s": 0.02} if is_measured else False
    return eo.profile(Encoder(hidden), SHAPE, measure=measure, target=target, name=f"encoder of {hidden}")


def converted() -> Converted:
    """A conversion as `compress.convert` returns it, without running one."""
    paths = [f"model.encoder.layers.{n}.self_attn.{name}" for n in range(4) for name in ("q_proj", "out_proj")]
    layers = tuple(
        LayerPrecision(path, "MatMul", "fp32" if n % 2 else "int8", "spared") for n, path in enumerate(paths)
    )
    agreement = Agreement(0.1, 0.01, 1.0, 0.99, 64, 2, "calibration batches")
    return Converted(
        "int8", "onnxruntime", "int8+fp32", layers, kernels(), agreement, 2048, 8192, "out/encoder.onnx", ("x",),
        ("y",), ("3 of 12 kernels only convert or reorder tensors",), nn.Linear(2, 2),
    )  # fmt: skip


def kernels() -> tuple[Kernel, ...]:
    return tuple(
        Kernel(
            f"/model/encoder/layers.{n}/self_attn/q_proj/MatMul_quant", "MatMulInteger", "int8", f"l.{n}", ("m",), 1e-5
        )
        for n in range(4)
    )


@cache
def records() -> dict[str, Any]:
    """Every record that a notebook user meets, by its name."""
    small, large = profiled(), profiled(32)
    there, here = profiled(target="raspberry-pi-4"), profiled(is_measured=True)
    batches = [(torch.randn(4, *SHAPE[1:]), torch.zeros(4, dtype=torch.int64))]
    sweep = small_sweep()
    assert here.measurement is not None and here.measurement.layers is not None
    return {
        "profile": small,
        "profile of a target": there,
        "profile, measured": here,
        "comparison": compare(small, large),
        "check": eo.check(large, "macs <= 1k", "params <= 1M", "peak_memory_mb <= 1", baseline=small),
        "targets": eo.compare_targets(Encoder(), SHAPE, TARGETS),
        "prediction": there.prediction,
        "measurement": here.measurement,
        "layer latencies": here.measurement.layers,
        "latency": here.measurement.latency,
        "roofline": eo.roofline(small, "raspberry-pi-4"),
        "device": eo.device("raspberry-pi-4"),
        "batch fit": eo.fit_batch(Encoder(), SHAPE[1:], memory_limit_mb=1),
        "memory": eo.peak_memory(small),
        "totals": small.totals,
        "environment": here.measurement.environment,
        "metrics": sweep.trials[0].metrics,
        "device memory": small.device_memory(),
        "calibration": imaginary(count=60),
        "reconciliation": eo.reconcile(small, "fvcore"),
        "pruned": compress.prune(Encoder(), SHAPE, 0.5),
        "converted": converted(),
        "agreement": converted().agreement,
        "kernels": RunnerProfile("onnxruntime", kernels(), 3),
        "sensitivity": eo.sensitivity(Encoder(), batches, prune=()),
        "explanation": eo.explain(here, replace(here, name="again")),
        "training step": eo.training_step(Encoder(), SHAPE),
        "sweep": sweep,
        "trial": sweep.trials[0],
        "status": SweepStatus("runs/a", "a", 4, 2, 1, 1, None, None, ("prune 0.5 int8 onnxruntime",), None, "none yet"),
    }


def served() -> ServingComparison:
    """A small language model in two formats on two devices."""
    from language_models import small_llama

    found = eo.llm(small_llama(), target=["raspberry-pi-5", "apple-m1"], weights="q4_0,q8_0", context=128)
    assert isinstance(found, ServingComparison)
    return found
