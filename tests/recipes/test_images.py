"""Image classifiers over people's own files."""

import io
import itertools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from stretto.echo import EchoLoader, Even
from stretto.errors import ConfigError
from stretto_lab.cli import main
from stretto_lab.recipes import ImageClassification
from stretto_lab.recipes.classifiers import Augmentation, augmented
from stretto_lab.recipes.pictures import read_pictures
from stretto_lab.recipes.rows import Heldout
from stretto_lab.recipes.task import Task
from tests.recipes.files import parameters, run_over, train_virtually

PICTURES = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
CLASSES = np.arange(24) % 3
NOTHING = Augmentation(padding=0, flip=False)
QUARTER = Heldout(share=0.25)
TINY = {"scale": 0.1, "batch": 4, "readers": 0}


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture.transpose(1, 2, 0)).save(file, "png")
    return file.getvalue()


def records(*labels: np.ndarray) -> bytes:
    columns = [label[:, None].astype(np.uint8) for label in labels]
    return np.concatenate([*columns, PICTURES.reshape(24, -1)], axis=1).tobytes()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pictures in every format."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    root = tmp_path_factory.mktemp("pictures")
    for name in (
        "cifar10",
        "cifar100",
        "tree/a",
        "tree/b",
        "tree/c",
        "split/train/x",
        "split/train/y",
        "split/test/x",
    ):
        (root / name).mkdir(parents=True)
    whole = records(CLASSES)
    half = len(whole) // 2
    (root / "cifar10/data_batch_1.bin").write_bytes(whole[:half])
    (root / "cifar10/data_batch_2.bin").write_bytes(whole[half:])
    (root / "cifar10/test_batch.bin").write_bytes(whole[:half])
    (root / "cifar100/train.bin").write_bytes(records(CLASSES * 0 + 9, CLASSES))
    for number, (picture, label) in enumerate(zip(PICTURES, CLASSES, strict=True)):
        (root / "tree" / "abc"[label] / f"{number:02}.png").write_bytes(png(picture))
    for name in ("train/x/1.png", "train/y/2.png", "test/x/3.png"):
        (root / "split" / name).write_bytes(png(PICTURES[0]))
    images = [png(picture) for picture in PICTURES]
    table = pyarrow.table({"image": images, "label": CLASSES})
    parquet.write_table(table, root / "plain.parquet")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    )
    rows = [{"image": {"bytes": image, "path": None}, "label": int(label)}
            for image, label in zip(images, CLASSES, strict=True)]  # fmt: skip
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(root / "features.parquet"))
    return root


def all_pictures(place: Path) -> dict[int, Tensor]:
    """Every picture, by its number, of both sides."""
    sides = read_pictures(str(place), QUARTER, 32, 1.0)
    known = {picture.tobytes(): number for number, picture in enumerate(PICTURES)}
    found = {}
    for side in sides:
        images = side.batch(torch.arange(len(side)))
        for pixels, label in zip(images.pixels, images.classes.tolist(), strict=True):
            number = known[pixels.numpy().tobytes()]
            assert label == CLASSES[number]
            found[number] = pixels
    return found


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "tree", "plain.parquet", "features.parquet"])
def test_every_format_gives_the_pictures_and_classes_that_were_written(files: Path, name: str) -> None:
    assert sorted(all_pictures(files / name)) == list(range(24))


def test_what_the_files_hold_out_is_held_out(files: Path) -> None:
    sizes = {name: tuple(map(len, read_pictures(str(files / name), QUARTER, 32, 1.0)))
             for name in ("cifar10", "cifar100", "split")}  # fmt: skip
    assert sizes == {"cifar10": (24, 12), "cifar100": (18, 6), "split": (2, 1)}
    other = read_pictures(str(files / "tree"), Heldout(data=str(files / "plain.parquet")), 32, 0.5)
    assert (len(other.train), len(other.heldout)) == (12, 24)
    assert [read_pictures(str(files / name), QUARTER, 32, 1.0).train.num_classes
            for name in ("cifar10", "cifar100", "tree", "split")] == [10, 100, 3, 2]  # fmt: skip


def test_other_sizes_are_brought_to_one(files: Path) -> None:
    for name in ("cifar10", "tree"):
        pictures = read_pictures(str(files / name), QUARTER, 16, 1.0).train
        assert pictures.batch(torch.tensor([1, 2])).pixels.shape == (2, 3, 16, 16)


def built(place: Path, rank: int = 0, world_size: int = 1, **settings: Any) -> Task:
    return ImageClassification(data=str(place), **{**TINY, "scale": 0.3, **settings}).build(
        rank, world_size, 0, 8
    )


def test_a_loader_resumes_to_the_sample_and_two_ranks_share_the_pictures(files: Path) -> None:
    whole = list(itertools.islice(built(files / "tree").loader, 12))
    running = built(files / "tree", readers=1)
    for place, batch in enumerate(itertools.islice(running.loader, 6)):
        resumed = built(files / "tree").loader
        resumed.load_state_dict(running.loader.state_dict())
        assert torch.equal(batch.pixels, whole[place].pixels)
        assert torch.equal(next(iter(resumed)).pixels, whole[place + 1].pixels)
    one, two = (next(iter(built(files / "tree", rank, 2, batch=3).loader)).pixels for rank in range(2))
    assert not {row.numpy().tobytes() for row in one} & {row.numpy().tobytes() for row in two}


def test_augmented_pictures_are_cut_from_their_padded_selves_and_some_are_mirrored() -> None:
    pixels = torch.from_numpy(PICTURES)
    found = augmented(pixels, Augmentation(padding=2))
    padded = torch.nn.functional.pad(pixels, (2, 2, 2, 2))
    kinds = set()
    for number in range(24):
        places = itertools.product(range(5), range(5), (False, True))
        (kind,) = [
            (top, left, mirrored)
            for top, left, mirrored in places
            if torch.equal(found[number], cut(padded[number], top, left, mirrored))
        ]
        kinds.add(kind)
    assert len(kinds) > 10
    assert {mirrored for _, _, mirrored in kinds} == {False, True}
    assert torch.equal(augmented(pixels, NOTHING), pixels)


def cut(picture: Tensor, top: int, left: int, mirrored: bool) -> Tensor:
    part = picture[:, top : top + 32, left : left + 32]
    return part.flip(2) if mirrored else part


def test_every_use_of_an_echoed_batch_is_augmented_anew_and_evaluation_is_not(files: Path) -> None:
    task = built(files / "cifar10")
    seen: list[Tensor] = []
    task.model.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["pixel_values"].clone()), with_kwargs=True
    )
    for batch in itertools.islice(EchoLoader(task.loader, Even(2)), 2):
        task.loss(task.model, batch)
    assert seen[0].shape == seen[1].shape
    assert not torch.equal(seen[0], seen[1])
    assert task.evaluate(task.model) == task.evaluate(task.model)


@pytest.mark.parametrize("model", ["resnet-18", "resnet-50", "mobilenet-v2"])
def test_every_model_learns_the_brightness_of_pictures(model: Any, tmp_path: Path) -> None:
    dark = np.zeros((40, 3073), np.uint8)
    dark[:, 0] = np.arange(40) // 2 % 2
    dark[:, 1:] = 255 * dark[:, :1]
    (tmp_path / "data_batch_1.bin").write_bytes(dark.tobytes())
    (tmp_path / "test_batch.bin").write_bytes(dark[:8].tobytes())
    task = built(
        tmp_path, model=model, optimizer="adamw", lr=0.003, size=8, augment=NOTHING, batch=8, scale=0.1
    )
    losses = []
    for batch in itertools.islice(task.loader, 40):
        loss = task.loss(task.model, batch).value
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    # Losses of training, normalised with the statistics of the batch: the running ones still move. A single loss may be
    # high, because batches are small; most are not.
    assert statistics.median(losses[-15:]) < 0.5  # ln 10 = 2.3 is chance
    assert 0 <= task.accuracy(task.model) <= 1


def test_accuracy_and_loss_are_means_over_all_held_out_pictures(files: Path) -> None:
    task, other = built(files / "cifar10"), built(files / "cifar10", heldout=Heldout(samples=5))
    heldout = read_pictures(str(files / "cifar10"), QUARTER, 32, 1.0).heldout.batch(torch.arange(12))
    task.model.eval()
    with torch.no_grad():
        logits = task.model(heldout.pixels)
    assert task.accuracy(task.model) == float((logits.argmax(1) == heldout.classes).double().mean())
    mean = torch.nn.functional.cross_entropy(logits.double(), heldout.classes).item()
    assert task.evaluate(task.model) == pytest.approx(mean, abs=1e-5)  # float32 of a number near 2
    assert other.evaluate(task.model) != task.evaluate(task.model)


def test_a_run_on_two_ranks_ends_with_an_accuracy(files: Path) -> None:
    task = ImageClassification(data=str(files / "cifar10"), **TINY)
    first, second = train_virtually(run_over(task, "run", updates=2, strategy="paft-sync:interval=1"), 2)
    assert first.accuracy == second.accuracy is not None
    assert any("running_mean" in name for name in parameters("run"))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("data_batch_1.bin", b"\0" * 3072, "has 3072 bytes: expected whole records of 3073"),
        ("data_batch_1.bin", b"", "has 0 bytes"),
        ("train.bin", b"\0" * 3073, "has 3073 bytes: expected whole records of 3074"),
        ("test.bin", b"\0" * 3074, "there is no data/train.bin"),
        ("data_batch_1", b"\x80", "holds CIFAR as pickles"),
        ("cat/1.png", b"no picture", "data/cat/2.png is not an image that can be decoded"),
        ("cat/1.txt", b"no picture", "data has no column 'image', only text"),
        ("rows.parquet", b"", "data is empty"),
    ],
)
def test_what_cannot_be_read_is_one_line_before_anything_starts(
    name: str, content: bytes, named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("data", name).parent.mkdir(parents=True)
    Path("data", name).write_bytes(content)
    if "cat" in name:  # one image could not be divided
        Path("data", name).with_name(f"2{Path(name).suffix}").write_bytes(content)
    assert main(["train", "images", "--task.data", "data"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert named in line
    assert [path.name for path in Path().iterdir()] == ["data"]


def test_rows_without_images_or_classes_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"picture": [b""] * 3}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"image": [b""] * 3, "label": ["cat"] * 3}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"has no column 'image', only picture"):
        ImageClassification(data=str(tmp_path / "a.parquet")).check()
    with pytest.raises(ConfigError, match=r"'label' of .* does not hold classes"):
        ImageClassification(data=str(tmp_path / "b.parquet")).check()
    with pytest.raises(ConfigError, match="data is missing"):
        ImageClassification().check()
