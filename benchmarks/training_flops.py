"""FLOPs of training steps against FlopCounterMode with backward on meta, over torchvision's zoo and some of others.

    python benchmarks/training_flops.py [NAME ...]

A line per model: both counts where they differ, or why a model was left out; then how many are equal. FlopCounterMode
counts the weight gradient of a convolution in groups as if it had one group: those models differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import edge_opt as eo
from edge_opt.training_steps.step_trace import summed

TESTS = Path(__file__).parent.parent / "tests"
# Smallest pictures that these take; the others take 64 x 64.
SIDES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56, "swin": 128, "alexnet": 96, "densenet": 96}
TIMM = (
    "convnext_atto", "vit_tiny_patch16_224", "mobilenetv3_small_050", "efficientnet_lite0", "resnet10t",
    "mixer_s32_224", "deit_tiny_patch16_224", "regnetx_002", "ghostnet_050", "levit_128s",
)  # fmt: skip


def zoo() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[], Any]]]:
    """Name, how to make the model, how to make its input; all on meta."""
    from zoo import torchvision_models

    models = torchvision_models()
    for name in models.list_models(module=models):
        side = next((size for start, size in SIDES.items() if name.startswith(start)), 64)
        options = {"image_size": side // 16 * 16} if name.startswith("vit") and name != "vit_h_14" else {}
        if name == "vit_h_14":
            options = {"image_size": side}
        if name in ("googlenet", "inception_v3"):
            options = {"init_weights": False}
        yield (
            f"torchvision {name}",
            lambda name=name, options=options: models.get_model(name, weights=None, **options),  # type: ignore[misc]
            lambda side=side: torch.empty(2, 3, side, side, device="meta"),  # type: ignore[misc]
        )
    import timm

    for name in TIMM:
        yield (
            f"timm {name}",
            lambda name=name: timm.create_model(name),  # type: ignore[misc]
            lambda: torch.empty(2, 3, 224, 224, device="meta"),
        )
    import transformers

    small = {"num_hidden_layers": 2}
    narrow = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "use_cache": False}
    for config in (
        transformers.BertConfig(**small), transformers.GPT2Config(n_layer=2, use_cache=False),
        transformers.LlamaConfig(**small, **narrow),
    ):  # fmt: skip
        yield (
            f"transformers {config.model_type}",
            lambda config=config: transformers.AutoModel.from_config(config),  # type: ignore[misc]
            lambda: torch.zeros(2, 32, dtype=torch.int64, device="meta"),
        )


def hollow(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without weights; RegNets compute their widths with tensors, and are made with weights first."""
    try:
        with torch.device("meta"):
            return make()
    except NotImplementedError:
        return make().to("meta")


def main() -> None:
    sys.path[:0] = [str(TESTS / "support")]
    equal, others = 0, 0
    for name, make, make_input in zoo():
        if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
            continue
        try:
            model, x = hollow(make).train(), make_input()
            ours = eo.training_step(model, x, optimizer="sgd").flops
            with FlopCounterMode(display=False) as counter:
                summed(model(x)).backward()  # type: ignore[no-untyped-call]
            theirs = counter.get_total_flops()
        except Exception as error:
            others += 1
            print(f"{name:40} left out: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            continue
        equal += ours == theirs
        others += ours != theirs
        if ours != theirs:
            print(f"{name:40} ours {ours:,} torch {theirs:,} ({ours / theirs - 1:+.4%})", flush=True)
    print(f"{equal} models equal, {others} not or left out")


if __name__ == "__main__":
    main()
