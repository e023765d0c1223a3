"""The proof that a pruned model is the original with channels silenced."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from edge_opt.errors import PruningFailed
from edge_opt.pruning.recipe import apply_spec
from edge_opt.records.compression import KeptIndices, PruneCheck, PruneSpec
from edge_opt.trace.inputs import CallArguments, flat_tensors

# The pruned model may differ from the silenced original by this share of what silencing changes. At half of the
# channels of resnet18, mobilenet_v3_small, a U-Net, a vision transformer and SmallCNN, float32 rounding is 5e-8 to 4e-7
# of it. Channels that are not the right ones differ by about as much as silencing changes.
TOLERANCE = 1e-3
# The same five have rounding errors of 0.5 to 6 eps of the output's norm; deeper networks get 50 times the largest.
_ROUNDING_EPS = 300


def with_random_constants(model: nn.Module) -> nn.Module:
    """Return a copy in which nothing is constant: fresh norms, layer scales and heads would hide errors around them."""
    copied = copy.deepcopy(model)
    numbers = torch.Generator().manual_seed(0)
    norms = [module for module in copied.modules() if isinstance(module, _BatchNorm)]
    statistics = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var)]
    with torch.no_grad():
        for tensor in (*copied.parameters(), *(each for each in statistics if each is not None)):
            if tensor.is_floating_point() and tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
                # Far enough from 0 to change the outputs, and above it, as a variance must be.
                tensor.copy_(torch.rand(tensor.shape, generator=numbers) + 0.5)
                if tensor.dim() > 1:
                    tensor.mul_(tensor[0].numel() ** -0.5)
    return copied


def check_pruned(probe: nn.Module, pruned: nn.Module, spec: PruneSpec, arguments: CallArguments) -> PruneCheck:
    """Run the pruned model forward and backward, and its recipe on the probe; raises where it does not hold up.

    `probe` is the original with random constants, `pruned` the model itself in eval mode.
    """
    error = silenced_error(probe, apply_spec(probe, spec), spec, arguments)
    if error is not None and error > TOLERANCE:
        raise PruningFailed(
            f"the pruned {type(pruned).__name__} is not the original without the removed channels: its outputs are off "
            f"by {error:.2g} of what the removal changes"
        )
    with torch.enable_grad():
        outputs = flat_tensors(_run(pruned, arguments))
        trained = [parameter for parameter in pruned.parameters() if parameter.requires_grad]
        differentiable = [each.float().sum() for each in outputs if each.requires_grad]
        if trained and not differentiable:
            raise PruningFailed("no output of the pruned model depends on a trainable parameter any more")
        gradients = torch.autograd.grad(differentiable, trained, allow_unused=True) if trained else ()
    computed = [gradient for gradient in gradients if gradient is not None]
    for gradient in computed:
        if not bool(torch.isfinite(gradient).all()):
            raise PruningFailed("the backward pass of the pruned model gives gradients that are not finite")
    return PruneCheck(tuple(tuple(each.shape) for each in outputs), len(computed), error)


def silenced_error(original: nn.Module, pruned: nn.Module, spec: PruneSpec, arguments: CallArguments) -> float | None:
    """Return the distance of the pruned model from the original with the removed channels silenced.

    It is a share of what silencing changes, |silenced - pruned| / |silenced - original|, not of the outputs: where the
    removed channels hardly matter, wrong channels differ little from the outputs, but as much as the change itself.
    A change below rounding would divide by noise. So the denominator is at least the rounding error over the
    tolerance: a distance within rounding then always passes.

    None where nothing is removed. Raises where the shapes of the outputs differ.
    """
    with torch.no_grad():
        before = flat_tensors(_run(original, arguments))
        after = flat_tensors(_run(pruned, arguments))
        shapes = [tuple(each.shape) for each in before], [tuple(each.shape) for each in after]
        if shapes[0] != shapes[1]:
            raise PruningFailed(
                f"the outputs of the pruned model are {shapes[1]}; those of the original are {shapes[0]}"
            )
        if not spec.kept:
            return None
        if not all(bool(torch.isfinite(each).all()) for each in before if each.is_floating_point()):
            raise PruningFailed(
                "the original's outputs on the example inputs are not finite; pass inputs as it expects"
            )
        silenced = flat_tensors(_run(_silenced(original, pruned, spec), arguments))
    worst = 0.0
    for o, p, s in zip(before, after, silenced, strict=True):
        if not o.is_floating_point():
            continue
        distance, change, size = (
            (a.double() - b.double()).norm() for a, b in ((s, p), (s, o), (s, torch.zeros_like(s)))
        )
        rounding = _ROUNDING_EPS * torch.finfo(o.dtype).eps * float(size)
        if not bool(torch.isfinite(distance)):
            return float("inf")
        worst = max(worst, float(distance) / max(float(change), rounding / TOLERANCE, 1e-30))
    return worst


def _run(model: nn.Module, arguments: CallArguments) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            return model(*arguments.args, **arguments.kwargs)
        except Exception as error:
            raise PruningFailed(f"the pruned model does not run: {type(error).__name__}: {error}") from error


def _silenced(original: nn.Module, pruned: nn.Module, spec: PruneSpec) -> nn.Module:
    """Return the original with zeros in place of removed entries, and norms over the kept channels only."""
    silenced = copy.deepcopy(original)
    tensors = dict(
        [*silenced.named_parameters(remove_duplicate=False), *silenced.named_buffers(remove_duplicate=False)]
    )
    kept: dict[str, KeptIndices] = {}
    for each in spec.kept:
        tensor = tensors[each.tensor]
        gone = sorted(set(range(tensor.shape[each.dim])) - set(each.indices))
        tensor.index_fill_(each.dim, torch.tensor(gone, device=tensor.device), 0)
        kept[each.tensor] = each
    for path, module in list(silenced.named_modules()):
        index = kept.get(f"{path}.weight") if path else None
        # Models bring RMS norms of their own, known by their name.
        is_norm = isinstance(module, (nn.LayerNorm, nn.GroupNorm)) or "RMSNorm" in type(module).__name__
        if index is not None and is_norm:
            width = tensors[index.tensor].shape[index.dim]
            silenced.set_submodule(path, _Masked(pruned.get_submodule(path), index.indices, width))
    return silenced


class _Masked(nn.Module):
    """A norm of the pruned model in the original's place: it sees the channels that are left, others come out as 0."""

    def __init__(self, norm: nn.Module, indices: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.norm = norm
        self.indices = indices
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Norms of images, such as group norm, have the channels second; where both fit, the kind decides.
        # A layer norm with a forward of its own, as torchvision's and timm's, normalizes dimension 1.
        is_own = isinstance(self.norm, nn.LayerNorm) and type(self.norm).forward is not nn.LayerNorm.forward
        dims = (1, -1) if isinstance(self.norm, nn.GroupNorm) or is_own else (-1, 1)
        dim = next(dim for dim in dims if x.shape[dim] == self.width)
        index = torch.tensor(self.indices, device=x.device)
        out: torch.Tensor = self.norm(x.index_select(dim, index))
        return torch.zeros_like(x).index_copy(dim, index, out)
