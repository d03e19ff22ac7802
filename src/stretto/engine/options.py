"""The options of a job, and the quota of micro-batches in each of its rounds."""

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Literal

from stretto.errors import ConfigError
from stretto.exchange import WIRES, Wire
from stretto.fields import check_at_least, check_fields, did_you_mean, is_count
from stretto.noise import Noise
from stretto.strategies import Strategy
from stretto.strategies.ledger import Ledger


@dataclasses.dataclass(frozen=True, slots=True)
class BufferChoices:
    """The treatment of each floating-point buffer; see `Options.buffers`."""

    by_pattern: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, text: str) -> "BufferChoices":
        """Read "pattern=choice, ...".

        Raises:
            ConfigError: The text has another form.
        """
        pairs = [pair.strip().rpartition("=") for pair in text.split(",") if pair.strip()]
        for pattern, _, choice in pairs:
            if not pattern or choice not in _CHOICES:
                raise ConfigError(
                    f"Options(buffers={text!r}): expected pattern=choice, ..., with a choice of {', '.join(_CHOICES)}, "
                    f"found {pattern or choice!r}{did_you_mean(choice, _CHOICES)}"
                )
        return cls(tuple((pattern.strip(), choice) for pattern, _, choice in pairs))

    def check(self, names: Sequence[str]) -> None:
        """Raise unless every pattern fits a buffer, because a pattern without one is misspelt.

        Raises:
            ConfigError: A pattern fits none; the message names the first.
        """
        for pattern, choice in self.by_pattern:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"Options(buffers='{pattern}={choice}'): the pattern fits no floating-point buffer of the "
                    f"model, which has {', '.join(names) or 'none'}"
                )

    def of(self, name: str) -> str:
        """Return the choice for the buffer of this name."""
        fitting = (choice for pattern, choice in self.by_pattern if fnmatch.fnmatchcase(name, pattern))
        return next(fitting, "mean")


_CHOICES = ("mean", "rank0", "alone")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of `DataParallel`; equal on all ranks."""

    wire: str = "fp32"
    """fp32, bf16, int8, int4, int2, rotated4, rotated3, rotated2, rotated1, or your own: the format in which
    gradients and parameters are sent. See the page adding-a-wire. bf16 halves the bytes; masters stay fp32. int8 and
    int4 send gradients in blocks of 8-bit or 4-bit integers with error feedback, and parameters as changes in the
    same format: about a half and a quarter of bf16's bytes, for some arithmetic and, per parameter, 4 bytes of
    memory plus the parameter's size. Averages are sent as bf16. int2 is only for strategies that average replicas.
    rotated4 to rotated1 send 4 to 1 bits without error feedback; they are unbiased, and save these 4 bytes."""
    changes: str | None = None
    """The format in which owners send a step's changes to all ranks, under strategies that shard the optimizer; None
    for the wire's format. A plain format sends the parameters themselves."""
    ranks_per_node: int | None = None
    """Sum inside nodes of so many consecutive ranks first, and send only these sums and the owners' parameters
    between nodes, which divides the bytes between nodes by this number. It is for nodes whose ranks have a faster
    link among themselves; under torchrun `int(os.environ["LOCAL_WORLD_SIZE"])`. None treats all ranks equally."""
    verified: bool = False
    """Send a digest with all data, check received values and sums, and repeat damaged transfers before use; on
    nodes, on both levels. Costs eight bytes per bucket and rank, a second sum, and one small gather per exchange."""
    strikes: int | None = None
    """Number of updates in which guards or the verified exchange blame one rank, or one link, for damage before the job
    ends on all ranks with `Quarantined`; None for no limit. A strike counts for 1,000 updates. One may be an accident,
    three suggest a faulty device."""
    clip_norm: float | None = None
    """Largest 2-norm of the mean gradient; None does not clip."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """What to do with a round whose loss or gradient is not finite on some rank: end the job with an error that names
    ranks and step, or leave the round out on all ranks."""
    allow_unused: bool = False
    """Accept parameters that no rank used in the first update; their steps are skipped, as in PyTorch."""
    accumulate: Literal["fp32", "parameter"] = "fp32"
    """Dtype in which gradients of 16-bit parameters accumulate. The parameters' own dtype saves 2 to 4 bytes per
    parameter, but loses low bits with every micro-batch."""
    bucket_bytes: int | None = None
    """Largest collective, in bytes of the gradient buffer. None is 1 MiB for parameters on a CPU, and 64 MiB on
    other devices, where every bucket costs launches. If a rank would send each other rank less than 16 KiB of such a
    bucket, None is larger: with `rotated2` from 5 ranks on, with fp32 from 65 ranks on. `job.layout.bucket_bytes` is
    the resulting size. Over slow links between GPUs set it yourself, because a single large transfer fills a link's
    queue and then waits for itself. Four buckets are sent at a time, and a rank holds scratch memory for them. If an
    optimizer needs whole tensors, a bucket is larger where even slices require it. The last bucket is never hidden:
    on CPUs 2**18 was 5 % faster at 100 Mbit/s, and 3 to 5 % slower on fast links."""
    hide_reductions: bool = True
    """Reduce gradients bucket by bucket during the last backward pass of an update, as DDP does, under `ddp`,
    `zero1`, `paft-sync` and `paft-dyn` with fixed micro-batches. Results are bit-identical; the page architecture
    lists when it does not apply."""
    buffers: str = ""
    """The treatment of the model's floating-point buffers at every exchange, by name: "pattern=choice, ...", where
    the first matching pattern counts, as in "*.codes=rank0, cache=alone". mean: the mean over ranks, right for
    running statistics, and the default. rank0: the values of rank 0, as in `DistributedDataParallel`. alone: each
    rank keeps its own values."""
    noise: Noise | None = None
    """Add Gaussian noise to every rank's mean gradient; the value is its variance, as 1e-2. Settings follow after
    commas: 1e-4,every=500:0.1 has bursts; rank=1 affects one rank; mean=0.01 is a bias; averages=1e-4 adds noise to
    averages of weights. See the page paft."""
    timeout_seconds: float = 600.0
    """Seconds that a collective may wait for a rank that lives but does not answer."""
    silent_seconds: float = 60.0
    """Seconds that a rank may give no sign of life while others wait for it. A separate thread gives signs twice a
    second, and answers even during a long call that keeps Python's lock; a stopped process or a disconnected machine
    gives none. Choose it longer than usual interruptions of the network."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("wire", "changes"):
            name = getattr(self, field)
            if name is not None and name not in WIRES:
                raise ConfigError(
                    f"Options({field}={name!r}): expected one of {', '.join(WIRES)}{did_you_mean(name, WIRES)}"
                )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"Options(clip_norm={self.clip_norm}): expected a positive norm, or None")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ConfigError(
                f"Options(bucket_bytes={self.bucket_bytes}): expected a positive number of bytes, or None"
            )
        if self.strikes is not None and self.strikes < 1:
            raise ConfigError(f"Options(strikes={self.strikes}): expected at least 1")
        for limit in ("timeout_seconds", "silent_seconds"):
            found = getattr(self, limit)
            if not 0 < found < float("inf"):
                raise ConfigError(f"Options({limit}={found}): expected a positive, finite number of seconds")
        BufferChoices.read(self.buffers)
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"Options(ranks_per_node={self.ranks_per_node}): expected at least 1, or None")

    def with_wire(self, wire: str | None) -> "Options":
        """Return these options with another wire than the default; None changes nothing.

        Raises:
            ConfigError: They already set another wire.
        """
        if wire is None:
            return self
        chosen = dataclasses.replace(self, wire=wire)  # before it is compared: it may be anything
        if self.wire not in (wire, Options().wire):
            raise ConfigError(
                f"DataParallel(wire={wire!r}, options=Options(wire={self.wire!r})): expected one of them"
            )
        return chosen

    @property
    def wire_of_changes(self) -> Wire:
        """The format in which parameters are published, after a step and for a preview."""
        return WIRES[self.wire if self.changes is None else self.changes]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Keep accumulating until the communication lane is free: no rank idles, and fast ranks contribute more.

    The number of micro-batches in a round then depends on time, so runs are not reproducible to the bit. The counts
    are recorded, and a replay with the recorded counts is reproducible.
    """

    minimum: int = 1
    """Micro-batches per rank and round that must be counted before a round may end; at least 1."""
    maximum: int = 64
    """Micro-batches per rank and round after which the rank waits for the lane; limits the size of a batch."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"Clock(minimum={self.minimum}, maximum={self.maximum}): expected 1 <= minimum <= maximum"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Total:
    """Micro-batches of all ranks together in an update, dealt in rotation: some ranks may have one more than others.

    So the batch is the same on any number of ranks, one that divides it or not.
    """

    micro_batches: int
    """Number of micro-batches: at least 1, and as many as the strategy needs on every rank."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, micro_batches=1)

    def of(self, rank: int, world_size: int) -> int:
        """Return the number of micro-batches for a rank."""
        return len(range(rank, self.micro_batches, world_size))


@dataclasses.dataclass(frozen=True, slots=True)
class Quota:
    """By round of an update: when a rank closes its round."""

    minima: tuple[int, ...]
    """Number of micro-batches that is enough while the communication lane is free."""
    maxima: tuple[int, ...]
    """Number of micro-batches that is enough in any case."""

    @property
    def is_fixed(self) -> bool:
        """Whether this rank's number of micro-batches in a round is known in advance."""
        return self.minima == self.maxima


def check_formats(options: Options, strategy: Strategy, ledger: Ledger) -> None:
    """Raise if a format is chosen for values that are not sent, or is too narrow for gradients.

    Raises:
        ConfigError: It is; the message names the option and the strategy.
    """
    if options.changes is not None and not ledger.sends_changes:
        raise ConfigError(
            f"Options(changes={options.changes!r}): strategy {strategy.name} sends no changes: remove the "
            "option, or choose a strategy that sends changes, such as zero1"
        )
    if not (WIRES[options.wire].fits_gradients or ledger.local):
        raise ConfigError(
            f"Options(wire={options.wire!r}): strategy {strategy.name} sends gradients, which would cost a "
            "tenth of a nat on this wire: expected 'rotated2', which has as many bits, or a strategy that "
            "averages replicas, such as average"
        )


def plan_quota(
    strategy: Strategy, micro_batches: int | Total | Clock, rounds: int, rank: int = 0, world_size: int = 1
) -> Quota:
    """Return the quota of each round on one rank.

    Args:
        strategy: Splits a fixed number over its rounds.
        micro_batches: A number per rank and update, or of all ranks together; or a clock, which decides in each round.
        rounds: Rounds per update.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        ConfigError: The number is below 1, or below the number of rounds on some rank; or the strategy accepts no
            clock.
    """
    if isinstance(micro_batches, Total):
        if (least := micro_batches.of(world_size - 1, world_size)) < rounds:
            raise ConfigError(
                f"{strategy.name} needs at least {rounds} micro-batches per rank and update, and "
                f"{micro_batches} leaves {least} to a rank of {world_size}: expected at least "
                f"{rounds * world_size}, or fewer ranks; make each micro-batch smaller to keep the batch"
            )
        micro_batches = micro_batches.of(rank, world_size)
    if not isinstance(micro_batches, Clock) and not is_count(micro_batches, 1):
        raise ConfigError(
            f"micro_batches={micro_batches!r}: expected an integer of at least 1 per rank and update, a Total or a "
            "Clock"
        )
    if isinstance(micro_batches, Clock):
        if strategy.fixes_split:
            raise ConfigError(
                f"{strategy} fixes its micro-batches per round, and a Clock sets them by time: remove one of the two"
            )
        return Quota((micro_batches.minimum,) * rounds, (micro_batches.maximum,) * rounds)
    if micro_batches < rounds:
        raise ConfigError(
            f"{strategy.name} needs at least {rounds} micro-batches per rank and update, got {micro_batches}: "
            "raise micro_batches, and make each micro-batch smaller to keep the batch"
        )
    counts = strategy.quotas(micro_batches, rounds)
    return Quota(counts, counts)
