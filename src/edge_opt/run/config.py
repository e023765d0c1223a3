"""One YAML file to RunConfig: every key, checked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from edge_opt._support.deprecation import former_names
from edge_opt._support.extras import missing_extra
from edge_opt.budgets import parse_budget, trial_metrics
from edge_opt.errors import BudgetError, EdgeOptError
from edge_opt.loading import absolute_reference
from edge_opt.measuring.machine import usable_cores
from edge_opt.records.sweeps import SHARES
from edge_opt.runtimes.registry import check_name, runtime_names

try:
    import yaml
    from pydantic import (
        AfterValidator,
        BaseModel,
        ConfigDict,
        Field,
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


Scope = Literal["data", "training", "candidate", "timing", "search", "report"]
# Results depend on settings of these scopes: a folder that holds results with other values is refused.
RESULT_SCOPES: tuple[Scope, ...] = ("data", "training", "candidate", "timing")


def setting(default: Any, scope: Scope, description: str, *, sweep: bool = False, group: str = "") -> Any:
    """Declare a key of the configuration.

    Args:
        default: Its default.
        scope: What depends on it. data: the samples. training: the baseline. candidate: how a variant is made.
            timing: how it is measured. search: which candidates are tried and how the work is done. report: what is
            reported. Keys of `search` and `report` may change between two runs on the same folder.
        description: One sentence for help, template and docs.
        sweep: Whether `edge_opt.sweep` and `edge-opt sweep` have it, too.
        group: The heading in a file that begins with this key.
    """
    return Field(default, description=description, json_schema_extra={"scope": scope, "sweep": sweep, "group": group})


class RunConfig(BaseModel):
    """Everything that decides a run, from data to the model to ship. Passed whole; nothing copies its fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    seed: Annotated[int, Field(ge=0)] = setting(
        0, "training", "Decides the parts of the data, first weights and fine-tuning.", sweep=True, group="Run"
    )
    output_dir: str = setting("outputs", "report", "Where everything is written; a second run resumes there.")

    dataset: str = setting(
        "digits", "data", "digits, mnist, fashion-mnist, or loaders of your own: file.py:loaders.", group="Data"
    )
    data_dir: str | None = setting(None, "search", "Folder of idx files; null looks where packages put them.")
    download: bool = setting(False, "search", "Fetch mnist or fashion-mnist if it is not here.")
    batch_size: Count = setting(32, "data", "Samples per batch, in training and in measured latency.")
    train_subset: Count | None = setting(None, "data", "Training samples; null is all that are left.")
    val_subset: Count | None = setting(
        None, "data", "Validation samples, by which candidates are chosen; null is as many as the test part has."
    )
    calibration_batches: Count = setting(
        4, "data", "Batches that decide the ranges of int8, apart from the others.", sweep=True
    )
    dataloader_seed: Annotated[int, Field(ge=0)] | None = setting(
        None, "data", "Decides the order of training samples; null is seed."
    )
    num_workers: Annotated[int, Field(ge=0, le=1024)] = setting(
        0, "search", "Processes that load data; 0 is none beside ours."
    )

    metric: Any = setting(
        "accuracy",
        "training",
        "What answers are worth: accuracy, top5, f1, miou, mae, rmse, r2, auroc, perplexity, wer, "
        "or your own on outputs and targets: file.py:f.",
        sweep=True,
        group="Task",
    )
    metric_direction: Literal["higher", "lower"] | None = setting(
        None,
        "training",
        "Which way the metric is better; null is the named metric's own. Yours must say it.",
        sweep=True,
    )
    loss: Any = setting(
        None,
        "training",
        "What is trained on: cross_entropy, mse, l1, smooth_l1, huber, bce_with_logits, "
        "or file.py:f; null follows the metric's task.",
        sweep=True,
    )
    forward: Any = setting(
        None,
        "training",
        "How the model is called with a batch: file.py:f of (model, batch); null passes its inputs.",
        sweep=True,
    )
    collate: Any = setting(
        None,
        "training",
        "Makes a batch of a list of samples: file.py:f, for parts that are datasets, not loaders.",
        sweep=True,
    )

    model: str | SmallCNNConfig = setting(
        SmallCNNConfig(),
        "training",
        "Widths of the bundled network, or a model of yours: file.py:factory, torchvision:NAME, timm:NAME.",
        group="Training",
    )
    device: str = setting("cpu", "training", "Where training runs: cpu, cuda, cuda:1 or mps. Variants run on the CPU.")
    build_threads: Threads | None = setting(
        1,
        "training",
        "Threads of training and building; small networks are fastest with one. null is all cores.",
        sweep=True,
    )
    epochs: Annotated[Epochs, Field(ge=1)] = setting(12, "training", "Passes over the training part for the baseline.")
    learning_rate: Positive = setting(3e-3, "training", "Of AdamW, falling to zero over the epochs.", sweep=True)
    fine_tune_epochs: Annotated[Epochs, Field(ge=0)] = setting(3, "candidate", "Passes after pruning.", sweep=True)
    distillation: bool = setting(False, "candidate", "Let the baseline teach while fine-tuning.", sweep=True)
    train_for_int8: bool = setting(
        False,
        "candidate",
        "Fine-tune what runs in int8 with its rounding, the unpruned model too: more training.",
        sweep=True,
    )

    pruning_levels: Annotated[list[Share], Field(min_length=1)] | Literal["auto"] = setting(
        "auto",
        "search",
        "Shares of channels to remove, such as [0, 0.25, 0.5]; auto tries thirteen before training, and "
        "trains the one worth it.",
        sweep=True,
        group="Variants",
    )
    layer_pruning: dict[str, Annotated[list[Share], Field(min_length=1)]] = setting(
        {}, "search", "Shares to try for single layers, by path; there they stand in for pruning_levels.", sweep=True
    )
    importance: Literal["auto", "group", "reconstruction", "taylor"] = setting(
        "auto",
        "candidate",
        "Which channels go: the least by this; auto is group: all layers that write or read it.",
        sweep=True,
    )
    round_to: Count | Literal["auto"] = setting(
        "auto", "candidate", "Channels that stay are a multiple of this; auto is what this CPU runs fast.", sweep=True
    )
    precisions: Annotated[list[Precisions], Field(min_length=1)] = setting(
        ["fp32", "int8"], "search", "fp32, fp16, bf16, int8.", sweep=True
    )
    quantization_backend: Literal["auto", "x86", "fbgemm", "onednn", "qnnpack"] = setting(
        "auto",
        "candidate",
        "Kernels that int8 is made for: x86 (fbgemm, onednn), qnnpack (ARM), or this machine's.",
        sweep=True,
    )
    runtimes: Annotated[list[Runtimes], Field(min_length=1)] = setting(
        ["torch", "onnxruntime"],
        "search",
        f"{', '.join(runtime_names())}.",
        sweep=True,
    )

    constraints: list[str] = setting(
        ["accuracy_drop <= 0.01"],
        "search",
        "What a variant must keep, such as latency_ms <= 5, size_mb <= 1, mae_drop <= 0.2. With another "
        "metric the default speaks of its own drop if it is a share, and else there is none.",
        sweep=True,
        group="Budget",
    )
    active_memory_budget_mb: Positive | None = setting(
        None,
        "search",
        "MiB that the weights may take: model_mb <= this. Peak memory is a constraint of its own.",
        sweep=True,
    )
    memory_budgets_mb: list[Positive] = setting(
        [1.0, 2.0, 4.0], "report", "Budgets of the weights for which the tables say what keeps them."
    )
    pareto_use_ci: bool = setting(
        False, "search", "A variant beats another only where their intervals do not overlap.", sweep=True
    )

    sampler: Literal["grid", "nsga2", "tpe"] = setting(
        "grid",
        "search",
        "Who chooses `trials` of a larger space: grid at random, nsga2 and tpe by what was found.",
        sweep=True,
        group="Search",
    )
    trials: Count | None = setting(None, "search", "Candidates to try; null is the whole space.", sweep=True)
    memory_limit_mb: Positive | None = setting(
        None, "search", "Memory that one candidate may take; null is no limit.", sweep=True
    )
    time_limit_s: Positive | None = setting(600.0, "search", "Seconds that one candidate may take.", sweep=True)
    sensitivity: bool = setting(False, "report", "Also find out what pruning each layer alone costs.")

    min_time_s: Positive = setting(
        0.4,
        "timing",
        "Seconds for which each variant is timed at least; twice as long where it is noisy.",
        sweep=True,
        group="Measuring",
    )
    deploy_batch: Count = setting(
        1,
        "timing",
        "Samples in one call of the deployed model; by its time variants are ranked and compared.",
        sweep=True,
    )
    threads: Threads | None = setting(
        1, "timing", "Threads of a variant while it is timed; null is all cores.", sweep=True
    )
    benchmark_repeats: Count = setting(5, "report", "Accepted from older files and not used: min_time_s decides.")
    benchmark_trials: Count = setting(3, "report", "Accepted from older files and not used: min_time_s decides.")
    benchmark_warmup: Annotated[int, Field(ge=0)] = setting(
        3, "report", "Accepted from older files and not used: warm-up ends when times no longer fall."
    )
    power_watts: Positive = setting(
        2.0,
        "timing",
        "Power of the device; where no meter can be read, energy is this times latency, a proxy.",
        sweep=True,
    )

    target: str | None = setting(
        None,
        "report",
        "A device of `edge-opt devices`, for which times are estimated beside those measured here.",
        group="Deployment",
    )
    target_runtime: str | None = setting(
        None, "report", "What runs the model on the target, such as ncnn; null is the best known."
    )
    target_threads: Count | None = setting(
        None, "report", "Of the runtime on the target; null is those of its best-known platform."
    )
    cpu_frequency_scale: Positive = setting(1.0, "report", "Clock of the device over the clock here; 0.5 is half.")
    stream_interval_ms: Positive = setting(10.0, "report", "One sample arrives every so often.")
    memory_bandwidth_gbps: Positive = setting(
        4.3, "report", "Of the device, for its own roofline; 4.3 is a Raspberry Pi 4."
    )
    peak_compute_gmacs: Positive | None = setting(None, "report", "Of the device; null leaves the roofline's knee out.")

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

    def subset(self, *scopes: Scope) -> dict[str, Any]:
        """Return the settings of these scopes as JSON values: functions by name, the model by its reference."""
        chosen = {name for name, field in RunConfig.model_fields.items() if declared(field, "scope") in scopes}
        values = self.model_dump(include=chosen)
        return values | ({"model": self.model_reference} if "model" in chosen else {})

    @property
    def task(self) -> dict[str, Any]:
        """The settings that make a task: metric, loss, forward and collate, as every process can import them."""
        values = {key: getattr(self, key) for key in TASK_KEYS}
        return {key: absolute_reference(value) if isinstance(value, str) else value for key, value in values.items()}

    @property
    def rounds_in_training(self) -> bool:
        """Whether int8 candidates are trained with int8 rounding."""
        return self.train_for_int8 and self.fine_tune_epochs > 0

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
    """Every key that has an effect, with its default, under a heading, with what it is for.

    >>> print(template().splitlines()[4])
    # Decides the parts of the data, first weights and fine-tuning.
    """
    lines = [_HEAD]
    former = former_names("configuration key")
    for name, field in RunConfig.model_fields.items():
        if name in former:
            continue
        if declared(field, "group"):
            lines.append(f"\n## {declared(field, 'group')}\n")
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
