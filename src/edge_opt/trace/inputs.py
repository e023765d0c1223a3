"""Convert what users pass as inputs (shapes, tensors, dicts, keywords) to arguments, and outputs to tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from edge_opt._support.checks import is_whole
from edge_opt.errors import InvalidInput, TraceFailed, translated
from edge_opt.records.fields import field, record

MOST_ELEMENTS = 1 << 50  # a tensor beyond a petabyte is a mistake


@record
class InputSpec:
    """A tensor described by its shape and dtype, to be made when it is needed.

    >>> InputSpec((1, 128), "int64")
    InputSpec(shape=(1, 128), dtype='int64')
    """

    shape: tuple[int, ...] = field("Its dimensions, batch included.")
    dtype: str | None = field("Its type by torch's name; None takes the type of the model's weights.", default=None)

    def __post_init__(self) -> None:
        for dim in self.shape:
            if not is_whole(dim):
                raise InvalidInput(f"input shape {tuple(self.shape)} has the dimension {dim!r}; all must be at least 1")
        if prod(self.shape) > MOST_ELEMENTS:
            raise InvalidInput(f"input shape {tuple(self.shape)} has more elements than 2^50, the most allowed")
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise InvalidInput(f"unknown dtype {self.dtype!r}; use a torch name such as float32, float16 or int64")


class ShapeOnlyModule(nn.Module):
    """Base of modules whose forward looks at shapes, never at values, and which may say what type their inputs have.

    Only these are asked: a user's model may have an attribute `input_dtype` that means something else.
    """

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The type of an input that is given by its shape alone; None where the module does not say."""
        return None


def default_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of an input that is given by its shape alone: that of the weights, or what the module says."""
    if isinstance(model, ShapeOnlyModule) and model.input_dtype is not None:
        return model.input_dtype
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floating, torch.get_default_dtype())


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of `model(*args, **kwargs)`; described tensors are still `InputSpec`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_arguments(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None) -> CallArguments:
    """Read `inputs` the way users write them.

    A tuple of integers is one shape; a list or tuple of anything else is one entry per positional argument; a mapping
    is passed by name where `forward` knows its keys, as one argument otherwise. Shapes may stand inside further lists,
    tuples and dicts. In `kwargs` integers stay integers: a tensor there is a tensor, an `InputSpec`, or a pair of
    shape and dtype. Arguments that were read before are returned as they are.
    """
    if isinstance(inputs, CallArguments):
        return inputs
    named = {key: _described(value, has_shapes=False) for key, value in (kwargs or {}).items()}
    if inputs is None or (isinstance(inputs, (tuple, list)) and not inputs and named):
        if not named:
            raise InvalidInput("no inputs given: pass a shape such as (1, 3, 224, 224), tensors, or kwargs={...}")
        return CallArguments((), named)
    if isinstance(inputs, Mapping):
        described = {key: _described(value) for key, value in inputs.items()}
        if not accepts_keywords(model, list(described)):
            return CallArguments((described,), named)
        clash = sorted(set(described) & set(named))
        if clash:
            raise InvalidInput(f"{clash[0]!r} is given twice, in inputs and in kwargs; keep one of them")
        return CallArguments((), described | named)
    if _is_shape(inputs) or isinstance(inputs, (torch.Tensor, InputSpec)) or not isinstance(inputs, (tuple, list)):
        return CallArguments((_described(inputs),), named)
    if not inputs:
        raise InvalidInput("inputs is empty: pass a shape such as (1, 3, 224, 224), or tensors")
    return CallArguments(tuple(_described(value) for value in inputs), named)


def _is_shape(value: Any) -> bool:
    is_row = isinstance(value, (tuple, list)) and len(value) > 0
    return is_row and all(isinstance(dim, int) and not isinstance(dim, bool) for dim in value)


def _described(value: Any, has_shapes: bool = True) -> Any:
    """Return shapes and (shape, dtype) pairs as `InputSpec`, at any depth; anything else as it is.

    Without `has_shapes` a row of integers is just that, and only pairs are taken.
    """
    if _is_shape(value):
        return InputSpec(tuple(value)) if has_shapes else value
    is_pair = isinstance(value, tuple) and len(value) == 2 and _is_shape(value[0])
    if is_pair and isinstance(value[1], (str, torch.dtype)):
        return InputSpec(tuple(value[0]), str(value[1]).removeprefix("torch."))
    if type(value) is dict:
        return {key: _described(item, has_shapes) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_described(item, has_shapes) for item in value)
    return value


def accepts_keywords(model: nn.Module, names: list[str]) -> bool:
    """Return whether `forward` has parameters of all these names."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return all(isinstance(name, str) for name in names)
    return set(names) <= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def map_arguments(arguments: CallArguments, make: Callable[[Any], Any]) -> CallArguments:
    """Return the same arguments with `make` applied to every tensor and `InputSpec` inside, at any depth."""
    return CallArguments(
        tuple(_mapped(value, make) for value in arguments.args),
        {key: _mapped(value, make) for key, value in arguments.kwargs.items()},
    )


def _mapped(value: Any, make: Callable[[Any], Any]) -> Any:
    if isinstance(value, (torch.Tensor, InputSpec)):
        return make(value)
    if isinstance(value, Mapping):
        items = {key: _mapped(item, make) for key, item in value.items()}
        try:  # a class whose constructor takes a dict (BatchEncoding, OrderedDict) stays what it is
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, make) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, make) for item in value)
    if isinstance(value, nn.Module):
        return value
    # Anything else that forward might write to, such as a key-value cache; the tensors in it are inputs too.
    return copied_with(make, value)


class _CopiesTensors(TorchFunctionMode):
    """Decides what becomes of a tensor when an object around it is copied."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._make(tensor)
        return memo[id(tensor)]


def copied_with(make: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a copy of a value in which `make` decides what becomes of tensors; what cannot be copied is shared."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    with _CopiesTensors(make):
        try:
            return copy.deepcopy(value)
        except (TypeError, NotImplementedError, copy.Error):  # an open file, a lock, an object of a C library
            return value


# Token ids, masks and lengths up to this size keep their values, which models like to look at: 2048 x 2048.
SMALL = 1 << 22


def meta_tensor(value: Any, dtype: torch.dtype, keeps_small: bool = True) -> torch.Tensor:
    """Return a new tensor of the caller's shape, without data unless it is small and of integers.

    Those keep their values, which a model may look at; `keeps_small` is False for a `ShapeOnlyModule`.
    """
    if isinstance(value, InputSpec):
        wanted = _torch_dtype(value, dtype)
        is_whole = not wanted.is_floating_point and not wanted.is_complex
        if keeps_small and is_whole and prod(value.shape) <= SMALL:
            return torch.zeros(value.shape, dtype=wanted)
        return torch.empty(value.shape, dtype=wanted, device="meta")
    is_whole = not value.is_floating_point() and not value.is_complex()
    if keeps_small and is_whole and not value.is_meta and value.numel() <= SMALL:
        copied: torch.Tensor = value.detach().cpu().clone()
        return copied
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def real_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an input with data: the caller's own (copied), or for a described one small random numbers or zeros."""
    if not isinstance(value, InputSpec):
        return torch.zeros_like(value, device=device) if value.is_meta else value.detach().clone().to(device)
    wanted = _torch_dtype(value, dtype)
    if not wanted.is_floating_point:
        return torch.zeros(value.shape, dtype=wanted, device=device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(value.shape, generator=generator).to(device=device, dtype=wanted)


def with_shapes(model: nn.Module, arguments: CallArguments) -> nn.Module:
    """Return the model itself, or a copy that was run once where parameters of lazy modules have no shape yet."""
    if not any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        return model
    dtype, device = default_dtype(model), next(model.parameters()).device
    call = map_arguments(arguments, lambda value: real_tensor(value, dtype, device))
    empty: Any = nn.parameter.UninitializedBuffer  # torch copies parameters without a shape, but no buffers
    lazy = filter(nn.parameter.is_lazy, model.buffers())
    copied = copy.deepcopy(model, {id(buffer): empty(False, buffer.device, buffer.dtype) for buffer in lazy})
    with torch.no_grad(), torch.random.fork_rng(devices=[]), translated("the lazy model cannot be run", TraceFailed):
        copied(*call.args, **call.kwargs)
    return copied


def on_device(model: nn.Module, device: str) -> nn.Module:
    """Return the model itself if all of it is on the device already, else a copy that is."""
    if isinstance(model, ShapeOnlyModule):
        raise InvalidInput("the model was read from a file for its costs; this needs one that runs: give its source")
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise InvalidInput("the model's weights are on the meta device and have no values; build it with real weights")
    wanted = torch.device(device)
    devices = {tensor.device for tensor in tensors}
    if all(current.type == wanted.type and current.index in (None, wanted.index or 0) for current in devices):
        return model
    return copy.deepcopy(model).to(wanted)


def call_on(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, device: str) -> CallArguments:
    """Return the arguments of one call, with tensors of their own on the device; described ones are random."""
    dtype = default_dtype(model)
    # The module inside torch.compile has the signature with the names of the arguments.
    original = model._modules.get("_orig_mod")
    described = call_arguments(model if original is None else original, inputs, kwargs)
    return map_arguments(described, lambda value: real_tensor(value, dtype, torch.device(device)))


def _torch_dtype(spec: InputSpec, default: torch.dtype) -> torch.dtype:
    return default if spec.dtype is None else getattr(torch, spec.dtype)  # type: ignore[no-any-return]


def flat_tensors(answer: Any) -> list[torch.Tensor]:
    """Return every tensor of an answer, in order: of tuples, mappings of any class, and fields of dataclasses.

    >>> flat_tensors((torch.tensor(1), {"a": SimpleNamespace(b=torch.tensor(2))}))
    [tensor(1), tensor(2)]
    """
    return [leaf for leaf in flat_leaves(answer) if isinstance(leaf, torch.Tensor)]


def summed(result: Any) -> torch.Tensor:
    """Return the loss where none is given: `loss` of the output if it has one, else the sum of its floating tensors."""
    own = getattr(result, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    tensors = with_gradient(result)
    if not tensors:
        raise InvalidInput("the output has no floating tensor to sum; pass loss=, a function of the output")
    total = tensors[0].sum()
    for tensor in tensors[1:]:
        total = total + tensor.sum()
    return total


def with_gradient(result: Any) -> list[torch.Tensor]:
    """Return the floating tensors of an output that a loss can be made of."""
    return [tensor for tensor in flat_tensors(result) if tensor.requires_grad and tensor.is_floating_point()]


def flat_leaves(answer: Any) -> list[Any]:
    """Return everything in an answer that has no parts, in order."""
    leaves: list[Any] = []
    for leaf in tree_leaves(answer):
        parts = {} if isinstance(leaf, torch.Tensor) else _parts(leaf)
        leaves += [item for part in parts.values() for item in flat_leaves(part)] if parts else [leaf]
    return leaves


def map_tensors(function: Callable[..., Any], *answers: Any) -> Any:
    """Return answers of the same structure as one: the function makes each of its tensors from theirs.

    Values that are not tensors are those of the first.

    >>> one, two = (SimpleNamespace(scores=torch.tensor([value])) for value in (1, 2))
    >>> map_tensors(lambda a, b: torch.cat([a, b]), one, two)
    namespace(scores=tensor([1, 2]))
    """
    rows, spec = zip(*(tree_flatten(answer)[0] for answer in answers), strict=True), tree_flatten(answers[0])[1]
    return tree_unflatten([_mapped_row(function, row) for row in rows], spec)


def _mapped_row(function: Callable[..., Any], row: tuple[Any, ...]) -> Any:
    first = row[0]
    if isinstance(first, torch.Tensor):
        return function(*row)
    parts = [_parts(each) for each in row]
    if not parts[0]:
        return first
    result = copy.copy(first)
    for name in parts[0]:
        value = map_tensors(function, *(each[name] for each in parts))
        if isinstance(first, Mapping):
            result[name] = value
        else:
            # A frozen dataclass refuses the ordinary way.
            object.__setattr__(result, name, value)
    return result


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of a structure that torch does not know: another mapping, a dataclass, a namespace."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return dict(vars(value)) if isinstance(value, SimpleNamespace) else {}
