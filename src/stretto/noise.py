"""Artificial noise as data: it is added to the mean gradient, or to an average, that a rank receives.

`stretto.engine.noisy` adds it.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, Literal

from stretto.errors import ConfigError
from stretto.fields import check_fields, field_types, is_count, read_value, unknown_name


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """Gaussian noise on the values that ranks receive; see Note [Noise] in `stretto.engine.noisy`.

    On the command line: VARIANCE[,key=value]..., as 1e-4,every=500:0.1 or 1e-2,rank=1.
    """

    variance: float
    """Variance for every coordinate of the mean gradient."""
    _: dataclasses.KW_ONLY
    mean: float = 0.0
    """Mean of the noise for every coordinate."""
    every: tuple[int, float] | None = None
    """Bursts: at every n-th update the noise has another variance; (500, 0.1), typed 500:0.1."""
    averages: float = 0.0
    """Variance for every coordinate of a rank's weights after an average of replicas."""
    rank: int | tuple[int, ...] | Literal["all"] = "all"
    """Ranks with noise: all, one, or several; typed all, 1 or 1+3."""
    seed: int | None = None
    """Seed of the draws; None uses the run's seed, or 0 in a program."""

    def __post_init__(self) -> None:
        check_fields(self)
        variances = (self.variance, self.averages, *(() if self.every is None else self.every[1:]))
        if not all(0 <= variance < math.inf for variance in variances) or not math.isfinite(self.mean):
            raise ConfigError(f"noise {self}: expected variances of at least 0 and a mean, all finite")
        if self.every is not None and not is_count(self.every[0], 1):
            raise ConfigError(f"noise {self}: expected a burst every 1 or more updates, as every=500:0.1")
        if min(self.ranks or (0,)) < 0:
            raise ConfigError(f"noise {self}: expected ranks from 0, or all")

    def __str__(self) -> str:
        """Return the noise as `parse_noise` reads it, without default settings."""
        burst = None if self.every is None else f"{self.every[0]}:{self.every[1]}"
        ranks = None if self.ranks is None else "+".join(map(str, self.ranks))
        settings = {
            "mean": self.mean or None,
            "every": burst,
            "averages": self.averages or None,
            "rank": ranks,
            "seed": self.seed,
        }
        chosen = [f"{name}={value}" for name, value in settings.items() if value is not None]
        return ",".join([str(self.variance), *chosen])

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks with noise; None is all ranks."""
        if self.rank == "all":
            return None
        return self.rank if isinstance(self.rank, tuple) else (self.rank,)

    def hits(self, rank: int) -> bool:
        """Return whether a rank has noise."""
        return self.ranks is None or rank in self.ranks

    def variance_at(self, update: int) -> float:
        """Return the variance at an update, counted from 1."""
        is_burst = self.every is not None and update % self.every[0] == 0
        return self.every[1] if self.every is not None and is_burst else self.variance

    def check(self, world_size: int) -> None:
        """Raise unless all ranks with noise exist.

        Raises:
            ConfigError: One does not exist; the message names it.
        """
        if outside := [rank for rank in self.ranks or () if rank >= world_size]:
            raise ConfigError(
                f"noise {self} names rank {outside[0]}; the run has ranks 0 to {world_size - 1}"
            )

    def going_on(self, left_out: Collection[int]) -> "Noise":
        """Return the noise for a run that continues without some ranks; the others have new numbers."""
        if self.ranks is None:
            return self
        stay = [rank - sum(other < rank for other in left_out) for rank in self.ranks if rank not in left_out]
        return dataclasses.replace(self, rank=tuple(stay))


def parse_noise(text: str) -> Noise:
    """Read VARIANCE[,key=value]...

    Raises:
        UnknownName: There is no such setting.
        ConfigError: A value cannot be read, or is not allowed.
    """
    _, *known = field_types(Noise)
    first, *others = (part.strip() for part in text.split(","))
    values: dict[str, Any] = {}
    for other in others:
        key, _, value = other.partition("=")
        if key not in known:
            raise unknown_name("noise has no setting", key, known)
        if key in values:
            raise ConfigError(f"noise {text}: {key} is set twice; remove one")
        values[key] = _read(key, value)
    return Noise(_read("variance", first), **values)


def _read(key: str, text: str) -> Any:
    try:
        if key == "every":
            updates, _, variance = text.partition(":")
            return read_value(updates, int), read_value(variance, float)
        if key == "rank":
            ranks = tuple(read_value(rank, int) for rank in text.split("+")) if text != "all" else "all"
            return ranks[0] if len(ranks) == 1 else ranks
        return read_value(text, int if key == "seed" else float)
    except ConfigError as error:
        example = {"every": "every=500:0.1", "rank": "rank=1, rank=1+3 or rank=all"}.get(key)
        hint = f"; as {example}" if example else ""
        raise ConfigError(f"noise: cannot read {key} {text!r}: {error}{hint}") from error
