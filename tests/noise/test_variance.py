"""What a rank steps with is the clean mean gradient and noise of the variance that was asked for, whatever the job."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

import stretto as st
from stretto.groups import Link
from stretto_lab.virtual import Compute, Network
from tests.noise.jobs import NEEDED, NUMEL, UPDATES, Case, added, run, steps

VARIANCE = 0.04
FAR = 500
SHARDED = ("zero1", "dpu", "wp", "acco")
"""Each coordinate has one owner, so a rank's noise is that of its slices."""
STRATEGIES: dict[str, st.Strategy] = {
    "ddp": st.DDP(),
    "zero1": st.ZeRO1(),
    "dpu": st.DPU(),
    "wp": st.WeightPrediction(),
    "acco": st.ACCO(),
    "acco, halves of unequal size": st.ACCO(first=1),
    "local": st.LocalSGD(rate=0, max_gap=FAR),
    "diloco": st.DiLoCo(interval=FAR),
    "paft-sync": st.PAFTSync(interval=FAR),
    "paft-dyn": st.PAFTDyn(first=FAR, maximum=FAR),
}
"""None of them averages within the updates that are looked at."""
CASES = [(name, seed) for name in STRATEGIES for seed in range(2)]


def draw_case(name: str, seed: int) -> Case:
    """Draw ranks, weights, micro-batches, buckets and wire, and for how long each rank has data."""
    chance = random.Random(f"{name}, {seed}")
    ranks = chance.randint(1, 8)
    steps_alone = name in ("average", "local", "diloco")
    weights = [chance.choice((0.3, 1.0, 17.0, 4096.0)) for _ in range(chance.randint(1, 5))]
    if ranks > 1 and not steps_alone:
        weights = [0.0, *weights]  # an update needs some weight on any rank, or it does not step
    lengths = [chance.choice((1, 2, UPDATES + 1)) for _ in range(ranks)]
    lengths[chance.randrange(ranks)] = UPDATES + 1
    return Case(
        strategy=STRATEGIES[name],
        ranks=ranks,
        micro_batches=chance.randint(3, 5) if name.startswith("acco") else chance.randint(1, 3),
        weights=tuple(weights),
        lengths=() if steps_alone else tuple(lengths),
        updates=UPDATES + 1,  # replicas are averaged at the end
        options=st.Options(
            wire=chance.choice(("fp32", "bf16", "int8", "int4")),
            bucket_bytes=chance.choice((1024, 8192, 2**20)),
            hide_reductions=chance.random() < 0.7,
            verified=chance.random() < 0.2,
        ),
    )


@pytest.mark.long(keep=2)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_mean_and_variance_are_what_was_asked_for(name: str, seed: int) -> None:
    """Of the mean gradient; in every other update that of a burst, for half of the jobs."""
    case, mean, burst = draw_case(name, seed), 0.3 * seed, 100 * VARIANCE
    every = (2, burst) if seed else None
    clean, noisy = run(case), run(case.with_noise(st.Noise(VARIANCE, mean=mean, every=every, seed=seed)))
    found = [one[:UPDATES] - mean for one in added(noisy, clean)]
    sizes = [burst if every and update % 2 == 0 else VARIANCE for update in range(1, UPDATES + 1)]
    found = [one / torch.tensor(sizes).sqrt()[:, None] for one in found]
    draws = torch.cat([one.flatten() for one in found])
    owners = 1 if name.startswith(SHARDED) else case.ranks
    assert len(draws) == owners * UPDATES * NUMEL >= NEEDED
    assert float(draws.var()) == pytest.approx(1, rel=0.03), case
    assert abs(float(draws.mean())) < 5 / math.sqrt(len(draws))
    assert [one for one in noisy if not (one.padding == 0).all()] == []
    assert_independent([one.flatten() for one in found] if owners > 1 else [])
    assert_independent(list(torch.cat(found, dim=1)))


def assert_independent(parts: list[Tensor]) -> None:
    """Correlations of independent draws have a standard deviation of 1 / √n; six of them are allowed."""
    for left, right in itertools.combinations(parts, 2):
        assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 6 / math.sqrt(len(left))


@pytest.mark.parametrize("name", ["dpu", "wp", "acco"])
def test_counts_that_follow_the_clock_do_not_change_the_variance(name: str) -> None:
    case = Case(strategy=STRATEGIES[name], ranks=3, micro_batches=st.Clock(minimum=1, maximum=4), updates=40)
    cluster = {
        "compute": Compute(slowness={1: 2.5}),
        "network": Network(link=Link(bits_per_second=1e8, latency_seconds=1e-4)),
    }
    clean, noisy = run(case, **cluster), run(case.with_noise(st.Noise(VARIANCE)), **cluster)
    assert len(set(noisy[0].updates[-1].micro_batches)) > 1
    # All micro-batches have the same gradient, which so is the mean of any number of them.
    draws = torch.cat(
        [(steps(one) - steps(other)[0]).flatten() for one, other in zip(noisy, clean, strict=True)]
    )
    assert len(draws) == len(noisy[0].updates) * NUMEL >= NEEDED
    assert float(draws.var()) == pytest.approx(VARIANCE, rel=0.03)


def test_what_acco_previews_and_what_it_commits_both_have_the_variance() -> None:
    """The step holds what the preview has been given, so their covariance is w_A / W of the variance: here a third."""
    case = Case(strategy=st.ACCO(first=1), micro_batches=3, ranks=2)
    clean, noisy = run(case), run(case.with_noise(st.Noise(VARIANCE)))
    start = clean[0].shown[0]
    for rank in range(case.ranks):
        pairs = list(zip(clean[rank].shown, noisy[rank].shown, strict=True))
        moments = [
            number
            for number, (one, _) in enumerate(pairs)
            if not number or not torch.equal(one, pairs[number - 1][0])
        ]
        estimate, committed = (pairs[moment][1].double() - pairs[moment][0] for moment in moments[1:3])
        assert not torch.equal(pairs[moments[1]][0], start)
        covariance = torch.cov(torch.stack([estimate, committed]))
        # Five standard deviations; that of a covariance is at most that of a variance.
        far = 5 * math.sqrt(2 / NUMEL) * VARIANCE
        expected = VARIANCE * torch.tensor([[1, 1 / 3], [1 / 3, 1]])
        assert float((covariance - expected).abs().max()) < far
