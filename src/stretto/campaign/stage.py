"""Where trials take place: on ranks of the virtual cluster, or on real workers that meet over Gloo."""

import torch
from torch import distributed as dist

from stretto.campaign.drawing import RANKS
from stretto.campaign.trial import PATIENCE_SECONDS, Seen, Trial, try_on_rank
from stretto.errors import StrettoError
from stretto.groups import Link
from stretto.train.seat import Seat, seated
from stretto.virtual import VirtualCluster


def try_virtually(trial: Trial) -> list[Seen]:
    """Run a trial on a virtual cluster and return what every rank saw."""
    seen = [Seen() for _ in range(RANKS)]

    def program(rank: int, group: dist.ProcessGroup) -> None:
        try_on_rank(group, trial, seen[rank])

    try:
        VirtualCluster(RANKS).run(program)
    except StrettoError as error:  # nobody could go on: every rank ends by that
        for of_rank in seen:
            of_rank.error = of_rank.error or f"{type(error).__name__}: {error}"
    return seen


def try_really(seat: Seat, trials: list[Trial]) -> list[Seen]:
    """Run one trial after the other on this real worker and return what it saw; all workers must call."""
    torch.set_num_threads(1)
    found = []
    with seated(seat, Link.parse("none"), torch.device("cpu"), PATIENCE_SECONDS):
        whole = dist.group.WORLD
        if whole is None:
            raise RuntimeError("expected torch's default group behind a seat")
        for trial in trials:
            found.append(Seen())
            try_on_rank(whole, trial, found[-1])
            dist.barrier()
    return found
