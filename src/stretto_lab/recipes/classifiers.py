"""Image classifiers of `transformers`, built from their configuration, with augmentation as a layer of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.fields import check_at_least, check_fields
from stretto_lab.recipes.task import extra

Backbone = Literal["resnet-18", "resnet-50", "mobilenet-v2"]

SMALL_IMAGES = 96
"""Side in pixels below which a model does not shrink its input at once."""

_RESNETS: Mapping[Backbone, Mapping[str, Any]] = MappingProxyType(
    {
        "resnet-18": {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]},
        "resnet-50": {
            "layer_type": "bottleneck", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]
        },
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """What is done to pictures in training, at every use anew."""

    padding: int = 4
    """Pixels added on every side, from which a random part of the old size is cut; 0 for none."""

    flip: bool = True
    """Mirror a random half of the pictures."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, padding=0)


class Classifier(nn.Module):
    """A model with all that happens to pixels before it: uint8 (images, 3, side, side) in, logits out.

    Augmentation acts in training mode alone, as dropout does, and draws from the rank's own generator. So it lies
    behind an echo, where every use of a batch gets other crops and flips, and a resumed run repeats it.

    Args:
        model: Of `transformers`.
        augmentation: What is done to pixels in training.
    """

    def __init__(self, model: nn.Module, augmentation: Augmentation) -> None:
        super().__init__()
        self.model = model
        self.augmentation = augmentation

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits."""
        if self.training:
            pixels = augmented(pixels, self.augmentation)
        # Close to zero mean and unit variance for photographs, whichever they are.
        values = (pixels.to(next(self.parameters()).dtype) / 255 - 0.5) / 0.25
        logits: Tensor = self.model(pixel_values=values).logits
        return logits


def augmented(pixels: Tensor, augmentation: Augmentation) -> Tensor:
    """Return images of the same size, each cut at random from its padded self, and mirrored at random."""
    count, side, padding = len(pixels), torch.arange(pixels.shape[-1]), augmentation.padding
    if padding:
        top, left = torch.randint(2 * padding + 1, (2, count, 1)) + side
        images = torch.arange(count)[:, None, None]
        padded = functional.pad(pixels, (padding,) * 4)
        # Indices in three places bring the channels to the end.
        pixels = padded[images, :, top[:, :, None], left[:, None, :]].permute(0, 3, 1, 2)
    if augmentation.flip:
        mirrored = torch.randint(2, (count, 1, 1, 1), dtype=torch.bool).to(pixels.device)
        pixels = torch.where(mirrored, pixels.flip(3), pixels)
    return pixels


def image_model(architecture: Backbone, *, classes: int, size: int, scale: float, seed: int) -> nn.Module:
    """Return a classifier: float images (images, 3, size, size) in, an output with `logits` out.

    For small images the first convolution does not skip pixels, and that of a ResNet is 3 x 3 with no pooling behind
    it, as for CIFAR in He et al., 2016, arXiv:1512.03385.

    Args:
        architecture: ResNet (He et al.) or MobileNetV2 (Sandler et al., 2018, arXiv:1801.04381).
        classes: Number of logits.
        size: Side of the images in pixels.
        scale: Factor on channels and depth; MobileNetV2 keeps its depth.
        seed: Decides the parameters; the random state of the caller is left as it was.

    Raises:
        MissingExtra: `transformers` is not installed.
    """
    transformers = extra("transformers", "the recipe images")
    if architecture == "mobilenet-v2":
        config = transformers.MobileNetV2Config(
            num_labels=classes, depth_multiplier=scale, image_size=size, classifier_dropout_prob=0.2
        )
    else:
        shape = _RESNETS[architecture]
        config = transformers.ResNetConfig(
            layer_type=shape["layer_type"],
            depths=[max(1, round(depth * scale)) for depth in shape["depths"]],
            hidden_sizes=[_channels(width, scale) for width in shape["hidden_sizes"]],
            embedding_size=_channels(64, scale),
            num_labels=classes,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
        if size < SMALL_IMAGES:
            _read_small_images(model, config)
    return model


def _read_small_images(model: Any, config: Any) -> None:
    if config.model_type == "resnet":
        stem = model.resnet.embedder
        stem.embedder.convolution = nn.Conv2d(3, config.embedding_size, 3, padding=1, bias=False)
        stem.pooler = nn.Identity()
    else:
        model.mobilenet_v2.conv_stem.first_conv.convolution.stride = (1, 1)


def _channels(channels: int, scale: float) -> int:
    return max(8, 8 * round(channels * scale / 8))
