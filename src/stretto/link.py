"""A network link as two numbers."""

import dataclasses
import math
import re

from stretto.errors import ConfigError
from stretto.fields import check_fields

MESSAGE_BYTES = 2**14
"""Smallest part of a bucket that a rank sends to each other rank: below it, calls and latency cost more than bytes."""
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")
_FORMS = (
    "expected a rate in bit, kbit, mbit or gbit (per second) or 'none', and optionally a latency in us, ms or s "
    "after a comma: '100mbit', '1gbit', '50mbit,2ms', 'none'"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction of a full-duplex link: n bytes need  latency + 8 n / rate  seconds to arrive."""

    bits_per_second: float | None = None
    """Rate; None for no limit, so that traffic is only counted."""
    latency_seconds: float = 0.0
    """Time from the last bit sent to its arrival; it does not occupy the link."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bits_per_second is not None and not self.bits_per_second > 0:
            raise ConfigError(
                f"a link's bits_per_second must be positive, found {self.bits_per_second}; {_FORMS}"
            )
        if not 0 <= self.latency_seconds < math.inf:
            raise ConfigError(
                f"a link's latency_seconds must be finite and at least 0, found {self.latency_seconds} s"
            )

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Read "100mbit", "1gbit", "50mbit,2ms" or "none", with the units of `tc`.

        Raises:
            ConfigError: The text has another form.
        """
        rate, comma, latency = (part.strip() for part in text.lower().partition(","))
        return cls(
            bits_per_second=None if rate == "none" else _quantity(rate, _BITS, text),
            latency_seconds=_quantity(latency, _SECONDS, text) if comma else 0.0,
        )

    def occupied_seconds(self, sent_bytes: int) -> float:
        """Return how long sending `sent_bytes` keeps the link busy."""
        return 0.0 if self.bits_per_second is None else 8 * sent_bytes / self.bits_per_second

    @property
    def is_free(self) -> bool:
        return self.bits_per_second is None and self.latency_seconds == 0.0


def _quantity(text: str, units: dict[str, int] | dict[str, float], whole: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise ConfigError(f"cannot read the link {whole!r}: {_FORMS}")
    return float(match[1]) * units[match[2]]
