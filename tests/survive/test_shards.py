"""Models that FSDP2 shards inside nodes: a node is lost, and the others go on, to the bit as fresh processes do."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import stretto as st
from stretto.errors import ConfigError, OutOfTurn
from stretto.survive import Term, survives
from stretto_lab.train.workers import host_store
from stretto_lab.virtual import VirtualCluster
from tests.draws import part
from tests.processes import run_ranks
from tests.survive.lived import SAMPLES, Lived, Told, check_samples, check_terms, fresh, lives
from tests.survive.virtually import survive

SHARDS = 2
AT_ONCE = 2
"""Jobs side by side: most of the time all of them wait."""
MOST_MOMENTS = 300
CASES = {
    "ddp": Lived(strategy=st.DDP()),
    "zero1": Lived(strategy=st.ZeRO1()),
    "dpu": Lived(strategy=st.DPU()),
    "wp": Lived(strategy=st.WeightPrediction()),
    "acco": Lived(strategy=st.ACCO()),
    "local": Lived(strategy=st.LocalSGD(rate=0.25)),
    "diloco": Lived(strategy=st.DiLoCo(interval=5)),
    "acco on int8": Lived(strategy=st.ACCO(), wire="int8"),
    "zero1 on rotated4, guarded": Lived(strategy=st.ZeRO1(), wire="rotated4", guards="standard"),
    "zero1 with Muon": Lived(strategy=st.ZeRO1(), whole_tensors=True),
}


def drawn(seed: int, lived: Lived) -> Lived:
    """The same job on three nodes, with a random rank killed in a random collective or in a pass through the model.

    Every second time its node comes again, before the others have agreed to go on without it, or after. Now and then
    the rank is stopped instead, and wakes later.
    """
    rng = random.Random(seed)
    seat, again = rng.randrange(3 * SHARDS), seed % 2 == 1
    return replace(
        lived,
        ranks=3 * SHARDS,
        shards=SHARDS,
        killed=((seat, rng.randrange(MOST_MOMENTS)),),
        again=seat // SHARDS * SHARDS if again else None,
        comes_late=seed % 4 == 1,
        stopped=(seat,) if seed % 4 == 2 else (),
        every=1 if again else rng.choice([1, 3, 5]),  # whoever comes is taken in after any update
        updates=24 if again else 16,
    )


def check(lived: Lived, folder: Path) -> None:
    """What goes on is what fresh processes make of the same state, and every sample of a node counts once."""
    ((seat, _),) = lived.killed
    outcomes = lives(lived, str(folder))
    found = {one.rank: one.value for one in outcomes if one.error is None}
    assert found.keys() >= set(range(lived.ranks)) - {seat}, (lived, [one.error for one in outcomes])
    left = {rank for rank, (model, _) in found.items() if model.startswith("seat")}
    beside = {rank for rank in range(lived.ranks) if rank // SHARDS == seat // SHARDS}
    assert left <= {*beside, *range(lived.ranks, lived.ranks + SHARDS)}, found
    ended: dict[int, tuple[str, list[Told]]] = {rank: one for rank, one in found.items() if rank not in left}
    assert len({model for model, _ in ended.values()}) == 1, (lived, ended)
    model = next(iter(ended.values()))[0]
    check_terms(ended)
    firsts = check_terms({rank: one for rank, one in ended.items() if rank % SHARDS == 0})
    check_samples(firsts, lived.strategy, lived.updates, SAMPLES * SHARDS)
    last = firsts[-1][0]
    paths = [str(path) for path in folder.glob(f"*-step-{last.step}")] if last.step else [None]
    assert run_ranks(len(last.seats), fresh, lived, paths[0]) == [model] * len(last.seats), lived


@pytest.mark.long
def test_nodes_of_shards_go_on_to_the_bit_as_fresh_processes_whoever_is_killed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cases = part([drawn(seed, lived) for seed, lived in enumerate(CASES.values())])
        list(pool.map(lambda case: check(case[1], tmp_path / str(case[0])), enumerate(cases)))


def refused(why: str) -> Callable[[Term], None]:
    def train(term: Term) -> None:
        with pytest.raises(ConfigError, match=why):
            term.meshes()

    return train


def with_a_default_group(rank: int) -> int:
    """Nobody repairs it, so a mesh over it would have the ranks that are lost."""
    store = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    survives(refused("torch has a default group already"), store=store, rank=rank, ranks=2)
    return dist.get_world_size()


def waits_beside_members(term: Term) -> None:
    """While somebody waits in the store of torch's groups, members reach theirs: the key comes over it."""
    theirs = dist.distributed_c10d._get_default_store()
    members = dist.PrefixStore("default/0/", term.group.get_group_store())  # as torch names it
    for number in range(20):  # of which some begin to wait before the key is there
        key, begins = f"waited for/{term.rank}/{number}", threading.Event()

        def wait(key: str = key, begins: threading.Event = begins) -> None:
            begins.set()
            theirs.wait([key], timedelta(seconds=20))

        with ThreadPoolExecutor(1) as pool:
            waited = pool.submit(wait)
            begins.wait()
            members.set(key, "")
            waited.result()


def makes_its_own(rank: int, port: int) -> list[int]:
    """Before a job has meshes, and after it, there is no default group."""
    store, found = dist.TCPStore("127.0.0.1", port, is_master=False), [dist.is_initialized()]

    def train(term: Term) -> None:
        meshes = term.meshes()
        with pytest.raises(OutOfTurn, match="twice in a term"):
            term.meshes()
        found.extend([dist.get_world_size(), meshes["node"].size(), meshes["shard"].size()])
        waits_beside_members(term)

    survives(train, store=store, rank=rank, ranks=4, ranks_per_node=2)
    return [*found, dist.is_initialized()]


def test_meshes_are_refused_where_they_could_not_be_left() -> None:
    assert run_ranks(2, with_a_default_group) == [2, 2]
    survive(VirtualCluster(2), refused("expected a group of processes"), every=None)


def test_torchs_default_group_goes_with_the_job() -> None:
    store = host_store("127.0.0.1", 0)
    assert run_ranks(4, makes_its_own, store.port, backend=None) == [[False, 4, 2, 2, False]] * 4
