"""The image classifier on the digits."""

import torch

from stretto_lab.recipes.digits_resnet import load_digits


def test_the_two_sides_are_all_the_digits() -> None:
    train_side, heldout = load_digits()
    assert (len(train_side.classes), len(heldout.classes)) == (1438, 359)
    together = torch.cat([train_side.pixels, heldout.pixels])
    from sklearn.datasets import load_digits as whole

    assert together.shape == (1797, 1, 8, 8)
    assert (together.min(), together.max()) == (0, 1)
    # As sets of images they are equal, so no image was lost or taken twice.
    assert sorted(together.flatten(1).tolist()) == sorted(
        (torch.from_numpy(whole().images).float() / 16).flatten(1).tolist()
    )
