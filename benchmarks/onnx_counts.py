"""Counts of exported models against the models themselves: MACs and parameters of 30 nets, before and after ONNX.

Weights are drawn anew, so that an exporter has no equal ones to store once. Parameters may differ by batch norms that
were folded (two vectors become one bias) and by constants that were stored; MACs must be equal, but for
modules that no input reaches: their results are stored. `eo.reconcile` names the cause of every difference in FLOPs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from subjects import torchvision_models

import edge_opt as eo
from edge_opt.cost.conventions.counting import WORKED_OUT
from edge_opt.loading import load_model

TORCHVISION = (
    "alexnet squeezenet1_1 resnet18 resnet50 wide_resnet50_2 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large "
    "shufflenet_v2_x1_0 mnasnet0_5 efficientnet_b0 regnet_y_400mf densenet121 googlenet convnext_tiny vgg11_bn"
).split()
TIMM = (
    "vit_tiny_patch16_224 deit_tiny_patch16_224 mixer_s32_224 resmlp_12_224 ghostnet_100 mobilenetv4_conv_small "
    "repvgg_a0 levit_128s pit_ti_224 poolformer_s12 edgenext_xx_small lcnet_050 tinynet_e xcit_nano_12_p16_224"
).split()


def compared(reference: str, folder: Path, size: int) -> tuple[str, bool]:
    """One line for a model, and whether its MACs are equal."""
    model = load_model(reference).model.eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.uniform_(0.1, 1.0)
    shape = (1, 3, size, size)
    path = folder / "model.onnx"
    program = torch.onnx.export(model, (torch.zeros(shape),), dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path), external_data=True)
    whole = eo.profile(model, shape)
    theirs = whole.totals
    start = time.process_time()
    found = eo.profile(load_model(str(path)).model, shape)
    took = time.process_time() - start
    ours = found.totals
    difference = eo.reconcile(whole, found)
    adds_up = difference.ours + sum(cause.difference for cause in difference.causes) == difference.theirs
    # What is computed from no input is computed by the exporter, and stored.
    stored = sum(_macs(whole, cause.layers) for cause in difference.causes if cause.cause == WORKED_OUT)
    is_equal = ours.macs + stored == theirs.macs and not found.unpriced and adds_up
    verdict = "equal" if ours.macs == theirs.macs else f"{stored:,} stored" if is_equal else f"DIFFERS: {theirs.macs:,}"
    causes = "; ".join(f"{cause.cause} {cause.difference:+,}" for cause in difference.causes)
    return (
        f"{reference:34} {ours.macs:>14,} MACs {verdict:8} params {ours.params - theirs.params:+,} "
        f"FLOPs {ours.flops / theirs.flops - 1:+.2%}  {took:.2f} s of CPU  {causes}"
    ), is_equal


def _macs(profile: eo.ModelProfile, paths: tuple[str, ...]) -> int:
    return sum(one.cost.macs for one in profile.operators if one.module in paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="references; 30 of torchvision and timm unless given")
    parser.add_argument("--size", type=int, default=224)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torchvision_models()  # declares the operators that torchvision's build may lack here
    names = given.models or [*(f"torchvision:{name}" for name in TORCHVISION), *(f"timm:{name}" for name in TIMM)]
    wrong = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                line, is_equal = compared(name, Path(folder), given.size)
            except Exception as error:
                line, is_equal = f"{name:42} {type(error).__name__}: {str(error).splitlines()[0][:150]}", False
        wrong += not is_equal
        print(line, flush=True)
    print(f"{len(names) - wrong} of {len(names)} equal")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
