"""A language model from its name, folder, configuration or module: built without weights, nothing else downloaded."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from edge_opt._support.json import read_document
from edge_opt._support.progress import quiet
from edge_opt.errors import InvalidInput, MissingExtra, ModelNotFound, first_line

FORMS = "hf:ORG/NAME, a folder or config.json, a transformers configuration or model, or a module with inputs="
HUB = "hf:"
# Several times those of the largest published models.
_MOST_LAYERS = 1_000
_MOST_EXPERTS = 4_096
# Makes the arguments of one call: inputs(tokens=1, past=511, batch=1) → arguments by name, the cache among them.
InputMaker = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model ready to be traced; `config` is None for a module of the user's own, which then has `inputs`."""

    name: str
    module: nn.Module
    config: Any
    inputs: InputMaker | None = None

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(getattr(self.config, "is_encoder_decoder", False))

    @property
    def sees_more_than_text(self) -> bool:
        """Whether pictures or sound are read as well, by parts that writing text does not meet."""
        return self.config is not None and text_config(self.config) is not self.config and not self.is_encoder_decoder

    @property
    def max_context(self) -> int | None:
        """The maximum context; None where nothing limits it, as in a state-space model."""
        text = text_config(self.config)
        keys = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        lengths = (getattr(text, key, None) for key in keys)
        return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def find_language_model(
    source: Any, dtype: torch.dtype, inputs: InputMaker | None = None, name: str | None = None
) -> LanguageModel:
    """Return the model that `source` names, on the meta device unless it is a module already."""
    if not isinstance(source, nn.Module):
        if inputs is not None:
            raise InvalidInput("inputs= makes the arguments of a module of your own; drop it, or pass the module")
        config = find_config(source)
        _refuse_encoder(config)
        return LanguageModel(name or _name(source, config), _built(config, dtype), config)
    name = name or type(source).__name__
    if inputs is not None:
        if not callable(inputs):
            raise InvalidInput(f"inputs is a {type(inputs).__name__}; it must be a function of tokens, past and batch")
        return LanguageModel(name, source, None, inputs)
    config = getattr(source, "config", None)
    if config is None or not hasattr(source, "get_output_embeddings"):
        kind = type(source).__name__
        raise InvalidInput(f"{kind} is not a transformers model; pass inputs=, a function of tokens, past and batch")
    _refuse_encoder(config)
    return LanguageModel(name, source, config)


def find_config(source: Any) -> Any:
    """Return a transformers configuration: itself, from a file or a folder, or from the Hub and its local cache."""
    transformers = import_transformers()
    if isinstance(source, transformers.PretrainedConfig):
        return source
    if isinstance(source, Mapping):
        return config_from(source, "the configuration", transformers)
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidInput(f"a language model is {FORMS}, and this is a {type(source).__name__}")
    text = os.fspath(source)
    if text.startswith(HUB):
        return _from_hub(text.removeprefix(HUB), transformers)
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return _from_file(path, transformers)
    if path.is_file():
        raise ModelNotFound(f"{text!r} is a {path.suffix or 'file'}, which is not read; pass the model's config.json")
    raise ModelNotFound(f"no folder and no file {text!r}; a language model is {FORMS}")


def import_transformers() -> Any:
    """Import transformers; hide a torchvision from it that does not fit this torch, because text needs none."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except Exception:  # compiled for another torch: which of its imports fails differs by version
        _hide_torchvision()
    try:
        transformers = importlib.import_module("transformers")
        # Names are looked up lazily: a package that is broken inside says so only here.
        _ = transformers.PretrainedConfig, transformers.AutoModelForCausalLM
    except ModuleNotFoundError as error:
        needed = f"language models by name need {error.name}, which is not installed"
        raise MissingExtra(f"{needed}; run `pip install transformers`, or pass a module with inputs=") from error
    except Exception as error:
        raise MissingExtra(f"transformers is installed but cannot be imported ({first_line(error)})") from error
    return transformers


def _hide_torchvision() -> None:
    """Let transformers believe that torchvision is not installed.

    It asks `importlib.util.find_spec` only, so a torchvision that was compiled for another torch counts as available,
    and an import of a model fails later. A stub in `sys.modules` would hide torchvision from the user's program as
    well. So the two checks are replaced in the modules that export them (`transformers.utils` and its `import_utils`);
    look there when a new version of transformers fails to import.
    """
    utilities = importlib.import_module("transformers.utils")
    details = importlib.import_module("transformers.utils.import_utils")

    def absent(*_: Any, **__: Any) -> bool:
        return False

    for module in (utilities, details):
        for check in ("is_torchvision_available", "is_torchvision_v2_available"):
            if hasattr(module, check):
                setattr(module, check, absent)


def _from_file(path: Path, transformers: Any) -> Any:
    data = read_document(path, ModelNotFound, "a folder of a model has its config.json")
    return config_from(data, str(path), transformers)


def config_from(data: Any, origin: str, transformers: Any) -> Any:
    """Return the configuration that the content of a config.json describes."""
    kind = data.get("model_type") if isinstance(data, Mapping) else None
    if not isinstance(kind, str):
        raise ModelNotFound(f"{origin} has no model_type, so it is not a configuration of a model")
    if kind not in transformers.CONFIG_MAPPING:
        known = f"transformers {transformers.__version__} does not know; update it, or pass the module with inputs="
        raise ModelNotFound(f"{origin} is of type {kind!r}, which {known}")
    _check_sizes(data, origin)
    try:
        with quiet():
            return transformers.CONFIG_MAPPING[kind].from_dict(dict(data))
    except Exception as error:  # each configuration checks its own fields in its own way
        raise ModelNotFound(f"{origin} is refused by transformers: {first_line(error)}") from error


def _check_sizes(data: Mapping[str, Any], origin: str) -> None:
    """Refuse sizes that no model has before layers are made of them: a billion layers would not end."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            _check_sizes(value, origin)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            most = _MOST_LAYERS if "layer" in key and "norm" not in key else _MOST_EXPERTS if "expert" in key else 1e12
            least = 1 if key.endswith("_size") or key.startswith("num_hidden") else -math.inf
            if not least <= value <= most:
                raise ModelNotFound(f"{origin}: {key} is {value:g}; it must be from {max(least, -1e12):g} to {most:g}")


def _from_hub(name: str, transformers: Any) -> Any:
    """Return the configuration from the Hub or, without a network, from its local cache."""
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    if not name or name.count("/") > 1:
        raise ModelNotFound(f"{HUB}{name} is not a name on the Hub; write {HUB}ORG/NAME")
    try:
        with quiet():
            path = _config_path(hub, errors, name)
    except Exception as error:  # of the Hub, requests, httpx and the operating system, each with its own
        raise ModelNotFound(_hub_refusal(error, errors, name)) from error
    return _from_file(path, transformers)


def _config_path(hub: Any, errors: Any, name: str) -> Path:
    """Return the configuration's file, from the local cache or downloaded.

    Whether the Hub can be reached is tried first: its own client waits half a minute.
    """
    with contextlib.suppress(errors.LocalEntryNotFoundError):
        return Path(hub.hf_hub_download(name, "config.json", local_files_only=True))
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if not any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")):
        try:
            socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()
        except OSError as error:
            raise errors.LocalEntryNotFoundError(str(error)) from error
    return Path(hub.hf_hub_download(name, "config.json"))


def _hub_refusal(error: Exception, errors: Any, name: str) -> str:
    """Say what to do about an error of the Hub; the kinds are in the order in which they specialize each other."""
    refusals = {
        errors.GatedRepoError: f"{HUB}{name} is gated: accept its terms on huggingface.co, and run `hf auth login`",
        errors.RepositoryNotFoundError: f"the Hub has no model {name!r}, or it is private; check the name",
        errors.LocalEntryNotFoundError: f"{name!r} is not in the local Hugging Face cache, and the Hub cannot be "
        "reached; connect to it",
        errors.EntryNotFoundError: f"{HUB}{name} has no config.json; name the model that it was made from",
    }
    unknown = f"the configuration of {name!r} cannot be fetched: {first_line(error)}"
    refusal = next((text for kind, text in refusals.items() if isinstance(error, kind)), unknown)
    return f"{refusal}, or pass its config.json"


def build_hub_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    """Build the model of `hf:NAME` on the meta device, as the class that its configuration names.

    Args:
        name: ORG/NAME on the Hub, or a folder with a config.json.
        options: Fields of the configuration to replace, as in `hf:ORG/NAME(num_hidden_layers=2)`.
    """
    transformers = import_transformers()
    config = find_config(name if Path(name).exists() else f"{HUB}{name}")
    unknown = [key for key in options if not hasattr(config, key)]
    if unknown:
        raise ModelNotFound(f"{HUB}{name} has no configuration field {unknown[0]!r}; drop it, or write its name")
    for key, value in options.items():
        setattr(config, key, value)
    named = next(iter(getattr(config, "architectures", None) or ()), "")
    try:
        with quiet(), torch.device("meta"), _without_initialization():
            model: nn.Module
            if hasattr(transformers, named):
                model = getattr(transformers, named)._from_config(config)
            else:
                model = transformers.AutoModel.from_config(config)
            model.tie_weights()  # type: ignore[operator]
    except Exception as error:  # whatever a model's own constructor raises
        raise ModelNotFound(f"{HUB}{name} cannot be built: {first_line(error)}") from error
    return model.eval()


def _built(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the model on the meta device, with tied tables tied."""
    transformers = import_transformers()
    auto = transformers.AutoModelForCausalLM
    if getattr(config, "is_encoder_decoder", False):
        auto = transformers.AutoModelForSeq2SeqLM
    elif not _is_one_of("CAUSAL_LM", config) and _is_one_of("IMAGE_TEXT_TO_TEXT", config):
        auto = transformers.AutoModelForImageTextToText
    try:
        with quiet(), torch.device("meta"), _without_initialization():
            model: nn.Module = auto.from_config(config, dtype=dtype)
            model.tie_weights()  # type: ignore[operator]
    except Exception as error:  # whatever a model's own constructor raises
        kind = getattr(config, "model_type", type(config).__name__)
        raise ModelNotFound(f"a model of type {kind!r} cannot be built to write text: {first_line(error)}") from error
    return model.eval()


@contextlib.contextmanager
def _without_initialization() -> Iterator[None]:
    """Skip the initialization of weights, which takes seconds; older versions have the helper elsewhere."""
    for module in ("transformers.initialization", "transformers.modeling_utils"):
        try:
            helper = getattr(importlib.import_module(module), "no_init_weights", None)
        except ImportError:
            continue
        if helper is not None:
            with helper():
                yield
            return
    yield


def _refuse_encoder(config: Any) -> None:
    """Refuse encoders such as BERT: they do not generate one token after another."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False):
        return
    is_encoder = _is_one_of("MASKED_LM", config)
    if is_encoder or not (_is_one_of("CAUSAL_LM", config) or _is_one_of("IMAGE_TEXT_TO_TEXT", config)):
        what = "an encoder only" if is_encoder else "no language model"
        kind = getattr(config, "model_type", "?")
        raise InvalidInput(f"a model of type {kind!r} is {what} and writes no tokens; use eo.profile for it")


def _is_one_of(task: str, config: Any) -> bool:
    """Return whether transformers has a model of this configuration for a task."""
    names = importlib.import_module("transformers.models.auto.modeling_auto")
    return getattr(config, "model_type", "?") in getattr(names, f"MODEL_FOR_{task}_MAPPING_NAMES", {})


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the text model."""
    getter = getattr(config, "get_text_config", None)
    return getter(decoder=True) if callable(getter) else config


def rope_scaling(config: Any) -> str:
    """Describe the RoPE scaling of a configuration; empty where there is none."""
    text = text_config(config)
    scaling = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(scaling, Mapping):
        return ""
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    for item in nested or [scaling]:
        kind = item.get("rope_type") or item.get("type")
        if kind and kind != "default":
            factor, origin = item.get("factor"), item.get("original_max_position_embeddings")
            scaled = f", factor {factor:g}" if isinstance(factor, (int, float)) else ""
            return f"RoPE scaling {kind}{scaled}" + (f", from {origin} positions" if origin else "")
    return ""


def _name(source: Any, config: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        if text.startswith(HUB):
            return text.removeprefix(HUB)
        path = Path(text)
        return path.parent.name if path.name == "config.json" and path.parent.name else path.name
    return getattr(config, "_name_or_path", "") or getattr(config, "model_type", type(config).__name__)
