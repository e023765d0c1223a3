"""Other tools, really installed and really run, held against our conventions."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import lru_cache

import thop
import torch
import torchinfo
from fvcore.nn import FlopCountAnalysis
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import edge_opt as eo
import rasp
from edge_opt.cost.conventions import count, reconcile, under_convention
from edge_opt.records.profiles import ModelProfile
from zoo import torchvision_models


def by_fvcore(model: nn.Module, x: torch.Tensor) -> int:
    analysis = FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return int(analysis.total())


def by_thop(model: nn.Module, x: torch.Tensor) -> int:
    return int(thop.profile(model, inputs=(x,), verbose=False)[0])


def by_ptflops(model: nn.Module, x: torch.Tensor) -> int | None:
    torchvision_models()  # which ptflops imports, and which must be made to fit first
    from ptflops import get_model_complexity_info as info

    with contextlib.redirect_stdout(io.StringIO()):
        found = info(model, (1,), input_constructor=lambda _: x, as_strings=False, print_per_layer_stat=False)
    return None if found[0] is None else int(found[0])


def by_torch(model: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        copy.deepcopy(model).to("meta")(x.to("meta"))
    return int(counter.get_total_flops())


def by_rasp(model: nn.Module, x: torch.Tensor) -> int:
    return int(rasp.stat(model, inputs=x, print_stat=False, returns="totals")["flops"])


def by_torchinfo(model: nn.Module, x: torch.Tensor) -> int:
    return int(torchinfo.summary(model, input_data=x, verbose=0).total_mult_adds)


PEERS: dict[str, Callable[[nn.Module, torch.Tensor], int | None]] = {
    "fvcore": by_fvcore,
    "thop": by_thop,
    "ptflops": by_ptflops,
    "torch": by_torch,
    "rasp": by_rasp,
    "torchinfo": by_torchinfo,
}


Case = tuple[Callable[[], nn.Module], tuple[int, ...] | torch.Tensor]


@lru_cache(maxsize=1)
def profiled(case: Case) -> tuple[nn.Module, torch.Tensor, ModelProfile]:
    """A model, its input and its profile; kept for the next tool, as the tools come one after the other."""
    build, given = case
    model = build().eval()
    x = given if isinstance(given, torch.Tensor) else torch.rand(given)
    return model, x, eo.profile(model, x)


def agree(case: Case, tool: str) -> None:
    """Our count is the tool's own, to the last digit, and the causes of the difference to ours add up."""
    model, x, profile = profiled(case)
    found = reconcile(profile, tool)
    assert found.theirs == count(profile, tool).total == PEERS[tool](model, x)
    assert found.ours + sum(cause.difference for cause in found.causes) == found.theirs
    assert found.ours == (profile.totals.macs if found.unit == "macs" else profile.totals.flops)
    theirs = under_convention(profile, tool)
    assert found.theirs == (theirs.totals.macs if found.unit == "macs" else theirs.totals.flops)
    assert all(layer.cost.macs >= 0 and layer.cost.other_ops >= 0 for layer in theirs.layers)
