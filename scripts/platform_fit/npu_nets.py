"""Nets of Qualcomm's AI Hub table that can be built here: by name, or from the dimensions in their papers.

Names are the table's. Weights do not matter for a time, so none are loaded. Nets whose input size or layers are not
known from their papers are left out, and so are their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class NpuNet:
    """A net by its name and part in the table; `family` is what it must be held out with.

    `is_timed`: whether its inputs are known, so that its times tell something; which layers leave does not need them.
    """

    name: str
    part: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Any
    is_timed: bool = True


def npu_nets(torchvision: Any, timm: Any, transformers: Any) -> tuple[NpuNet, ...]:
    """Return every net of the table that can be built; the three packages are passed in because one needs help."""
    return (*_vision_nets(torchvision.models), *_timm_nets(timm), *_sequence_nets(transformers), *_paper_nets())


def _image(size: int, channels: int = 3) -> tuple[int, ...]:
    return (1, channels, size, size)


def _vision_nets(models: Any) -> list[NpuNet]:
    families = {
        "densenet121": "densenet", "mobilenet_v2": "mobilenet_v2", "mobilenet_v3_large": "mobilenet_v3",
        "mobilenet_v3_small": "mobilenet_v3", "resnet18": "resnet", "resnet50": "resnet", "resnet101": "resnet",
    }  # fmt: skip
    other_names = {"regnet": "regnet_x_3_2gf", "resnext50": "resnext50_32x4d", "shufflenet_v2": "shufflenet_v2_x0_5"}
    nets = [NpuNet(name, "", family, getattr(models, name), _image(224)) for name, family in families.items()]
    nets += [NpuNet(name, "", name, getattr(models, there), _image(224)) for name, there in other_names.items()]
    video = (1, 3, 16, 112, 112)
    return [
        *nets,
        NpuNet("inception_v3", "", "inception", lambda: models.inception_v3(init_weights=False), _image(224)),
        NpuNet("efficientnet_b4", "", "efficientnet", models.efficientnet_b4, _image(380)),
        NpuNet("resnet_mixed", "", "video_resnet", models.video.mc3_18, video),
        NpuNet("resnet_2plus1d", "", "video_resnet", models.video.r2plus1d_18, video),
        NpuNet("deeplabv3_plus_mobilenet", "", "deeplab", lambda: DeepLabMobileNet(models), _image(513)),
    ]


def _timm_nets(timm: Any) -> list[NpuNet]:
    sizes = {
        "dla102x": ("dla102x", 224),
        "efficientvit_b2_cls": ("efficientvit_b2", 224),
        "swinv2_base": ("swinv2_base_window8_256", 256),
        "convnext_v2_base": ("convnextv2_base", 224),
        "beit": ("beit_base_patch16_224", 224),
    }
    return [
        *(
            NpuNet(name, "", name, lambda there=there: timm.create_model(there), _image(size))
            for name, (there, size) in sizes.items()
        ),
        # Recurrent layers are outside what is measured: their times are not part of the fit.
        NpuNet("sequencer2d", "", "sequencer2d", lambda: timm.create_model("sequencer2d_s"), _image(224), False),
        NpuNet("sam2", "encoder", "sam2", lambda: timm.create_model("sam2_hiera_tiny"), _image(1024), is_timed=False),
    ]


def _sequence_nets(transformers: Any) -> list[NpuNet]:
    segformer = transformers.SegformerConfig(num_labels=150)
    pair = (_tokens(77)["input_ids"], torch.zeros(_image(224)))
    return [
        NpuNet(
            "distil_bert_base_uncased_hf", "", "bert",
            lambda: transformers.DistilBertForMaskedLM(transformers.DistilBertConfig()), _tokens(384),
        ),
        NpuNet("nomic_embed_text", "", "bert", lambda: transformers.BertModel(transformers.BertConfig()), _tokens(128)),
        NpuNet("openai_clip", "", "clip", lambda: Clip(transformers), pair),
        NpuNet(
            "yolo_world", "text_encoder", "clip", lambda: ClipText(transformers), _tokens(77), is_timed=False,
        ),
        NpuNet(
            "video_mae", "", "video_mae",
            lambda: transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(num_labels=400)),
            (1, 16, 3, 224, 224),
        ),
        NpuNet(
            "mobile_bert_uncased_google", "", "bert",
            lambda: transformers.MobileBertForMaskedLM(transformers.MobileBertConfig()), _tokens(384),
        ),
        NpuNet(
            "segformer_base", "", "segformer", lambda: transformers.SegformerForSemanticSegmentation(segformer),
            _image(512),
        ),
    ]  # fmt: skip


def _tokens(count: int) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(1, count, dtype=torch.long)}


def _paper_nets() -> list[NpuNet]:
    return [
        NpuNet("dncnn", "", "dncnn", DnCnn, _image(256, 1)),
        NpuNet("unet_segmentation", "", "unet", UNet, (1, 3, 640, 1280)),
        NpuNet("quicksrnetlarge", "", "quicksrnet", QuickSrNet, _image(128)),
        NpuNet("sesr_m5", "", "sesr", Sesr, _image(128)),
        NpuNet("esrgan", "", "esrgan", Esrgan, _image(128)),
        NpuNet("yamnet", "", "mobilenet_v1", YamNet, (1, 1, 96, 64)),
        NpuNet("osnet", "", "osnet", OsNet, (1, 3, 256, 128)),
        NpuNet("superpoint", "", "superpoint", SuperPoint, (1, 1, 480, 640), is_timed=False),
        NpuNet("yolov8_det", "", "yolov8", YoloV8, _image(640)),
        NpuNet("yolov8_seg", "", "yolov8", lambda: YoloV8(has_masks=True), _image(640)),
        NpuNet("fastsam_s", "", "yolov8", lambda: YoloV8(32, 1, has_masks=True), _image(640)),
        NpuNet("fastsam_x", "", "yolov8", lambda: YoloV8(80, 1, (3, 6, 6, 3), has_masks=True), _image(640)),
    ]


def conv(
    inner: int, outer: int, kernel: int = 1, stride: int = 1, *, groups: int = 1, dilation: int = 1,
    act: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:  # fmt: skip
    """A convolution that keeps the size but for its stride, a batch norm and an activation."""
    padding = dilation * (kernel // 2)
    layer = nn.Conv2d(inner, outer, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outer), act())


class Clip(nn.Module):
    """CLIP ViT-B/16: image and text together, as the table has them."""

    def __init__(self, transformers: Any) -> None:
        super().__init__()
        self.model = transformers.CLIPModel(transformers.CLIPConfig(vision_config={"patch_size": 16}, text_config={}))

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        return self.model(input_ids=tokens, pixel_values=image).logits_per_image


class ClipText(nn.Module):
    """The text half of CLIP ViT-B/32, its result normalized, as YOLO-World has it (Cheng et al. 2024)."""

    def __init__(self, transformers: Any) -> None:
        super().__init__()
        self.model = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig())

    def forward(self, input_ids: Tensor) -> Tensor:
        return functional.normalize(self.model(input_ids=input_ids).text_embeds, dim=-1)


class SuperPoint(nn.Module):
    """SuperPoint (DeTone et al. 2018): scores of places, and a normalized descriptor of each."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 1
        for outer in (64, 64, 128, 128):
            for inner in (width, outer):
                layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU()]
            layers, width = [*layers, nn.MaxPool2d(2)], outer
        self.body = nn.Sequential(*layers[:-1])
        self.places = nn.Sequential(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 65, 1))
        self.descriptors = nn.Sequential(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        value = self.body(image)
        scores = functional.pixel_shuffle(self.places(value).softmax(1)[:, :-1], 8)
        return scores, functional.normalize(self.descriptors(value), dim=1)


class DeepLabMobileNet(nn.Module):
    """DeepLabV3+ (Chen et al. 2018) on MobileNetV2 with an output stride of 16."""

    def __init__(self, models: Any) -> None:
        super().__init__()
        features = models.mobilenet_v2().features
        self.low, self.high = features[:4], features[4:18]
        for block in self.high[10:]:
            for layer in block.modules():
                if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
                    layer.stride, layer.dilation, layer.padding = (1, 1), (2, 2), (2, 2)
        self.branches = nn.ModuleList([conv(320, 256), *(conv(320, 256, 3, dilation=rate) for rate in (6, 12, 18))])
        self.pooled, self.joined, self.skip = conv(320, 256), conv(1280, 256), conv(24, 48)
        self.head = nn.Sequential(conv(304, 256, 3), conv(256, 256, 3), nn.Conv2d(256, 21, 1))

    def forward(self, image: Tensor) -> Tensor:
        low = self.low(image)
        high = self.high(low)
        pooled = self.pooled(high.mean((2, 3), keepdim=True)).expand(-1, -1, *high.shape[2:])
        joined = self.joined(torch.cat([*(branch(high) for branch in self.branches), pooled], 1))
        joined = functional.interpolate(joined, size=low.shape[2:], mode="bilinear")
        classes = self.head(torch.cat([joined, self.skip(low)], 1))
        return functional.interpolate(classes, size=image.shape[2:], mode="bilinear").argmax(1)


class DnCnn(nn.Module):
    """DnCNN (Zhang et al. 2017): twenty 3x3 convolutions of 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        inner = [layer for _ in range(18) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
        self.body = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), *inner, nn.Conv2d(64, 1, 3, padding=1))

    def forward(self, image: Tensor) -> Tensor:
        return image - self.body(image)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with padding and batch norm, two classes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.first = self._double(3, 64)
        self.down = nn.ModuleList([self._double(width, 2 * width) for width in widths[:-1]])
        self.up = nn.ModuleList([nn.ConvTranspose2d(width, width // 2, 2, 2) for width in widths[:0:-1]])
        self.join = nn.ModuleList([self._double(width, width // 2) for width in widths[:0:-1]])
        self.last = nn.Conv2d(64, 2, 1)

    @staticmethod
    def _double(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(conv(inner, outer, 3), conv(outer, outer, 3))

    def forward(self, image: Tensor) -> Tensor:
        kept = [self.first(image)]
        for down in self.down:
            kept.append(down(functional.max_pool2d(kept[-1], 2)))
        value = kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            value = join(torch.cat([kept.pop(), up(value)], 1))
        return self.last(value)


class QuickSrNet(nn.Module):
    """QuickSRNet large (Berger et al. 2023), four times the size: eleven 3x3 convolutions of 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 64, 3, padding=1), *(nn.Conv2d(64, 64, 3, padding=1) for _ in range(11))]
        self.body = nn.Sequential(*(nn.Sequential(layer, nn.Hardtanh(0, 1)) for layer in layers))
        self.last = nn.Sequential(nn.Conv2d(64, 48, 3, padding=1), nn.PixelShuffle(4))

    def forward(self, image: Tensor) -> Tensor:
        return self.last(self.body(image)).clamp(0, 1)


class Sesr(nn.Module):
    """SESR-M5 (Bhardwaj et al. 2022), four times the size, with its linear blocks collapsed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 5, padding=2)
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(5)))
        self.last = nn.Sequential(nn.Conv2d(16, 48, 5, padding=2), nn.PixelShuffle(4))

    def forward(self, image: Tensor) -> Tensor:
        value = self.first(image)
        return self.last(value + self.body(value))


class DenseBlock(nn.Module):
    """Five convolutions, each of everything before it (Wang et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(64 + 32 * n, 32 if n < 4 else 64, 3, padding=1) for n in range(5))

    def forward(self, value: Tensor) -> Tensor:
        kept = [value]
        for layer in self.layers:
            kept.append(functional.leaky_relu(layer(torch.cat(kept, 1)), 0.2))
        return value + 0.2 * kept[-1]


class Esrgan(nn.Module):
    """ESRGAN's generator (Wang et al. 2018): 23 times three dense blocks, four times the size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.trunk = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.body = nn.Sequential(*(DenseBlock() for _ in range(69)))
        self.larger = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))
        self.last = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(64, 3, 3, padding=1))

    def forward(self, image: Tensor) -> Tensor:
        value = self.first(image)
        value = value + self.trunk(self.body(value))
        for layer in self.larger:
            value = functional.leaky_relu(layer(functional.interpolate(value, scale_factor=2.0)), 0.2)
        return self.last(value)


class YamNet(nn.Module):
    """YAMNet: MobileNetV1 (Howard et al. 2017) on a spectrogram of 96 x 64, 521 classes."""

    def __init__(self) -> None:
        super().__init__()
        plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
        layers, width = [conv(1, 32, 3, 2)], 32
        for outer, stride in plan:
            layers += [conv(width, width, 3, stride, groups=width), conv(width, outer)]
            width = outer
        self.body, self.last = nn.Sequential(*layers), nn.Linear(1024, 521)

    def forward(self, sound: Tensor) -> Tensor:
        return self.last(self.body(sound).mean((2, 3))).sigmoid()


class OmniBlock(nn.Module):
    """Four streams of light convolutions behind one gate (Zhou et al. 2019)."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        width = outer // 4

        def light() -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(width, width, 1, bias=False), conv(width, width, 3, groups=width))

        self.first = conv(inner, width)
        self.streams = nn.ModuleList(nn.Sequential(*(light() for _ in range(count))) for count in (1, 2, 3, 4))
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 16, 1), nn.ReLU(), nn.Conv2d(width // 16, width, 1),
            nn.Sigmoid(),
        )  # fmt: skip
        self.last = conv(width, outer, act=nn.Identity)
        self.skip = nn.Identity() if inner == outer else conv(inner, outer, act=nn.Identity)

    def forward(self, value: Tensor) -> Tensor:
        first = self.first(value)
        total = torch.zeros(())
        for stream in self.streams:
            wide = stream(first)
            total = total + wide * self.gate(wide)
        return functional.relu(self.last(total) + self.skip(value))


class OsNet(nn.Module):
    """OSNet x1.0 (Zhou et al. 2019), its features normalized: the table's layer counts have the operators of that."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
        for inner, outer in ((64, 256), (256, 384), (384, 512)):
            layers += [OmniBlock(inner, outer), OmniBlock(outer, outer)]
            layers += [conv(outer, outer), nn.AvgPool2d(2)] if outer < 512 else [conv(outer, outer)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        return functional.normalize(self.last(self.body(image)))


class Bottleneck(nn.Module):
    """Two convolutions, the second one 3x3, added to their input in the backbone."""

    def __init__(self, width: int, is_residual: bool, kernel: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(yolo_conv(width, width, kernel), yolo_conv(width, width, 3))
        self.is_residual = is_residual

    def forward(self, value: Tensor) -> Tensor:
        return value + self.body(value) if self.is_residual else self.body(value)


class SplitBlock(nn.Module):
    """YOLOv8's C2f: half of the channels goes through bottlenecks, and everything is joined."""

    def __init__(self, inner: int, outer: int, count: int, is_residual: bool = False) -> None:
        super().__init__()
        half = outer // 2
        self.first, self.last = yolo_conv(inner, outer), yolo_conv((2 + count) * half, outer)
        self.body = nn.ModuleList(Bottleneck(half, is_residual) for _ in range(count))

    def forward(self, value: Tensor) -> Tensor:
        kept = list(self.first(value).chunk(2, 1))
        for layer in self.body:
            kept.append(layer(kept[-1]))
        return self.last(torch.cat(kept, 1))


class PyramidPool(nn.Module):
    """YOLOv8's SPPF: three poolings of 5x5 in a row, joined."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = yolo_conv(width, width // 2), yolo_conv(2 * width, width)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, value: Tensor) -> Tensor:
        kept = [self.first(value)]
        for _ in range(3):
            kept.append(self.pool(kept[-1]))
        return self.last(torch.cat(kept, 1))


def yolo_conv(inner: int, outer: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    """A convolution with batch norm and SiLU."""
    return conv(inner, outer, kernel, stride, act=nn.SiLU)


class YoloV8(nn.Module):
    """YOLOv8 with its boxes decoded; FastSAM is the same with masks and one class.

    Args:
        width: Channels of the first layer: 16 for n, 32 for s, 80 for x.
        classes: Number of classes.
        depths: Bottlenecks of the four stages.
        has_masks: Whether it predicts masks, too.
    """

    def __init__(
        self, width: int = 16, classes: int = 80, depths: Sequence[int] = (1, 2, 2, 1), has_masks: bool = False
    ) -> None:
        super().__init__()
        a, b, c, d, e = (min(width * factor, 640) for factor in (1, 2, 4, 8, 16))
        self.stages = nn.ModuleList()
        for inner, outer, count in ((a, b, depths[0]), (b, c, depths[1]), (c, d, depths[2]), (d, e, depths[3])):
            self.stages.append(nn.Sequential(yolo_conv(inner, outer, 3, 2), SplitBlock(outer, outer, count, True)))
        self.first, self.pyramid = yolo_conv(3, a, 3, 2), PyramidPool(e)
        count = depths[0]
        self.up = nn.ModuleList([SplitBlock(e + d, d, count), SplitBlock(d + c, c, count)])
        self.smaller = nn.ModuleList([yolo_conv(c, c, 3, 2), yolo_conv(d, d, 3, 2)])
        self.down = nn.ModuleList([SplitBlock(c + d, d, count), SplitBlock(d + e, e, count)])
        self.classes, self.has_masks = classes, has_masks
        widths = (c, d, e)
        self.boxes = self._heads(widths, max(64, c // 4), 64)
        self.scores = self._heads(widths, max(c, min(classes, 100)), classes)
        self.distances = nn.Conv2d(16, 1, 1, bias=False)
        if has_masks:
            self.masks = self._heads(widths, max(32, c // 4), 32)
            larger = nn.ConvTranspose2d(64, 64, 2, 2)
            self.prototypes = nn.Sequential(yolo_conv(c, 64, 3), larger, yolo_conv(64, 64, 3), yolo_conv(64, 32))

    @staticmethod
    def _heads(widths: Sequence[int], inner: int, outer: int) -> nn.ModuleList:
        return nn.ModuleList(
            nn.Sequential(yolo_conv(width, inner, 3), yolo_conv(inner, inner, 3), nn.Conv2d(inner, outer, 1))
            for width in widths
        )

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        value, kept = self.first(image), []
        for stage in self.stages:
            value = stage(value)
            kept.append(value)
        _, low, middle, high = kept
        high = self.pyramid(high)
        middle = self.up[0](torch.cat([self._doubled(high), middle], 1))
        low = self.up[1](torch.cat([self._doubled(middle), low], 1))
        middle = self.down[0](torch.cat([self.smaller[0](low), middle], 1))
        high = self.down[1](torch.cat([self.smaller[1](middle), high], 1))
        levels = (low, middle, high)
        boxes, scores = self._joined(self.boxes, levels), self._joined(self.scores, levels).sigmoid()
        places = boxes.shape[2]
        sides = self.distances(boxes.view(1, 4, 16, places).transpose(2, 1).softmax(1)).view(1, 4, places)
        start, end = sides.chunk(2, 1)
        decoded = (torch.cat([(start + end) / 2, end - start], 1), *scores.max(1))
        return (*decoded, self._joined(self.masks, levels), self.prototypes(low)) if self.has_masks else decoded

    @staticmethod
    def _doubled(value: Tensor) -> Tensor:
        return functional.interpolate(value, scale_factor=2.0)

    @staticmethod
    def _joined(heads: nn.ModuleList, levels: Sequence[Tensor]) -> Tensor:
        return torch.cat([head(level).flatten(2) for head, level in zip(heads, levels, strict=True)], 2)
