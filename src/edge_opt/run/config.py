"""The configuration of a run: every key, and reading them from YAML, options and keywords."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from edge_opt._support.deprecation import current_keywords, former_names
from edge_opt._support.extras import missing_extra
from edge_opt._support.files import check_regular
from edge_opt.budgets import parse_budgets, trial_metrics
from edge_opt.errors import EdgeOptError, InvalidConfig, first_line, message_of
from edge_opt.loading import absolute_reference
from edge_opt.measuring.machine import usable_cores
from edge_opt.records.sweeps import SHARES
from edge_opt.runtimes.registry import LIMIT_VARIABLE, check_name, installed_runtimes, runtime_names
from edge_opt.text import shorten
from edge_opt.units import MIB

try:
    import yaml
    from pydantic import (
        AfterValidator,
        BaseModel,
        ConfigDict,
        Field,
        ValidationError,
        ValidationInfo,
        field_serializer,
        field_validator,
        model_validator,
    )
except ModuleNotFoundError as error:
    raise missing_extra("this needs", error.name or "pydantic", "run") from error

Precisions = Literal["fp32", "fp16", "bf16", "int8"]
Runtimes = Annotated[str, AfterValidator(check_name), Field(json_schema_extra={"enum": [*runtime_names()]})]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
# Beyond these bounds a number is a slip of the keyboard.
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
Count = Annotated[int, Field(ge=1, le=10**9)]
# Beyond this a number of passes is a slip of the keyboard.
Epochs = Annotated[int, Field(le=100_000)]
# Beyond this a machine would be busy with starting them.
Threads = Annotated[int, Field(ge=1, le=1024)]

SMALL_CNN = "edge_opt.model:SmallCNN"
# Ratios used if none are named and none can be searched for.
GRID = (0.0, 0.25, 0.5)


class SmallCNNConfig(BaseModel):
    """Widths of the bundled network."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    conv1_channels: Count = 16
    conv2_channels: Count = 32
    num_classes: Count = 10


Scope = Literal["data", "training", "candidate", "timing", "search", "report"]
# Results depend on settings of these scopes: a folder that holds results with other values is refused.
RESULT_SCOPES: tuple[Scope, ...] = ("data", "training", "candidate", "timing")


def setting(default: Any, scope: Scope, *, sweep: bool = False, group: str = "", description: str | None = None) -> Any:
    """Declare a key of the configuration. The text below the key is shown in help, template and docs.

    Args:
        default: Its default.
        scope: What depends on it. data: the samples. training: the baseline. candidate: how a variant is made.
            timing: how it is measured. search: which candidates are tried and how the work is done. report: what is
            reported. Keys of `search` and `report` may change between two runs on the same folder.
        sweep: Whether `edge_opt.sweep` and `edge-opt sweep` also have it.
        group: The heading in a file that begins with this key.
        description: The text, where it is not written below the key.
    """
    return Field(default, description=description, json_schema_extra={"scope": scope, "sweep": sweep, "group": group})


class RunConfig(BaseModel):
    """Everything that decides a run, from data to the model to ship. Passed whole; nothing copies its fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    seed: Seed = setting(0, "training", sweep=True, group="Run")
    """Seed of the split of the data, the initial weights and fine-tuning."""
    output_dir: Text = setting("outputs", "report")
    """Folder of all results; a second run resumes there."""

    dataset: Text = setting("digits", "data", group="Data")
    """digits, mnist, fashion-mnist, or your own loaders: file.py:loaders."""
    data_dir: Text | None = setting(None, "search")
    """Folder of idx files; null searches the usual folders."""
    download: bool = setting(False, "search")
    """Download mnist or fashion-mnist if it is missing."""
    batch_size: Count = setting(32, "data")
    """Samples per batch, in training and in measured latency."""
    train_subset: Count | None = setting(None, "data")
    """Training samples; null uses all that the other parts leave."""
    val_subset: Count | None = setting(None, "data")
    """Validation samples, used to choose candidates; null uses as many as the test part has."""
    calibration_batches: Count = setting(4, "data", sweep=True)
    """Batches that set the ranges of int8; in no other part."""
    dataloader_seed: Seed | None = setting(None, "data")
    """Seed of the order of training samples; null uses seed."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = setting(0, "search")
    """Extra processes that load data."""

    metric: Any = setting("accuracy", "training", sweep=True, group="Task")
    """Quality metric: accuracy, top5, f1, miou, mae, rmse, r2, auroc, perplexity, wer, or your own on outputs
    and targets: file.py:f."""
    metric_direction: Literal["higher", "lower"] | None = setting(None, "training", sweep=True)
    """Whether a higher or a lower metric is better; null: as usual for its name. Required for your own of another
    name."""
    loss: Any = setting(None, "training", sweep=True)
    """Loss: cross_entropy, mse, l1, smooth_l1, huber, bce_with_logits, or file.py:f; null: cross-entropy for classes,
    else squared error."""
    forward: Any = setting(None, "training", sweep=True)
    """Function (model, batch) that calls the model: file.py:f; null passes the batch's inputs."""
    collate: Any = setting(None, "training", sweep=True)
    """Function that makes a batch of a list of samples: file.py:f; for datasets instead of loaders."""

    model: str | SmallCNNConfig = setting(SmallCNNConfig(), "training", group="Training")
    """Widths of the bundled network, or your model: file.py:factory, torchvision:NAME, timm:NAME."""
    device: str = setting("cpu", "training")
    """Device for training: cpu, cuda, cuda:1 or mps. Variants run on the CPU."""
    build_threads: Threads | None = setting(1, "training", sweep=True)
    """Threads for training and building; small networks are fastest with one. null: all cores."""
    epochs: Annotated[Epochs, Field(ge=1)] = setting(12, "training")
    """Epochs of training the baseline."""
    learning_rate: Annotated[Positive, Field(le=100)] = setting(3e-3, "training", sweep=True)
    """Learning rate of AdamW, falling to zero over the epochs."""
    fine_tune_epochs: Annotated[Epochs, Field(ge=0)] = setting(4, "candidate", sweep=True)
    """Epochs of fine-tuning after pruning. Ratios that auto chooses are trained as long again while accuracy is
    missing, up to 3 times in all."""
    distillation: bool = setting(False, "candidate", sweep=True)
    """Distill the baseline while fine-tuning."""
    train_for_int8: bool | Literal["auto"] = setting("auto", "candidate", sweep=True)
    """Fine-tune int8 variants with simulated rounding, also the unpruned one; auto: where plain int8 loses more than
    half a point."""
    fair: bool = setting(False, "candidate", sweep=True)
    """Train the baseline for fine_tune_epochs as well, so that no variant was trained longer."""

    pruning_levels: Annotated[list[Share], Field(min_length=1)] | Literal["auto"] = setting(
        "auto", "search", sweep=True, group="Variants"
    )
    """Pruning ratios, such as [0, 0.25, 0.5]; auto screens thirteen without training, and trains the fastest that
    stays accurate."""
    layer_pruning: dict[str, Annotated[list[Share], Field(min_length=1)]] = setting({}, "search", sweep=True)
    """Pruning ratios of single layers, by path, instead of pruning_levels."""
    importance: Literal["auto", "group", "reconstruction", "taylor"] = setting("auto", "candidate", sweep=True)
    """How channels are ranked for removal; auto is group: weights of all layers that write or read it."""
    round_to: Count | Literal["auto"] = setting("auto", "candidate", sweep=True)
    """Round kept channels to a multiple of this; auto: what this CPU runs fast."""
    precisions: Annotated[list[Precisions], Field(min_length=1)] = setting(["fp32", "int8"], "search", sweep=True)
    """fp32, fp16, bf16, int8."""
    quantization_backend: Literal["auto", "x86", "fbgemm", "onednn", "qnnpack"] = setting(
        "auto", "candidate", sweep=True
    )
    """Kernels of int8: x86 (fbgemm, onednn), qnnpack (ARM), or auto: this machine's."""
    runtimes: Annotated[list[Runtimes], Field(min_length=1)] | Literal["auto"] = setting(
        "auto",
        "search",
        sweep=True,
        description=f"{', '.join(runtime_names())}; auto: every installed one (torch-compile must be named). Slow ones "
        "are dropped after a quick timing of the unpruned model.",
    )

    budgets: list[str] = setting(["accuracy_drop <= 0.01"], "search", sweep=True, group="Budget")
    """Limits of a variant, such as latency_ms <= 5, size_mb <= 1, mae_drop <= 0.2. For another metric between 0 and 1,
    the default limits its drop; other metrics have no default."""
    active_memory_budget_mb: Positive | None = setting(None, "search", sweep=True)
    """Limit of the weights in MiB: the budget model_mb <= this."""
    memory_budgets_mb: list[Positive] = setting([1.0, 2.0, 4.0], "report")
    """Limits of the weights in MiB that the tables are made for."""
    pareto_use_ci: bool = setting(False, "search", sweep=True)
    """A variant dominates another only if their intervals do not overlap."""

    sampler: Literal["grid", "nsga2", "tpe"] = setting("grid", "search", sweep=True)
    """Accepted from older files and not used: `trials` candidates are drawn at random."""
    trials: Count | None = setting(None, "search", sweep=True, group="Search")
    """Candidates to try, drawn at random; null: all."""
    memory_limit_mb: Annotated[Positive, Field(ge=256)] | None = setting(None, "search", sweep=True)
    """Memory limit of one candidate in MiB, at least 256 for torch itself; null: no limit."""
    time_limit_s: Positive | None = setting(600.0, "search", sweep=True)
    """Time limit of one candidate in seconds."""
    skip: bool = setting(True, "search", sweep=True)
    """Leave out candidates whose predicted latency misses a budget with 95 % confidence; false builds all. It needs a
    target, or a calibration of this machine for the runtimes."""
    sensitivity: bool = setting(False, "report")
    """Also measure the effect of pruning each layer alone."""

    min_time_s: Positive = setting(0.4, "timing", sweep=True, group="Measuring")
    """Minimum seconds of timing per variant; twice as long if it is noisy."""
    deploy_batch: Count = setting(1, "timing", sweep=True)
    """Samples per call of the deployed model; variants are ranked by this latency."""
    threads: Threads | None = setting(1, "timing", sweep=True)
    """Threads of a variant while it is timed; null: all cores."""
    benchmark_repeats: Count = setting(5, "report")
    """Accepted from older files and not used: min_time_s decides."""
    benchmark_trials: Count = setting(3, "report")
    """Accepted from older files and not used: min_time_s decides."""
    benchmark_warmup: Annotated[int, Field(ge=0)] = setting(3, "report")
    """Accepted from older files and not used: warm-up ends when times no longer fall."""
    power_watts: Positive = setting(2.0, "timing", sweep=True)
    """Power of the device in watts. Without a meter, energy is this times latency, a proxy."""

    target: Text | Annotated[list[Text], Field(min_length=1)] | None = setting(
        None, "report", sweep=True, group="Deployment"
    )
    """Device of `edge-opt devices` that decides: variants are judged and ranked by what they take there. Of several,
    each has a winner, and the first one's is exported. null: this machine decides."""
    target_runtime: Text | None = setting(None, "report", sweep=True)
    """Runtime on the target, such as ncnn; null: the one with the most accurate data."""
    target_threads: Count | None = setting(None, "report", sweep=True)
    """Threads of the runtime on the target; null: those with the most accurate data."""
    target_times: dict[str, Positive] = setting({}, "report", sweep=True)
    """Times of variants in ms that you measured on the target, by key or label; they correct the other predictions."""
    host_timing: bool = setting(True, "timing", sweep=True)
    """Also time variants on this machine. With a target, false leaves this out and saves most of the time."""
    cpu_frequency_scale: Annotated[Positive, Field(ge=0.001, le=1000)] = setting(1.0, "report")
    """Clock of the simulated device over the clock of this machine."""
    stream_interval_ms: Positive = setting(10.0, "report")
    """Interval between two samples of the simulated stream."""
    memory_bandwidth_gbps: Positive = setting(4.3, "report")
    """Memory bandwidth of the simulated device, for its roofline; 4.3 is a Raspberry Pi 4."""
    peak_compute_gmacs: Positive | None = setting(None, "report")
    """Peak compute of the simulated device; null: the roofline has no knee."""

    @field_validator("model", mode="before")
    @classmethod
    def _is_the_bundled_one(cls, model: Any) -> Any:
        """Return the bundled network under its own name, as earlier configurations call it."""
        return SmallCNNConfig() if model == "SmallCNN" else model

    @field_validator("metric", "loss", "forward", "collate")
    @classmethod
    def _are_functions(cls, value: Any, info: ValidationInfo) -> Any:
        is_left_out = value is None and info.field_name != "metric"
        if not (is_left_out or isinstance(value, str) or callable(value) or hasattr(value, "compute")):
            raise ValueError("must be a name, or a function: file.py:f")
        return value

    @field_serializer("metric", "loss", "forward", "collate")
    def _by_name(self, value: Any) -> Any:
        """Return a function or an object of the user's as text: where it is defined."""
        if value is None or isinstance(value, str):
            return value
        kind = value if inspect.isfunction(value) or inspect.isclass(value) else type(value)
        return f"{kind.__module__}:{kind.__qualname__}"

    @model_validator(mode="after")
    def _are_budgets(self) -> RunConfig:
        try:
            known = trial_metrics(self.metric_name)
        except EdgeOptError as error:
            raise ValueError(f"metric: {error}") from error
        try:
            parse_budgets(self.all_budgets if "budgets" in self.model_fields_set else (), known)
        except EdgeOptError as error:
            raise ValueError(f"budgets: {error}") from error
        return self

    @field_validator("pruning_levels", "precisions", "runtimes", "memory_budgets_mb", "budgets")
    @classmethod
    def _are_distinct(cls, values: list[Any] | str) -> list[Any] | str:
        if isinstance(values, str):
            return values
        twice = [value for index, value in enumerate(values) if value in values[:index]]
        if twice:
            raise ValueError(f"holds {twice[0]!r} twice; keep one of them")
        return values

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        kind, _, index = device.partition(":")
        if kind not in ("cpu", "cuda", "mps") or (index and not index.isdecimal()):
            raise ValueError("must be cpu, cuda, cuda:1 or mps")
        return device

    def subset(self, *scopes: Scope) -> dict[str, Any]:
        """Return the settings of these scopes as JSON values: functions by name, the model by its reference."""
        chosen = {name for name, field in RunConfig.model_fields.items() if declared(field, "scope") in scopes}
        values = self.model_dump(include=chosen)
        return values | ({"model": self.model_reference} if "model" in chosen else {})

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets; the first one decides."""
        named = [self.target] if isinstance(self.target, str) else self.target or []
        return tuple(named)

    @property
    def task(self) -> dict[str, Any]:
        """The settings that make a task: metric, loss, forward and collate, as every process can import them."""
        values = {key: getattr(self, key) for key in TASK_KEYS}
        return {key: absolute_reference(value) if isinstance(value, str) else value for key, value in values.items()}

    @property
    def prunes(self) -> bool:
        """Whether some candidate may be pruned."""
        return self.pruning_levels == "auto" or any(self.pruning_levels) or bool(self.layer_pruning)

    @property
    def screens_runtimes(self) -> bool:
        """Whether slow runtimes are dropped: those that are named, here or by the environment, are all tried."""
        return self.runtimes == "auto" and not os.environ.get(LIMIT_VARIABLE)

    @property
    def used_runtimes(self) -> list[str]:
        """The runtimes to try: those that are named, those that build for the targets, or every installed one."""
        if self.runtimes == "auto" and self.targets:
            # What the targets run follows from a configuration, so that its module imports this one.
            from edge_opt.run.target_sweep import runtimes_for

            return runtimes_for(self)
        return [*installed_runtimes()] if isinstance(self.runtimes, str) else self.runtimes

    @property
    def used_threads(self) -> int:
        """Threads of a variant while it is timed."""
        return self.threads or usable_cores()

    @property
    def used_build_threads(self) -> int:
        """Threads of training and building."""
        return self.build_threads or usable_cores()

    @property
    def reduce_range(self) -> bool | None:
        """Whether int8 weights get seven bits; None decides by this machine.

        x86 without VNNI adds two products of eight bits in sixteen bits, which overflows.
        """
        return {"auto": None, "qnnpack": False}.get(self.quantization_backend, True)

    @property
    def memory_limit_bytes(self) -> int | None:
        """Resident bytes that one phase may take; None: no limit."""
        return None if self.memory_limit_mb is None else int(self.memory_limit_mb * MIB)

    @property
    def model_reference(self) -> str:
        """The model as `load_model` takes it."""
        if isinstance(self.model, str):
            return self.model
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.model.model_dump().items())
        return f"{SMALL_CNN}({arguments})"

    @property
    def metric_name(self) -> str:
        """The metric as columns and budgets call it."""
        if self.metric == "accuracy":
            return "accuracy"
        # Not imported for accuracy: it needs torch, and reading a configuration does not.
        from edge_opt.tasks.metrics import reference_name

        return reference_name(self.metric)

    @property
    def all_budgets(self) -> tuple[str, ...]:
        """All budgets as texts, that of memory among them; where none were given, those that fit the metric."""
        texts = self.budgets
        if "budgets" not in self.model_fields_set and self.metric_name != "accuracy":
            texts = [f"{self.metric_name}_drop <= 0.01"] if self.metric_name in SHARES else []
        if self.active_memory_budget_mb is None:
            return tuple(texts)
        return (*texts, f"model_mb <= {self.active_memory_budget_mb:g}")


def declared(field: Any, name: str) -> Any:
    """Return what `setting` declared for a key: its scope, its group, or whether a sweep has it."""
    return field.json_schema_extra[name]


# The keys that a sweep of a trained model shares with a run: the same key, the same default, the same meaning.
SWEEP_KEYS = tuple(name for name, field in RunConfig.model_fields.items() if declared(field, "sweep"))
# The keys that make a task, as `finetune` and `sensitivity` take them.
TASK_KEYS = ("metric", "metric_direction", "loss", "forward", "collate")


_HEAD = """\
# From data to the model to ship: `edge-opt run THIS_FILE`. Every key is here with its default.
# One key for one run: `edge-opt run THIS_FILE --set epochs=3 --set model.conv1_channels=8`.
"""


def template() -> str:
    """Return a file with every key that has an effect, its default and what it is for, under headings.

    >>> print(template().splitlines()[4])
    # Seed of the split of the data, the initial weights and fine-tuning.
    """
    lines = [_HEAD]
    former = former_names("configuration key")
    for name, field in RunConfig.model_fields.items():
        if name in former:
            continue
        if declared(field, "group"):
            lines.append(f"\n## {declared(field, 'group')}\n")
        lines.append(f"# {description_of(name)}\n{name}: {default_text(field.default)}\n")
    return "".join(lines)


def default_text(default: Any) -> str:
    """Return a default as YAML on one line."""
    plain = default.model_dump() if isinstance(default, BaseModel) else default
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def description_of(key: str) -> str:
    """Return what a key means, on one line.

    >>> description_of("epochs")
    'Epochs of training the baseline.'
    """
    return " ".join(str(RunConfig.model_fields[key].description).split())


def show_settings(function: Callable[..., object], keys: Sequence[str]) -> None:
    """Show every key that a function takes as `**settings` in its signature and its help."""
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    fields = RunConfig.model_fields
    more = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=fields[key].default) for key in keys]
    cast(Any, function).__signature__ = signature.replace(parameters=[*own, *more])
    lines = "\n".join(f"        {key}: {description_of(key)}" for key in keys)
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n{lines}\n    "


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML without code, where a key that stands twice is an error and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"the key {key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# YAML 1.1 takes 1e-3 for text, because it has no point; here it is a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_config(path: str | os.PathLike[str] | None = None, settings: Sequence[str] = ()) -> RunConfig:
    """Read the configuration in a file, or the default one, with single keys set as `key=value`.

    >>> read_config(settings=["epochs=3", "model.conv1_channels=8"]).model_reference
    'edge_opt.model:SmallCNN(conv1_channels=8, conv2_channels=32, num_classes=10)'
    """
    content: dict[str, Any] = {} if path is None else _file(Path(path))
    return validated(read_settings(settings, content), "" if path is None else f"{path}: ")


def read_settings(settings: Sequence[str], content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return keys set one by one as `key=value`, on top of what is there."""
    merged = dict(content or {})
    for setting in settings:
        key, equals, text = setting.partition("=")
        steps = key.strip().split(".")
        if not equals or not all(steps):
            raise InvalidConfig(f"--set {setting!r} cannot be read; write key=value, such as epochs=3")
        # A layer's path has dots of its own: only the first is ours.
        steps = [steps[0], ".".join(steps[1:])] if steps[0] == "layer_pruning" and len(steps) > 1 else steps
        section = merged
        for step in steps[:-1]:
            inner = section.get(step)
            section[step] = dict(inner) if isinstance(inner, Mapping) else {}
            section = section[step]
        section[steps[-1]] = _yaml(text, f"--set {shorten(setting, 80)!r}")
    return merged


def validated(content: Mapping[str, Any], where: str = "") -> RunConfig:
    """Return the configuration that a mapping describes; every fault in it is one sentence of one error."""
    try:
        return RunConfig.model_validate(current_keywords(content, former_names("configuration key"), stacklevel=4))
    except ValidationError as error:
        sentences = list(dict.fromkeys(_sentence(fault) for fault in error.errors() if not _is_other_form(fault)))
        count = sum(length <= _MOST_SHOWN for length in accumulate(map(len, sentences))) or 1
        more = [f"and {len(sentences) - count} more"] if len(sentences) > count else []
        raise InvalidConfig("\n".join(f"{where}{text}" for text in sentences[:count] + more)) from error


def sweep_settings(settings: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a sweep, checked as a configuration is; keys of a run that mean nothing here are refused.

    >>> sweep_settings({"round_to": 8}).round_to
    8
    """
    known: dict[str, Any] = {}
    for key, value in current_keywords(settings, former_names("parameter", "sweep"), stacklevel=4).items():
        if key not in SWEEP_KEYS:
            raise InvalidConfig(unknown_key(key, SWEEP_KEYS))
        known[key] = _as_lists(value)
    return validated(known)


def _as_lists(value: Any) -> Any:
    """Return tuples as the lists that YAML would give."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, (tuple, list)) else value


def _file(path: Path) -> dict[str, Any]:
    try:
        check_regular(path)
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except OSError as error:
        cure = "`edge-opt init` writes one to start from"
        raise InvalidConfig(f"{path} cannot be read: {error.strerror or error}; {cure}") from error
    except ValueError as error:
        raise InvalidConfig(f"{path} is not a text file in UTF-8; a configuration is YAML") from error
    content = _yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} holds a {type(content).__name__}; a configuration is lines of `key: value`")
    return {str(key): value for key, value in content.items()}


# PyYAML takes seconds for a megabyte, and for thousands of brackets inside each other.
_MOST_CHARACTERS = 200_000
_MOST_LEVELS = 50
_MOST_SHOWN = 1500  # characters of faults


def _yaml(text: str, where: str) -> Any:
    levels = accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) for letter in text[:_MOST_CHARACTERS])
    if len(text) > _MOST_CHARACTERS or max(levels, default=0) > _MOST_LEVELS:
        limits = f"{_MOST_CHARACTERS:,} characters and {_MOST_LEVELS} brackets inside each other"
        raise InvalidConfig(f"{where} is too large; a configuration has at most {limits}")
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: it builds plain values only
    except RecursionError as error:
        raise InvalidConfig(f"{where} is nested deeper than a configuration can be, or holds itself") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        problem = getattr(error, "problem", None) or message_of(error)
        raise InvalidConfig(f"{where} is not YAML{line}: {problem}") from error
    except Exception as error:  # PyYAML converts dates, numbers and tags without checking them first
        raise InvalidConfig(f"{where} has a value that YAML cannot convert: {first_line(error)}") from error


# What pydantic adds to the location of a value that may have several forms, such as text or a mapping.
_FORM = re.compile(r"str$|SmallCNNConfig$|list\[|constrained-|literal\[")


def _is_other_form(fault: Any) -> bool:
    """Return whether a fault is of a form that was not meant: a list is not the word "auto", a mapping not text."""
    form = str(fault["loc"][1]) if len(fault["loc"]) > 1 else ""
    if form.startswith("literal["):
        return not isinstance(fault["input"], str)
    return form == "str" and isinstance(fault["input"], Mapping)


def _sentence(fault: Any) -> str:
    """Return one fault of a validation: the key, its value, and what pydantic expects."""
    first, *others = fault["loc"] or ("",)
    steps = [first, *(step for step in others if not _FORM.match(str(step)))]
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    if fault["type"] == "extra_forbidden":
        section: type[BaseModel] = SmallCNNConfig if steps[:-1] == ["model"] else RunConfig
        return unknown_key(key, section.model_fields)
    if fault["type"] == "value_error":
        problem = str(fault["ctx"]["error"])
        if problem.startswith("must be"):
            return f"{key} is {_short(fault['input'])}; it {problem}"
        return f"{key}: {problem}" if key else problem
    expected = fault["msg"].replace("Input should", "it should")
    if steps == ["model"]:
        expected = "it should be a reference such as file.py:factory, or the widths of the bundled network"
    return f"{key} is {_short(fault['input'])}; {expected}"


def _short(value: Any) -> str:
    try:
        shown = "null" if value is None else repr(value)
    except ValueError:  # Python does not print an integer of more than 4300 digits
        shown = "a number of thousands of digits"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return what to say about a key that does not exist: the closest ones."""
    names = list(known)
    close = get_close_matches(key.rpartition(".")[2], names, n=3, cutoff=0.5)
    return f"unknown key {key!r}; {'closest: ' + ', '.join(close) if close else 'keys are ' + ', '.join(names)}"
