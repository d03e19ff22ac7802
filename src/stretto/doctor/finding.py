"""What one check has found out about one rank's device, or about one link."""

import dataclasses
from typing import Any

Link = tuple[int, int]
"""Sender and receiver."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row of the table."""

    check: str
    """What was looked at: "matmul", "memory", "all-reduce", "link", ..."""
    rank: int | None = None
    """Whose device was looked at; None for a link, or where ranks are compared."""
    link: Link | None = None
    device: str = ""
    """Host and device, where it is one rank's."""
    is_sound: bool
    detail: str
    """How much was done and measured, or what disagrees."""
    megabytes_per_second: float | None = None
    """Of a link, in units of 10^6 bytes."""
    suspects: tuple[int, ...] = ()
    """Ranks that it is laid to, where something disagrees and they are known."""
    damaged_links: tuple[Link, ...] = ()
    """Links on which something did not arrive as it was sent."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Finding":
        """Return the finding that `as_json` wrote, also after a way through text."""
        link = fields["link"]
        return cls(
            **{
                **fields,
                "link": None if link is None else (link[0], link[1]),
                "suspects": tuple(fields["suspects"]),
                "damaged_links": tuple((sender, receiver) for sender, receiver in fields["damaged_links"]),
            }
        )
