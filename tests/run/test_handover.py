"""What is handed over with the shipped model: preprocessing, classes, input specification, and a program that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset, TensorDataset

from edge_opt.data import Splits
from edge_opt.run import export_best, handover


class Pictures(TensorDataset):
    classes = ("cat", "dog", "owl")
    transform = SimpleNamespace(
        transforms=[SimpleNamespace(mean=torch.tensor([0.5]), std=(0.25,)), type("Resize", (), {"size": 32})()]
    )


@pytest.fixture
def splits() -> Splits:
    pictures = Pictures(torch.zeros(9, 1, 4, 4), torch.zeros(9, dtype=torch.int64))
    batches = [(torch.zeros(5, 1, 4, 4), torch.zeros(5)), (torch.zeros(2, 1, 4, 4), torch.zeros(2))]
    loader = DataLoader(Subset(pictures, range(6)), batch_size=2)
    return Splits("net.py:loaders", batches, batches, loader, None)


def test_what_the_dataset_knows_is_handed_over(splits: Splits) -> None:
    assert handover.class_names(splits) == ["cat", "dog", "owl"]
    known = handover.preprocessing(splits)
    assert known is not None
    assert (known["mean"], known["std"], known["resize"]) == ([0.5], [0.25], [32.0])
    # lists of batches of 5 and 2; six of the nine pictures
    assert handover.sample_counts(splits) == {"train": 7, "calibration": 7, "validation": 6}


def test_no_folder_of_this_machine_is_in_the_command() -> None:
    command = ["edge-opt", "sweep", "/home/me/net.py:Net", "--budget", "latency_ms <= 2", "-o", "/tmp/out"]
    assert handover.reproducing_command(command) == "edge-opt sweep net.py:Net --budget 'latency_ms <= 2' -o out"


def test_the_program_takes_an_image_a_csv_and_an_array(tmp_path: Path) -> None:
    body = "scores = inputs[0].reshape(len(inputs[0]), -1)[:, :3]\n"
    text = export_best._HEAD.format(package="numpy", imports="") + body + export_best._TAIL
    (tmp_path / "run_best.py").write_text(text)
    spec = {"classes": ["cat", "dog", "owl"], "preprocessing": {"mean": [0.5], "std": [0.25]}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    np.savez(tmp_path / "samples.npz", input_0=np.zeros((1, 1, 2, 2), "float32"), labels=np.array([0]))
    np.save(tmp_path / "a.npy", np.array([[[0, 1], [0, 0]]]))
    (tmp_path / "b.csv").write_text("0,0,9,0\n5,0,0,0\n")
    # 0 becomes (0 - 0.5) / 0.25 = -2 and 255 becomes 2: the second of the first three pixels is the largest
    Image.fromarray(np.array([[0, 255], [0, 0]], "uint8")).save(tmp_path / "c.png")
    for name, answers in {"a.npy": "dog", "b.csv": "owl cat", "c.png": "dog"}.items():
        command = [sys.executable, "-I", str(tmp_path / "run_best.py"), str(tmp_path / name)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stdout.split(":")[1].split() == answers.split()
