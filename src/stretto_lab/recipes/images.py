"""The recipe `images`: an image classifier on local pictures."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch

from stretto import errors
from stretto.fields import check_at_least, check_fields
from stretto_lab.recipes.batches import MicroBatches
from stretto_lab.recipes.classifiers import Augmentation, Backbone, Classifier, image_model
from stretto_lab.recipes.classify import Images, InOrder, class_accuracy, class_loss, image_loss
from stretto_lab.recipes.optimizers import SGD, Adafactor, AdamW, Schedule
from stretto_lab.recipes.pictures import PictureSides, read_pictures
from stretto_lab.recipes.rows import Heldout
from stretto_lab.recipes.task import Task, mean_loss

EVALUATED_AT_ONCE = 256
"""Pictures per forward pass of an evaluation, at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageClassification:
    """An image classifier on your own pictures; CIFAR's binary files, folders by class, or Parquet; no download."""

    loss_unit: ClassVar[str] = "nats per image"
    """Of its losses."""

    model: Backbone = "resnet-18"
    """Which network; its parameters are new. Below 96 pixels its first convolution skips none."""

    data: str | None = None
    """Folder of CIFAR's binary files, folder of folders by class, or Parquet with columns image and label."""

    size: int = 32
    """Side in pixels to which pictures are brought."""

    batch: int = 32
    """Pictures per micro-batch; at least 2, because batch normalisation takes its statistics from them."""

    optimizer: Literal["sgd", "adamw", "adafactor"] = "sgd"
    """Which of those below trains the model."""

    lr: float | None = None
    """Learning rate after the warm-up; None takes 0.1 for sgd, 0.001 for adamw and 0.01 for adafactor."""

    scale: float = 1.0
    """Factor to rehearse with; on channels, depth and training pictures, above 0 and at most 1."""

    readers: int = 1
    """Processes per rank that read and decode ahead; 0 does it in the loop."""

    augment: Augmentation = field(default_factory=Augmentation)
    """What is done to pictures in training."""

    heldout: Heldout = field(default_factory=lambda: Heldout(share=0.1, samples=10_000))
    """What is evaluated on."""

    sgd: SGD = field(default_factory=SGD)
    """Options of sgd."""

    adamw: AdamW = field(default_factory=AdamW)
    """Options of adamw."""

    adafactor: Adafactor = field(default_factory=Adafactor)
    """Options of adafactor."""

    schedule: Schedule = field(default_factory=lambda: Schedule(floor=0.0))
    """The learning rate over the updates."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, size=8, batch=2, lr=0, readers=0)
        if not 0 < self.scale <= 1:
            raise errors.ConfigError(f"scale must be above 0 and at most 1, found {self.scale}")

    def check(self) -> None:
        """Raise where files are missing or wrong, before there are workers; see `OverFiles`."""
        for side in self._sides():
            side.batch(torch.tensor([0, len(side) - 1]))

    def kept_in(self, folder: str) -> "ImageClassification":
        """Return the same: nothing is kept; see `OverFiles`."""
        return self

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank; arguments and errors are those of `TaskConfig.build`."""
        train, heldout = self._sides()
        network = image_model(
            self.model, classes=train.num_classes, size=self.size, scale=self.scale, seed=seed
        )
        model = Classifier(network, self.augment)
        rate = {"sgd": 0.1, "adamw": 0.001, "adafactor": 0.01}[self.optimizer] if self.lr is None else self.lr
        options: SGD | AdamW | Adafactor = getattr(self, self.optimizer)
        optimizer = options.build(model, rate)
        loader: MicroBatches[Images] = MicroBatches(
            train,
            min(self.batch, len(train)),
            rank=rank,
            world_size=world_size,
            seed=seed,
            workers=self.readers,
        )
        evaluated = InOrder(heldout, max(self.batch, EVALUATED_AT_ONCE), self.heldout.samples)
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=self.schedule.build(optimizer, updates),
            loader=loader,
            loss=class_loss,
            evaluate=partial(mean_loss, batches=evaluated, loss=image_loss),
            accuracy=partial(class_accuracy, batches=evaluated),
        )

    def _sides(self) -> PictureSides:
        return read_pictures(self.data, self.heldout, self.size, self.scale)
