"""Configurations: every key checked, every fault one sentence with its cure."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import typing
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt.cli import app
from edge_opt.errors import InvalidConfig
from edge_opt.loading import load_model
from edge_opt.run.config import (
    RESULT_SCOPES,
    SWEEP_KEYS,
    Precisions,
    RunConfig,
    Scope,
    declared,
    description_of,
    read_config,
    sweep_settings,
    template,
)
from edge_opt.search.space import CONVERTIBLE

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "")) == read_config() == RunConfig()


def test_the_keys_of_the_published_pipeline_are_all_there() -> None:
    published = """seed dataloader_seed dataset batch_size epochs learning_rate train_subset val_subset num_workers
        device model pruning_levels precisions calibration_batches quantization_backend fine_tune_epochs power_watts
        cpu_frequency_scale memory_bandwidth_gbps peak_compute_gmacs memory_budgets_mb active_memory_budget_mb
        benchmark_repeats benchmark_trials benchmark_warmup pareto_use_ci output_dir""".split()
    assert set(published) <= set(RunConfig.model_fields)


def test_precisions_are_those_of_the_project() -> None:
    assert typing.get_args(Precisions) == CONVERTIBLE


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epoch: 3", "unknown key 'epoch'; closest: epochs"),
        ("prunning_levels: [0.5]", "unknown key 'prunning_levels'; closest: pruning_levels"),
        ("model: {conv1: 3}", "unknown key 'model.conv1'; closest: conv1_channels"),
        ("epochs: 0", "epochs is 0; it should be greater than or equal to 1"),
        ("epochs: 2.5", "epochs is 2.5; it should be a valid integer"),
        ("epochs: true", "epochs is True; it should be a valid integer"),
        ("epochs: null", "epochs is null; it should be a valid integer"),
        ("learning_rate: fast", "learning_rate is 'fast'; it should be a valid number"),
        ("learning_rate: 0", "learning_rate is 0; it should be greater than 0"),
        ("pruning_levels: [0.5, 1]", "pruning_levels[1] is 1; it should be less than 1"),
        ("pruning_levels: 0.5", "pruning_levels is 0.5; it should be a valid list"),
        ("pruning_levels: []", "pruning_levels is []; List should have at least 1 item"),
        ("pruning_levels: [0.5, 0.5]", "pruning_levels: holds 0.5 twice; keep one of them"),
        ("layer_pruning: {conv1: [2.0]}", "layer_pruning.conv1[0] is 2.0; it should be less than 1"),
        ("precisions: [int4]", "precisions[0] is 'int4'; it should be 'fp32', 'fp16', 'bf16' or 'int8'"),
        (
            "runtimes: [tflite]",
            "runtimes[0]: unknown runtime 'tflite'; it is one of torch, onnxruntime",
        ),
        ("pareto_use_ci: 1", "pareto_use_ci is 1; it should be a valid boolean"),
        ("device: gpu", "device is 'gpu'; it must be cpu, cuda, cuda:1 or mps"),
        ("model: 3", "model is 3; it should be a reference such as file.py:factory, or the widths"),
        ("budgets: [latncy_ms <= 5]", "unknown metric 'latncy_ms'; closest: latency_ms"),
        ("budgets: [latency_ms]", "expected <=, <, >= or >"),
        (
            "importance: random",
            "importance is 'random'; it should be 'auto', 'group'",
        ),
        ("stream_interval_ms: 0", "stream_interval_ms is 0; it should be greater than 0"),
        ("round_to: some", "round_to is 'some'; it should be"),
        ("output_dir: 3", "output_dir is 3; it should be a valid string"),
        ("- epochs", "holds a list; a configuration is lines of `key: value`"),
        ("epochs: [1", "is not YAML (line 1)"),
        ("epochs: 1\nepochs: 2", "is not YAML (line 2): the key 'epochs' stands twice"),
        ("epochs: !!python/object/apply:os.getcwd []", "is not YAML (line 1): could not determine a constructor"),
    ],
)
def test_a_fault_is_named_with_its_value_and_its_cure(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidConfig, match=re.escape(sentence)) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_every_fault_gets_its_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, "epochs: 0\nbatch_sise: 4\n")
    with pytest.raises(InvalidConfig) as caught:
        read_config(path)
    assert str(caught.value).splitlines() == [
        f"{path}: epochs is 0; it should be greater than or equal to 1",
        f"{path}: unknown key 'batch_sise'; closest: batch_size, val_subset",
    ]


@pytest.mark.parametrize("name", ["absent.yaml", ".", "pipe.yaml"])
def test_a_file_that_cannot_be_read_is_said(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")  # nobody writes to it: opening it would wait forever
    with pytest.raises(InvalidConfig, match="cannot be read: .*; `edge-opt init` writes one"):
        read_config(tmp_path / name)


def test_bytes_that_are_no_text_are_said(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"\x80\x02\xff")
    with pytest.raises(InvalidConfig, match="not a text file"):
        read_config(tmp_path / "model.pt")


def test_keys_are_set_one_by_one_with_types(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {conv1_channels: 4}\nepochs: 9\n")
    settings = ["model.conv2_channels=8", "epochs=1", "learning_rate=1e-4", "train_subset=null", "precisions=[int8]",
                "layer_pruning.features.0=[0.5]", "output_dir=a=b"]  # fmt: skip
    config = read_config(path, settings)
    assert config.model_reference == "edge_opt.model:SmallCNN(conv1_channels=4, conv2_channels=8, num_classes=10)"
    assert (config.epochs, config.learning_rate, config.train_subset, config.precisions) == (1, 1e-4, None, ["int8"])
    assert config.layer_pruning == {"features.0": [0.5]} and config.output_dir == "a=b"


@pytest.mark.parametrize("setting", ["epochs", "=3", "a..b=1"])
def test_a_setting_that_cannot_be_read_is_said(setting: str) -> None:
    with pytest.raises(InvalidConfig, match="write key=value, such as epochs=3"):
        read_config(settings=[setting])


def test_a_model_replaces_the_bundled_one() -> None:
    assert read_config(settings=["model=net.py:Net"]).model_reference == "net.py:Net"


def test_the_bundled_model_is_built_with_its_widths() -> None:
    loaded = load_model(read_config(settings=["model.conv1_channels=3"]).model_reference)
    assert loaded.model.conv1.out_channels == 3


def test_the_memory_budget_is_a_constraint_like_others() -> None:
    config = read_config(settings=["active_memory_budget_mb=2.5"])
    assert config.all_budgets == ("accuracy_drop <= 0.01", "model_mb <= 2.5")
    assert read_config().all_budgets == ("accuracy_drop <= 0.01",)


@pytest.mark.filterwarnings("error")
def test_the_template_is_the_default_with_every_key_explained(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, template())) == RunConfig()
    without_effect = {"sampler", "benchmark_repeats", "benchmark_trials", "benchmark_warmup"}
    assert list(yaml.safe_load(template())) == [key for key in RunConfig.model_fields if key not in without_effect]
    for key in RunConfig.model_fields:
        assert key in without_effect or f"# {description_of(key)}\n" in template()


def test_the_default_file_of_the_project_is_the_template() -> None:
    assert (ROOT / "configs/default.yaml").read_text(encoding="utf-8") == template()


def test_the_published_default_is_a_configuration() -> None:
    config = read_config(ROOT / "configs/fashion_mnist.yaml")
    assert (config.dataset, config.train_subset) == ("fashion-mnist", 12000)


def test_init_writes_a_configuration_and_never_over_one(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "mine.yaml"
    done = CliRunner().invoke(app, ["init", str(path)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(path))
    path.write_text("epochs: 1\n")
    refused = CliRunner().invoke(app, ["init", str(path)])
    assert refused.exit_code == 2 and "exists; choose another name" in refused.output
    assert path.read_text() == "epochs: 1\n"
    assert CliRunner().invoke(app, ["init", str(path), "--force"]).exit_code == 0
    assert path.read_text() == template()


def test_every_key_declares_its_scope_and_results_depend_on_all_but_search_and_report() -> None:
    scopes = {name: declared(field, "scope") for name, field in RunConfig.model_fields.items()}
    assert set(scopes.values()) == set(typing.get_args(Scope))
    assert set(RunConfig().subset(*RESULT_SCOPES)) == {
        name for name, scope in scopes.items() if scope not in ("search", "report")
    }
    # Each of these changes what is trained, made or measured: two runs that differ in it share no result.
    assert {"seed", "metric", "device", "fine_tune_epochs", "round_to", "deploy_batch"} <= set(
        RunConfig().subset(*RESULT_SCOPES)
    )


def test_a_sweep_takes_the_keys_of_a_configuration_with_their_defaults() -> None:
    parameters = inspect.signature(eo.sweep).parameters
    fields = RunConfig.model_fields
    assert {name: parameters[name].default for name in SWEEP_KEYS} == {
        name: fields[name].default for name in SWEEP_KEYS
    }
    assert all(f"        {name}: {description_of(name)}" in (eo.sweep.__doc__ or "") for name in SWEEP_KEYS)
    assert sweep_settings({}) == RunConfig()
    assert sweep_settings({"runtimes": ("torch",)}).runtimes == ["torch"]


def test_former_names_of_settings_still_work_and_say_their_new_ones() -> None:
    with pytest.warns(FutureWarning, match=r"sweep\(pruning\) is deprecated since 0.2, use sweep\(pruning_levels\)"):
        assert sweep_settings({"pruning": [0.5]}).pruning_levels == [0.5]


def test_the_former_samplers_warn_that_candidates_are_drawn_at_random() -> None:
    with pytest.warns(FutureWarning, match="sampler has no effect since 0.3, use trials"):
        assert read_config(settings=["sampler=nsga2", "trials=5"]).trials == 5


@pytest.mark.parametrize("key", ["benchmark_repeats", "benchmark_trials", "benchmark_warmup"])
def test_keys_of_older_files_that_have_no_effect_warn(key: str) -> None:
    with pytest.warns(FutureWarning, match=f"{key} has no effect since 0.2, use min_time_s"):
        read_config(settings=[f"{key}=7"])
    with pytest.raises(InvalidConfig, match=f"{key} is -1; it should be greater than or equal to"):
        read_config(settings=[f"{key}=-1"])


@pytest.mark.parametrize("key", ["epochs", "prunning_levels"])
def test_keys_that_a_sweep_does_not_know_are_refused(key: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"unknown key '{key}'; closest: "):
        sweep_settings({key: 1})


def test_a_wrong_key_ends_a_run_with_one_sentence_and_exit_2() -> None:
    done = CliRunner().invoke(app, ["run", "--set", "epoch=3"])
    assert (done.exit_code, done.stderr) == (2, "error: unknown key 'epoch'; closest: epochs, deploy_batch\n")


@pytest.mark.parametrize("script", ["run_pipeline.py", "multi_seed.py"])
def test_the_scripts_call_the_command(script: str, tmp_path: Path, edge_opt_command: str) -> None:
    words = [str(ROOT / "scripts" / script), "--config", str(tmp_path / "absent.yaml"), "--workers", "2"]
    done = subprocess.run([*shlex.split(edge_opt_command), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/absent.yaml cannot be read: No such file or directory")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prune", "half"], "--prune is 'half'; write shares such as"),
        (["-i", "1x3x8x8", "-i", "1x3"], "--inputs is the shape of the batch to time"),
        (["--precision", "int4"], "--precision is 'int4'; it should be 'fp32'"),
        (["--budget", "latency_mss <= 5"], "unknown metric 'latency_mss'; closest: latency_ms"),
    ],
)
def test_wrong_use_of_a_sweep_is_one_sentence_and_exit_2(tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nbatch = (torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))\n"
        "def loaders():\n    return {'train': [batch], 'validation': [batch]}\n"
    )
    common = ["sweep", "edge_opt.model:SmallCNN", "--data", f"{tmp_path}/own.py:loaders", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*common, *words])
    assert done.exit_code == 2 and sentence in done.stderr, done.output


@pytest.mark.parametrize("text", ["{" * 5000, "epochs: 1\n" * 50_000], ids=["deep", "long"])
def test_a_file_that_takes_long_to_parse_is_refused_before(text: str, tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidConfig, match="too large"):
        read_config(path)


def test_a_file_full_of_faults_names_the_first_ones(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("".join(f"key{number}: 1\n" for number in range(1000)), encoding="utf-8")
    with pytest.raises(InvalidConfig, match="unknown key 'key0'(.|\n)*and 99[0-9] more") as refused:
        read_config(path)
    assert len(str(refused.value)) < 2000
