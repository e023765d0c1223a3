"""A typical mistake in each command: what failed, what is allowed and the fix, in three lines that name options."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge_opt.cli import app

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 64, 10)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))

def loaders():
    batches = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 10)]
    return {"train": batches, "validation": batches}
"""
MISTAKES = [
    ("profile net.py:Nat -i 1x1x8x8", "closest: Net"),
    ("profile resnet50 -i 1x3x224x224", "torchvision:resnet50"),
    ("profile net.py:Net", "add -i [NAME:]DIMxDIM"),
    ("profile net.py:Net -i 1x3x8x8", "refused its input (1, 3, 8, 8): Invalid channel dimensions; check --inputs"),
    ("profile net.py:Net -i 1,1,8,8", "--inputs '1,1,8,8' cannot be read; write [NAME:]DIMxDIM"),
    ("profile net.py:Net -i 1x1x8x8 --runtime ncnn", "--runtime requires --target, such as --target raspberry-pi-4"),
    ("profile net.py:Net -i 1x1x8x8 -t raspbery-pi-4", "closest: raspberry-pi-4"),
    ("profile net.py:Net -i 1x1x8x8 --depht 1", "--depth"),
    ("profile net.py:Net -i 1x1x8x8 --top many", "--top is 'many'"),
    ("profile net.py:Net -i 1x1x8x8 --sort time", "profile with --measure"),
    ("check net.py:Net -i 1x1x8x8", "add --budget 'macs <= 600M'"),
    ("check net.py:Net -i 1x1x8x8 --budget 'mcas <= 6'", "closest: macs"),
    ("compare net.py:Net gone.json -i 1x1x8x8", "no file 'gone.json'; `edge-opt profile -o FILE.json`"),
    ("sweep net.py:Net", "missing option '--data'; `edge-opt sweep -h`"),
    ("sweep net.py:Net --data net.py:loader", "closest: loaders"),
    ("sweep net.py:Net --data net.py:loaders --precision int3", "--precision is 'int3'; it should be 'fp32'"),
    ("sweep net.py:Net --data net.py:loaders --budget 'latency_mss <= 5'", "closest: latency_ms"),
    ("sweep net.py:Net --data net.py:loaders -i 1x3x8x8", "--inputs is (1, 3, 8, 8)"),
    ("run gone.yaml", "`edge-opt init` writes one"),
    ("run --set epoch=3", "closest: epochs"),
    ("llm gone/ -t raspberry-pi-5", "a language model is model.gguf"),
    ("devices raspbery-pi-4", "`edge-opt devices` lists all"),
    ("convert net.py:Net -i 1x1x8x8 --precision int8", "int8 needs --calibration"),
    ("convert net.py:Net -i 1x1x8x8 --precision int3", "fp32, fp16, bf16, int8, int4"),
    ("convert net.py:Net -i 1x1x8x8 --runtime onx", "onnxruntime"),
    ("convert net.py:Net -i 1x1x8x8 -o net.pt", "must end in .onnx"),
    ("convert net.py:Net -i 1x3x8x8 -o net.onnx", "refused its input (1, 3, 8, 8)"),
    ("prune net.py:Net -i 1x1x8x8", "add --ratio 0.5"),
    ("prune net.py:Net -i 1x1x8x8 --ratio 1.5", "--ratio is 1.5"),
    ("prune net.py:Net -i 1x1x8x8 --ratio 0.5 --threads 2", "--threads requires --target and --latency-target"),
    ("calibrate --threads 0", "--threads is 0"),
    ("calibrate --measure-on pi@board", "--measure-on requires --output"),
    ("measure-on pi@board gone.onnx", "`edge-opt convert MODEL"),
    ("report gone", "`edge-opt run`"),
    ("train-cost net.py:Net -i 1x1x8x8 --optimizer sdg", "closest: sgd"),
    ("train-cost net.py:Net -i 1x1x8x8 --budget 512", "train_peak_memory_mb"),
    ("status gone", "`edge-opt sweep -o gone`"),
    ("doctor --seconds 0", "--seconds is 0.0"),
    ("profle net.py:Net", "Did you mean 'profile'"),
]


@pytest.mark.parametrize(("line", "fix"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_answered_in_three_lines(
    line: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = CliRunner().invoke(app, shlex.split(line))
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert fix in done.stderr
    assert sum(len(textwrap.wrap(text, 100)) for text in done.stderr.splitlines()) <= 3
    assert not re.search(r"\b[a-z_]+=(?=[\s,;:.]|$)", done.stderr), "a parameter of Python"


# Options that a command would ignore, with the file or the options that make it so.
WITHOUT_EFFECT = [
    ("profile net.py:Net -i 1x1x8x8", "--min-time 2", "without --measure"),
    ("profile net.py:Net -i 1x1x8x8", "--idle-uw 3", "without --battery"),
    ("profile net.onnx", "--mode train", "on a file"),
    ("profile net.onnx", "--trust", "on net.onnx"),
    ("check p.json --budget 'macs <= 1G'", "--inputs 1x1x8x8", "on a saved profile"),
    ("check p.json --budget 'macs <= 1G'", "--batch 2", "on a saved profile"),
    ("check net.py:Net --budget 'macs <= 1G'", "--min-time 2", "without a budget on a measured figure"),
    ("check net.py:Net --budget 'macs <= 1G'", "--optimizer sgd", "without a budget on a training step"),
    ("check net.py:Net --budget 'macs <= 1G'", "--target raspberry-pi-4", "without a budget on a figure of it"),
    ("compare a.json b.json", "--inputs 1x1x8x8", "on saved profiles"),
    ("compare net.py:Net b.json", "--min-time 2", "without --measure"),
    ("explain a.json b.json", "--threads 2", "on saved profiles"),
    ("reconcile a.json --with thop", "--batch 2", "on a saved profile"),
    ("convert net.tflite --runtime tflm", "--precision int8", "on a .tflite file"),
    ("convert net.py:Net -i 1x1x8x8", "--core cortex-m7", "without --runtime tflm"),
    ("convert net.py:Net -i 1x1x8x8", "--scheme dynamic", "without --precision int8"),
    ("convert net.py:Net -i 1x1x8x8", "--calibration-batches 2", "without --calibration"),
    ("prune net.py:Net -i 1x1x8x8 --ratio 0.5", "--seed 3", "without --importance random"),
    ("prune net.py:Net -i 1x1x8x8 --ratio 0.5", "--strict", "without --macs-target"),
    ("train-cost net.py:Net -i 1x1x8x8 --largest-batch", "--suggest", "with --largest-batch"),
    ("llm config.json", "--engine gpu", "without --target"),
    ("llm config.json", "--strict", "without --target or --ram"),
    ("run", "--insecure", "without --scheduler"),
    ("sweep net.py:Net --data net.py:loaders --scheduler tls://host:1", "--workers 2", "with --scheduler"),
]


@pytest.mark.parametrize(("line", "option", "reason"), WITHOUT_EFFECT, ids=lambda text: text)
def test_an_option_without_effect_is_refused(line: str, option: str, reason: str) -> None:
    shown = CliRunner().invoke(app, shlex.split(f"{line} {option}"))
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"error: {option.partition(' ')[0]} has no effect {reason}")
