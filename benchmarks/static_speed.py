"""CPU time of one full static profile, memory cold, against the tools people use. Peers count MACs alone."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from subjects import MODELS, Call
from timing import interleaved, save
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import edge_opt as eo
from edge_opt.profiling import clear_caches

REFERENCE = "FlopCounterMode (meta)"


def ours(model: nn.Module, call: Call) -> Callable[[], int]:
    def run() -> int:
        clear_caches()
        return eo.profile(model, kwargs=call).totals.macs

    return run


def flop_counter(model: nn.Module, call: Call) -> Callable[[], int]:
    def run() -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(**call)
        return counter.get_total_flops() // 2

    return run


def flop_counter_fake(model: nn.Module, call: Call) -> Callable[[], int]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run() -> int:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            fake = {name: mode.from_tensor(tensor) for name, tensor in call.items()}
            with FlopCounterMode(display=False) as counter:
                model(**fake)
        return counter.get_total_flops() // 2

    return run


def thop(model: nn.Module, call: Call) -> Callable[[], int]:
    from thop import profile

    return lambda: int(profile(model, inputs=tuple(call.values()), verbose=False)[0])


def ptflops(model: nn.Module, call: Call) -> Callable[[], int]:
    from ptflops import get_model_complexity_info

    given: Any = call if len(call) > 1 else next(iter(call.values()))

    def run() -> int:
        macs, _ = get_model_complexity_info(
            model, (1,), input_constructor=lambda _: given, as_strings=False, print_per_layer_stat=False, verbose=False
        )
        return int(macs or 0)

    return run


def fvcore(model: nn.Module, call: Call) -> Callable[[], int]:
    from fvcore.nn import FlopCountAnalysis

    def run() -> int:
        analysis = FlopCountAnalysis(model, tuple(call.values()))
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        return int(analysis.total())

    return run


def torchinfo(model: nn.Module, call: Call) -> Callable[[], int]:
    from torchinfo import summary

    return lambda: int(summary(model, input_data=call, verbose=0).total_mult_adds)


PEERS: dict[str, Callable[[nn.Module, Call], Callable[[], int]]] = {
    "thop (ultralytics)": thop,
    "ptflops": ptflops,
    "fvcore": fvcore,
    "torchinfo": torchinfo,
    "FlopCounterMode (fake)": flop_counter_fake,
}


def candidates(build: Callable[[], nn.Module], call: Callable[..., Call]) -> dict[str, Callable[[], int]]:
    """What can count this model at all: a model built on meta has no weights for peers that run it."""
    model = build()
    is_meta = next(model.parameters()).is_meta
    runs = {"edge_opt": ours(model, call())}
    if not is_meta:
        runs |= {name: peer(build(), call()) for name, peer in PEERS.items()}
    runs[REFERENCE] = flop_counter(build().to("meta"), call("meta"))
    return {name: quiet for name, run in runs.items() if (quiet := _quiet(run)) is not None}


def _quiet(run: Callable[[], int]) -> Callable[[], int] | None:
    """The run without its chatter, tried once; None where the tool fails on the model."""

    def quiet() -> int:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), _no_warnings():
            return run()

    try:
        quiet()
    except Exception:
        return None
    return quiet


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measure(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name, (build, call) in MODELS.items():
        runs = candidates(build, call)
        seconds = interleaved(runs, repeats)
        counts = {tool: run() for tool, run in runs.items()}
        rows.append({"model": name, "cpu_ms": {t: round(s * 1e3, 3) for t, s in seconds.items()}, "macs": counts})
    return rows


def show(rows: list[dict[str, Any]]) -> dict[str, float]:
    console = Console(width=140)
    tools = ["edge_opt", REFERENCE, *PEERS]
    table = Table("model", *tools, "ours / meta", "ours / fastest", title="CPU ms of one static profile (* other MACs)")
    ratios, fastest = [], []
    for row in rows:
        times, macs = row["cpu_ms"], row["macs"]
        peers = {tool: value for tool, value in times.items() if tool != "edge_opt"}
        cells = [
            "–" if tool not in times else f"{times[tool]:.1f}{'' if macs[tool] == macs['edge_opt'] else '*'}"
            for tool in tools
        ]
        fastest.append(times["edge_opt"] / min(peers.values()))
        ratio = times["edge_opt"] / times[REFERENCE] if REFERENCE in times else float("nan")
        ratios.append(ratio)
        table.add_row(row["model"], *cells, f"{ratio:.3f}", f"{fastest[-1]:.3f}")
    console.print(table)
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    summary = {
        "geometric_mean_over_meta": round(math.exp(sum(map(math.log, known)) / len(known)), 4),
        "worst_over_meta": round(max(known), 4),
        "worst_over_fastest_peer": round(max(fastest), 4),
    }
    console.print(summary)
    return summary


def main(repeats: int = 7) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = measure(repeats)
    print(f"written: {save('static_speed', rows, **show(rows)).name}")


if __name__ == "__main__":
    main()
