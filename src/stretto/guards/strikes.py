"""Strikes: damage that is attributed to the same rank or link too often ends the job.

Note [Two ends of a link]
    Damage on the way from one rank to another may come from the sender, the receiver or the link between them. A rank
    at one end of several damaged links is blamed for all of them; the rank with most partners comes first. A rank whose
    own row came back damaged from its own memory is blamed too. Any other damage is blamed on the link.
"""

import platform
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch

from stretto.errors import Quarantined
from stretto.records import Incident

COUNTS_FOR = 1000
"""Updates for which a strike counts. Otherwise a long job would end because of a few accidents weeks apart."""
Link = tuple[int, int]
"""Sender and receiver."""
Culprit = int | Link


class Strikes:
    """Counts, equally on every rank, the updates in which each rank and each link was named.

    An update is one strike, even if it has many incidents, because one accident may cause many.

    Args:
        limit: Strikes that end the job; None for no limit.
        seats: Host and device of every rank, for messages.
    """

    def __init__(self, limit: int | None, seats: Sequence[str]) -> None:
        self._limit = limit
        self._seats = seats
        self._incidents: list[Incident] = []

    def note(self, step: int, incidents: Sequence[Incident]) -> None:
        """Add the incidents of the `step`-th update, and drop expired ones."""
        if incidents and self._limit is not None:
            self._incidents += incidents
            self._incidents = [incident for incident in self._incidents if incident.step > step - COUNTS_FOR]

    def check(self, step: int) -> None:
        """Raise the same error on all ranks if a rank or a link has reached the limit by `step`.

        Raises:
            Quarantined: One has; the message names ranks and links, with their incidents.
        """
        if not self._incidents or self._limit is None:
            return
        laid = {who: found for who, found in laid_to(self._incidents).items() if len(found) >= self._limit}
        if laid:
            incidents = [incident for found in laid.values() for incident in found.values()]
            raise Quarantined(
                f"after step {step}: {' and '.join(map(self._named, laid))} reached {self._limit} strikes "
                f"within {COUNTS_FOR} updates: {'; '.join(map(str, incidents))}; resume from the last "
                f"checkpoint without {'it' if len(laid) == 1 else 'them'}",
                ranks=[who for who in laid if isinstance(who, int)],
                links=[who for who in laid if not isinstance(who, int)],
                incidents=incidents,
            )

    def _named(self, who: Culprit) -> str:
        if isinstance(who, int):
            return f"rank {who} ({self._seats[who]})"
        return f"the link from {self._named(who[0])} to {self._named(who[1])}"


def laid_to(incidents: Sequence[Incident]) -> dict[Culprit, Mapping[int, Incident]]:
    """Return the ranks and links to which incidents are attributed, each with its first incident of every update."""
    culprits = blame({incident.link for incident in incidents if incident.link is not None})
    laid: defaultdict[Culprit, dict[int, Incident]] = defaultdict(dict)
    for incident in incidents:
        named: Sequence[Culprit] = incident.ranks if incident.link is None else [culprits[incident.link]]
        for who in named:
            laid[who].setdefault(incident.step, incident)
    return dict(laid)


def blame(links: Collection[Link]) -> dict[Link, Culprit]:
    """Return the culprit for each damaged link: one of its ends, or the link; see Note [Two ends of a link]."""
    laid: dict[Link, Culprit] = {}
    left = set(links)
    while left:
        partners = defaultdict(set)
        for sender, receiver in left:
            partners[sender].add(receiver)
            partners[receiver].add(sender)
        worst = max(sorted(partners), key=lambda rank: (len(partners[rank]), rank in partners[rank]))
        is_rank = len(partners[worst]) > 1 or worst in partners[worst]
        touched = {link for link in left if worst in link}
        laid.update({link: worst if is_rank else link for link in touched})
        left -= touched
    return laid


def describe_seat(device: torch.device) -> str:
    """Describe this process's host and device."""
    kind = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"host {platform.node()}, {device}{kind}"
