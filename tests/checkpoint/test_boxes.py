"""Boxes cover a run of elements: all of it, each element once, in order, and few of them."""

import itertools
import math
import random

import torch

from stretto.flat.parted import cover, whole


def test_boxes_are_the_run_and_no_more() -> None:
    for shape in [(), (1,), (7,), (3, 5), (4, 1, 6), (2, 3, 4, 5), (1, 1, 1)]:
        numel = math.prod(shape)
        tensor = torch.arange(numel).view(shape)
        for start in range(numel + 1):
            for stop in range(start, numel + 1, max(1, numel // 12)):
                boxes = list(cover(shape, start, stop))
                content = [
                    tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
                    for box in boxes
                ]
                flat = torch.cat([part.reshape(-1) for part in content]) if content else tensor.new_empty(0)
                assert torch.equal(flat, torch.arange(start, stop))
                assert [(box.start, box.numel) for box in boxes] == [
                    (int(part.reshape(-1)[0]), part.numel()) for part in content
                ]
                assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_runs_that_tile_a_tensor_have_boxes_of_different_offsets() -> None:
    chooser = random.Random(0)
    for _ in range(100):
        shape = tuple(chooser.randint(1, 6) for _ in range(chooser.randint(1, 4)))
        numel = math.prod(shape)
        cuts = sorted({0, numel, *(chooser.randint(0, numel) for _ in range(3))})
        boxes = [box for a, b in itertools.pairwise(cuts) for box in cover(shape, a, b)]
        assert len({box.offsets for box in boxes}) == len(boxes)


def test_everything_is_one_box() -> None:
    for shape in [(), (0,), (2, 0, 3), (2, 3)]:
        assert whole(shape).sizes == shape
    assert list(cover((2, 3), 0, 6)) == [whole((2, 3))]
    assert list(cover((0, 3), 0, 0)) == []
