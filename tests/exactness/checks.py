"""Compares what ranks saw with what the equations give."""

from collections.abc import Sequence

from stretto.strategies.ledger import ledger_of
from tests.exactness.jobs import Case, Observed, same
from tests.exactness.reference import Counts, Trace, fixed_counts


def expected_counts(case: Case, world_size: int) -> list[Counts]:
    """Return the micro-batches by update, round and rank of a case with a fixed number on equal streams."""
    quotas = case.strategy.quotas(int(case.micro_batches), ledger_of(case.strategy).rounds)
    return fixed_counts(case.length(0), quotas, world_size)


def check(ranks: Sequence[Observed], expected: Trace, counts: Sequence[Counts] | None = None) -> None:
    """Compare every rank to the bit; states that are shown after the last micro-batch are seen by nobody."""
    for rank, found in enumerate(ranks):
        if counts is not None:
            assert recorded_counts(found) == list(counts), f"rank {rank}"
        assert len(expected.shown) - 2 * found.behind <= len(found.shown) <= len(expected.shown)
        num_seen = len(expected.shown) - 2 * found.behind
        for position, (state, reference) in enumerate(
            zip(found.shown[:num_seen], expected.shown, strict=False)
        ):
            assert same(state, reference), f"rank {rank}: shown state {position} differs"
        assert len(found.committed) in (0, len(expected.committed) - found.drained)
        for position, (state, reference) in enumerate(zip(found.committed, expected.committed, strict=False)):
            assert same(state, reference), f"rank {rank}: committed state {position} differs"
        assert same(found.final, expected.committed[-1]), f"rank {rank}: the final state differs"


def recorded_counts(found: Observed) -> list[Counts]:
    """Return the micro-batches by update, round and rank, as the updates record them."""
    return [[list(by_rank) for by_rank in update.rounds] for update in found.updates]
