"""What an examination has come to: a row per check, and one line that says whom not to trust."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from stretto.doctor.finding import Finding, Link
from stretto.engine.strikes import blame


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
    def verdict(self) -> str:
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
            "verdict": self.verdict,
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
