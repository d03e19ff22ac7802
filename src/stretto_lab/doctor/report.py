"""The doctor's report: one finding per check, and a summary that says which ranks and links not to trust."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from stretto.guards.strikes import Link, blame


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check: of one rank's device, of one link, or of all ranks together."""

    check: str
    """What was checked: "matmul", "memory", "all-reduce", "link", ..."""
    rank: int | None = None
    """The rank whose device was checked; None for a link, and where ranks are compared."""
    link: Link | None = None
    """Sender and receiver, for a link."""
    device: str = ""
    """Host and device, for a device."""
    passed: bool
    detail: str
    """How much was done and measured, and what went wrong."""
    megabits_per_second: float | None = None
    """Rate of a link, in units of 10^6 bits."""
    suspects: tuple[int, ...] = ()
    """Ranks that a failure is attributed to, if they are known."""
    damaged_links: tuple[Link, ...] = ()
    """Links on which something did not arrive as it was sent."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All findings; the same on every rank."""

    hosts: tuple[str, ...]
    """Of every rank, in rank order."""
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(finding.passed for finding in self.findings)

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that a failure is attributed to; damaged links are attributed to a rank that they share."""
        named = {rank for finding in self.findings for rank in finding.suspects}
        return tuple(sorted(named | {who for who in self._culprits if isinstance(who, int)}))

    @property
    def links(self) -> tuple[Link, ...]:
        """Damaged links that cannot be attributed to one of their ends."""
        return tuple(sorted({who for who in self._culprits if not isinstance(who, int)}))

    @property
    def summary(self) -> str:
        """The report in one line."""
        ranks = len(self.hosts)
        if self.passed:
            return (
                f"passed: {len(self.findings)} checks on {ranks} rank{'s' * (ranks > 1)}, nothing disagrees"
            )
        named = [f"rank {rank} (host {self.hosts[rank]})" for rank in self.suspects]
        named += [f"the link from rank {sender} to rank {receiver}" for sender, receiver in self.links]
        checks = ", ".join(dict.fromkeys(finding.check for finding in self.findings if not finding.passed))
        return f"not to be trusted: {', '.join(named) or 'nobody can be named'}; see {checks}"

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "passed": self.passed,
            "summary": self.summary,
            "suspects": self.suspects,
            "links": self.links,
            **dataclasses.asdict(self),
        }

    @property
    def _culprits(self) -> Sequence[int | Link]:
        return list(blame({link for finding in self.findings for link in finding.damaged_links}).values())
