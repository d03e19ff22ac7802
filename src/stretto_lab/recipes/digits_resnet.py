"""The recipe `digits-resnet`: an image classifier on scikit-learn's digits, 1,797 images of 8 x 8 pixels.

A residual network with batch normalisation (He et al., 2016, arXiv:1512.03385), small enough for these images.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.fields import check_at_least, check_fields
from stretto_lab.recipes.batches import MicroBatches
from stretto_lab.recipes.classify import Images, class_accuracy, class_loss
from stretto_lab.recipes.optimizers import SGD, AdamW, Schedule
from stretto_lab.recipes.task import MeanLoss, Task, extra

CLASSES = 10
HELDOUT_SHARE = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsResNet:
    """A small residual network for pictures of handwritten digits; about 75,000 parameters, SGD with momentum."""

    loss_unit: ClassVar[str] = "nats per image"
    """Unit of the losses."""

    width: int = 16
    """Channels of the first block; the third has four times as many."""

    batch: int = 32
    """Images per micro-batch; at least 2, because batch normalisation needs statistics."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The optimizer."""

    lr: float | None = None
    """Learning rate after the warm-up; None takes 0.05 for sgd and 0.003 for adamw."""

    sgd: SGD = field(default_factory=SGD)
    """Options of sgd."""

    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the updates."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, width=1, batch=2, lr=0)

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank; see `TaskConfig.build` for arguments and errors."""
        train, heldout = load_digits()
        model = ResNet(self.width, seed)
        lr = {"sgd": 0.05, "adamw": 0.003}[self.optimizer] if self.lr is None else self.lr
        optimizer = (self.sgd if self.optimizer == "sgd" else AdamW()).build(model, lr)
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=self.schedule.build(optimizer, updates),
            loader=MicroBatches(Digits(train), self.batch, rank=rank, world_size=world_size, seed=seed),
            loss=class_loss,
            evaluate=MeanLoss([heldout], class_loss),
            accuracy=partial(class_accuracy, batches=[heldout]),
        )


@dataclass(frozen=True, slots=True)
class Digits:
    images: Images

    def __len__(self) -> int:
        return len(self.images.classes)

    def batch(self, indices: Tensor) -> Images:
        return Images(self.images.pixels[indices], self.images.classes[indices])


def load_digits() -> tuple[Images, Images]:
    """Return the training images and the held-out images, which do not depend on the run's seed.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    digits = extra("sklearn.datasets", "the recipe digits-resnet").load_digits()
    pixels = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    classes = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    heldout, train = order.tensor_split([round(len(classes) * HELDOUT_SHARE)])
    return Images(pixels[train], classes[train]), Images(pixels[heldout], classes[heldout])


class Block(nn.Module):
    """`relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))`, with 3 x 3 convolutions."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.shortcut(images) + self.second_norm(self.second(inner)))


class ResNet(nn.Sequential):
    """Three residual blocks, the second and third with doubled width at half the resolution.

    Args:
        width: Channels of the first block.
        seed: Decides the initial parameters; the caller's random state is not changed.
    """

    def __init__(self, width: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(
                nn.Conv2d(1, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                Block(width, width, stride=1),
                Block(width, 2 * width, stride=2),
                Block(2 * width, 4 * width, stride=2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(4 * width, CLASSES),
            )
