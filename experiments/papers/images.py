"""The papers' image classifiers on CIFAR's binary files: `stretto train experiments/papers/images.py:CifarClassifier`.

Models are built from the configurations of `transformers`, with new parameters. For small images the first convolution
skips no pixels, and a ResNet has no pooling behind it, as for CIFAR in He et al., 2016, arXiv:1512.03385.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.errors import ConfigError
from stretto_lab.recipes import MicroBatches, Task
from stretto_lab.recipes.classify import Images, class_accuracy, class_loss
from stretto_lab.recipes.optimizers import SGD, Schedule
from stretto_lab.recipes.task import Loss, MeanLoss, extra

SIDE, PIXELS = 32, 3 * 32**2
PADDING = 4
"""Pixels around a picture, from which a random part of the old size is cut."""


class Cifar:
    """Records of CIFAR's binary files: labels, then red, green and blue planes of 32 x 32 pixels."""

    def __init__(self, folder: str, kind: str) -> None:
        files = sorted(Path(folder).glob("data_batch_*.bin" if kind == "train" else "test_batch.bin"))
        fine = Path(folder, f"{kind}.bin")
        if not files and not fine.is_file():
            raise ConfigError(f"{folder} has no file of CIFAR's binary version to {kind} on")
        self.classes = 10 if files else 100
        records = np.concatenate([np.fromfile(path, np.uint8) for path in files or [fine]])
        # The label stands before the pixels; of CIFAR-100 the coarse one stands before it.
        self.records = records.reshape(-1, PIXELS + (1 if files else 2))

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, indices: Tensor) -> Images:
        """Return the images `indices`; pixels are uint8."""
        found = torch.from_numpy(self.records[indices.numpy()])
        pixels = found[:, -PIXELS:].unflatten(1, (3, SIDE, SIDE)).contiguous()
        return Images(pixels, found[:, -PIXELS - 1].long())


class Classifier(nn.Module):
    """A model with all that happens to pixels before it: uint8 in, logits out.

    Random crops and flips act in training mode alone, as dropout does, and draw from the rank's own generator. So they
    lie behind an echo, where every use of a batch gets others, and a resumed run repeats them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits."""
        if self.training:
            count, side = len(pixels), torch.arange(SIDE)
            top, left = torch.randint(2 * PADDING + 1, (2, count, 1)) + side
            padded = functional.pad(pixels, (PADDING,) * 4)
            # Indices in three places bring the channels to the end.
            images = torch.arange(count)[:, None, None]
            pixels = padded[images, :, top[:, :, None], left[:, None, :]].permute(0, 3, 1, 2)
            mirrored = torch.randint(2, (count, 1, 1, 1), dtype=torch.bool).to(pixels.device)
            pixels = torch.where(mirrored, pixels.flip(3), pixels)
        # Close to zero mean and unit variance for photographs, whichever they are.
        values = (pixels.to(next(self.parameters()).dtype) / 255 - 0.5) / 0.25
        logits: Tensor = self.model(pixel_values=values).logits
        return logits


def network(architecture: str, classes: int, width: float, seed: int) -> nn.Module:
    """Return a classifier of `transformers` with new parameters; the caller's random state stays as it was."""
    transformers = extra("transformers", "the papers' images")
    if architecture == "mobilenet-v2":
        config = transformers.MobileNetV2Config(
            num_labels=classes, depth_multiplier=width, image_size=SIDE, classifier_dropout_prob=0.2
        )
    else:
        layer, depths, factor = {
            "resnet-18": ("basic", [2, 2, 2, 2], 1),
            "resnet-50": ("bottleneck", [3, 4, 6, 3], 4),
        }[architecture]
        stem = max(8, round(64 * width))
        config = transformers.ResNetConfig(
            layer_type=layer, depths=depths, hidden_sizes=[stem * factor * 2**stage for stage in range(4)],
            embedding_size=stem, num_labels=classes,
        )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForImageClassification.from_config(config)
        if architecture == "mobilenet-v2":
            model.mobilenet_v2.conv_stem.first_conv.convolution.stride = (1, 1)
        else:
            first = model.resnet.embedder
            first.embedder.convolution = nn.Conv2d(3, config.embedding_size, 3, padding=1, bias=False)
            first.pooler = nn.Identity()
    return model


def image_loss(model: nn.Module, images: Images) -> Loss:
    """Return `class_loss` with the number of images as its weight, for means over batches of several sizes."""
    return class_loss(model, images)._replace(weight=float(len(images.classes)))


@dataclass(frozen=True, kw_only=True)
class CifarClassifier:
    """An image classifier on CIFAR-10 or CIFAR-100, under SGD."""

    loss_unit: ClassVar[str] = "nats per image"

    model: Literal["resnet-18", "resnet-50", "mobilenet-v2"] = "resnet-18"
    """Which network."""
    data: str = "cifar-10-batches-bin"
    """Folder of the binary files."""
    width: float = 1.0
    """Factor on channels, to rehearse with."""
    batch: int = 32
    """Pictures per micro-batch."""
    lr: float = 0.1
    """Learning rate after the warm-up, from which it falls to zero as a half cosine."""
    readers: int = 1
    """Processes per rank that read ahead; 0 reads in the loop."""
    sgd: SGD = field(default_factory=SGD)
    """Options of the optimizer."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank."""
        train, heldout = Cifar(self.data, "train"), Cifar(self.data, "test")
        model = Classifier(network(self.model, train.classes, self.width, seed))
        optimizer = self.sgd.build(model, self.lr)
        share = {"rank": rank, "world_size": world_size, "seed": seed, "workers": self.readers}
        evaluated = [*map(heldout.batch, torch.arange(len(heldout)).split(max(self.batch, 256)))]
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=Schedule(floor=0.0).build(optimizer, updates),
            loader=MicroBatches(train, self.batch, **share),
            loss=class_loss,
            evaluate=MeanLoss(evaluated, image_loss),
            accuracy=partial(class_accuracy, batches=evaluated),
        )
