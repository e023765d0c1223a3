"""RunConfig: every key of a run, with its default, its bounds and what it is for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from edge_opt.budget import TRIAL_METRICS, parse_budget
from edge_opt.errors import BudgetError

Precisions = Literal["fp32", "fp16", "bf16", "int8"]
Runtimes = Literal["torch", "onnxruntime", "openvino"]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

SMALL_CNN = "edge_opt.model:SmallCNN"


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
    val_subset: Count = Field(300, description="Validation samples, by which candidates are chosen.")
    calibration_batches: Count = Field(4, description="Batches that decide the ranges of int8, apart from the others.")
    dataloader_seed: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Decides the order of training samples; null is seed."
    )
    num_workers: Annotated[int, Field(ge=0)] = Field(0, description="Processes that load data; 0 is none beside ours.")

    model: str | SmallCNNConfig = Field(
        SmallCNNConfig(),
        description="Widths of the bundled network, or a model of yours: file.py:factory, torchvision:NAME, timm:NAME.",
        json_schema_extra={"group": "Training"},
    )
    device: str = Field("cpu", description="Where training runs: cpu, cuda, cuda:1 or mps. Variants run on the CPU.")
    build_threads: Count | None = Field(
        1, description="Threads of training and building; small networks are fastest with one. null is all cores."
    )
    epochs: Count = Field(12, description="Passes over the training part for the baseline.")
    learning_rate: Positive = Field(3e-3, description="Of AdamW, falling to zero over the epochs.")
    fine_tune_epochs: Annotated[int, Field(ge=0)] = Field(3, description="Passes after pruning.")
    distillation: bool = Field(False, description="Let the baseline teach while fine-tuning.")

    pruning_levels: Annotated[list[Share], Field(min_length=1)] = Field(
        [0.0, 0.25, 0.5], description="Shares of channels to remove.", json_schema_extra={"group": "Variants"}
    )
    layer_pruning: dict[str, Annotated[list[Share], Field(min_length=1)]] = Field(
        {}, description="Shares to try for single layers, by path; there they stand in for pruning_levels."
    )
    importance: Literal["l1", "l2", "taylor"] = Field("l1", description="Which channels go: the smallest by this.")
    round_to: Count = Field(4, description="Channels that stay are a multiple of this.")
    precisions: Annotated[list[Precisions], Field(min_length=1)] = Field(
        ["fp32", "int8"], description="fp32, fp16, bf16, int8."
    )
    quantization_backend: Literal["auto", "x86", "fbgemm", "onednn", "qnnpack"] = Field(
        "auto", description="Kernels that int8 is made for: x86 (fbgemm, onednn), qnnpack (ARM), or this machine's."
    )
    runtimes: Annotated[list[Runtimes], Field(min_length=1)] = Field(
        ["torch", "onnxruntime"], description="torch, onnxruntime, openvino."
    )

    constraints: list[str] = Field(
        ["accuracy_drop <= 0.01"],
        description="What a variant must keep, such as latency_ms <= 5, size_mb <= 1, energy_j <= 0.01.",
        json_schema_extra={"group": "Budget"},
    )
    active_memory_budget_mb: Positive | None = Field(None, description="Short for peak_memory_mb <= this.")
    memory_budgets_mb: list[Positive] = Field(
        [1.0, 2.0, 4.0], description="Budgets for which the summary says what would be accepted."
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
    threads: Count | None = Field(1, description="Threads of a variant while it is timed; null is all cores.")
    benchmark_repeats: Count = Field(5, description="Baseline's published metrics: runs that are timed as one.")
    benchmark_trials: Count = Field(3, description="Baseline's published metrics: how often that is repeated.")
    benchmark_warmup: Annotated[int, Field(ge=0)] = Field(
        3, description="Baseline's published metrics: runs before the clock starts."
    )
    power_watts: Positive = Field(2.0, description="Power of the device; energy is this times latency, a proxy.")

    target: str | None = Field(
        None,
        description="A device of `edge-opt devices`, for which times are estimated beside those measured here.",
        json_schema_extra={"group": "Deployment"},
    )
    cpu_frequency_scale: Positive = Field(1.0, description="Clock of the device over the clock here; 0.5 is half.")
    stream_interval_ms: Positive = Field(10.0, description="One sample arrives every so often.")
    memory_bandwidth_gbps: Positive = Field(4.3, description="Of the device; 4.3 is a Raspberry Pi 4.")
    peak_compute_gmacs: Positive | None = Field(None, description="Of the device; null leaves the roofline's knee out.")

    @field_validator("constraints")
    @classmethod
    def _are_budgets(cls, texts: list[str]) -> list[str]:
        for text in texts:
            try:
                parse_budget(text, TRIAL_METRICS)
            except BudgetError as error:
                raise ValueError(str(error)) from error
        return texts

    @field_validator("pruning_levels", "precisions", "runtimes", "memory_budgets_mb", "constraints")
    @classmethod
    def _are_distinct(cls, values: list[Any]) -> list[Any]:
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
    def budgets(self) -> tuple[str, ...]:
        """All constraints as texts, the memory budget among them."""
        if self.active_memory_budget_mb is None:
            return tuple(self.constraints)
        return (*self.constraints, f"peak_memory_mb <= {self.active_memory_budget_mb:g}")
