"""A wire format of one's own: one file, and one line that registers it with programs and the command line.

    python examples/extend/wire.py train digits-resnet --strategy acco --wire largest --changes bf16

In a program, once this file has been imported: `stretto.Options(wire="largest", changes="bf16")`. Parameters travel as
values: most of their changes would wait for long, while models show old ones.
"""

import torch
from torch import Tensor

from stretto.exchange import WIRES, PackedWire
from stretto_lab.cli import main


class Largest(PackedWire):
    """Four values of every 64: the largest ones, each in bf16 behind a byte that says which it is.

    The others wait: error feedback adds them to the next contribution, until they are among the largest.

    Bytes: 12 for 64 values, a twentieth of fp32.
    Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent".
    """

    name = "largest"
    block = 64
    block_bytes = 4 * 2 + 4
    kept = 4

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Keep the largest values; one that is not finite counts as the largest of all."""
        sizes = blocks.abs().nan_to_num_(nan=torch.inf)
        places = sizes.topk(self.kept, dim=1).indices
        values = blocks.gather(1, places)
        short = (values.view(torch.int32) >> 16 << 16).view(torch.float32)  # towards zero: never to infinity
        packed[:, :8].view(torch.bfloat16).copy_(torch.where(values.isfinite(), short, values))
        packed[:, 8:].copy_(places)

    def unpack(self, packed: Tensor) -> Tensor:
        """Put the values in their places, among zeros."""
        blocks = torch.zeros(len(packed), self.block, device=packed.device)
        values = packed[:, :8].view(torch.bfloat16).to(torch.float32)
        return blocks.scatter_(1, packed[:, 8:].to(torch.int64), values)


WIRES[Largest.name] = Largest()  # the line of registration

if __name__ == "__main__":
    raise SystemExit(main())
