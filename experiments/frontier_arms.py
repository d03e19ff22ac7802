"""What `frontier.py` runs: arms, and the settings in which they train."""

import dataclasses
from collections.abc import Mapping, Sequence

UPDATES, POINTS, WARM_UP = 1500, 15, 100
MICRO_BATCHES = 2
CLIP_NORM = 1.0
TUNING_SEED = 1000
LARGER_BATCHES = ("zero1:wire=int4:micro_batches=4:lr=0.012", "zero1:wire=int4:micro_batches=8:lr=0.008")
"""Two and four times the batch of all others: as many samples in fewer updates."""
BY_NODE = ":worker=node:ranks_per_node=4"
"""Two nodes of four ranks, each node one worker; inside it the link is free."""
SYNCHRONOUS = "ddp"
POWER_SGD = "torch-ddp-powersgd"
"""PyTorch's DDP with its PowerSGD hook, of rank 1, plain until the warm-up is over."""
AVERAGE = "diloco:outer_lr=1:outer_momentum=0"
HIDDEN = f"{AVERAGE}:keep_progress=on:wire=int4"
EVERY_2 = f"{HIDDEN}:interval=2:delay=1"
EVERY_4 = f"{HIDDEN}:interval=4:fragments=2:delay=1"
EVERY_10 = f"{HIDDEN}:interval=10:fragments=5:delay=1"
EVERY_30 = f"{HIDDEN}:interval=30:fragments=10:delay=2"
TWO_BITS = tuple(arm.replace("wire=int4", "wire=int2") for arm in (EVERY_4, EVERY_10, EVERY_30))
"""Hidden averages as above, of changes in 2 bits."""
LONG_DELAY = f"{HIDDEN}:interval=10:delay=9"
"""All parameters as one fragment, under way nearly all the time: what it is good for to cut them."""
PLAIN_10 = f"{AVERAGE}:interval=10"
"""What `PostLocalSGDOptimizer` and Accelerate's `LocalSGD` do: a plain average now and then, in fp32, not hidden."""
OUTER_30 = "diloco:interval=30:outer_lr=0.7:outer_momentum=0.9"
"""DiLoCo as published, with the paper's outer step; in fp32, not hidden."""
AS_HIVEMIND = tuple(
    f"{AVERAGE}:keep_progress=on:wire=bf16:interval={interval}:delay={delay}"
    for interval, delay in ((8, 4), (30, 28))
)
"""As averages by hivemind in 16 bits hide them at 10 and 1 Mbit/s: whole replicas, under way for long."""
AS_TORCHFT = tuple(f"{AVERAGE}:mix=0.5:{cut}" for cut in (
    "interval=16:fragments=4:delay=2", "interval=64:fragments=8:delay=7",
))  # fmt: skip
"""As torchft's DiLoCo hides fp32 there: a share of what a rank changed meanwhile is kept."""
BITS = ("zero1:wire=int8", "zero1:wire=int4")
LOCAL = "local:rate=0.1:wire=bf16"
RARE = (LOCAL, EVERY_2, EVERY_4, EVERY_10, EVERY_30, LONG_DELAY, PLAIN_10, OUTER_30)
DELAYED = ("acco", "acco:wire=int4")
OTHERS = (
    "acco:wire=int4", PLAIN_10, AS_HIVEMIND[0], POWER_SGD, AS_TORCHFT[0], LOCAL,
    "zero1:wire=int8", "acco",
)  # fmt: skip
"""What the settings of more ranks have beside the arms that they name."""
COARSE = (
    "zero1:wire=int4:changes=int2",
    "zero1:wire=int4:changes=int2:micro_batches=4:lr=0.012",
)  # fmt: skip
"""2 bits one way: for what a step has changed, or for gradients, whose rounding errors more ranks average out."""
SPARSE = (
    "zero1:wire=largest:changes=int4", "zero1:wire=int4:changes=largest", EVERY_4.replace("wire=int4", "wire=largest"),
)  # fmt: skip
"""The four largest values of every 64, in 1.5 bits an element: the wire of `examples/extend/wire.py`."""
HIDDEN_EXCHANGES = (
    "acco:wire=int8", "wp:wire=int8", "wp:wire=int4:changes=int2:micro_batches=4:lr=0.012",
    "acco:wire=int4:changes=int2:micro_batches=4:lr=0.012",
)  # fmt: skip
"""Exchanges beside the next gradients, also with twice the batch."""
ROTATED = (
    "zero1:wire=rotated2:changes=int2", "zero1:wire=rotated2", "zero1:wire=rotated1:changes=int2",
    "zero1:wire=rotated3:changes=int2", "acco:wire=rotated2:changes=int2", "acco:wire=rotated2",
)  # fmt: skip
"""1 to 3 bits that are right on average, for gradients and for changes."""
SAME_WIRE = {"acco": SYNCHRONOUS, "acco:wire=int4": "zero1:wire=int4"}
"""Synchronous arms that send in the same format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on some ranks, and the arms that train it."""

    size: str
    ranks: int
    batch: int
    """Windows of 64 bytes per micro-batch."""
    arms: tuple[str, ...]
    rates: tuple[float, ...] = ()
    """To choose from."""
    tuned: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Arms whose rate is tuned, each with those that take its rate. All others take that of `ddp`, or, where that is
    not tuned here, the one that they have on two ranks."""


SETTINGS = {
    "2-ranks": Setting(
        size="0.1m", ranks=2, batch=4, rates=(4e-3, 8e-3, 1.6e-2),
        arms=(SYNCHRONOUS, *BITS, *DELAYED, *RARE, POWER_SGD, *AS_HIVEMIND, *AS_TORCHFT, COARSE[0],
              *TWO_BITS, *SPARSE, *ROTATED),
        tuned={
            SYNCHRONOUS: (), LOCAL: (), OUTER_30: (),
            LONG_DELAY: (EVERY_2, EVERY_4, EVERY_10, EVERY_30, PLAIN_10, *AS_HIVEMIND, *AS_TORCHFT, *TWO_BITS,
                         SPARSE[2]),
            POWER_SGD: (),
        },
    ),
    "8-ranks": Setting(
        size="0.1m", ranks=8, batch=4,
        arms=(SYNCHRONOUS, EVERY_4, EVERY_30, "zero1:wire=int4", OUTER_30, EVERY_10, *LARGER_BATCHES,
              f"{EVERY_4}{BY_NODE}", f"{EVERY_30}{BY_NODE}", *OTHERS, *COARSE, *HIDDEN_EXCHANGES,
              TWO_BITS[0], *ROTATED),
    ),
    "8-ranks-same-batch": Setting(
        size="0.1m", ranks=8, batch=1, arms=(SYNCHRONOUS, "zero1:wire=int4", EVERY_4)
    ),
    "32-ranks": Setting(
        size="0.1m", ranks=32, batch=1,
        arms=(SYNCHRONOUS, "zero1:wire=int4", EVERY_4, EVERY_30, OUTER_30, *OTHERS, COARSE[0], *ROTATED),
    ),
    "2-ranks-larger": Setting(
        size="0.5m", ranks=2, batch=4, rates=(2e-3, 4e-3, 8e-3),
        arms=(SYNCHRONOUS, "zero1:wire=int4", EVERY_4, EVERY_30, OUTER_30, ROTATED[0]),
        tuned={SYNCHRONOUS: (EVERY_4, EVERY_30, OUTER_30)},  # which all had one rate on the smaller model
    ),
}  # fmt: skip
