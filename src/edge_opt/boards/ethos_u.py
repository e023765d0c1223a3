"""Models on an Ethos-U: compiled by Arm's Vela, with the cycles and the SRAM that it estimates."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.model_files.tflm_graph import TflmGraph, read_tflm
from edge_opt.records.devices import DeviceSpec

VELA: Literal["vela"] = "vela"
_NPU = re.compile(r"Ethos-(U\d+-\d+)")
_LIMIT_S = 600
_OPERATOR = "ethos-u"


class VelaRun(NamedTuple):
    """What Vela made of a file."""

    graph: TflmGraph  # the compiled file: commands for the NPU, and operators that are left to the CPU
    seconds: float  # its estimate for the NPU's part, at the clock of its system
    note: str  # what the estimate is for, in words
    cpu_operators: tuple[str, ...]  # those that are left to the CPU


def npu_of(spec: DeviceSpec | None) -> str | None:
    """Return Vela's name of a board's NPU, such as "ethos-u55-128"; None where it has no Ethos-U."""
    named = None if spec is None or spec.microcontroller is None else _NPU.search(spec.microcontroller.extension)
    return f"ethos-{named[1].lower()}" if named else None


def compiled_by_vela(file: Path, spec: DeviceSpec | None) -> VelaRun:
    """Compile an int8 `.tflite` file for a board's Ethos-U, with Vela's own system and memory for it.

    Args:
        file: The file.
        spec: The board.
    """
    npu = npu_of(spec)
    if spec is None or npu is None:
        raise InvalidInput(
            f"{spec.name if spec else 'a core'} has no Ethos-U; name a board with one, such as corstone-300"
        )
    if find_spec("ethosu") is None:
        raise InvalidInput("Ethos-U needs Arm's compiler Vela: pip install 'edge-opt[ethos-u]'")
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ethosu.vela", str(file), "--accelerator-config", npu, "--output-dir", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConversionFailed(f"Vela did not finish {file.name} within {_LIMIT_S} s") from None
        summary, compiled = (next(Path(folder).glob(f"*{end}"), None) for end in ("_summary_*.csv", "_vela.tflite"))
        if done.returncode or summary is None or compiled is None:
            last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
            raise ConversionFailed(f"Vela could not compile {file.name}: {''.join(last)[:300]}")
        row = next(csv.DictReader(summary.read_text(encoding="utf-8").splitlines()))
        graph = replace(read_tflm(compiled), name=file.name)
    operators = [operator.op for operator in graph.operators()]
    if _OPERATOR not in operators:
        raise InvalidInput(f"Vela leaves all of {file.name} to the CPU; it compiles int8 files")
    left = tuple(operator for operator in operators if operator != _OPERATOR)
    note = (
        f"an estimate of Arm's Vela {version('ethos-u-vela')} for {row['accelerator_configuration']}: "
        f"{int(float(row['cycles_total']))} cycles at {float(row['core_clock']) / 1e6:g} MHz and "
        f"{float(row['sram_memory_used']):.1f} KiB of SRAM, in {row['system_config']}, {row['memory_mode']}"
    )
    if left:
        note += f"; not in its time: {len(left)} operators that are left to the CPU, such as {left[0]}"
    return VelaRun(graph, float(row["inference_time"]), note, left)
