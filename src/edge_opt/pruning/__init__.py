"""Structured pruning: channels and heads that depend on each other, ranked, removed, and proved.

`structured_channel_prune`, as the published pipeline calls pruning, is served from here. It is imported on first use,
so that `edge_opt.pruning` costs no import of torch and the modules below can be imported one by one.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_opt.pruning.prune import structured_channel_prune as structured_channel_prune

__all__ = ["structured_channel_prune"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'edge_opt.pruning' has no attribute {name!r}")
    from edge_opt.pruning import prune

    return getattr(prune, name)
