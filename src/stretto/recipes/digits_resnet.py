"""An image classifier on scikit-learn's digits: 1,797 images of 8 x 8 pixels, ten classes."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto import errors
from stretto.recipes.batches import MicroBatches
from stretto.recipes.extras import extra
from stretto.recipes.heldout import evaluating, mean_loss
from stretto.recipes.optimizers import SGD, AdamW
from stretto.recipes.resnet import ResNet
from stretto.recipes.schedule import Schedule
from stretto.recipes.task import Loss, Task

CLASSES = 10


class Images(NamedTuple):
    """Images and their classes."""

    pixels: Tensor
    """float32, (images, 1, 8, 8), from 0 to 1."""

    classes: Tensor
    """int64, (images,)."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images collected by index."""

    images: Images

    def __len__(self) -> int:
        return len(self.images.classes)

    def batch(self, indices: Tensor) -> Images:
        return Images(self.images.pixels[indices], self.images.classes[indices])


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsResNet:
    """Options of the recipe `digits-resnet`."""

    width: int = 16
    """Channels of the first stage; the third has four times as many."""

    blocks: int = 1
    """Residual blocks per stage."""

    batch: int = 32
    """Images per micro-batch, at least 2: batch normalisation takes its statistics from them."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Which of the two below trains the model."""

    lr: float | None = None
    """Learning rate after the warm-up; None takes 0.05 for sgd and 0.003 for adamw."""

    heldout_share: float = 0.2
    """Share of the images kept for evaluation, between 0 and 1."""

    split_seed: int = 0
    """Decides which images are held out; apart from the run's seed, so that runs can be compared."""

    sgd: SGD = field(default_factory=SGD)
    """Options of sgd."""

    adamw: AdamW = field(default_factory=AdamW)
    """Options of adamw."""

    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the updates."""

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("blocks", 1), ("batch", 2)):
            if (found := getattr(self, name)) < least:
                raise errors.ConfigError(f"{name} must be at least {least}, found {found}")
        if not 0 < self.heldout_share < 1:
            raise errors.ConfigError(f"heldout_share must be between 0 and 1, found {self.heldout_share}")

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """See `TaskConfig.build`."""
        train, heldout = load_digits(self.heldout_share, self.split_seed)
        model = ResNet(width=self.width, blocks=self.blocks, classes=CLASSES, seed=seed)
        optimizer = self._optimizer(model)
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=self.schedule.build(optimizer, updates),
            loader=MicroBatches(Digits(train), self.batch, rank=rank, world_size=world_size, seed=seed),
            loss=class_loss,
            evaluate=partial(mean_loss, batches=[heldout], loss=class_loss),
            accuracy=partial(class_accuracy, images=heldout),
        )

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return self.sgd.build(model, 0.05 if self.lr is None else self.lr)
        return self.adamw.build(model, 0.003 if self.lr is None else self.lr)


def load_digits(heldout_share: float, split_seed: int) -> tuple[Images, Images]:
    """The digits, training side and held-out side.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    digits = extra("sklearn.datasets", "the recipe digits-resnet").load_digits()
    pixels = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    classes = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(split_seed))
    heldout, train = order.tensor_split([round(len(classes) * heldout_share)])
    return Images(pixels[train], classes[train]), Images(pixels[heldout], classes[heldout])


def class_loss(model: nn.Module, images: Images) -> Loss:
    """Mean cross-entropy per image, in nats, with weight 1."""
    logits = _logits(model, images)
    value = functional.cross_entropy(logits.float(), images.classes.to(logits.device, non_blocking=True))
    return Loss(value, 1.0, len(images.classes))


def class_accuracy(model: nn.Module, images: Images) -> float:
    """Share of `images` whose largest logit is that of their class."""
    with evaluating(model):
        chosen = _logits(model, images).argmax(1).cpu()
    return float((chosen == images.classes).double().mean())


def _logits(model: nn.Module, images: Images) -> Tensor:
    device = next(model.parameters()).device
    logits: Tensor = model(images.pixels.to(device, non_blocking=True))
    return logits


def digits_resnet() -> DigitsResNet:
    """The recipe `digits-resnet`: about 75,000 parameters with BatchNorm, SGD with momentum."""
    return DigitsResNet()
