"""A job whose model is sharded inside nodes equals what it should be equal to: to the bit where sums have one order.

What people do with their models is in the rows too: adapters, mixed precision, recomputation, compiling, optimizers
that step whole tensors. Tied weights and a frozen layer are in all of these models.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy

from stretto import (
    ACCO,
    DDP,
    DPU,
    AtRest,
    Clock,
    DataParallel,
    DiLoCo,
    LocalSGD,
    Options,
    ReplicaGuard,
    ZeRO1,
)
from stretto.engine.runtime import Pending
from tests.draws import draws
from tests.processes import run_ranks
from tests.sharded.jobs import (
    STRATEGIES,
    WORLD_SIZE,
    Case,
    Network,
    Outcome,
    adamw,
    beside_adamw,
    lars,
    network,
    run_plainly,
    run_sharded,
    run_whole,
    sharded,
    tolerance,
)


class Adapted(nn.Module):
    """A frozen layer with an adapter of LoRA beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.base(values) + self.up(self.down(values))
        return result


def with_lora(width: int) -> Network:
    model = network(width).requires_grad_(False)
    torch.manual_seed(1)
    model.mix = nn.ModuleList(Adapted(layer) for layer in model.mix)
    return model


def recomputed(width: int) -> Network:
    model = network(width)
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.mix))
    return model


class Looked:
    """Work whose lane is free when a schedule says so."""

    def __init__(self, pending: Pending[Any], answers: Any) -> None:
        self._pending, self._answers = pending, answers

    def done(self) -> bool:
        return next(self._answers)

    def result(self) -> Any:
        return self._pending.result()


def by_schedule(parallel: DataParallel, ranks: Sequence[int]) -> None:
    """Let the lane be free when the draws of all `ranks` say so."""
    runtime: Any = parallel.job.compute.runtime
    runtime = getattr(runtime, "_runtime", runtime)  # of a node, each rank has one inside
    rngs = [random.Random(f"clock {rank}") for rank in ranks]

    def answers() -> Any:
        while True:
            yield all([one.random() < 0.6 for one in rngs])

    spawn, schedule = runtime.spawn, answers()
    runtime.spawn = lambda work: Looked(spawn(work), schedule)


MODELS = {"plain": network, "lora": with_lora, "recomputed": recomputed}
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "bf16, sums in fp32": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
}
CLIPPED = Options(bucket_bytes=512, clip_norm=0.3)
PACKED = Options(bucket_bytes=512, wire="int8", clip_norm=0.5)
SKIPPING = Options(bucket_bytes=512, nonfinite="skip")
POISONED = (3, 4)
"""Rank and micro-batch: the first words, whose gradients are not finite, lie on rank 2."""
ON_WIRES = {
    "bf16": ZeRO1(),
    "int8": ACCO(),
    "int4": DiLoCo(interval=2, fragments=1, delay=1),
    "int2": DiLoCo(interval=2, fragments=1, delay=1),
    "rotated4": ACCO(),
    "rotated2": ZeRO1(),
}
OF_WHOLE_TENSORS = {
    **{one.name: Case(strategy=one) for one in STRATEGIES},
    "zero1, rows that do not divide": Case(width=11),
    "acco, rows that do not divide": Case(strategy=ACCO(), width=11),
    "acco on int8": Case(strategy=ACCO(), options=PACKED),
    "diloco on int8": Case(strategy=DiLoCo(interval=2, fragments=2), options=PACKED),
}
INT8 = 0.02
"""A tenth of what training changes: blocks are cut elsewhere, and int8 rounds to a 254th of the largest in each."""
muon = functools.partial(beside_adamw, torch.optim.Muon, ("mix", "back"))


@dataclasses.dataclass(frozen=True)
class Row:
    """A case, its nodes, and what it is compared with: to the bit, or with whole models within rounding."""

    case: Case
    nodes: int
    against: Literal["whole", "pytorch"] | Case
    within: float | None = None
    """Or within so much."""


def exact_rows() -> Iterator[tuple[str, Row]]:
    """Equal to the bit."""
    clipped = dataclasses.replace(CLIPPED, clip_norm=0.5)
    for one in STRATEGIES:
        yield (
            f"{one.name}, nodes of one shard",
            Row(Case(strategy=one, optimizer=adamw, options=clipped), 4, "whole"),
        )
    for wire, one in ON_WIRES.items():
        case = Case(strategy=one, optimizer=adamw, options=dataclasses.replace(clipped, wire=wire))
        yield f"{one.name} on {wire}, nodes of one shard", Row(case, 4, "whole")
    for name, case in OF_WHOLE_TENSORS.items():
        yield f"muon, {name}, nodes of one shard", Row(dataclasses.replace(case, optimizer=muon), 4, "whole")
    for model, policy in itertools.product(MODELS, POLICIES):
        # HSDP adds up nodes in the policy's 16 bits too, a strategy in the wire's format: on one node they agree.
        optimizer = {} if model == "lora" else {"optimizer": adamw}
        case = Case(model=MODELS[model], policy=POLICIES[policy], micro_batches=1, **optimizer)
        yield f"{model}, {policy}", Row(case, 1 if policy == "bf16" else 2, "pytorch")
    for one, optimizer, policy in itertools.product(
        (ZeRO1(), DDP()), (adamw, muon), ("fp32", "bf16, sums in fp32")
    ):
        case = Case(strategy=one, optimizer=optimizer, policy=POLICIES[policy], micro_batches=1)
        yield f"{one.name}, {policy}, one node, {optimizer}", Row(case, 1, "pytorch")
    for one in STRATEGIES:
        yield f"{one.name}, evaluated", Row(Case(strategy=one, evaluates=True), 2, Case(strategy=one))
    for one in (DDP(), ZeRO1(), ACCO()):
        case = Case(strategy=one, optimizer=muon)
        guarded = dataclasses.replace(case, guards=(ReplicaGuard(), AtRest()))
        yield f"muon, {one.name}, guarded", Row(guarded, 2, case)


def rows_of_two_nodes() -> Iterator[tuple[str, Row]]:
    """Two nodes of two shards are two ranks with whole models, up to rounding."""
    cases = {one.name: Case(strategy=one) for one in STRATEGIES}
    cases["acco, clipped"] = Case(strategy=ACCO(), options=CLIPPED)
    cases["ddp, clipped"] = Case(strategy=DDP(), options=CLIPPED)
    cases["zero1, unequal weights"] = Case(weights=(0.5, 3.0, 2.0, 1.0))
    cases["acco, weight zero on one rank"] = Case(strategy=ACCO(), weights=(1.0, 0.0, 2.0, 1.0))
    for one in (ZeRO1(), DDP(), ACCO(), LocalSGD(0.34)):
        cases[f"{one.name}, a shard not finite"] = Case(strategy=one, options=SKIPPING, poisoned=POISONED)
    ends = itertools.product(("any", "all"), (True, False), (ZeRO1(), ACCO(), LocalSGD(0.34)))
    for until, has_length, one in ends:
        name = f"{one.name}, until {until} ends, lengths {'' if has_length else 'not '}known"
        cases[name] = Case(strategy=one, lengths=(8, 5, 8, 8), until=until, has_length=has_length)
    for one in (ACCO(), DPU(), ZeRO1()):
        clock = Clock(minimum=1, maximum=4)
        cases[f"{one.name}, by a clock"] = Case(strategy=one, micro_batches=clock, prepared=by_schedule)
    for model, one in itertools.product(MODELS, (ACCO(), DiLoCo(interval=2, fragments=1))):
        cases[f"{model}, {one.name}"] = Case(strategy=one, model=MODELS[model])
    for one in (ZeRO1(), ACCO(), DiLoCo(interval=2, fragments=1)):
        cases[f"{one.name}, compiled"] = Case(strategy=one, compiles=True)
    for name, case in cases.items():
        yield f"{name}, two nodes", Row(case, 2, "whole")
    for name, case in OF_WHOLE_TENSORS.items():
        row = Row(
            dataclasses.replace(case, optimizer=lars), 2, "whole", INT8 if case.options is PACKED else None
        )
        yield f"lars, {name}, two nodes", row


ROWS = {**dict(exact_rows()), **dict(rows_of_two_nodes())}
BLOCKS = 51
"""About as many as either kind has rows: a block has one of each."""


def compared(rank: int, names: Sequence[str]) -> dict[str, tuple[list[str], list[float]]]:
    """Of every row: what differs on this rank, and the norms that it is told."""
    found = {}
    for name in names:
        row = ROWS[name]
        shards = WORLD_SIZE // row.nodes
        outcome = run_sharded(row.case, rank, row.nodes, shards)
        if row.against == "pytorch":
            expected = run_plainly(row.case, rank, row.nodes, shards)
            faults = [] if outcome.distance(expected) == 0 else [f"{outcome.distance(expected)} off"]
        elif row.against == "whole":
            expected = run_whole(row.case, rank, row.nodes)
            faults = list(differing(row, outcome, expected))
        else:
            expected = run_sharded(row.against, rank, row.nodes, shards)
            faults = (
                [] if outcome.equals(expected) else [f"{outcome.distance(expected)} off, or told otherwise"]
            )
        faults += [str(one) for update in outcome.updates for one in update.incidents]
        found[name] = faults, [update.gradient_norm for update in outcome.updates]
    return found


def differing(row: Row, outcome: Outcome, expected: Outcome) -> Iterator[str]:
    """Yield in what a job over shards differs from whole models."""
    if row.nodes == WORLD_SIZE:
        if not outcome.equals(expected):
            yield f"{outcome.distance(expected)} off, or told otherwise"
        return
    allowed = tolerance(row.case, expected) if row.within is None else row.within
    if not outcome.distance(expected) <= allowed:
        yield f"{outcome.distance(expected)} off, of {allowed}"
    for told in ("weight", "skipped_rounds"):
        ours, theirs = ([getattr(update, told) for update in one.updates] for one in (outcome, expected))
        if ours != theirs:
            yield f"{told}: {ours}, not {theirs}"
    ours, theirs = ([update.gradient_norm for update in one.updates] for one in (outcome, expected))
    if row.within is None and ours != pytest.approx(theirs, rel=1e-5, abs=0, nan_ok=True):
        yield f"norms: {ours}, not {theirs}"
    sizes = {count for update in outcome.updates for counts in update.rounds for count in counts}
    if isinstance(row.case.micro_batches, Clock) and row.case.strategy.overlaps and len(sizes) == 1:
        yield "the clock made all rounds alike"


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_job_over_shards_is_what_it_should_be(block: int) -> None:
    """A run of four ranks goes through a row of each kind: to the bit, and on two nodes."""
    names = list(ROWS)[block::BLOCKS]
    results = run_ranks(WORLD_SIZE, compared, names)
    for name in names:
        for rank, found in enumerate(results):
            faults, norms = found[name]
            assert faults == [], (name, rank)
            node = rank // (WORLD_SIZE // ROWS[name].nodes) * (WORLD_SIZE // ROWS[name].nodes)
            assert repr(norms) == repr(results[node][name][1]), (name, rank)


def dealt(rank: int) -> list[list[tuple[int, ...]]]:
    """Of random jobs: set, place and bucket of every matrix that stays whole."""
    found = []
    for seed in draws(8):
        rng = random.Random(seed)
        nodes, shards = rng.choice([(2, 2), (1, WORLD_SIZE)])
        case = Case(
            strategy=rng.choice([ZeRO1(), ACCO(), DDP()]),
            optimizer=lars,
            options=Options(bucket_bytes=rng.choice([256, 512, 4096])),
            width=rng.randint(13, 40),
        )
        _, parallel = sharded(case, nodes, shards)
        layout = parallel.job.layout
        places = [(slot.index, slot.set_index, slot.start) for slot in layout.slots if slot.is_whole]
        whole_sets = {set_index for _, set_index, _ in places}
        buckets = [
            (one.set_index, one.start, one.numel) for one in layout.buckets if one.set_index in whole_sets
        ]
        found.append([*places, *buckets])
        parallel.finish()
    return found


def test_all_ranks_deal_whole_tensors_alike_however_many_rows_they_hold() -> None:
    first, *others = run_ranks(WORLD_SIZE, dealt)
    assert [] not in first
    assert others == [first] * len(others)
