"""Qualcomm's AI Hub table, read: which net took how long on the NPU of which device, in which runtime and precision.

Rows of which a layer ran on the GPU or CPU are left out: their time is mostly that of handing tensors over. So are
3-D convolutions in TFLite, which it runs as hundreds of 2-D ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from npu_image_nets import image_nets
from npu_nets import NpuNet, npu_nets
from published_tables import AI_HUB, Board, Net, rows_of

import edge_opt
from edge_opt.boards.fused_layers import model_work
from edge_opt.records.predictions import NPU_UNUSED
from edge_opt.records.profiles import ModelProfile

RUNTIMES = {"qnn_dlc": "qnn", "onnx": "onnx", "tflite": "tflite"}
PRECISIONS = {"float": "fp16", "w8a8": "int8", "w8a16": "w8a16"}
# Devices whose rows are those of another with the same chip; `data/fitted/siblings.toml` names them.
SAME_ROWS = (
    "dragonwing-q-8750", "dragonwing-iq-x7181", "snapdragon-xr2-gen-2", "sa8255p-adp", "sa8775p-adp",
    "dragonwing-q-7790",
)  # fmt: skip
# Devices that have nearly the same chip: neither predicts the other in a held-out test.
SAME_CHIP = {"dragonwing-iq-9075-evk": "sa8650p-adp"}


def device_name(title: str) -> str:
    """The name of a device of the table: lower case, hyphens, without maker, "5G" and what is in brackets.

    >>> device_name("Samsung Galaxy S22 5G"), device_name("QCS8550 (Proxy)")
    ('galaxy-s22', 'qcs8550')
    """
    plain = re.sub(r"\(.*?\)|\b5G\b|\bSamsung\b", "", title)
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")


@cache
def traced_nets() -> tuple[tuple[NpuNet, ModelProfile], ...]:
    """Every net of the table that can be built, traced."""
    import timm
    import torchvision
    import transformers

    nets = (*npu_nets(torchvision, timm, transformers), *image_nets(timm, transformers))
    return tuple((item, edge_opt.profile(item.build().eval(), item.inputs)) for item in nets)


@dataclass(frozen=True)
class PlacedRow:
    """A row of the table whose net can be built, and how many layers ran on the CPU; `is_whole`: all left the NPU."""

    net: NpuNet
    profile: ModelProfile
    device: str
    runtime: str
    precision: str
    cpu_layers: int
    is_whole: bool


def placed_rows(folder: Path) -> list[PlacedRow]:
    """Every row of the three runtimes and precisions whose net can be built, those outside the NPU included."""
    known = {(item.name, item.part): (item, profile) for item, profile in traced_nets()}
    return [
        PlacedRow(
            *known[row["model"], row["component"]], device_name(row["device"]), RUNTIMES[row["runtime"]],
            PRECISIONS[row["precision"]], int(row["cpu"]), row["unit"] != "NPU",
        )
        for row in _timed_rows(folder)
        if (row["model"], row["component"]) in known
    ]  # fmt: skip


def _timed_rows(folder: Path) -> list[dict[str, str]]:
    return [row for row in rows_of(folder, "aihub") if row["runtime"] in RUNTIMES and row["precision"] in PRECISIONS]


def _left_notes(rows: Sequence[Mapping[str, str]], title: str, runtime: str, precision: str) -> tuple[str, ...]:
    """A note where a tenth or more of the models that some NPU runs did not run on this one at all.

    Models that run on no NPU of the table do not count: its package asks for another unit, as for Whisper's encoder.
    """
    alike = [row for row in rows if (RUNTIMES[row["runtime"]], PRECISIONS[row["precision"]]) == (runtime, precision)]
    on_npu = {(row["model"], row["component"]) for row in alike if row["unit"] == "NPU"}
    units = [row["unit"] for row in alike if row["device"] == title and (row["model"], row["component"]) in on_npu]
    left = sum(unit != "NPU" for unit in units)
    if left < 0.1 * len(units):
        return ()
    return (f"{NPU_UNUSED} {left} of {len(units)} models that NPUs run, and nothing in a model tells which",)


def npu_boards(folder: Path) -> tuple[Board, ...]:
    """One board per device, runtime and precision, with the rows that ran on the NPU alone.

    Args:
        folder: where the tables are; without this one there are no boards.
    """
    rows = _timed_rows(folder)
    if not rows:
        return ()
    known = {
        (item.name, item.part): Net(item.name, item.family, model_work(profile))
        for item, profile in traced_nets()
        if item.is_timed
    }
    times: dict[tuple[str, str, str], dict[str, tuple[Net, float]]] = {}
    for row in rows:
        net = known.get((row["model"], row["component"]))
        is_whole = row["unit"] == "NPU" and row["gpu"] == row["cpu"] == "0"
        is_copy = device_name(row["device"]) in SAME_ROWS
        if net is None or is_copy or not is_whole or (row["runtime"] == "tflite" and net.family == "video_resnet"):
            continue
        key = (row["device"], RUNTIMES[row["runtime"]], PRECISIONS[row["precision"]])
        times.setdefault(key, {})[net.name] = (net, float(row["latency_ms"]))
    print(f"AI Hub: {sum(map(len, times.values()))} rows of {len(known)} nets", file=sys.stderr)
    return tuple(
        Board(
            device=device_name(title), title=title, soc=SAME_CHIP.get(device_name(title), device_name(title)),
            core=None, ghz=None, engine="npu", cores="all", runtime=runtime, day="2026", precision=precision,
            threads=None, source=AI_HUB, times=tuple(own.values()),
            notes=_left_notes(rows, title, runtime, precision),
        )
        for (title, runtime, precision), own in times.items()
    )  # fmt: skip
