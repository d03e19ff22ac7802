"""What a plan's choice costs against the best one, on random virtual clusters.

    python experiments/plan_regret.py --clusters 1000 --out benchmarks/results/DATE-plan-regret

Each cluster has its own number of ranks, model, micro-batch, network (links of unequal rates, racks that share one, a
latency) and stragglers. The planner sees what it would measure there: the slowest rank's times, and one link for all.
It prices its arms on two ranks. Then the arms train on the whole cluster, every rank and link as it is. The regret is
how much longer an update of the choice takes than one of the best arm.

Only arms that the planner may choose take part. An arm whose price is above `CLOSE` times the lowest is not trained,
except on every tenth cluster, where all are: so the results say whether one of them was ever the best.
"""

import argparse
import dataclasses
import json
import math
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stretto import DataParallel, Options
from stretto.groups import Link
from stretto.groups.collectives import method_of
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.plan import Machine, compute_of, rank_by_time
from stretto_lab.train.arms import parse_arm
from stretto_lab.virtual import Network, Uplink, VirtualCluster

CLOSE = 1.25
TENSORS = 16
WARM_UP, COUNTED = 3, 6
"""Updates."""
TRANSFERS, TRANSFER_BYTES = 8, 2**12
"""What measures the link: all-to-alls at once, and bytes that each rank sends with one, about."""
BATCHES = 8
"""Micro-batches that every rank times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One random cluster, and the job that trains on it."""

    ranks: int
    numel: int
    """Of each of the model's tensors."""
    micro_batches: int
    even: Machine
    """What a rank would be measured as that is no straggler, without jitter and on the link of most ranks."""
    slowness: dict[int, float]
    jitter: float
    network: Network

    @property
    def bucket_bytes(self) -> int:
        """A quarter of the model, so that buckets follow each other."""
        return self.even.parameters


def draw(seed: int) -> Setting:
    """Return the cluster of a seed."""
    draws = random.Random(seed)
    ranks = round(2 * 128 ** (draws.random() ** 3))
    numel = 64 * round(2 ** draws.uniform(5, 8))
    micro_batches = draws.choice([1, 2, 4, 8])
    micro_batch_seconds = 10 ** draws.uniform(-3, -1)
    update_seconds = micro_batches * micro_batch_seconds
    exchange = update_seconds * draws.uniform(0.0, 0.1)
    # What fp32 sends takes a thirtieth to thirty times as long as computing.
    rate = 8 * 8 * numel * TENSORS * (ranks - 1) / ranks / (update_seconds * 10 ** draws.uniform(-1.5, 1.5))
    latency = 10 ** draws.uniform(-5, -2)
    slow = draws.sample(range(ranks), draws.randint(1, max(1, ranks // 10))) if draws.random() < 0.5 else []
    unequal = range(ranks) if draws.random() < 0.5 else ()
    racks = draws.choice([2, 4, 8]) if draws.random() < 0.3 else ranks
    shared = Link(bits_per_second=rate * draws.uniform(0.5, 4.0), latency_seconds=latency)
    return Setting(
        ranks=ranks,
        numel=numel,
        micro_batches=micro_batches,
        even=Machine(
            ranks=ranks,
            parameters=numel * TENSORS,
            forward_seconds=micro_batch_seconds / 3,
            backward_seconds=micro_batch_seconds * 2 / 3,
            load_seconds=0.0,
            step_seconds=update_seconds * draws.uniform(0.0, 0.1),
            exchange_seconds={
                wire: exchange * factor
                for wire, factor in (("fp32", 1.0), ("bf16", 1.2), ("int8", 2.5), ("int4", 3.0))
            },
            link=Link(bits_per_second=rate, latency_seconds=latency),
            cores=draws.choice([1.0, 2.0, float("inf")]),
        ),
        slowness={rank: draws.uniform(1.1, 3.0) for rank in slow},
        jitter=draws.uniform(0.0, 0.3),
        network=Network(
            link=Link(bits_per_second=rate, latency_seconds=latency),
            links={
                rank: Link(bits_per_second=rate * draws.uniform(0.3, 1.0), latency_seconds=latency)
                for rank in unequal
            },
            uplinks=tuple(
                Uplink(ranks=tuple(range(start, min(start + racks, ranks))), link=shared)
                for start in range(0, ranks, racks)
            )
            if racks < ranks
            else (),
        ),
    )


def measured(setting: Setting, draws: random.Random) -> Machine:
    """Return what `stretto plan` would measure on the cluster; its jitter is known from a few micro-batches only."""
    each = TRANSFER_BYTES // setting.ranks  # to every rank

    def send(rank: int, group: Any) -> float:
        whole = [torch.zeros(each * setting.ranks, dtype=torch.uint8) for _ in range(TRANSFERS)]
        works = [method_of(group, "all_to_all_single")(torch.empty_like(one), one, [], []) for one in whole]
        for work in works:
            work.wait()
        return float(group.now_ns) / 1e9

    taken = max(VirtualCluster(setting.ranks, setting.network).run(send).values)
    latency = setting.even.link.latency_seconds
    slowest = max([1.0, *setting.slowness.values()])
    sent = TRANSFERS * each * (setting.ranks - 1)
    even = setting.even
    return dataclasses.replace(
        even,
        forward_seconds=even.forward_seconds * slowest,
        backward_seconds=even.backward_seconds * slowest,
        step_seconds=even.step_seconds * slowest,
        exchange_seconds={wire: seconds * slowest for wire, seconds in even.exchange_seconds.items()},
        link=Link(bits_per_second=8 * sent / (taken - latency), latency_seconds=latency),
        jitter=statistics.fmean(
            math.sqrt(3)
            * statistics.stdev(draws.uniform(-setting.jitter, setting.jitter) for _ in range(BATCHES))
            for _ in range(setting.ranks)
        ),
    )


def train(setting: Setting, arm: str, seed: int) -> float:
    """Return the virtual seconds of an update of an arm on the whole cluster."""
    parsed = parse_arm(arm)
    options = Options(wire=parsed.wire, bucket_bytes=setting.bucket_bytes, allow_unused=True)

    def program(rank: int, group: Any) -> float:
        model = nn.ParameterList(nn.Parameter(torch.ones(setting.numel)) for _ in range(TENSORS))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        parallel = DataParallel(
            model,
            optimizer,
            parsed.strategy(),
            micro_batches=setting.micro_batches,
            group=group,
            options=options,
        )
        ends: list[float] = []
        while len(ends) < WARM_UP + COUNTED:
            loss = torch.stack([parameter.sum() for parameter in model]).sum()
            if parallel.backward(loss):
                ends.append(group.now_ns / 1e9)
        parallel.finish()
        return (ends[-1] - ends[WARM_UP - 1]) / COUNTED

    compute = dataclasses.replace(
        compute_of(parsed, setting.even, setting.micro_batches),
        slowness=setting.slowness,
        jitter=setting.jitter,
    )
    cluster = VirtualCluster(setting.ranks, setting.network, compute, seed=seed)
    return float(cluster.run(program).values[0])


def compare(seed: int) -> dict[str, Any]:
    """Return the prices and the times of one cluster's arms."""
    torch.set_num_threads(1)
    setting = draw(seed)
    ranking = rank_by_time(
        measured(setting, random.Random(-1 - seed)),
        micro_batches=setting.micro_batches,
        bucket_bytes=setting.bucket_bytes,
        prices_all=False,
    )
    prices = {one.arm: one.seconds for one in ranking.prices}
    limit = float("inf") if seed % 10 == 0 else CLOSE * min(prices.values())
    times = {arm: train(setting, arm, seed) for arm, seconds in prices.items() if seconds <= limit}
    best = min(times, key=times.__getitem__)
    return {
        "seed": seed,
        "ranks": setting.ranks,
        "micro_batches": setting.micro_batches,
        "stragglers": len(setting.slowness),
        "jitter": setting.jitter,
        "unequal_links": bool(setting.network.links),
        "racks": len(setting.network.uplinks),
        "choice": ranking.choice.arm,
        "best": best,
        "regret": times[ranking.choice.arm] / times[best] - 1,
        "prices": prices,
        "times": times,
    }


def main() -> None:
    """Compare on all clusters, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clusters", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first cluster")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    replace_json(options.out / "environment.json", describe_environment())
    rows: list[dict[str, Any]] = []
    seeds = range(options.first, options.first + options.clusters)
    with (
        ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool,
        Path(options.out, f"clusters-{options.first}.jsonl").open("w", buffering=1) as file,
    ):
        for row in pool.map(compare, seeds):
            rows.append(row)
            print(json.dumps(row), file=file)
            print(
                f"cluster {row['seed']}, {row['ranks']} ranks: {row['choice']}, regret {row['regret']:.4f}",
                flush=True,
            )
    regrets = sorted(row["regret"] for row in rows)
    whole = [row for row in rows if row["seed"] % 10 == 0]
    far = sum(row["prices"][row["best"]] > CLOSE * min(row["prices"].values()) for row in whole)
    percentiles = statistics.quantiles(regrets, n=100) if len(regrets) > 1 else regrets * 99
    print(
        f"{len(rows)} clusters: regret 0 in {sum(one == 0 for one in regrets)}, median {percentiles[49]:.4f}, "
        f"95th percentile {percentiles[94]:.4f}, most {regrets[-1]:.4f}; of {len(whole)} clusters with all arms "
        f"the best was priced above {CLOSE} times the lowest in {far}"
    )


if __name__ == "__main__":
    main()
