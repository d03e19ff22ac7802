"""What goes on after a loss: to the bit what fresh processes make of the same state, and every sample once."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stretto as st
from stretto.exchange import WIRES
from stretto.guards.text import GUARDS
from stretto.strategies import STRATEGIES
from tests.draws import draws, part
from tests.processes import Outcome, run_ranks
from tests.survive.lived import Lived, Told, check_samples, check_terms, fresh, lives

AT_ONCE = 4
"""Jobs side by side: most of the time all of them wait."""
CASES = {
    "ddp": Lived(strategy=st.DDP()),
    "zero1": Lived(strategy=st.ZeRO1()),
    "dpu": Lived(strategy=st.DPU()),
    "wp": Lived(strategy=st.WeightPrediction()),
    "acco": Lived(strategy=st.ACCO()),
    "local": Lived(strategy=st.LocalSGD(rate=0.25)),
    "diloco": Lived(strategy=st.DiLoCo(interval=5)),
    "paft-sync": Lived(strategy=st.PAFTSync(4)),
    "paft-dyn": Lived(strategy=st.PAFTDyn()),
    "acco on int8": Lived(strategy=st.ACCO(), wire="int8"),
    "zero1 on int4, guarded": Lived(strategy=st.ZeRO1(), wire="int4", guards="standard"),
    "average on bf16": Lived(strategy=st.Average(4), wire="bf16"),
    "average on int2": Lived(strategy=st.Average(4), wire="int2"),
    "wp on rotated4": Lived(strategy=st.WeightPrediction(), wire="rotated4"),
    "zero1 on rotated3, audited": Lived(
        strategy=st.ZeRO1(), wire="rotated3", guards=(st.Audit(rate=0.5, seed=1),)
    ),
    "acco on rotated2, guarded": Lived(strategy=st.ACCO(), wire="rotated2", guards="standard"),
    "ddp on rotated1, guarded": Lived(
        strategy=st.DDP(), wire="rotated1", guards=(st.AtRest(), st.ReplicaGuard())
    ),
}
MOST_COLLECTIVES = 200
CAME_TOO_LATE = "before this process could join"


def test_every_strategy_wire_and_guard_is_among_the_cases() -> None:
    cases = CASES.values()
    assert {one.strategy.name for one in cases if isinstance(one.strategy, st.Strategy)} == STRATEGIES.keys()
    assert {one.wire for one in cases} == WIRES.keys()
    named = {type(guard) for one in cases if one.guards != "standard" for guard in one.guards}
    assert named == set(GUARDS.values())


def drawn(seed: int, lived: Lived) -> Lived:
    """The same job with a random rank killed in a random collective."""
    rng = random.Random(seed)
    return replace(lived, killed=((rng.randrange(lived.ranks), rng.randrange(MOST_COLLECTIVES)),))


def living(outcomes: list[Outcome], lived: Lived) -> dict[int, tuple[str, list[Told]]]:
    """What those have seen that were not killed, who all end alike."""
    killed = dict(lived.killed)
    found = {one.rank: one.value for one in outcomes if one.error is None}
    unkilled = {one.rank for one in outcomes if one.rank not in killed or one.rank in lived.stopped}
    assert found.keys() >= unkilled, (lived, [one.error for one in outcomes])
    models = {model for rank, (model, _) in found.items() if rank not in lived.stopped}
    assert len({model for model in models if CAME_TOO_LATE not in model}) == 1, (lived, found)
    return found


def check(lived: Lived, folder: Path) -> None:
    found = living(lives(lived, str(folder)), lived)
    terms = check_terms(found)
    check_samples(terms, lived.strategy, lived.updates)
    last, model = terms[-1][0], next(model for model, told in found.values() if told[-1:] == terms[-1][:1])
    paths = [str(path) for path in folder.glob(f"*-step-{last.step}")] if last.step else [None]
    assert run_ranks(len(last.seats), fresh, lived, paths[0]) == [model] * len(last.seats), lived


@pytest.mark.long
def test_what_goes_on_is_to_the_bit_what_fresh_processes_make_of_the_same_state(tmp_path: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cases = [drawn(seed, lived) for seed, lived in enumerate(CASES.values())]
        list(pool.map(lambda case: check(case[1], tmp_path / str(case[0])), enumerate(cases)))


def struck_twice(seed: int) -> Lived:
    """A random job whose ranks are struck at two random moments; somebody is left."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 3])
    seats = rng.sample(range(ranks), ranks - 1)
    killed = tuple((seat, rng.randrange(MOST_COLLECTIVES)) for seat in seats)
    return replace(
        CASES[rng.choice(list(CASES))], ranks=ranks, killed=killed, every=rng.choice([1, 3, 7]), updates=16
    )


@pytest.mark.parametrize("part", part(range(4)))
def test_a_job_goes_on_whoever_is_killed_in_whichever_collective(part: int) -> None:
    def goes_on(seed: int) -> None:
        lived = struck_twice(seed)
        outcomes = lives(lived)
        errors = [one.error for one in outcomes if one.error is not None and "exit code -9" not in one.error]
        if len(lived.killed) == 2 and errors:
            assert [error for error in errors if "no generation in memory is whole" not in error] == [], (
                lived,
                errors,
            )
            return
        terms = check_terms(found := living(outcomes, lived))
        assert found
        check_samples(terms, lived.strategy, lived.updates)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(goes_on, range(6 * part, 6 * part + len(draws(6)))))


@pytest.mark.long
def test_one_that_is_stopped_is_left_out_and_says_so_when_it_wakes() -> None:
    lived: Any = replace(CASES["zero1"], killed=((1, 60),), stopped=(1,))
    found = living(lives(lived), lived)
    assert "seat 1: the other members continue without this process, as seats [0, 2]" in found[1][0]
    check_terms({rank: told for rank, told in found.items() if rank != 1})


def visited(seed: int) -> Lived:
    """A random job one of whose ranks is killed, or sleeps and sends 666 when it wakes; another process comes."""
    rng = random.Random(seed)
    struck = rng.randrange(3)
    return replace(
        CASES[("zero1", "acco", "ddp", "zero1 on int4, guarded")[seed % 4]],
        killed=((struck, rng.randrange(MOST_COLLECTIVES // 2)),),
        stopped=(struck,) if seed % 3 else (),
        again=struck,
        updates=40,
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_one_is_killed_or_wakes_with_other_values_and_another_comes(seed: int, tmp_path: Path) -> None:
    check(visited(seed), tmp_path)
