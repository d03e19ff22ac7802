"""The laws of an update strategy: its coroutine keeps the rules, and small jobs show what it declares.

A linear model shows which micro-batches it has been trained on. Micro-batch i alone touches parameter i, with a
gradient of one; plain SGD at a rate of one then gives −(times that i was applied) / (weight of its update).
"""

import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.engine import Options
from stretto.errors import StrettoError
from stretto.parallel import DataParallel
from stretto.records import Update
from stretto.strategies import Strategy, contract
from stretto.strategies.ledger import ledger_of
from stretto_lab.testing.jobs import Job, RunRanks, goes_on, on_virtual_ranks, train

_READ, _UPDATES = 8, 6
"""Number of updates whose scripts are read in a row, and of updates in a traced job."""


class _Marked:
    """A mark for a gradient, with its update and rounds; it can only be added and passed on."""

    def __init__(self, update: int, rounds: frozenset[int]) -> None:
        self.update, self.rounds, self.is_spent = update, rounds, False

    def __add__(self, other: "_Marked") -> "_Marked":
        total = _Marked(self.update, self.rounds | other.rounds)
        total.is_spent = self.is_spent or other.is_spent
        self.is_spent = other.is_spent = True
        return total


def _read(strategy: Strategy) -> tuple[list[list[str]], list[str]]:
    """Run scripts with marked gradients; return the names of their effects by update, and the broken rules."""
    asked: list[list[str]] = []
    broken = []
    for update in range(_READ):
        script, reduced, stepped = strategy.update(), 0, frozenset[int]()
        answer: Any = None
        asked.append(names := [])
        while True:
            try:
                effect = script.send(answer)
            except StopIteration:
                break
            names.append(type(effect).__name__)
            answer, where = None, f"update {update}, effect {len(names)}"
            gradient = getattr(effect, "gradient", None)
            if not isinstance(effect, get_args(contract.Effect)):
                broken.append(f"{where}: expected one of the effects, found {effect!r}")
            elif isinstance(effect, contract.Reduce | contract.AllReduce):
                answer = _Marked(update, frozenset([reduced]))
                reduced += 1
            elif isinstance(effect, contract.Look):
                answer = contract.Moment(update, 1, is_finishing=False)
            elif isinstance(effect, contract.Average) and effect.probe:
                answer = contract.Divergence.none()
            elif not hasattr(effect, "gradient"):
                continue
            elif not isinstance(gradient, _Marked) or gradient.update != update:
                broken.append(f"{where}: expected a gradient that this update has reduced")
            elif gradient.is_spent:
                broken.append(f"{where}: expected the sum, not a gradient that is in it")
            elif isinstance(effect, contract.Step):
                stepped |= gradient.rounds
        if left := set(range(reduced)) - stepped:
            broken.append(f"update {update}: the gradients of rounds {sorted(left)} reached no Step")
    return asked, broken


@dataclasses.dataclass
class _Trace:
    """Parameters at each micro-batch and at the end; parameters after each update, from the start; all updates."""

    shown: list[Tensor]
    committed: list[Tensor]
    updates: list[Update]


def _weight(idle: bool, micro_batches: int, rank: int, size: int, index: int) -> float:
    """Return a micro-batch's weight: the last rank idles in the second update, all ranks in the third and half of the
    fourth.
    """
    update, place = divmod(index, micro_batches)
    nothing = (update == 1 and rank == size - 1, update == 2, update == 3 and 2 * place < micro_batches)
    return 0.0 if idle and any(nothing) else 1.0


def _trace(strategy: Strategy, micro_batches: int, idle: bool, rank: int, group: dist.ProcessGroup) -> _Trace:
    """Train on every micro-batch once, and record every update."""
    size, count = group.size(), micro_batches * _UPDATES
    model = nn.ParameterList([torch.zeros(count * size)])
    optimizer, options = torch.optim.SGD(model.parameters(), lr=1.0), Options(allow_unused=True)
    seen = _Trace([], [torch.zeros_like(model[0])], [])
    with DataParallel(
        model, optimizer, strategy, micro_batches=micro_batches, group=group, options=options
    ) as parallel:
        for index in range(count):
            seen.shown.append(model[0].detach().clone())
            loss, weight = model[0][index * size + rank], _weight(idle, micro_batches, rank, size, index)
            update = parallel.backward(loss, weight=weight, samples=1)
            if update is not None:
                seen.updates.append(update)
                with parallel.settled():
                    seen.committed.append(model[0].detach().clone())
        seen.updates += parallel.finish()
    seen.shown.append(model[0].detach().clone())
    return seen


def _misapplied(traces: Sequence[_Trace], micro_batches: int, idle: bool) -> Iterator[str]:
    """Yield the micro-batches that were not applied once. The records give the micro-batches of each rank in an update,
    in order.
    """
    size, updates, final = len(traces), traces[0].updates, traces[0].shown[-1]
    for rank in range(size):
        ends, counted = list(accumulate(update.micro_batches[rank] for update in updates)), 0
        for index in range(micro_batches * _UPDATES):
            expected = _weight(idle, micro_batches, rank, size, index)
            update = next((u for u, end in zip(updates, ends, strict=True) if counted < end), None)
            counted += expected > 0
            weight = 1.0 if expected == 0 or update is None else update.weight
            found = 0.0 - float(final[index * size + rank]) * weight
            if abs(found - expected) > 2**-20:  # one division, one product: two roundings of 2^-24
                where = f"micro-batch {index} of rank {rank} of {size}"
                yield f"{where}: expected to be applied {expected:g} times, found {found:g} times"


def _staleness(traces: Sequence[_Trace]) -> list[int]:
    """Return for each update how many updates its freshest gradients lag behind.

    A gradient is as old as the newest committed update that is complete in the parameters for which it was computed.
    """
    committed, lags = traces[0].committed, []
    for step in range(1, len(committed)):
        arrived = ((committed[step] != 0) & (committed[step - 1] == 0)).nonzero().flatten().tolist()
        places = [divmod(position, len(traces)) for position in arrived]
        shown = [traces[rank].shown[index] for index, rank in places]
        newest = [max(k for k in range(step) if bool((x[committed[k] != 0] != 0).all())) for x in shown]
        lags.append(min((step - 1 - one for one in newest), default=0))
    return lags


def strategy_faults(
    make: Callable[[], Strategy],
    *,
    ranks: Sequence[int] = (1, 2, 3),
    micro_batches: int = 4,
    updates: int = 4,
    run: RunRanks = on_virtual_ranks,
) -> list[str]:
    """Return the laws that a strategy breaks; `make` is its class or a function that makes it.

    Jobs have `micro_batches` per rank and update; saved and resumed jobs have `updates` updates. The laws do not apply
    to strategies whose ranks step alone, such as `LocalSGD`, because their replicas differ.
    """
    strategy, again = make(), pickle.loads(pickle.dumps(make()))
    asked, broken = _read(strategy)
    if repr(strategy) != repr(again) or not asked == _read(strategy)[0] == _read(again)[0]:
        broken.append("expected the same effects of equal options, later and on other ranks; found others")
    rounds = [sum(name in ("Reduce", "AllReduce") for name in names) for names in asked]
    quotas = [strategy.quotas(count, rounds[0]) for count in range(micro_batches, micro_batches + 8)]
    parts = [(len(one), sum(one), min(one) >= 1) for one in quotas]
    if parts != [(rounds[0], micro_batches + k, True) for k in range(8)] or len(set(rounds)) > 1:
        broken.append(f"expected as many rounds in each update, none empty: found {rounds}, {quotas}")
    job = Job(strategy=strategy, micro_batches=micro_batches, updates=updates)
    try:
        ledger_of(strategy)
        for size in ranks:
            broken += _traced_faults(make, micro_batches, size, run)
            broken += _job_faults(dataclasses.replace(job, strategy=make()), size, run)
    except StrettoError as error:
        broken.append(f"{type(error).__name__}: {error}")
    return broken


def _traced_faults(make: Callable[[], Strategy], micro_batches: int, size: int, run: RunRanks) -> list[str]:
    """Return which micro-batches were not applied once, and where the staleness is not as declared."""
    traces = run(size, functools.partial(_trace, make(), micro_batches, False))
    broken, found = list(_misapplied(traces, micro_batches, False)), max(_staleness(traces))
    if found != (declared := make().staleness):
        broken.append(f"largest staleness on {size} ranks: expected {declared}, found {found}")
    traces = run(size, functools.partial(_trace, make(), micro_batches, True))
    # Nobody weighs anything in the third update, nor a lone rank in the second.
    if (commits := len(traces[0].updates)) != (weighty := _UPDATES - 1 - (size == 1)):
        broken.append(f"{size} ranks: expected {weighty} updates of any weight, found {commits}")
    return broken + list(_misapplied(traces, micro_batches, True))


def _job_faults(job: Job, size: int, run: RunRanks) -> list[str]:
    """Return where ranks differ, where an evaluation changes the job, and where a resumed job is not bit-identical."""
    first, *others = watched = run(size, functools.partial(train, job))
    broken = []
    for rank, other in enumerate(others, start=1):
        alike = dataclasses.replace(other, shown=first.shown, masters=first.masters)
        broken += alike.differs_from(first, f"rank {rank} of {size}, against rank 0")
    unwatched = run(size, functools.partial(train, dataclasses.replace(job, looks=False)))
    for rank, (one, other) in enumerate(zip(watched, unwatched, strict=True)):
        other.committed = one.committed
        broken += other.differs_from(one, f"rank {rank} of {size}, run again without looks")
    return broken + goes_on(job, size, saved_at=(0, 2), run=run)
