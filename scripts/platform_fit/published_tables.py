"""Published tables of times, read: which net took how long on which board, with its layers.

The tables are other people's measurements and are not part of this package. `scripts/fit_platforms.py` fits costs to
them, `benchmarks/boards.py` checks estimates against them.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import published_nets as nets

from edge_opt.boards.class_costs import ModelWork
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import Engine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAMES = Path(__file__).parent / "board_names.toml"
_SPELLINGS = {
    "squeezenet-ssd": "squeezenet_ssd",
    "mobilenet-ssd": "mobilenet_ssd",
    "mobilenet-yolo": "mobilenet_yolo",
    "mobilenet_yolov3": "mobilenetv2_yolov3",
}
# Nets that share most of their layers: one is never predicted from another in a held-out test.
_FAMILIES = {
    "squeezenet_ssd": "squeezenet", "mobilenet_ssd": "mobilenet", "mobilenet_yolo": "mobilenet",
    "mobilenetv2_yolov3": "mobilenet_v2", "nanodet_m": "shufflenet_v2", "yolo-fastestv2": "shufflenet_v2",
    "FastestDet": "shufflenet_v2", "proxylessnasnet": "mnasnet", "efficientnetv2_b0": "efficientnet_b0",
    "resnet50": "resnet18",
}  # fmt: skip
# The source of the table whose nets have to be traced (npu_table.py).
AI_HUB = "Qualcomm AI Hub Models 0.65.0, performance files, BSD-3"
_POWERSAVE = {"1": "little", "2": "big"}


@dataclass(frozen=True, slots=True)
class Net:
    """A net of a table; `family` is what it must be held out with."""

    name: str
    family: str
    workload: ModelWork


@dataclass(frozen=True, slots=True)
class Board:
    """One run of a table: a device with an engine, a runtime, a precision and threads, and the times of its nets.

    `soc` is the chip, which several boards may share. `cores` is "all", "big" or "little". `threads` is None where
    the table does not say. `day` is when the table had it, as precise as known. `notes` are for the platform's file.
    """

    device: str
    title: str
    soc: str
    core: str | None
    ghz: float | None
    engine: Engine
    cores: str
    runtime: str
    day: str
    precision: str
    threads: int | None
    source: str
    times: tuple[tuple[Net, float], ...]
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Device, engine, runtime without its date, precision and threads: newer runs of the same replace older."""
        engine = self.engine if self.cores in ("all", "big") else f"{self.engine}-{self.cores}"
        threads = "" if self.threads is None else f"-{self.threads}"
        return f"{self.device}/{engine}{threads}/{self.runtime}/{self.precision}"


def read_tables(folder: Path) -> tuple[Board, ...]:
    """Every run of every table that this module knows, but for timm's, whose nets must be traced.

    Args:
        folder: where the tables are, as `*.csv.gz` and `ncnn_layers.json.gz`. Tables that are not there are left out,
            but ncnn's must be.
    """
    return (
        *ncnn_boards(folder),
        *xnnpack_boards(folder),
        *nasbench_boards(folder),
        *st_boards(folder),
        *mlperf_boards(folder),
    )


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows of one table; none where there is no such table.

    Args:
        folder: where the tables are.
        name: of the table, without its ending.
    """
    path = folder / f"{name}.csv.gz"
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def ncnn_nets(folder: Path) -> dict[str, Net]:
    """ncnn's benchmark nets, which are not torchvision's.

    Args:
        folder: where `ncnn_layers.json.gz` is.
    """
    path = folder / "ncnn_layers.json.gz"
    if not path.exists():
        raise InvalidInput(f"there is no {path.name} in {folder}; name the folder of the published tables")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        layers: Mapping[str, Any] = json.load(file)
    return {
        name: Net(name, _FAMILIES.get(name, name), nets.ncnn_workload(name, found)) for name, found in layers.items()
    }


def ncnn_boards(folder: Path) -> tuple[Board, ...]:
    """Runs of ncnn's benchmark. Where one entry has two runs, of other builds or settings, they are two boards.

    Args:
        folder: where the tables are.
    """
    known = ncnn_nets(folder)
    runs: dict[tuple[str, ...], dict[str, float]] = {}
    firsts: dict[tuple[str, ...], str] = {}
    for row in rows_of(folder, "ncnn_boards"):
        # int8 rows under Vulkan run on the CPU, with other threads than the entry says.
        if row["engine"] == "gpu" and row["precision"] == "int8":
            continue
        name = row["model"].removesuffix("_int8")
        name = _SPELLINGS.get(name, name)
        if name not in known:
            continue
        columns = ("board", "gpu_name", "engine", "runtime", "precision", "threads", "powersave")
        key = tuple(row[column] for column in columns)
        run = 0
        while name in runs.get((*key, str(run)), {}):
            run += 1
        runs.setdefault((*key, str(run)), {})[name] = float(row["latency_ms"])
        firsts.setdefault((*key, str(run)), row["first_seen"])
    return tuple(_ncnn_board(key, known, times, firsts[key]) for key, times in runs.items())


def _ncnn_board(key: Sequence[str], known: Mapping[str, Net], times: Mapping[str, float], day: str) -> Board:
    title, gpu, engine, _, precision, threads, powersave, run = key
    cores = _POWERSAVE.get(powersave, "all")
    if engine == "gpu":
        title, cores = f"{title}: {gpu}", "all"
    base = named(title, engine, cores, int(threads))
    is_software = "llvmpipe" in gpu
    suffix = ("-llvmpipe" if is_software else "") + ("" if run == "0" else f"-run-{int(run) + 1}")
    return replace(
        base,
        device=base.device + suffix,
        runtime="ncnn" if engine == "cpu" else "ncnn-vulkan",
        day=day,
        precision="fp32" if precision == "float" else precision,
        threads=int(threads) if engine == "cpu" else None,
        source="Tencent/ncnn benchmark/README.md and its history, BSD-3",
        times=tuple((known[name], time) for name, time in times.items()),
    )


@cache
def _names() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads(NAMES.read_text(encoding="utf-8"))["board"])


def named(title: str, engine: str = "cpu", cores: str = "all", threads: int | None = None) -> Board:
    """A board without times, by its name in a table; a name that nobody wrote down is made into one.

    Args:
        title: the board as the table calls it.
        engine: what ran the nets.
        cores: which cores ran them: "all", "big" or "little".
        threads: how many threads ran them; with more than there are big cores, no one core is named.

    >>> named("Raspberry Pi 5 Broadcom BCM2712, Cortex-A76 (ARMv8) (2.4GHz x 4)").device
    'raspberry-pi-5'
    >>> (found := named("Acme One (Cortex-A73 2.1GHz x 4)")).device, found.core, found.ghz
    ('acme-one', 'cortex-a73', 2.1)
    """
    entry = next((item for item in _names() if item["match"].lower() in title.lower()), None)
    if entry is None:
        slug = re.sub(r"[^a-z0-9]+", "-", re.split(r"[(:]", title)[0].lower()).strip("-") or "board"
        core = re.search(r"Cortex[-\u2011 ]?([AMX]\d+\w*)", title, re.IGNORECASE)
        clock = re.search(r"(\d+(?:\.\d+)?)\s*(GHz|MHz)", title, re.IGNORECASE)
        ghz = None if clock is None else float(clock[1]) / (1 if clock[2].lower() == "ghz" else 1000)
        entry = {"device": slug, "core": f"cortex-{core[1].lower()}" if core else None, "ghz": ghz}
    is_little = cores == "little" and "little" in entry
    is_mixed = not is_little and (threads or 1) > entry.get("big_cores", 99)
    ghz = entry.get("ghz_of_4", entry.get("ghz")) if (threads or 1) >= 4 else entry.get("ghz")
    return Board(
        device=entry["device"], title=title, soc=entry.get("soc", entry["device"]),
        core=None if is_mixed else entry["little"] if is_little else entry.get("core"),
        ghz=entry["little_ghz"] if is_little else ghz,
        engine=cast(Engine, engine), cores=cores, runtime="", day="", precision="fp32", threads=threads, source="",
        times=(),
    )  # fmt: skip


def nasbench_boards(folder: Path) -> tuple[Board, ...]:
    """HW-NAS-Bench's times of NAS-Bench-201 nets; those of the Pi are believed to be of one thread.

    Args:
        folder: where the tables are.
    """
    rows = [row for row in rows_of(folder, "nasbench201_pi4_sample") if not nets.is_constant(row["arch"])]
    cells = [Net(row["arch"], row["arch"], nets.nasbench201_workload(row["arch"])) for row in rows]
    return tuple(
        replace(
            named(title), runtime="tflite", day="2021", threads=threads, precision="fp32",
            source="HW-NAS-Bench by way of HayeonLee/HELP",
            times=tuple((cell, float(row[column])) for cell, row in zip(cells, rows, strict=True)),
        )
        for title, column, threads in (("RPi 4 (BCM2711, ARM64)", "raspi4_ms", 1), ("Pixel 3", "pixel3_ms", None))
        if rows
    )  # fmt: skip


_XNNPACK: Mapping[str, Callable[[], ModelWork]] = {
    "MobileNet v1 1.0X": lambda: nets.mobilenet_v1(1.0, 224),
    "MobileNet v2 1.0X": lambda: nets.mobilenet_v2(1.0, 224),
    "MobileNet v3 Large": lambda: nets.mobilenet_v3(True),
    "MobileNet v3 Small": lambda: nets.mobilenet_v3(False),
}
# "all big cores" of the boards in XNNPACK's table.
_BIG_CORES = {"pixel-2": 4, "raspberry-pi-zero-w": 1, "pixel": 2, "pixel-3a": 2}


def xnnpack_boards(folder: Path) -> tuple[Board, ...]:
    """XNNPACK's own table: four nets in float, two in int8.

    Args:
        folder: where the tables are.
    """
    found: dict[tuple[str, ...], list[tuple[Net, float]]] = {}
    for row in rows_of(folder, "xnnpack"):
        net = Net(row["model"], row["model"][:12], _XNNPACK[row["model"]]())
        key = tuple(row[column] for column in ("board", "runtime", "precision", "threads"))
        found.setdefault(key, []).append((net, float(row["latency_ms"])))
    return tuple(_xnnpack_board(key, times) for key, times in found.items())


def _xnnpack_board(key: Sequence[str], times: Sequence[tuple[Net, float]]) -> Board:
    title, runtime, precision, threads = key
    base = named(title)
    count = 1 if threads == "1" else _BIG_CORES.get(base.device, 4)
    return replace(
        base, runtime="xnnpack", day=runtime.split()[-1], precision=precision, threads=count,
        source="google/XNNPACK README", times=tuple(times),
    )  # fmt: skip


def st_boards(folder: Path) -> tuple[Board, ...]:
    """ST's model zoo in int8, as far as its nets are known by their names.

    Args:
        folder: where the tables are.
    """
    found: dict[tuple[str, ...], dict[str, tuple[Net, float]]] = {}
    for row in rows_of(folder, "st_zoo"):
        net = st_net(row["model"], row["input"])
        if net is None or row["precision"] != "int8" or not row["board"]:
            continue
        if "per_tensor" in row["model"]:  # other kernels than the rest of the table
            continue
        base = named(row["board"], row["engine"])
        runtime = "st-edge-ai" if "STEdgeAI" in row["runtime"] else "tflite" if row["engine"] == "cpu" else "openvx"
        threads = row["threads"] or ("1" if row["engine"] == "cpu" else "")
        key = (base.device, row["engine"], runtime, threads)
        # The same net in several trainings: a few per cent apart; each counts.
        found.setdefault(key, {})[row["model"] + row["input"]] = (net, float(row["latency_ms"]))
    return tuple(_st_board(key, list(times.values())) for key, times in found.items())


def _st_board(key: Sequence[str], times: Sequence[tuple[Net, float]]) -> Board:
    device, engine, runtime, threads = key
    title = next(item["match"] for item in _names() if item["device"] == device)
    return replace(
        named(title, engine), runtime=runtime, day="2026" if runtime == "st-edge-ai" else "2025", precision="int8",
        threads=int(threads) if threads else None, source="STMicroelectronics/stm32ai-modelzoo READMEs",
        times=tuple(times),
    )  # fmt: skip


def st_net(model: str, size: str) -> Net | None:
    """A net of ST's zoo by its name and input; None where the name does not say enough to know its layers.

    Args:
        model: the table's name of it.
        size: its input, such as 224x224x3.

    >>> st_net("image_classification/mobilenetv1:mobilenetv1_a025_96_fft_int8.tflite", "96x96x3").family
    'mobilenetv1'
    """
    numbers = [int(number) for number in re.findall(r"\d+", size)]
    if len(numbers) != 3:
        return None
    height, width, channels = numbers
    family = model.split("/")[-1].split(":")[0]
    # Trained for flowers ("fft" and "tfs", five classes), or for ImageNet.
    classes = 5 if "fft" in model or "tfs" in model else 1000
    alpha = re.search(r"_a(\d)(\d\d)", model)
    scale = float(f"{alpha[1]}.{alpha[2]}") if alpha else 1.0
    makers: Mapping[str, Callable[[], ModelWork]] = {
        "mobilenetv1": lambda: nets.mobilenet_v1(scale, height, width, channels, classes),
        "mobilenetv2": lambda: nets.mobilenet_v2(scale, height, width, classes),
        "squeezenetv11": lambda: nets.squeezenet_v11(height, classes),
        "resnet50v2": lambda: nets.resnet50_v2(height, classes),
        "resnet": lambda: nets.resnet8(height),
        "fdmobilenet": lambda: nets.fd_mobilenet(0.25, height, classes),
        "osnet": lambda: nets.osnet(scale, height, width),
    }
    is_unknown = (family == "resnet" and "resnet8" not in model) or (family == "fdmobilenet" and "ST " in model)
    if family not in makers or is_unknown or "st_fdmobilenet" in model:
        return None
    return Net(f"{model.split(':')[-1]} {size}", family, makers[family]())


# MLPerf Tiny's four nets, which every board runs in int8.
_MLPERF_NETS: Mapping[str, Callable[[], ModelWork]] = {
    "ad": nets.autoencoder,
    "vww": lambda: nets.mobilenet_v1(0.25, 96, classes=2),
    "ic": nets.resnet8,
    "kws": nets.ds_cnn,
}
# By the start of the runtime's name in the table; other submitters changed the nets, or do not say what runs them.
_MLPERF_RUNTIMES = {"X-CUBE-AI": "st-edge-ai", "Bosch Hardware-Aware": "bosch-hal"}


def _mlperf_net(model: str, runtime: str) -> ModelWork:
    is_reduced = (model, runtime) == ("vww", "st-edge-ai")
    return nets.vww_kept_by_st() if is_reduced else _MLPERF_NETS[model]()


def mlperf_boards(folder: Path) -> tuple[Board, ...]:
    """Microcontrollers of MLPerf Tiny; where a board was submitted several times with a runtime, its best times.

    Args:
        folder: where the tables are.
    """
    found: dict[tuple[str, str, str, float], dict[str, float]] = {}
    for row in rows_of(folder, "mlperf_tiny"):
        runtime = next((name for start, name in _MLPERF_RUNTIMES.items() if row["runtime"].startswith(start)), None)
        core = re.search(r"Cortex\W*-?(M\d+\+?)", row["soc"])
        clock = re.search(r"(\d+) MHz", row["note"])
        if runtime is None or core is None or clock is None:
            continue
        device = re.sub(r"[^a-z0-9]+", "-", row["board"].lower()).strip("-")
        name = core[1].lower().replace("+", "plus")
        times = found.setdefault((device, runtime, f"cortex-{name}", float(clock[1]) / 1000), {})
        times[row["model"]] = min(times.get(row["model"], float("inf")), float(row["latency_ms"]))
    return tuple(
        Board(
            device=device, title=device.upper(), soc=device, core=core, ghz=ghz, engine="cpu", cores="all",
            runtime=runtime, day="2024", precision="int8", threads=1, source="mlcommons/tiny_results_v1.2",
            times=tuple((Net(model, model, _mlperf_net(model, runtime)), time) for model, time in times.items()),
        )
        for (device, runtime, core, ghz), times in found.items()
    )  # fmt: skip


def timm_rows(folder: Path, every: int = 4) -> Iterator[tuple[str, int, float]]:
    """Names, input sizes and times in ms of timm's table; the nets have to be built and traced.

    Args:
        folder: where the tables are.
        every: take one row in so many; one in four leaves 360, which is more than twenty costs need.
    """
    for row in rows_of(folder, "timm_i7_12700h")[::every]:
        yield row["model"], int(row["input"]), float(row["latency_ms"])
