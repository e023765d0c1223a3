"""Files that 0.2.0 wrote: every one is still read, and says what it said."""

from __future__ import annotations

import gzip
import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import edge_opt as eo
from edge_opt._support.json import OLD_FIELDS, from_plain
from edge_opt.calibration.calibration_file import load_calibration
from edge_opt.errors import InvalidCalibration
from edge_opt.pruning.recipe import load_pruned
from edge_opt.records.compression import PruneCheck, PruneRequest, PruneResult, Sensitivity
from edge_opt.records.conversions import Converted
from edge_opt.records.profiles import CheckResult
from edge_opt.records.serving import ServingMemory, ServingReport
from edge_opt.records.training_steps import TrainingStep
from edge_opt.report.comparison import load_comparison
from edge_opt.report.sweep_files import load_sweep
from shown import Encoder

FILES = Path(__file__).parents[1] / "recordings" / "files_of_0_2"


def text(name: str) -> str:
    return gzip.decompress((FILES / f"{name}.json.gz").read_bytes()).decode()


def document(name: str) -> Any:
    return json.loads(text(name))


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    for file in FILES.glob("*.json.gz"):
        (tmp_path / file.stem).write_text(text(Path(file.stem).stem), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["profile", "profile_target", "profile_measured"])
def test_profiles(name: str, unpacked: Path) -> None:
    profile = eo.load(unpacked / f"{name}.json")
    assert profile.totals.macs == document(name)["totals"]["macs"]
    assert list(profile.trace.moved_tensor_bytes) == document(name)["trace"]["resident"]
    assert (profile.measurement is not None) == (name == "profile_measured")
    assert bool(profile.predictions) == (name == "profile_target")


def test_a_loaded_profile_is_compared_with_a_new_one(unpacked: Path) -> None:
    old = eo.load(unpacked / "profile.json")
    new = eo.profile(Encoder(), (1, 4, 8), name=old.name)
    assert eo.compare(old, new).figure("macs").difference() == 0


def test_comparison(unpacked: Path) -> None:
    assert load_comparison(unpacked / "comparison.json").names == ("encoder of 16", "encoder of 32")


def test_sweep(unpacked: Path) -> None:
    result = load_sweep(unpacked / "sweep.json")
    assert len(result.trials) == len(document("sweep")["trials"])


def test_a_calibration_of_0_2_is_refused_with_what_to_do(unpacked: Path) -> None:
    with pytest.raises(InvalidCalibration, match="version 1.*calibrate"):
        load_calibration(unpacked / "calibration.json")


def test_pruned_model() -> None:
    pruned = load_pruned(FILES / "pruned", Encoder)
    assert sum(p.numel() for p in pruned.parameters()) == document("pruned")["achieved"]["params"]


def own_fields(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    """A document without what its writer adds to the record: its format, and figures that follow from the fields."""
    known = {field.name for field in fields(kind)} | OLD_FIELDS.get(kind.__name__, {}).keys()
    return {key: value for key, value in data.items() if key in known}


def read(kind: Any, data: dict[str, Any]) -> Any:
    return from_plain(kind, own_fields(kind, data))


def test_documents_without_a_reader_of_their_own_have_the_fields_of_their_records() -> None:
    assert not read(CheckResult, document("check")).passed
    assert read(Sensitivity, document("sensitivity")).rows
    assert read(Converted, document("converted")).effective_precision == "int8+fp32"
    pruned = document("pruned")
    for kind, key in ((PruneRequest, "asked"), (PruneResult, "achieved"), (PruneCheck, "check")):
        read(kind, pruned[key])
    assert read(TrainingStep, document("training_step")).peak_bytes == document("training_step")["peak_bytes"]
    for report in document("llm")["reports"]:
        memory = own_fields(ServingMemory, report["memory"])
        assert read(ServingReport, report | {"memory": memory}).weights in ("q4_0", "q8_0")


@pytest.mark.parametrize("name", document("records"))
def test_records(name: str) -> None:
    stored = document("records")[name]
    module, _, kind = stored["kind"].rpartition(".")
    from_plain(getattr(importlib.import_module(module), kind), stored["document"])
