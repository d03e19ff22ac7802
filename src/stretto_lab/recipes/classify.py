"""Classification: images with their classes, the loss, and the accuracy."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from stretto_lab.recipes.task import Loss, evaluating


class Images(NamedTuple):
    """Images and their classes."""

    pixels: Tensor
    """(images, channels, height, width); float32 from 0 to 1, or uint8 for a model that normalises."""

    classes: Tensor
    """int64, (images,)."""


def class_loss(model: nn.Module, images: Images) -> Loss:
    """Return the mean cross-entropy per image, in nats, with weight 1."""
    logits = logits_of(model, images)
    value = functional.cross_entropy(logits.float(), images.classes.to(logits.device, non_blocking=True))
    return Loss(value, 1.0, len(images.classes))


def class_accuracy(model: nn.Module, batches: Iterable[Images]) -> float:
    """Return the share of the images whose largest logit belongs to their class."""
    right = images = 0
    with evaluating(model):
        for batch in batches:
            right += int((logits_of(model, batch).argmax(1).cpu() == batch.classes).sum())
            images += len(batch.classes)
    return right / images


def logits_of(model: nn.Module, images: Images) -> Tensor:
    """Return `model`'s output for the pixels, on its own device."""
    device = next(model.parameters()).device
    logits: Tensor = model(images.pixels.to(device, non_blocking=True))
    return logits
