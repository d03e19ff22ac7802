"""Jobs whose workers are nodes, on virtual ranks."""

import dataclasses
from typing import Any

import stretto as st
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster
from tests.exactness.jobs import Case, Observed, train

STRATEGIES: tuple[Strategy, ...] = (
    st.DiLoCo(interval=3, worker="node"),
    st.DiLoCo(interval=6, fragments=2, delay=2, mix=0.25, keep_progress=True, worker="node"),
    st.LocalSGD(rate=0.4, worker="node"),
    st.LocalSGD(rate=0.4, state=True, worker="node"),
)


def with_nodes(case: Case, ranks_per_node: int | None) -> Case:
    return dataclasses.replace(case, options=dataclasses.replace(case.options, ranks_per_node=ranks_per_node))


def of_ranks(strategy: Strategy) -> Strategy:
    """The same with workers that are ranks."""
    changed: Any = strategy
    return dataclasses.replace(changed, worker="rank")


def run(case: Case, world_size: int, ranks_per_node: int | None) -> tuple[Observed, ...]:
    chosen = with_nodes(case, ranks_per_node)
    return VirtualCluster(world_size).run(lambda rank, group: train(rank, chosen, group)).values
