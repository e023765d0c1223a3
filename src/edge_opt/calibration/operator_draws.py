"""Operators drawn at random, to be timed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from edge_opt.records.costs import OpSignature, TensorInfo
from edge_opt.trace.operators import Behavior, facts_of, signature_of

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
MOST_MACS = 500_000_000
MOST_BYTES = 48 << 20


T = TypeVar("T")


class Draw:
    """Random sizes, mostly round ones, as people choose them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def log(self, low: int, high: int) -> int:
        return round(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def width(self, low: int = 8, high: int = 2048) -> int:
        step = self.random.choice((1, 4, 8, 8, 8, 16, 16, 32))
        return max(low, round(self.log(low, high) / step) * step)

    def batch(self) -> int:
        return self.random.choice((1, 1, 1, 2, 4, 8, 8))

    def side(self) -> int:
        return self.random.choice((7, 7, 14, 14, 28, 28, 56, 56, 112, self.log(4, 120)))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def of(self, *values: T) -> T:
        return self.random.choice(values)

    def image(self, low: int = 8, high: int = 1024) -> torch.Tensor:
        """Return a feature map of at most the largest size, with its channels last now and then."""
        while True:
            batch, width, side = self.batch(), self.width(low, high), self.side()
            if batch * width * side * side * 4 <= MOST_BYTES:
                image = tensor(batch, width, side, side)
                return image.to(memory_format=torch.channels_last) if self.chance(0.12) else image

    def rows(self) -> torch.Tensor:
        """Return a tensor of tokens: batch, length, width."""
        while True:
            batch, length, width = self.batch(), self.of(49, 64, 128, 196, 197, self.log(8, 512)), self.width(32, 3072)
            if batch * length * width * 4 <= MOST_BYTES:
                return tensor(batch, length, width)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class DrawnOperator(NamedTuple):
    """An operator to time: its signature as a trace would record it, and the call with tensors without data."""

    signature: OpSignature
    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator that a trace would record, in the same order, views included, and calls it by `run`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if facts_of(func).behavior is Behavior.DECOMPOSE:
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an operator."""
        raise NotImplementedError


class SignatureRecorder(OperatorMode):
    """Keeps the signatures of operators while it is on, as a trace would record them, and the last call itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.signatures: list[OpSignature] = []
        # Arguments of every call of a whole training step would take too much memory.
        self.last: DrawnOperator | None = None

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        # A backward returns None for gradients that were not requested.
        outputs = [item for item in (result if isinstance(result, (tuple, list)) else [result]) if item is not None]
        self.signatures.append(signature_of(func, args, kwargs, outputs, func.is_view, 0))
        self.last = DrawnOperator(self.signatures[-1], func, args, kwargs)
        return result


def last_operator(call: Callable[[], object]) -> DrawnOperator:
    """Return the last operator of a call on meta tensors: what comes before it only lays out its operands."""
    recorder = SignatureRecorder()
    with torch.inference_mode(), recorder:
        call()
    assert recorder.last is not None
    return recorder.last


# Parameter names of operators that hold what a model has learned; these are cold, all other operands warm.
WEIGHTS = frozenset({"weight", "bias", "running_mean", "running_var", "params", "mat2"})


def is_warm(signature: OpSignature) -> tuple[bool, ...]:
    """Return for each tensor that an operator reads whether the operators before it would have left it in a cache."""
    values = [*zip(signature.names, signature.args, strict=False), *signature.kwargs]
    return tuple(name not in WEIGHTS for name, value in values for _ in range(_count(value)))


def _count(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(_count(item) for item in value)
    return int(isinstance(value, TensorInfo))


def plan(seed: int = 0, count: int = 1400) -> list[DrawnOperator]:
    """Draw operators to time alone, shuffled, so that any first part of them is a fair sample."""
    draw = Draw(seed)
    total = sum(share for share, _ in _SHARES)
    planned: list[DrawnOperator] = []
    for share, kind in _SHARES:
        wanted = max(2, round(count * share / total))
        distinct: dict[OpSignature, DrawnOperator] = {}
        for _ in range(20 * wanted):
            if len(distinct) >= wanted:
                break
            operator = last_operator(kind(draw))
            distinct.setdefault(operator.signature, operator)
        planned += distinct.values()
    draw.random.shuffle(planned)
    return planned


def _convolution(draw: Draw) -> Callable[[], object]:
    while True:
        x = draw.image()
        kernel = draw.of(1, 1, 1, 1, 3, 3, 3, 3, 3, 5, 7)
        stride = draw.of(1, 1, 1, 2)
        width_in, side = x.shape[1], x.shape[2]
        out = draw.width()
        groups = 1
        if draw.chance(0.2):
            # Groups as people choose them: a number of groups, or of channels in each.
            groups = draw.of(
                *(g for g in (2, 8, 32, *(width_in // w for w in (4, 8, 16, 24))) if g and width_in % g == 0), 1
            )
            kernel, out = 3, width_in if draw.chance(0.7) else out
        out = max(groups, out // groups * groups)
        if side < kernel:
            continue
        macs = x.shape[0] * out * (side // stride) ** 2 * width_in // groups * kernel**2
        if 100_000 <= macs <= MOST_MACS:
            weight = tensor(out, width_in // groups, kernel, kernel)
            bias = tensor(out) if draw.chance(0.3) else None
            return lambda: F.conv2d(x, weight, bias, stride, kernel // 2, 1, groups)


def _stem(draw: Draw) -> Callable[[], object]:
    batch, side = draw.of(1, 1, 2, 4), draw.of(96, 128, 160, 192, 224, 256)
    kernel, stride = draw.of((3, 1), (3, 2), (3, 2), (7, 2), (4, 4), (8, 8), (16, 16), (32, 32))
    width = draw.width(16, 96 if stride < 8 else 768)
    x, weight = tensor(batch, 3, side, side), tensor(width, 3, kernel, kernel)
    bias = tensor(width) if draw.chance(0.4) else None
    return lambda: F.conv2d(x, weight, bias, stride, 0 if stride == kernel else kernel // 2)


def _depthwise(draw: Draw) -> Callable[[], object]:
    x = draw.image(16, 1200)
    kernel, stride = draw.of(3, 3, 3, 5, 5, 7), draw.of(1, 1, 1, 2)
    weight, bias = tensor(x.shape[1], 1, kernel, kernel), tensor(x.shape[1]) if draw.chance(0.3) else None
    return lambda: F.conv2d(x, weight, bias, stride, kernel // 2, 1, x.shape[1])


def _excitation(draw: Draw) -> Callable[[], object]:
    width_in, width = draw.width(8, 1200), draw.width(8, 1200)
    x, weight, bias = tensor(draw.batch(), width_in, 1, 1), tensor(width, width_in, 1, 1), tensor(width)
    return lambda: F.conv2d(x, weight, bias)


def _linear(draw: Draw) -> Callable[[], object]:
    while True:
        x = draw.rows() if draw.chance(0.7) else tensor(draw.batch(), draw.width(32, 8192))
        if draw.chance(0.15):
            x = tensor(draw.batch(), draw.side(), draw.side(), draw.width(32, 1024))
        out = draw.width(16, 4096)
        if x.numel() * out <= MOST_MACS and x.shape[-1] * out * 4 <= MOST_BYTES:
            weight, bias = tensor(out, x.shape[-1]), tensor(out) if draw.chance(0.8) else None
            return lambda: F.linear(x, weight, bias)


def _heads(draw: Draw) -> tuple[int, int, int, int]:
    while True:
        batch, heads = draw.of(1, 1, 4, 8, 64), draw.of(1, 3, 4, 6, 8, 12, 16)
        width = draw.of(32, 64, 64, draw.log(16, 128))
        length = draw.of(49, 64, 128, 196, 197, draw.log(16, 512))
        if batch * heads * length * max(length, 4 * width) * 4 <= MOST_BYTES:
            return batch, heads, length, width


def _attention(draw: Draw) -> Callable[[], object]:
    batch, heads, length, width = _heads(draw)
    is_causal = draw.chance(0.3)
    is_masked = not is_causal and draw.chance(0.3)
    # As a projection leaves them: heads side by side in each token.
    q, k, v = (tensor(batch, length, heads, width).transpose(1, 2) for _ in range(3))
    mask = tensor(batch, 1, length, length, dtype=draw.of(torch.bool, torch.float32)) if is_masked else None
    return lambda: F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)


def _products(draw: Draw) -> Callable[[], object]:
    batch, heads, length, width = _heads(draw)
    if draw.chance(0.3):
        x, y = tensor(draw.log(1, 512), draw.width(32, 2048)), draw.width(32, 2048)
        if draw.chance(0.5):
            return lambda: torch.addmm(tensor(y), x, tensor(x.shape[1], y))
        return lambda: torch.mm(x, tensor(x.shape[1], y))
    x = tensor(batch * heads, length, width)
    if draw.chance(0.5):
        return lambda: torch.bmm(x, tensor(batch * heads, length, width).transpose(1, 2))
    return lambda: torch.bmm(tensor(batch * heads, length, length), x)


def _softmax(draw: Draw) -> Callable[[], object]:
    batch, heads, length, _ = _heads(draw)
    return lambda: tensor(batch, heads, length, length).softmax(-1)


def _any(draw: Draw) -> torch.Tensor:
    return draw.image() if draw.chance(0.6) else draw.rows()


def _activation(draw: Draw) -> Callable[[], object]:
    x = _any(draw)
    kinds: tuple[Callable[..., object], ...] = (
        F.relu, F.relu_, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, lambda x: F.silu(x, True),
        F.hardswish, lambda x: F.hardswish(x, True), F.hardsigmoid, torch.sigmoid, lambda x: F.hardtanh(x, 0, 6, True),
        lambda x: F.hardtanh(x, 0, 6), torch.tanh, F.leaky_relu, F.elu,
    )  # fmt: skip
    kind = draw.of(*kinds)
    return lambda: kind(x)


def _pairs(draw: Draw) -> Callable[[], object]:
    x = _any(draw)
    functions: tuple[Callable[..., object], ...] = (
        torch.add, torch.add, torch.mul, torch.sub, torch.div, torch.Tensor.add_, torch.Tensor.mul_,
    )  # fmt: skip
    function = draw.of(*functions)
    shapes: list[tuple[int, ...]] = [tuple(x.shape)] * 3
    shapes.append((*x.shape[:2], *(1,) * (x.dim() - 2)) if x.dim() == 4 else (x.shape[-1],))
    other: Any = draw.of(*shapes, None)
    y = 0.5 if other is None else tensor(*other)
    return lambda: function(x, y)


def _norm(draw: Draw) -> Callable[[], object]:
    if draw.chance(0.5):
        x = draw.image()
        parts = [tensor(x.shape[1]) for _ in range(4)]
        if draw.chance(0.12) and x.shape[1] % 8 == 0:
            return lambda: F.group_norm(x, 8, parts[0], parts[1])
        return lambda: F.batch_norm(x, parts[0], parts[1], parts[2], parts[3])
    x = draw.rows()
    if draw.chance(0.3):
        image = draw.image(32, 1024)
        x = image.permute(0, 2, 3, 1)
    scale, shift = tensor(x.shape[-1]), tensor(x.shape[-1])
    if draw.chance(0.15):
        return lambda: F.rms_norm(x, (x.shape[-1],), scale)
    return lambda: F.layer_norm(x, (x.shape[-1],), scale, shift)


def _pooling(draw: Draw) -> Callable[[], object]:
    x = draw.image()
    if x.shape[2] < 4 or draw.chance(0.4):
        return draw.of(lambda: F.adaptive_avg_pool2d(x, 1), lambda: x.mean((2, 3)), lambda: x.mean((2, 3), True))
    kernel, stride, pad = draw.of((2, 2, 0), (3, 2, 1), (3, 1, 1))
    return draw.of(lambda: F.max_pool2d(x, kernel, stride, pad), lambda: F.avg_pool2d(x, kernel, stride, pad))


def _movement(draw: Draw) -> Callable[[], object]:
    kind = draw.of("cat", "cat", "cat", "copy", "copy", "copy", "roll", "pad", "upsample", "mean", "pow", "tokens")
    if kind == "cat":
        x = draw.image(8, 400)
        count = draw.of(2, 2, 3, 4, 6)
        parts = [x[:, : draw.of(x.shape[1], max(1, x.shape[1] // 2))] for _ in range(count)]
        whole = [tensor(*part.shape) for part in parts]
        return lambda: torch.cat(whole, 1)
    if kind == "upsample":
        x = draw.image(8, 128)
        mode = draw.of("nearest", "bilinear")
        return lambda: F.interpolate(x, scale_factor=2, mode=mode)
    if kind == "pad":
        x = draw.image()
        return lambda: F.pad(x, draw.of((0, 1, 0, 1), (1, 1, 1, 1)))
    if kind == "roll":
        x = draw.image().permute(0, 2, 3, 1)
        return lambda: torch.roll(x, (3, 3), (1, 2))
    if kind == "copy":
        x = draw.image(16, 512)
        order = draw.of((0, 2, 3, 1), (0, 2, 1, 3), (0, 1, 3, 2))
        return lambda: x.permute(order).clone(memory_format=torch.contiguous_format)
    x = draw.rows()
    if kind == "tokens":
        heads = draw.of(*(h for h in (1, 2, 4, 8) if x.shape[-1] % h == 0))
        return lambda: x.view(*x.shape[:2], heads, -1).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return (lambda: x.mean(-1, keepdim=True)) if kind == "mean" else (lambda: x.pow(2))


def _embedding(draw: Draw) -> Callable[[], object]:
    weight = tensor(draw.log(500, 12000), draw.width(64, 1024))
    return lambda: F.embedding(tensor(draw.batch(), draw.log(8, 512), dtype=torch.int64), weight)


def _recurrent(draw: Draw) -> Callable[[], object]:
    width, hidden, layers = draw.width(32, 512), draw.width(32, 512), draw.of(1, 1, 2)
    kind = draw.of(torch.nn.LSTM, torch.nn.LSTM, torch.nn.GRU)
    with torch.device("meta"):
        model = kind(width, hidden, layers).eval()
    x = tensor(draw.log(4, 64), draw.of(1, 1, 4, 8), width)
    state = tensor(layers, x.shape[1], hidden)
    weights = [parameter.detach() for parameter in model.parameters()]
    if kind is torch.nn.LSTM:
        return lambda: torch.lstm(x, (state, state), weights, True, layers, 0.0, False, False, False)
    return lambda: torch.gru(x, state, weights, True, layers, 0.0, False, False, False)


def _transposed(draw: Draw) -> Callable[[], object]:
    while True:
        x = draw.image(16, 256)
        out, kernel = draw.width(8, 256), draw.of(2, 2, 3, 4)
        if x.numel() * out * kernel**2 <= MOST_MACS:
            return lambda: F.conv_transpose2d(x, tensor(x.shape[1], out, kernel, kernel), None, 2)


def _convolution_1d(draw: Draw) -> Callable[[], object]:
    while True:
        x = tensor(draw.batch(), draw.width(8, 512), draw.log(32, 2000))
        out, kernel = draw.width(8, 512), draw.of(1, 3, 9)
        if x.numel() * out * kernel <= MOST_MACS:
            return lambda: F.conv1d(x, tensor(out, x.shape[1], kernel), None, 1, kernel // 2)


_SHARES: tuple[tuple[int, Callable[[Draw], Callable[[], object]]], ...] = (
    (430, _convolution), (40, _stem), (150, _depthwise), (40, _excitation), (220, _linear), (90, _attention),
    (70, _products), (40, _softmax), (190, _activation), (120, _pairs), (140, _norm), (90, _pooling),
    (130, _movement), (20, _embedding), (24, _recurrent), (24, _transposed), (24, _convolution_1d),
)  # fmt: skip
