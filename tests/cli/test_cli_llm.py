"""edge-opt llm: the table, JSON, files, several at once, and mistakes as one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from edge_opt.cli import app

SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 500,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def configuration(tmp_path: Path) -> str:
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SMALL))
    return str(path.parent)


def test_the_table_and_its_files(configuration: str, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    arguments = [configuration, "-t", "raspberry-pi-5", "-w", "q8_0", "-c", "256", "-p", "32", "-o", str(out)]
    done = CliRunner().invoke(app, ["llm", *arguments])
    assert done.exit_code == 0, done.output
    for word in ("attention", "mlp", "head", "kv", "Fits", "Decoding", "tokens/s", "Energy"):
        assert word in done.output
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_json_holds_the_answer(configuration: str) -> None:
    done = CliRunner().invoke(app, ["llm", configuration, "-w", "fp16", "-c", "100", "-p", "10", "--json"])
    [report] = json.loads(done.stdout)["reports"]
    # Keys and values, two layers, two heads of 16, fp16.
    assert report["memory"]["kv_bytes"] == 2 * 2 * 2 * 16 * 100 * 2
    assert report["memory"]["fits"] is None and report["decode"]["tokens_per_s"] is None


def test_several_stand_side_by_side(configuration: str) -> None:
    arguments = ["-t", "raspberry-pi-5", "-t", "apple-m1", "-w", "q8_0,fp16", "-c", "64", "-p", "8"]
    done = CliRunner().invoke(app, ["llm", configuration, *arguments])
    assert done.exit_code == 0 and done.output.count("apple-m1") >= 2 and done.output.count("fp16") >= 2


def test_what_does_not_fit_may_fail_a_build(configuration: str) -> None:
    arguments = ["llm", configuration, "-t", "raspberry-pi-5", "-c", "64", "-p", "8", "--strict"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--ram", "0.00001"]).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-c", "1000"], "context is 1000, and the maximum of small is 512"),
        (["-t", "rp2040"], "the bandwidth of rp2040 is unknown"),
        (["-w", "q9"], "no weight format named 'q9'"),
        (["-o", "out.pdf"], "use one of .html, .json, .md, .txt"),
    ],
)
def test_a_mistake_is_one_sentence(configuration: str, arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["llm", configuration, *arguments])
    assert done.exit_code == 2
    # Whoever imports transformers first in a process may see log lines of torch, "W1118 04:38 …", before ours.
    *before, error = done.stderr.strip().splitlines()
    assert error.startswith("error: ") and sentence in error
    assert not [line for line in before if not re.match(r"W\d{4} ", line)]
