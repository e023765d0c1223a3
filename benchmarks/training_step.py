"""The training step: static peak against real steps byte for byte, cost against FlopCounterMode, a 7B LoRA step.

    python benchmarks/training_step.py [NAME ...]

Ratios are of CPU time, interleaved, the minimum of five repeats; FlopCounterMode runs forward and backward on meta, and
the trace also runs the optimizer.
"""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import edge_opt as eo
from edge_opt.measuring.memory import record_events, replay
from edge_opt.training_steps.step_report import repeated_blocks
from edge_opt.training_steps.step_trace import summed

TESTS = Path(__file__).parent.parent / "tests"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": torch.optim.AdamW,
}


WAYS = ("plain", "frozen", "checkpointed")


def byte_table(names: list[str], architectures: dict[str, Any]) -> None:
    """Static and measured peak of the first step, without weights, buffers and batch."""
    for name in names:
        for optimizer, build in OPTIMIZERS.items():
            for way in WAYS:
                print(
                    f"{name:20} {optimizer:6} {way:13} {byte_row(*architectures[name], optimizer, build, way)}",
                    flush=True,
                )


def byte_row(
    make: Callable[[], nn.Module], make_input: Callable[[], torch.Tensor], optimizer: str,
    build: Callable[..., torch.optim.Optimizer], way: str,
) -> str:  # fmt: skip
    """One line: the peak by the trace and by the allocator, and how far apart they are."""
    torch.manual_seed(0)
    model, x = make().train(), make_input()
    frozen = first_children(model) if way == "frozen" else ()
    blocks = blocks_of(model) if way == "checkpointed" else ()
    try:
        step = eo.training_step(model, x, optimizer=optimizer, frozen=frozen, checkpoint=blocks)
    except eo.errors.EdgeOptError as error:
        return f"refused: {error}"
    before = step.peak.memory.weights + step.peak.memory.buffers + step.peak.memory.inputs
    static = step.first_peak_bytes - before
    for path in frozen:
        model.get_submodule(path).requires_grad_(False)
    for path in blocks:
        module = model.get_submodule(path)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    real = real_peak(model, x, build(model.parameters()))
    return f"real {real:>13,} static apart by {static - real:+,} ({(static - real) / real:+.4%})"


def first_children(model: nn.Module) -> tuple[str, ...]:
    """The first half of a model's children that have parameters; the first part of the only one."""
    path, owning = "", [(n, c) for n, c in model.named_children() if any(True for _ in c.parameters())]
    while len(owning) == 1:
        path, inner = f"{path}{owning[0][0]}.", owning[0][1]
        owning = [(n, c) for n, c in inner.named_children() if any(True for _ in c.parameters())]
    return tuple(f"{path}{name}" for name, _ in owning[: max(len(owning) // 2, 1)])


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """The blocks that `remedies=True` would checkpoint; every child where there are none."""
    return repeated_blocks(model) or tuple(name for name, _ in model.named_children())


def real_peak(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    """The allocator's peak of the tensors of a first step."""

    def step() -> None:
        optimizer.zero_grad()
        loss = summed(model(x))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return replay(record_events(step, torch.device("cpu"))).tensor_peak_bytes


def speed_table(names: list[str], architectures: dict[str, Any]) -> None:
    """CPU time of the trace relative to FlopCounterMode with backward."""
    for name in names:
        make, make_input = architectures[name]
        model, x = make().train(), make_input()
        hollow, empty = make().train().to("meta"), make_input().to("meta")

        def count(hollow: nn.Module = hollow, empty: torch.Tensor = empty) -> None:
            with FlopCounterMode(display=False):
                summed(hollow(empty)).backward()  # type: ignore[no-untyped-call]

        ours, theirs = [], []
        for _ in range(5):
            ours.append(_seconds(lambda model=model, x=x: eo.training_step(model, x, optimizer="sgd")))  # type: ignore[misc]
            theirs.append(_seconds(count))
        print(f"{name:20} {min(ours):.3f} s, FlopCounterMode {min(theirs):.3f} s, ratio {min(ours) / min(theirs):.2f}")


def _seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Lora(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def lora_7b() -> None:
    """A LoRA step of a model with the dimensions of Llama 2 7B, built without weights."""
    import transformers

    with torch.device("meta"):
        config = transformers.LlamaConfig()
        config.use_cache = False
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Lora(layer.self_attn.v_proj)
    start = time.process_time()
    step = eo.training_step(model, [((1, 512), "int64")], optimizer="adamw")
    seconds = time.process_time() - start
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"7B LoRA: {seconds:.2f} s, {resident:.0f} MiB resident at most (imports included)")
    print(step.trained_params, step.flops, step.peak_by_kind)


def main() -> None:
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "measuring")]
    if sys.argv[1:] == ["lora"]:
        return lora_7b()
    from test_memory_architectures import ARCHITECTURES

    names = sys.argv[1:] or list(ARCHITECTURES)
    byte_table(names, ARCHITECTURES)
    speed_table(names, ARCHITECTURES)
    return None


if __name__ == "__main__":
    main()
