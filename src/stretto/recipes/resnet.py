"""A small residual network with batch normalisation (He et al., 2016, arXiv:1512.03385)."""

import torch
from torch import Tensor, nn
from torch.nn import functional


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
    """Three stages of `blocks` blocks, the second and third with doubled width at half the resolution.

    Args:
        width: Channels of the first stage.
        blocks: Blocks per stage.
        classes: Number of logits.
        seed: Decides the initial parameters; the random state of the caller is left as it was.
    """

    def __init__(self, *, width: int, blocks: int, classes: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(
                nn.Conv2d(1, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                *_stage(width, width, blocks, stride=1),
                *_stage(width, 2 * width, blocks, stride=2),
                *_stage(2 * width, 4 * width, blocks, stride=2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(4 * width, classes),
            )


def _stage(channels_in: int, channels: int, blocks: int, stride: int) -> list[Block]:
    rest = [Block(channels, channels, 1) for _ in range(blocks - 1)]
    return [Block(channels_in, channels, stride), *rest]
