"""A state that ranks hold together, whoever has which part of it, comes to those who need it in rounds of any size."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from stretto.checkpoint import Held
from stretto.dealing import Holding
from stretto.errors import TornCheckpoint
from stretto.flat import PartedTensor, Runs
from stretto.share import Header, read_share
from tests.checkpoint.forged import extents
from tests.draws import draws

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
LARGEST_ELEMENT = 8
SHARE = b"stretto3"
"""How records of values begin; those of names are JSON."""


class Ranks:
    """Threads that gather records."""

    def __init__(self, ranks: int) -> None:
        self._records = [b""] * ranks
        self._barrier = threading.Barrier(ranks)
        self.most_bytes = 0
        """Of values in a record."""

    def gather(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def gather(record: bytes) -> list[bytes]:
            self._records[rank] = record
            if record.startswith(SHARE):
                self.most_bytes = max(self.most_bytes, read_share(record, "a record").num_bytes)
            self._barrier.wait()
            records = list(self._records)
            self._barrier.wait()
            return records

        return gather


@dataclass
class Case:
    """Some entries, cut and dealt at random."""

    ranks: int
    round_bytes: int
    whole: dict[str, Tensor] = field(default_factory=dict)
    held: list[dict[str, Runs]] = field(default_factory=list)
    wanted: list[dict[str, PartedTensor]] = field(default_factory=list)
    lost: set[tuple[int, str]] = field(default_factory=set)
    """Rank, and an entry of which it wants what nobody has."""


def cuts(rng: random.Random, numel: int) -> list[tuple[int, int]]:
    places = sorted({0, numel, *(rng.randint(0, numel) for _ in range(rng.randrange(6)))})
    return list(itertools.pairwise(places))


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    case = Case(ranks=rng.randint(1, 4), round_bytes=rng.choice([1, 100, 1000, 10**6]))
    case.held = [{} for _ in range(case.ranks)]
    case.wanted = [{} for _ in range(case.ranks)]
    for number in range(rng.randint(1, 4)):
        name, dtype = str(number), rng.choice(DTYPES)
        shape = [rng.randint(0, 5) for _ in range(rng.randrange(4))]
        case.whole[name] = whole = torch.arange(torch.Size(shape).numel()).to(dtype)
        held: list[list[tuple[int, Tensor]]] = [[] for _ in range(case.ranks)]
        gone: list[tuple[int, int]] = []
        for begin, end in cuts(rng, whole.numel()):
            having = rng.sample(range(case.ranks), rng.randint(1, case.ranks))
            if rng.random() < 0.03:
                gone.append((begin, end))
                continue
            for rank in having:
                held[rank].append((begin, whole[begin:end]))
        for rank in range(case.ranks):
            if held[rank]:
                runs = held[rank]
                written = [(first, first + run.numel()) for first, run in runs]
                case.held[rank][f"carry.{name}"] = Runs(tuple(shape), dtype, runs, written)
            begin, end = rng.choice(cuts(rng, whole.numel()) or [(0, 0)])
            case.wanted[rank][name] = PartedTensor(Runs(tuple(shape), dtype, wanted=[(begin, end)]))
            if any(max(begin, first) < min(end, last) for first, last in gone):
                case.lost.add((rank, name))
    return case


@pytest.mark.parametrize("moves", [False, True])
def test_who_lacks_something_gets_it_and_what_nobody_has_is_named(moves: bool) -> None:
    for seed in draws(60):
        case = drawn(seed)
        ranks = Ranks(case.ranks)

        def read(rank: int, case: Case = case, ranks: Ranks = ranks) -> list[str]:
            share = Held(header=Header(1, "ddp", "SGD", 2, ""), entries=case.held[rank])
            holding = Holding([share], ranks.gather(rank), case.round_bytes)
            return holding.read({"carry": case.wanted[rank]}, moves=moves)

        with ThreadPoolExecutor(case.ranks) as pool:
            missing = list(pool.map(read, range(case.ranks)))
        for rank, names in enumerate(missing):
            found = {name.removeprefix("carry.") for name in names}
            assert found == {name for one, name in case.lost if one == rank}, (seed, rank)
            for name in case.wanted[rank].keys() - found:
                for start, stop in case.wanted[rank][name].runs.wanted:
                    found_run = case.wanted[rank][name].run(start, stop - start)
                    assert found_run is not None, (seed, rank, name)
                    assert torch.equal(found_run, case.whole[name][start:stop]), (seed, rank, name)
        assert ranks.most_bytes <= max(LARGEST_ELEMENT, case.round_bytes // case.ranks), seed


def test_a_share_comes_back_from_its_bytes_and_every_changed_byte_of_an_entry_names_it() -> None:
    for seed in draws(60):
        rng, case = random.Random(seed), drawn(seed)
        for rank, entries in enumerate(case.held):
            packed = {f"rank.{number}": rng.randbytes(rng.choice([0, 10, 70_000])) for number in range(3)}
            written = {
                name: Runs(
                    runs.shape, runs.dtype, runs.values, [one for one in runs.written if rng.random() < 0.7]
                )
                for name, runs in entries.items()
            }
            held = {**written, **packed, "job.step": seed, "extra": None}
            share = Held(header=Header(seed, "ddp", "SGD", 2, "x"), entries=held)
            content = share.written().joined()
            assert bytes(content) == b"".join(share.written().chunks())
            found = read_share(rng.choice([content, bytes(content)]), "a share", share.written().digest)
            assert found.header == share.header
            own = {name: runs for name, runs in written.items() if runs.written}
            assert found.entries.keys() == {*own, *packed, "extra", "job.step"}
            assert {name: found.entries[name] for name in packed} == packed, (seed, rank)
            for name, runs in own.items():
                assert (found.entries[name].shape, found.entries[name].dtype) == (runs.shape, runs.dtype)
                own_values, values = runs.own.values, found.entries[name].values
                assert sum(run.numel() for _, run in values) == sum(run.numel() for _, run in own_values)
                for start, run in own_values:
                    again = found.entries[name].run(start, start + run.numel())
                    assert again is not None, (seed, name, start)
                    assert torch.equal(again, run), (seed, name, start)
            _, index, places = extents(bytes(content))
            for (name, *_), (begin, end) in zip(index, places, strict=True):
                if begin < end:
                    content[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
                    with pytest.raises(TornCheckpoint, match=f"'{name or 'settings'}' is damaged"):
                        read_share(bytes(content), "a share")
                    content = share.written().joined()
            cut = rng.randrange(len(content))
            with pytest.raises(TornCheckpoint, match="a share is damaged"):
                read_share(content[:cut], "a share")
