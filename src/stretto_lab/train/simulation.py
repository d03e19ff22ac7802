"""A run on the virtual cluster: the usual training loop, on many ranks of this process, in virtual time."""

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch

from stretto.disk import replace_file
from stretto.errors import ConfigError
from stretto.fields import check_at_least
from stretto_lab.faults import Fault
from stretto_lab.observe import Progress
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig, TaskT, Training, part_of
from stretto_lab.train.handle import check_run
from stretto_lab.train.launch import STEADY_AFTER
from stretto_lab.train.outcome import Outcome, prepare_run_folder
from stretto_lab.train.rank import RankContext, header_of, train_at
from stretto_lab.train.slow_loader import SlowStore
from stretto_lab.train.workers import device_of
from stretto_lab.virtual import Compute, Results, VirtualCluster, VirtualGroup, parse_network

TRACE = "trace.jsonl"
"""File of the trace of every rank; the other files are the same as in any run."""
DEFAULT_UPDATES = 20
"""Default length of a run, since a virtual run takes more real than virtual time."""
_NANOSECONDS_PER_MILLISECOND = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulateConfig(Training[TaskT]):
    """The recipe and the virtual cluster that trains it."""

    strategy: str = "zero1"
    """ddp, zero1, dpu, wp, acco, average, local, diloco, paft-sync or paft-dyn; settings after colons as for `stretto
    train`."""
    ranks: int = 64
    """Number of ranks, all in this process; memory and real time grow with it."""
    network: str = "office"
    """free, datacenter, ethernet, office, internet, or a link for every rank, such as 100mbit,2ms."""
    nodes: int | None = None
    """Number of nodes of equal size, each with one link of the network to the others; links inside nodes are free. None
    gives every rank a link."""
    micro_batch_ms: float = 100.0
    """Virtual milliseconds of one micro-batch."""
    step_ms: float = 0.0
    """Virtual milliseconds of one optimizer step or preview."""
    slow: dict[int, float] = dataclasses.field(default_factory=dict)
    """Ranks whose work takes longer, as 3=2.5,7=1.2."""
    jitter: float = 0.0
    """Share by which the time of work varies, up and down; drawn from the seed."""
    seed: int = 0
    """Seed of the initial parameters, all draws, and the order of ranks that are ready at the same instant. Not
    negative."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Device of all models; auto uses a CUDA device if there is one. Times are virtual on each device."""
    updates: int | None = None
    """Committed updates after which the run ends; 20 if nothing else ends it."""
    slow_loader: str = "none"
    """MS[,jitter=CV]: virtual milliseconds that a rank waits for each micro-batch, which the loader reads ahead in the
    background."""
    faults: tuple[Fault, ...] = ()
    """Faults to inject as a rehearsal: SITE:rank=R[:instant=N][:lasts=sticky]..., as masters:rank=1:instant=3, or with
    rank=all; see the page guards."""
    evaluate_every: int | None = None
    """Updates between evaluations of the held-out loss, besides the evaluations before and after the run."""
    run_dir: str | None = None
    """Folder for config, records, trace and model; None writes no files."""

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        check_at_least(self, ranks=1)
        if not all(0 <= cost < math.inf for cost in (self.micro_batch_ms, self.step_ms)):
            raise ConfigError(
                f"micro_batch_ms and step_ms must be finite and at least 0, found {self.micro_batch_ms} and "
                f"{self.step_ms}"
            )
        if outside := [rank for rank in self.slow if not 0 <= rank < self.ranks]:
            raise ConfigError(f"slow names rank {outside[0]}; the run has ranks 0 to {self.ranks - 1}")
        arm = parse_arm(self.strategy)
        if not arm.is_ours:
            raise ConfigError(
                f"{arm.name} runs on real workers only: stretto compare RECIPE --strategies {arm.name}"
            )
        store = SlowStore.parse(self.slow_loader)
        if store is not None and store.decodes:
            raise ConfigError(
                f"slow loader {self.slow_loader!r}: the time that decoding takes from a core is not modelled: "
                "expected a loader that waits, as 30,jitter=0.5"
            )
        self.cluster()  # refuses a network and costs that cannot be

    @property
    def planned_updates(self) -> int | None:
        """Committed updates after which the run ends; None if samples end it."""
        return DEFAULT_UPDATES if self.updates is None and self.samples is None else self.updates

    def as_run(self) -> RunConfig[TaskT]:
        """Return the configuration of an equal run on real workers, as the training loop takes it."""
        run = RunConfig(
            **{**part_of(self, Training), "updates": self.planned_updates},
            strategy=self.strategy,
            faults=self.faults,
            run_dir=self.run_dir,
            workers=self.ranks,
            device=self.device,
            checkpoint_every=None,
            tensorboard=False,
        )
        return run.run_of(parse_arm(self.strategy))

    def cluster(self) -> VirtualCluster:
        """Return the virtual cluster of the run."""
        compute = Compute(
            micro_batch_ns=round(self.micro_batch_ms * _NANOSECONDS_PER_MILLISECOND),
            step_ns=round(self.step_ms * _NANOSECONDS_PER_MILLISECOND),
            slowness=self.slow,
            jitter=self.jitter,
        )
        network = parse_network(self.network)
        if self.nodes is not None:
            network = network.between(self.nodes, self.ranks)
        return VirtualCluster(self.ranks, network, compute, self.seed)


def simulate(simulation: SimulateConfig[TaskT], *, shows_progress: bool = False) -> Results[Outcome]:
    """Run `simulation`, show the progress of rank 0 if asked, and return the outcome of every rank; all times are
    virtual.

    Raises:
        ConfigError: Settings contradict each other, or the folder already contains a run.
        StrettoError: A rank failed.
    """
    run, cluster = simulation.as_run(), simulation.cluster()
    check_run(run, cluster.world_size)
    device = device_of(simulation.device, 0, 1)  # all ranks share it
    prepare_run_folder(run, device=device)
    torch.set_num_threads(1)
    progress = Progress(header_of(run, is_virtual=True)) if shows_progress else None
    losses: dict[int, float] = {}

    def program(rank: int, group: VirtualGroup) -> Outcome:
        context = RankContext(
            rank=rank,
            world_size=cluster.world_size,
            device=device,
            group=group,
            now=lambda: group.now_ns / 1e9,
            losses=losses,
        )
        return train_at(context, run, STEADY_AFTER, progress if rank == 0 else None)

    with nullcontext() if progress is None else progress.watched():
        results = cluster.run(program)
    if run.run_dir is not None:
        replace_file(Path(run.run_dir, TRACE), results.trace.write)
    return results
