"""Write docs/operators.md: which operators of torch's own test database have a cost rule, and which do not.

A test checks the page. With `--check`, the script only prints what is not true.
"""

from __future__ import annotations

import sys
import textwrap
import types
import unittest
import warnings
from collections import Counter, defaultdict
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
# Why an operator of the database has no cost rule. An operator without a rule that is not here fails the tests.
REASONS = {
    "matrix_exp": "the number of products follows from the norm of the matrix, which is a value",
    "resolve_neg": "`numpy()` and `tolist()` end with it, so it is taken for values that leave torch",
    "jiterator_unary": _CUDA_ONLY,
    "jiterator_binary": _CUDA_ONLY,
    "jiterator_4inputs_with_extra_args": _CUDA_ONLY,
    "jiterator_binary_return_by_ref": _CUDA_ONLY,
    "jiterator_2inputs_2outputs": _CUDA_ONLY,
    "torch.ops.aten._flash_attention_forward": _CUDA_ONLY,
    "torch.ops.aten._efficient_attention_forward": _CUDA_ONLY,
    "nn.functional.batch_norm (without_cudnn)": "the same operator as `nn.functional.batch_norm`, for CUDA only",
}

_HEAD = """# Operators

Every operator of torch's own test database ({count} in {version}) was profiled on its sample inputs. It is *priced* by
a cost rule ([counting](counting.md) has the formulas), *free*, or *not priced*. Operators that this page does not name
are priced.
"""
_DTYPES = (
    torch.float32, torch.complex64, torch.int64, torch.bool, torch.int32, torch.float64, torch.bfloat16,
    torch.float8_e4m3fn,
)  # fmt: skip


class _Call(nn.Module):
    """A call of an operator whose only inputs are tensors; other arguments are fixed."""

    def __init__(self, function: Any, spec: Any, values: list[Any]) -> None:
        super().__init__()
        self.function = function
        self.spec = spec
        self.values = values

    def forward(self, *tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        values = [next(remaining) if isinstance(value, torch.Tensor) else value for value in self.values]
        args, kwargs = tree_unflatten(values, self.spec)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Verdict:
    """The result of profiling an operator on its samples: kinds of work, operators without a cost rule, refusals."""

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
    """Return torch's descriptions of its operators with sample inputs."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            # Torch's test package needs it for the base class of its own tests. None of them is run here.
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(info: Any) -> str:
    return f"{info.name} ({info.variant_test_name})" if info.variant_test_name else str(info.name)


def verdict(info: Any, samples: int = SAMPLES) -> Verdict:
    """Profile an operator on its first samples."""
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
    """Return the whole page."""
    blocks = [_HEAD.format(count=len(verdicts), version=torch_version())]
    kinds = Counter(kind for item in verdicts if item.group == "priced" for kind in item.kinds)
    priced = sum(item.group == "priced" for item in verdicts)
    blocks.append(f"\n## Priced: {priced}\n\nKinds of work, with the number of operators that do it:\n\n")
    blocks.append(_wrapped(", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) + "."))
    free = sorted(f"`{item.name}`" for item in verdicts if item.group == "free")
    blocks.append(f"\n## Free: {len(free)}\n\nViews, empty tensors and queries:\n\n{_wrapped(' '.join(free))}")
    rest = sorted((item for item in verdicts if item.group in ("unpriced", "refused")), key=lambda item: item.name)
    reasons: dict[str, list[str]] = defaultdict(list)
    for item in rest:
        reasons[REASONS[item.name]].append(f"`{item.name}`")
    blocks.append(f"\n## Not priced: {len(rest)}\n\n")
    blocks += [_wrapped(f"- {', '.join(names)}: {reason}.", "  ") for reason, names in reasons.items()]
    return "".join(blocks)


def _wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def untrue(verdicts: list[Verdict]) -> list[str]:
    """List what the page and the table of reasons say wrongly; the page of another torch is not checked."""
    in_need = {item.name for item in verdicts if item.group in ("unpriced", "refused")}
    faults = [f"{name} has no cost rule, and REASONS does not say why" for name in sorted(in_need - set(REASONS))]
    faults += [f"{name} has a cost rule: remove it from REASONS" for name in sorted(set(REASONS) - in_need)]
    written = PAGE.read_text(encoding="utf-8")
    if not faults and torch_version() in written and written != page(verdicts):
        faults.append(f"{PAGE.name} is not up to date: run `python scripts/write_operator_table.py`")
    return faults


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
