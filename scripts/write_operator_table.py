"""Write docs/operators.md: what each operator of torch's own test database costs here.

The tests hold that the page is true. Run it from a checkout: `python scripts/write_operator_table.py`; with `--check`
it only says what is not true.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import edge_opt as eo

PAGE = Path(__file__).parent.parent / "docs" / "operators.md"
SAMPLES = 4

_CUDA_ONLY = "runs on CUDA only, and torch has no kernel for shapes alone"
# Why an operator of the database has no price. One that has none and is not here fails the tests.
REASONS = {
    "matrix_exp": "the number of products follows from the norm of the matrix, which is a value",
    "jiterator_unary": _CUDA_ONLY,
    "jiterator_binary": _CUDA_ONLY,
    "jiterator_4inputs_with_extra_args": _CUDA_ONLY,
    "jiterator_binary_return_by_ref": _CUDA_ONLY,
    "jiterator_2inputs_2outputs": _CUDA_ONLY,
    "torch.ops.aten._flash_attention_forward": _CUDA_ONLY,
    "torch.ops.aten._efficient_attention_forward": _CUDA_ONLY,
    "nn.functional.batch_norm (without_cudnn)": "the same operator as `nn.functional.batch_norm`, for CUDA alone",
}

_HEAD = """# Operators

What each of the {count} operators in torch's own test database ({version}) costs here. The formulas are in
[counting](counting.md). This page is written by `scripts/write_operator_table.py`, and the tests hold that it is true.
"""
_DTYPES = (
    torch.float32, torch.complex64, torch.int64, torch.bool, torch.int32, torch.float64, torch.bfloat16,
    torch.float8_e4m3fn,
)  # fmt: skip


class _Call(nn.Module):
    """An operator on tensors, with everything that is no tensor already in place."""

    def __init__(self, function: Any, spec: Any, values: list[Any]) -> None:
        super().__init__()
        self.function = function
        self.spec = spec
        self.values = values

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        values = [next(given) if isinstance(value, torch.Tensor) else value for value in self.values]
        args, kwargs = tree_unflatten(values, self.spec)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Verdict:
    """How an operator comes out over its samples: kinds of work, operators without a price, refusals."""

    name: str
    kinds: tuple[str, ...]
    unpriced: tuple[str, ...]
    refusals: tuple[str, ...]

    @property
    def group(self) -> str:
        if self.refusals:
            return "refused"
        if self.unpriced:
            return "unpriced"
        return "priced" if self.kinds else "free"


def database() -> list[Any]:
    """Torch's descriptions of its operators with sample inputs."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            # Torch's test package wants it for the base class of its own tests, of which none is run here.
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(info: Any) -> str:
    return f"{info.name} ({info.variant_test_name})" if info.variant_test_name else str(info.name)


def verdict(info: Any, samples: int = SAMPLES) -> Verdict:
    """The operator's verdict on its first few samples."""
    kinds: set[str] = set()
    unpriced: set[str] = set()
    refusals: list[str] = [] if _dtype(info) else ["no type that the CPU computes"]
    for model, tensors in islice(_calls(info), samples):
        try:
            profile = eo.profile(model, inputs=tensors or [torch.zeros(())])
        except eo.EdgeOptError as error:
            refusals.append(str(error))
            continue
        kinds |= {operator.kind for operator in profile.operators if operator.status == "priced"}
        unpriced |= {operator.op for operator in profile.operators if operator.status == "unpriced"}
    return Verdict(name_of(info), tuple(sorted(kinds)), tuple(sorted(unpriced)), tuple(refusals))


def _dtype(info: Any) -> torch.dtype | None:
    return next((dtype for dtype in _DTYPES if dtype in info.dtypes), None)


def _calls(info: Any) -> Iterator[tuple[nn.Module, list[torch.Tensor]]]:
    dtype = _dtype(info)
    if dtype is None:
        return
    torch.manual_seed(0)
    for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
        values, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if all(tensor.numel() for tensor in tensors):
            yield _Call(info.op, spec, values), tensors


def torch_version() -> str:
    return f"torch {torch.__version__.partition('+')[0]}"


def page(verdicts: list[Verdict]) -> str:
    """The whole page."""
    blocks = [_HEAD.format(count=len(verdicts), version=torch_version())]
    by_kind: dict[str, list[str]] = defaultdict(list)
    for item in verdicts:
        if item.group == "priced":
            by_kind[", ".join(item.kinds)].append(f"`{item.name}`")
    blocks.append(f"\n## Priced: {sum(map(len, by_kind.values()))}\n\n| kinds of work | operators |\n|---|---|\n")
    blocks += [f"| {kinds} | {' '.join(sorted(names))} |\n" for kinds, names in sorted(by_kind.items())]
    free = sorted(f"`{item.name}`" for item in verdicts if item.group == "free")
    blocks.append(f"\n## Free: {len(free)}\n\nViews, empty tensors, questions about a tensor: {' '.join(free)}\n")
    rest = sorted((item for item in verdicts if item.group in ("unpriced", "refused")), key=lambda item: item.name)
    blocks.append(f"\n## Not priced: {len(rest)}\n\n| operator | reason |\n|---|---|\n")
    blocks += [f"| `{item.name}` | {REASONS[item.name]} |\n" for item in rest]
    return "".join(blocks)


def untrue(verdicts: list[Verdict]) -> list[str]:
    """What the page and the table of reasons say that is not so; the page of another torch is not looked at."""
    in_need = {item.name for item in verdicts if item.group in ("unpriced", "refused")}
    found = [f"{name} has no price and no reason" for name in sorted(in_need - set(REASONS))]
    found += [f"{name} has a reason to have no price, and has one" for name in sorted(set(REASONS) - in_need)]
    written = PAGE.read_text(encoding="utf-8")
    if not found and torch_version() in written and written != page(verdicts):
        found.append(f"{PAGE.name} is not up to date: run `python scripts/write_operator_table.py`")
    return found


def main() -> int:
    warnings.filterwarnings("ignore")
    verdicts = [verdict(info) for info in database()]
    if "--check" in sys.argv[1:]:
        print("\n".join([f"{len(verdicts)} operators", *untrue(verdicts)]))
        return 1 if untrue(verdicts) else 0
    PAGE.write_text(page(verdicts), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
