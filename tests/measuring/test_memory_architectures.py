"""The peak of real architectures: measured, replayed by the profiler, tracked and estimated, byte for byte the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from torch.utils._python_dispatch import TorchDispatchMode

import edge_opt as eo
from edge_opt.measuring.memory import measure_memory
from edge_opt.records.costs import Trace
from edge_opt.records.measurements import MeasuredMemory
from zoo import torchvision_models

FLOAT = 4


class UNet(nn.Module):
    """Two levels down and up, with concatenated skips and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = self.block(3, 16), self.block(16, 32), self.block(32, 64)
        self.up2, self.join2 = nn.ConvTranspose2d(64, 32, 2, stride=2), self.block(64, 32)
        self.up1, self.join1 = nn.ConvTranspose2d(32, 16, 2, stride=2), self.block(32, 16)
        self.head = nn.Conv2d(16, 2, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        y = self.up2(self.bottom(F.max_pool2d(second, 2)))
        y = self.up1(self.join2(torch.cat([y, second], 1)))
        return self.head(self.join1(torch.cat([y, first], 1)))


class Reader(nn.Module):
    """An LSTM that reads tokens and classifies the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


def bert() -> nn.Module:
    import transformers

    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=2))


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision_models(), name)(weights=None, **options)


def pixels(size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(2, 3, size, size)


def tokens() -> torch.Tensor:
    return torch.randint(0, 1000, (2, 64))


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "resnet18": (vision("resnet18"), pixels(96)),
    "resnet50": (vision("resnet50"), pixels(96)),
    "mobilenet_v2": (vision("mobilenet_v2"), pixels(96)),
    "mobilenet_v3_small": (vision("mobilenet_v3_small"), pixels(96)),
    "vgg11": (vision("vgg11"), pixels(64)),
    "squeezenet1_1": (vision("squeezenet1_1"), pixels(96)),
    "densenet121": (vision("densenet121"), pixels(96)),
    "googlenet": (vision("googlenet", init_weights=False), pixels(96)),
    "efficientnet_b0": (vision("efficientnet_b0"), pixels(96)),
    "shufflenet_v2_x1_0": (vision("shufflenet_v2_x1_0"), pixels(96)),
    "convnext_tiny": (vision("convnext_tiny"), pixels(96)),
    "vit_b_16": (vision("vit_b_16", image_size=64), pixels(64)),
    "swin_t": (vision("swin_t"), pixels(128)),
    "unet": (UNet, pixels(64)),
    "lstm": (Reader, tokens),
    "bert": (bert, tokens),
    "llama": (llama, tokens),
}


def profiler_peak(model: nn.Module, x: torch.Tensor) -> int:
    """The highest running sum of the profiler's memory events, of a model nobody has touched."""
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = model(x)
        del result
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert alive == 0
    return peak


class Tracker(TorchDispatchMode):
    """Follows the storages of every operator's outputs on real tensors."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), x)}
        self.refs: dict[int, weakref.ref] = {}
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            address, nbytes = storage._cdata, storage.nbytes()
            if address not in self.known and address not in self.refs:
                self.refs[address] = weakref.ref(storage, lambda _, a=address, n=nbytes: self.gone(a, n))
                self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        return result

    def gone(self, address: int, nbytes: int) -> None:
        del self.refs[address]
        self.alive -= nbytes


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def tracked_peak(model: nn.Module, x: torch.Tensor) -> int:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # A dispatch mode keeps torch from it anyway, and says so in a warning.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with Tracker(model, x) as tracker:
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return tracker.peak


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_way_of_finding_the_peak_gives_the_same(name: str) -> None:
    make, make_input = ARCHITECTURES[name]
    torch.manual_seed(0)
    model, x = make().eval(), make_input()
    profile = eo.profile(model, x)
    memory = measure_memory(model, (x,), {}, profile.trace)
    with torch.no_grad():
        found = {
            "static estimate": profile.peak_activation_bytes,
            "tensors, measured": memory.tensor_peak_bytes,
            "tensors, tracked": tracked_peak(model, x),
            "allocator, measured": memory.peak_bytes,
            "allocator, by the profiler": profiler_peak(model, x),
            "scratch at the peak": memory.scratch_bytes,
        }
    table = "\n".join([name, *(f"{way:>28} {nbytes:>12,}" for way, nbytes in found.items())])
    assert found["allocator, measured"] == found["allocator, by the profiler"], table
    assert found["tensors, measured"] == found["tensors, tracked"], table
    assert found["static estimate"] == found["tensors, measured"], table
    assert memory.activation_bytes + memory.scratch_bytes == memory.peak_bytes
    assert memory.param_bytes == sum(parameter.numel() * FLOAT for parameter in model.parameters())
    check_rows(memory, profile.trace)


def check_rows(memory: MeasuredMemory, trace: Trace) -> None:
    rows = memory.modules
    assert [(row.module, row.path) for row in rows] == [(call.index, call.path) for call in trace.modules]
    assert rows[0].before_bytes == 0
    assert rows[0].peak_bytes == memory.peak_bytes
    assert memory.peak_module in {row.path for row in rows if row.peak_bytes == memory.peak_bytes}
    for row, call in zip(rows, trace.modules, strict=True):
        assert row.peak_bytes >= max(row.before_bytes, row.before_bytes + row.allocated_bytes)
        assert call.parent is None or row.peak_bytes <= rows[call.parent].peak_bytes
