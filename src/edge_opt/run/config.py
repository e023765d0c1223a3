"""One YAML file to RunConfig: every key, checked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from edge_opt._support.deprecation import current_keywords, former_names
from edge_opt._support.extras import missing_extra
from edge_opt.budgets import parse_budget, trial_metrics
from edge_opt.errors import BudgetError, EdgeOptError, InvalidConfig
from edge_opt.records.sweeps import SHARES

try:
    import yaml
    from pydantic import (
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
Runtimes = Literal["torch", "onnxruntime", "openvino", "torch-compile", "litert", "executorch"]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
# Beyond this a number of passes is a slip of the keyboard.
Epochs = Annotated[int, Field(le=100_000)]
# Beyond this a machine would be busy with starting them.
Threads = Annotated[int, Field(ge=1, le=1024)]

SMALL_CNN = "edge_opt.model:SmallCNN"
# Levels for what cannot look for its own, where nobody names any.
GRID = (0.0, 0.25, 0.5)


class SmallCNNConfig(BaseModel):
    """Widths of the bundled network."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    conv1_channels: Count = 16
    conv2_channels: Count = 32
    num_classes: Count = 10


class RunConfig(BaseModel):
    """A run from data to the model to ship. `group` of a field is the heading it stands under in a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    seed: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Decides the parts of the data, first weights and fine-tuning.",
        json_schema_extra={"group": "Run"},
    )
    output_dir: str = Field("outputs", description="Where everything is written; a second run resumes there.")

    dataset: str = Field(
        "digits",
        description="digits, mnist, fashion-mnist, or loaders of your own: file.py:loaders.",
        json_schema_extra={"group": "Data"},
    )
    data_dir: str | None = Field(None, description="Folder of idx files; null looks where packages put them.")
    download: bool = Field(False, description="Fetch mnist or fashion-mnist if it is not here.")
    batch_size: Count = Field(32, description="Samples per batch, in training and in measured latency.")
    train_subset: Count | None = Field(None, description="Training samples; null is all that are left.")
    val_subset: Count | None = Field(
        None, description="Validation samples, by which candidates are chosen; null is as many as the test part has."
    )
    calibration_batches: Count = Field(4, description="Batches that decide the ranges of int8, apart from the others.")
    dataloader_seed: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Decides the order of training samples; null is seed."
    )
    num_workers: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Processes that load data; 0 is none beside ours."
    )

    metric: Any = Field(
        "accuracy",
        description="What answers are worth: accuracy, top5, f1, miou, mae, rmse, r2, auroc, perplexity, wer, "
        "or your own on outputs and targets: file.py:f.",
        json_schema_extra={"group": "Task"},
    )
    metric_direction: Literal["higher", "lower"] | None = Field(
        None, description="Which way the metric is better; null is the named metric's own. Yours must say it."
    )
    loss: Any = Field(
        None,
        description="What is trained on: cross_entropy, mse, l1, smooth_l1, huber, bce_with_logits, "
        "or file.py:f; null follows the metric's task.",
    )
    forward: Any = Field(
        None, description="How the model is called with a batch: file.py:f of (model, batch); null passes its inputs."
    )
    collate: Any = Field(
        None, description="Makes a batch of a list of samples: file.py:f, for parts that are datasets, not loaders."
    )

    model: str | SmallCNNConfig = Field(
        SmallCNNConfig(),
        description="Widths of the bundled network, or a model of yours: file.py:factory, torchvision:NAME, timm:NAME.",
        json_schema_extra={"group": "Training"},
    )
    device: str = Field("cpu", description="Where training runs: cpu, cuda, cuda:1 or mps. Variants run on the CPU.")
    build_threads: Threads | None = Field(
        1, description="Threads of training and building; small networks are fastest with one. null is all cores."
    )
    epochs: Annotated[Epochs, Field(ge=1)] = Field(12, description="Passes over the training part for the baseline.")
    learning_rate: Positive = Field(3e-3, description="Of AdamW, falling to zero over the epochs.")
    fine_tune_epochs: Annotated[Epochs, Field(ge=0)] = Field(3, description="Passes after pruning.")
    distillation: bool = Field(False, description="Let the baseline teach while fine-tuning.")
    train_for_int8: bool = Field(
        False, description="Fine-tune what runs in int8 with its rounding, the unpruned model too: more training."
    )

    pruning_levels: Annotated[list[Share], Field(min_length=1)] | Literal["auto"] = Field(
        "auto",
        description="Shares of channels to remove, such as [0, 0.25, 0.5]; auto tries thirteen before training, and "
        "trains the one worth it.",
        json_schema_extra={"group": "Variants"},
    )
    layer_pruning: dict[str, Annotated[list[Share], Field(min_length=1)]] = Field(
        {}, description="Shares to try for single layers, by path; there they stand in for pruning_levels."
    )
    importance: Literal["auto", "group", "reconstruction", "taylor"] = Field(
        "auto", description="Which channels go: the least by this; auto is group: all layers that write or read it."
    )
    round_to: Count | Literal["auto"] = Field(
        "auto", description="Channels that stay are a multiple of this; auto is what this CPU runs fast."
    )
    precisions: Annotated[list[Precisions], Field(min_length=1)] = Field(
        ["fp32", "int8"], description="fp32, fp16, bf16, int8."
    )
    quantization_backend: Literal["auto", "x86", "fbgemm", "onednn", "qnnpack"] = Field(
        "auto", description="Kernels that int8 is made for: x86 (fbgemm, onednn), qnnpack (ARM), or this machine's."
    )
    runtimes: Annotated[list[Runtimes], Field(min_length=1)] = Field(
        ["torch", "onnxruntime"], description="torch, onnxruntime, openvino, torch-compile, litert, executorch."
    )

    constraints: list[str] = Field(
        ["accuracy_drop <= 0.01"],
        description="What a variant must keep, such as latency_ms <= 5, size_mb <= 1, mae_drop <= 0.2. With another "
        "metric the default speaks of its own drop if it is a share, and else there is none.",
        json_schema_extra={"group": "Budget"},
    )
    active_memory_budget_mb: Positive | None = Field(
        None, description="MiB that the weights may take: model_mb <= this. Peak memory is a constraint of its own."
    )
    memory_budgets_mb: list[Positive] = Field(
        [1.0, 2.0, 4.0], description="Budgets of the weights for which the tables say what keeps them."
    )
    pareto_use_ci: bool = Field(False, description="A variant beats another only where their intervals do not overlap.")

    sampler: Literal["grid", "nsga2", "tpe"] = Field(
        "grid",
        description="Who chooses `trials` of a larger space: grid at random, nsga2 and tpe by what was found.",
        json_schema_extra={"group": "Search"},
    )
    trials: Count | None = Field(None, description="Candidates to try; null is the whole space.")
    memory_limit_mb: Positive | None = Field(None, description="Memory that one candidate may take; null is no limit.")
    time_limit_s: Positive | None = Field(600.0, description="Seconds that one candidate may take.")
    sensitivity: bool = Field(False, description="Also find out what pruning each layer alone costs.")

    min_time_s: Positive = Field(
        0.4,
        description="Seconds for which each variant is timed at least; twice as long where it is noisy.",
        json_schema_extra={"group": "Measuring"},
    )
    deploy_batch: Count = Field(
        1, description="Samples in one call of the deployed model; by its time variants are ranked and compared."
    )
    threads: Threads | None = Field(1, description="Threads of a variant while it is timed; null is all cores.")
    benchmark_repeats: Count = Field(5, description="Accepted from older files and not used: min_time_s decides.")
    benchmark_trials: Count = Field(3, description="Accepted from older files and not used: min_time_s decides.")
    benchmark_warmup: Annotated[int, Field(ge=0)] = Field(
        3, description="Accepted from older files and not used: warm-up ends when times no longer fall."
    )
    power_watts: Positive = Field(
        2.0, description="Power of the device; where no meter can be read, energy is this times latency, a proxy."
    )

    target: str | None = Field(
        None,
        description="A device of `edge-opt devices`, for which times are estimated beside those measured here.",
        json_schema_extra={"group": "Deployment"},
    )
    target_runtime: str | None = Field(
        None, description="What runs the model on the target, such as ncnn; null is the best known."
    )
    target_threads: Count | None = Field(
        None, description="Of the runtime on the target; null is those of its best-known platform."
    )
    cpu_frequency_scale: Positive = Field(1.0, description="Clock of the device over the clock here; 0.5 is half.")
    stream_interval_ms: Positive = Field(10.0, description="One sample arrives every so often.")
    memory_bandwidth_gbps: Positive = Field(
        4.3, description="Of the device, for its own roofline; 4.3 is a Raspberry Pi 4."
    )
    peak_compute_gmacs: Positive | None = Field(None, description="Of the device; null leaves the roofline's knee out.")

    @field_validator("model", mode="before")
    @classmethod
    def _is_the_bundled_one(cls, model: Any) -> Any:
        """The bundled network under its own name, as earlier configurations call it."""
        return SmallCNNConfig() if model == "SmallCNN" else model

    @field_validator("metric", "loss", "forward", "collate")
    @classmethod
    def _are_functions(cls, given: Any, info: ValidationInfo) -> Any:
        if given is None and info.field_name != "metric":
            return given
        if not isinstance(given, str) and not callable(given) and not hasattr(given, "compute"):
            raise ValueError("must be a name, or a function: file.py:f")
        return given

    @field_serializer("metric", "loss", "forward", "collate")
    def _by_name(self, given: Any) -> Any:
        return given if given is None or isinstance(given, str) else task_name(given)

    @model_validator(mode="after")
    def _are_budgets(self) -> RunConfig:
        try:
            known = trial_metrics(self.metric_name)
            for text in self.constraints if "constraints" in self.model_fields_set else ():
                parse_budget(text, known)
        except BudgetError as error:
            raise ValueError(f"constraints: {error}") from error
        except EdgeOptError as error:
            raise ValueError(f"metric: {error}") from error
        return self

    @field_validator("pruning_levels", "precisions", "runtimes", "memory_budgets_mb", "constraints")
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

    @property
    def model_reference(self) -> str:
        """The model as `load_model` takes it."""
        if isinstance(self.model, str):
            return self.model
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.model.model_dump().items())
        return f"{SMALL_CNN}({arguments})"

    @property
    def metric_name(self) -> str:
        """The metric as columns and constraints call it."""
        if self.metric == "accuracy":
            return "accuracy"
        # Not imported for accuracy: it needs torch, and reading a configuration does not.
        from edge_opt.tasks.metrics import reference_name

        return reference_name(self.metric)

    @property
    def keeps(self) -> tuple[str, ...]:
        """The constraints; where none were given, those that fit the metric."""
        if "constraints" in self.model_fields_set or self.metric_name == "accuracy":
            return tuple(self.constraints)
        return (f"{self.metric_name}_drop <= 0.01",) if self.metric_name in SHARES else ()

    @property
    def budgets(self) -> tuple[str, ...]:
        """All constraints as texts, the memory budget among them."""
        if self.active_memory_budget_mb is None:
            return self.keeps
        return (*self.keeps, f"model_mb <= {self.active_memory_budget_mb:g}")


def task_name(given: Any) -> str:
    """A function or an object of the user's as text: where it is found."""
    kind = given if inspect.isfunction(given) or inspect.isclass(given) else type(given)
    return f"{kind.__module__}:{kind.__qualname__}"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML without code, where a key that stands twice is an error and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# YAML 1.1 takes 1e-3 for text, because it has no point; nobody means that.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_config(path: str | Path | None = None, settings: Sequence[str] = ()) -> RunConfig:
    """The configuration in a file, or the default one, with single keys set as `key=value`.

    >>> read_config(settings=["epochs=3", "model.conv1_channels=8"]).model_reference
    'edge_opt.model:SmallCNN(conv1_channels=8, conv2_channels=32, num_classes=10)'
    """
    content: dict[str, Any] = {} if path is None else _file(Path(path))
    return validated(read_settings(settings, content), "" if path is None else f"{path}: ")


def read_settings(settings: Sequence[str], content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keys set one by one as `key=value`, on top of what is there."""
    found = dict(content or {})
    for setting in settings:
        _set(found, setting)
    return found


def validated(content: Mapping[str, Any], where: str = "") -> RunConfig:
    """The configuration that a mapping describes; every fault in it is one sentence of one error."""
    try:
        return RunConfig.model_validate(current_keywords(content, former_names("configuration key"), stacklevel=4))
    except ValidationError as error:
        faults = [{**fault, "loc": _named(fault["loc"])} for fault in error.errors() if not _is_other_form(fault)]
        sentences = dict.fromkeys(map(_sentence, faults))
        raise InvalidConfig("\n".join(f"{where}{sentence}" for sentence in sentences)) from error


# What a sweep of a trained model shares with a run: the same key, the same default, the same meaning.
SWEEP_KEYS = (
    "pruning_levels", "layer_pruning", "importance", "round_to", "precisions", "quantization_backend", "runtimes",
    "calibration_batches", "metric", "metric_direction", "loss", "forward", "collate", "fine_tune_epochs",
    "learning_rate", "distillation", "train_for_int8", "constraints", "active_memory_budget_mb", "pareto_use_ci",
    "sampler", "trials", "seed", "min_time_s", "deploy_batch", "threads", "build_threads", "power_watts",
    "memory_limit_mb", "time_limit_s",
)  # fmt: skip
# What is scored and trained on, as `finetune` and `sensitivity` take it, too.
TASK_KEYS = ("metric", "metric_direction", "loss", "forward", "collate")


def sweep_settings(settings: Mapping[str, Any]) -> RunConfig:
    """The settings of a sweep, checked as a configuration is; keys of a run that mean nothing here are refused.

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
    """Tuples as the lists that YAML would give."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, (tuple, list)) else value


def _is_other_form(fault: Any) -> bool:
    """A mapping under `model` is not meant to be text, and a list not the word "auto": the other fault says it all."""
    if len(fault["loc"]) > 1 and str(fault["loc"][1]).startswith("literal["):
        return not isinstance(fault["input"], str)
    return fault["loc"] == ("model", "str") and isinstance(fault["input"], Mapping)


def _named(place: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where a fault is, without the names of the forms that a value may have."""
    return tuple(part for part in place if not str(part).startswith(("list[", "constrained-")))


def _file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        cure = "`edge-opt init` writes one to start from"
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}; {cure}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} is not a text file in UTF-8; a configuration is YAML") from error
    content = _yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} holds a {type(content).__name__}; a configuration is lines of `key: value`")
    return {str(key): value for key, value in content.items()}


def _yaml(text: str, where: str) -> Any:
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader: it builds plain values only
        if _written_out(content, {}) > _MOST_VALUES:
            raise InvalidConfig(f"{where} holds more than {_MOST_VALUES} values; a configuration has about a hundred")
        return content
    except RecursionError as error:
        raise InvalidConfig(f"{where} is nested deeper than a configuration can be, or holds itself") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise InvalidConfig(f"{where} is not YAML{line}: {getattr(error, 'problem', None) or error}") from error


_MOST_VALUES = 10_000


def _written_out(value: Any, known: dict[int, int]) -> int:
    """How many values there are where every alias is written out; a few lines of YAML can stand for billions."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        items = [*value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_written_out(item, known) for item in items)
    return known[id(value)]


def _set(content: dict[str, Any], setting: str) -> None:
    """Put `a.b=value` into the mapping; the value is read as YAML."""
    key, equals, text = setting.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        raise InvalidConfig(f"--set {setting!r} cannot be read; write key=value, such as epochs=3 or precisions=[int8]")
    # A layer's path has dots of its own: only the first is ours.
    steps = [steps[0], ".".join(steps[1:])] if steps[0] == "layer_pruning" and len(steps) > 1 else steps
    place = content
    for step in steps[:-1]:
        inner = place.get(step)
        place[step] = dict(inner) if isinstance(inner, Mapping) else {}
        place = place[step]
    place[steps[-1]] = _yaml(text, f"--set {setting!r}")


_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a mapping of keys and values",
    "model_type": "a mapping of keys and values",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "too_short": "a list of at least {min_length}",
    "literal_error": "one of {expected}",
}


def _sentence(fault: Any) -> str:
    """One fault of a validation: the key, its value, and what is allowed."""
    # `model` may be text or a mapping: pydantic names which of the two it tried.
    steps = [step for step in fault["loc"] if step not in ("str", "SmallCNNConfig")]
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    if fault["type"] == "extra_forbidden":
        return unknown_key(key, _known_keys(steps[:-1]))
    if fault["type"] == "value_error":
        problem = str(fault["ctx"]["error"])
        if problem.startswith("must be"):
            return f"{key} is {_short(fault['input'])}; it {problem}"
        return f"{key}: {problem}" if key else problem
    allowed = _ALLOWED.get(fault["type"])
    expected = allowed.format(**fault.get("ctx", {})) if allowed else fault["msg"]
    if steps == ["model"]:
        expected = "a reference such as file.py:factory, or the widths of the bundled network"
    return f"{key} is {_short(fault['input'])}; it must be {expected}"


def _short(value: Any) -> str:
    shown = "null" if value is None else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _known_keys(steps: Sequence[Any]) -> Iterable[str]:
    found: type[BaseModel] = SmallCNNConfig if list(steps) == ["model"] else RunConfig
    return found.model_fields


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say about a key that there is not: the closest ones."""
    names = list(known)
    close = get_close_matches(key.rpartition(".")[2], names, n=3, cutoff=0.5)
    return f"unknown key {key!r}; {'closest: ' + ', '.join(close) if close else 'keys are ' + ', '.join(names)}"


_HEAD = """\
# From data to the model to ship: `edge-opt run THIS_FILE`. Every key is here with its default.
# One key for one run: `edge-opt run THIS_FILE --set epochs=3 --set model.conv1_channels=8`.
"""


def template() -> str:
    """Every key that has an effect, with its default, under a heading, with what it is for.

    >>> print(template().splitlines()[4])
    # Decides the parts of the data, first weights and fine-tuning.
    """
    lines = [_HEAD]
    former = former_names("configuration key")
    for name, field in RunConfig.model_fields.items():
        if name in former:
            continue
        extra = field.json_schema_extra
        if isinstance(extra, dict) and "group" in extra:
            lines.append(f"\n## {extra['group']}\n")
        lines.append(f"# {field.description}\n{name}: {_shown(field.default)}\n")
    return "".join(lines)


def _shown(default: Any) -> str:
    plain = default.model_dump() if isinstance(default, BaseModel) else default
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def settings_table() -> str:
    """Every key with its default, what it means, and whether a sweep takes it too, as a table in Markdown."""
    rows = [
        f"| `{key}` | `{_shown(field.default)}` | {_meaning(key)} | {'✓' if key in SWEEP_KEYS else ''} |"
        for key, field in RunConfig.model_fields.items()
    ]
    return "\n".join(["| key | default | | sweep |", "|---|---|---|:-:|", *rows])


def settings_help(keys: Iterable[str], indent: str = "        ") -> str:
    """Keys and what they mean, as lines of an `Args:` block."""
    return "\n".join(f"{indent}{key}: {_meaning(key)}" for key in keys)


def settings_parameters(keys: Iterable[str]) -> list[inspect.Parameter]:
    """Keys as the keyword parameters that a function takes them by, with their defaults."""
    fields = RunConfig.model_fields
    return [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=fields[key].default) for key in keys]


def _meaning(key: str) -> str:
    return str(RunConfig.model_fields[key].description)
