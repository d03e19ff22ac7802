"""What one check has found out about one rank's device, or about one link.

What an examination has come to: a row per check, and one line that says whom not to trust.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from stretto.guards.strikes import blame

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All findings; the same on every rank."""

    seats: tuple[str, ...]
    """Host of every rank, in rank order."""
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing disagrees."""
        return all(finding.is_sound for finding in self.findings)

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that something is laid to, ends of damaged links among them."""
        named = {rank for finding in self._unsound for rank in finding.suspects}
        return tuple(sorted(named | {who for who in self._blamed if isinstance(who, int)}))

    @property
    def links(self) -> tuple[Link, ...]:
        """Links that are damaged while neither end is known to be at fault."""
        return tuple(sorted({who for who in self._blamed if not isinstance(who, int)}))

    @property
    def incident(self) -> str:
        """One line."""
        ranks = len(self.seats)
        if self.is_sound:
            return f"sound: {len(self.findings)} checks on {ranks} rank{'s' * (ranks > 1)}, nothing disagrees"
        named = [f"rank {rank} ({self.seats[rank]})" for rank in self.suspects]
        named += [f"the link from rank {sender} to rank {receiver}" for sender, receiver in self.links]
        checks = ", ".join(dict.fromkeys(finding.check for finding in self._unsound))
        return f"not to be trusted: {', '.join(named) or 'nobody can be named'}; see {checks}"

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "is_sound": self.is_sound,
            "incident": self.incident,
            "suspects": list(self.suspects),
            "links": [list(link) for link in self.links],
            "seats": list(self.seats),
            "findings": [finding.as_json() for finding in self.findings],
        }

    @property
    def _unsound(self) -> Sequence[Finding]:
        return [finding for finding in self.findings if not finding.is_sound]

    @property
    def _blamed(self) -> Sequence[int | Link]:
        return list(blame({link for finding in self.findings for link in finding.damaged_links}).values())
