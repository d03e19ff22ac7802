"""Pictures of local files: CIFAR's binary files, folders of images by class, or Parquet with images and labels.

CIFAR also comes as Python pickles, which run whatever they hold when they are read: those are refused.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stretto import errors
from stretto_lab.recipes.classify import Images
from stretto_lab.recipes.rows import Heldout, check_column, divided, read_rows
from stretto_lab.recipes.task import extra

CIFAR_SIDE = 32
CIFAR_PIXELS = 3 * CIFAR_SIDE**2
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
HELDOUT_FOLDERS = ("test", "validation", "valid", "val")


class Pictures(Protocol):
    """Images read by index, all of one size."""

    def __len__(self) -> int: ...

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        ...

    def batch(self, indices: Tensor) -> Images:
        """Return the images `indices`; pixels are uint8."""
        ...


class PictureSides(NamedTuple):
    """What is trained on, and what is held out."""

    train: Pictures
    heldout: Pictures


@dataclass(frozen=True, slots=True, eq=False)
class Cifar:
    """Records of CIFAR's binary files: labels, then red, green and blue planes of 32 x 32 pixels."""

    records: np.ndarray
    """uint8, (images, bytes of a record)."""
    size: int
    """Side of the images that are given, in pixels."""

    def __len__(self) -> int:
        return len(self.records)

    @property
    def num_classes(self) -> int:
        return 10 if self.records.shape[1] == 1 + CIFAR_PIXELS else 100

    def batch(self, indices: Tensor) -> Images:
        found = torch.from_numpy(self.records[indices.numpy()])
        pixels = found[:, -CIFAR_PIXELS:].unflatten(1, (3, CIFAR_SIDE, CIFAR_SIDE)).contiguous()
        if self.size != CIFAR_SIDE:
            pixels = functional.interpolate(
                pixels.float(), (self.size, self.size), mode="bilinear", antialias=True
            )
            pixels = pixels.round().to(torch.uint8)
        # The label stands before the pixels; of CIFAR-100 the coarse one stands before it.
        return Images(pixels, found[:, -CIFAR_PIXELS - 1].long())


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """Image files and their classes."""

    paths: Sequence[Path]
    """One file per image."""
    classes: np.ndarray
    """int64, (images,)."""
    size: int
    """Side in pixels; other images are stretched to it."""
    num_classes: int
    """How many classes there are."""

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: Tensor) -> Images:
        files = [self.paths[index] for index in indices.tolist()]
        pixels = [decoded(path.read_bytes(), str(path), self.size) for path in files]
        return Images(torch.stack(pixels), torch.from_numpy(self.classes[indices.numpy()]))


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows of Parquet, with an image's bytes and its class."""

    rows: Any
    """Of `datasets`, with columns image and label."""
    size: int
    """As of `Files`."""
    num_classes: int
    """How many classes there are."""

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> Images:
        found = self.rows[indices.tolist()]
        images = [one["bytes"] if isinstance(one, dict) else one for one in found["image"]]
        pixels = [decoded(image, f"row {row}", self.size) for row, image in zip(indices, images, strict=True)]
        return Images(torch.stack(pixels), torch.tensor(found["label"]))


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Some of other pictures."""

    pictures: Pictures
    """The others."""
    indices: Tensor
    """Which."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def num_classes(self) -> int:
        return self.pictures.num_classes

    def batch(self, indices: Tensor) -> Images:
        return self.pictures.batch(self.indices[indices])


def decoded(content: bytes, name: str, size: int) -> Tensor:
    """Return an encoded image as uint8 (3, size, size).

    Raises:
        ConfigError: It cannot be decoded.
        MissingExtra: Pillow is not installed.
    """
    pil = extra("PIL.Image", "decoding images")
    try:
        with pil.open(io.BytesIO(content)) as image:
            whole = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
        raise errors.ConfigError(
            f"{name} is not an image that can be decoded ({type(error).__name__})"
        ) from error
    if whole.size != (size, size):
        whole = whole.resize((size, size), pil.Resampling.BILINEAR)
    return torch.from_numpy(np.array(whole)).permute(2, 0, 1).contiguous()


def read_pictures(place: str | None, heldout: Heldout, size: int, limit: float) -> PictureSides:
    """Return the pictures to train on and those held out.

    Args:
        place: Folder of CIFAR's binary files, folder with a folder per class (or `train` and `test` of these), or what
            `read_rows` takes.
        heldout: What is held out. Beside the others may stand CIFAR's test files, or a folder `test`.
        size: Side in pixels.
        limit: Share of the pictures to train on at all, spread evenly; 1 for all.

    Raises:
        ConfigError: There is nothing, or it cannot be read.
    """
    if place is None:
        raise errors.ConfigError("data is missing: name a file or a folder")
    train, beside = _read(Path(place), size)
    if heldout.data is not None:
        beside, _ = _read(Path(heldout.data), size, _classes_of(Path(place)))
    if beside is None:
        kept, left_out = divided(len(train), heldout.share)
        train, beside = Chosen(train, torch.from_numpy(kept)), Chosen(train, torch.from_numpy(left_out))
    if limit != 1:
        count = max(2, round(len(train) * limit))
        train = Chosen(train, torch.arange(count) * len(train) // count)
    return PictureSides(train, beside)


def _read(path: Path, size: int, classes: Sequence[str] = ()) -> tuple[Pictures, Pictures | None]:
    """Return the pictures at a place, and those beside them that are held out."""
    if not path.exists():
        raise errors.ConfigError(f"there are no data at {path}: expected a file or a folder")
    if path.is_dir() and list(path.glob("*.bin")):
        return _cifar(path, size)
    if path.is_dir() and (path / "data_batch_1").exists():
        raise errors.ConfigError(
            f"{path} holds CIFAR as pickles, which can run anything when they are read: expected the binary version, "
            "data_batch_1.bin and so on"
        )
    if _classes_of(path):
        return _folder(path, size, classes or _classes_of(path))
    return _table(path, size), None


def _table(path: Path, size: int) -> Table:
    rows = read_rows(str(path))
    for column in ("image", "label"):
        check_column(rows, str(path), column)
    encoded = extra("datasets", "images in Parquet").Image(decode=False)
    if type(rows.features["image"]) is type(encoded):
        rows = rows.cast_column("image", encoded)
    labels = np.asarray(rows["label"])
    if labels.dtype.kind != "i" or labels.min() < 0:
        raise errors.ConfigError(f"column 'label' of {path} does not hold classes: expected integers from 0")
    return Table(rows, size, int(labels.max()) + 1)


def _cifar(path: Path, size: int) -> tuple[Cifar, Cifar | None]:
    train, test = sorted(path.glob("data_batch_*.bin")), path / "test_batch.bin"
    record = 1 + CIFAR_PIXELS
    if not train:
        train, test = [path / "train.bin"], path / "test.bin"
        record = 2 + CIFAR_PIXELS
    return Cifar(_records(train, record), size), (
        Cifar(_records([test], record), size) if test.exists() else None
    )


def _records(files: Sequence[Path], record: int) -> np.ndarray:
    parts = []
    for file in files:
        if not file.is_file():
            raise errors.ConfigError(f"there is no {file}: expected CIFAR's binary files")
        content = np.fromfile(file, dtype=np.uint8)
        if not len(content) or len(content) % record:
            raise errors.ConfigError(
                f"{file} has {len(content)} bytes: expected whole records of {record}, a label and 32 x 32 pixels; is "
                "the download whole?"
            )
        parts.append(content.reshape(-1, record))
    return np.concatenate(parts)


def _classes_of(path: Path) -> list[str]:
    """Return the names of the classes of a folder: those of the folders in it, or in its `train`, that hold images."""
    root = path / "train" if (path / "train").is_dir() else path
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    return [
        folder.name
        for folder in folders
        if folder.name not in HELDOUT_FOLDERS
        and any(file.suffix.lower() in ENDINGS for file in folder.iterdir())
    ]


def _folder(path: Path, size: int, classes: Sequence[str]) -> tuple[Files, Files | None]:
    root = path / "train" if (path / "train").is_dir() else path
    beside = [path / name for name in HELDOUT_FOLDERS if (path / name).is_dir()]
    return _files(root, size, classes), (_files(beside[0], size, classes) if beside else None)


def _files(root: Path, size: int, classes: Sequence[str]) -> Files:
    paths: list[Path] = []
    numbers: list[int] = []
    for number, name in enumerate(classes):
        folder = root / name
        images = (
            sorted(file for file in folder.iterdir() if file.suffix.lower() in ENDINGS)
            if folder.is_dir()
            else []
        )
        paths += images
        numbers += [number] * len(images)
    if not paths:
        raise errors.ConfigError(f"{root} has no images of the classes {', '.join(classes)}")
    return Files(paths, np.array(numbers), size, len(classes))
