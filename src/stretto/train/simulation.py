"""A run on the virtual cluster: the training loop of every run, on many ranks of this process, in virtual time."""

import dataclasses
from pathlib import Path
from typing import Generic

import torch

from stretto.engine import Clock, Options
from stretto.errors import ConfigError
from stretto.faults import Fault
from stretto.train.arms import parse_arm
from stretto.train.configuration import RunConfig, TaskT
from stretto.train.launch import STEADY_AFTER
from stretto.train.outcome import Outcome, prepare_run_folder
from stretto.train.rank import Post, train_at
from stretto.train.slow_loader import SlowStore
from stretto.virtual import Compute, Results, VirtualCluster, VirtualGroup, parse_network

TRACE = "trace.jsonl"
"""What every rank did when, beside the files of any run."""
_NANOSECONDS_PER_MILLISECOND = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulateConfig(Options, Generic[TaskT]):
    """What is trained on which virtual cluster; the options of `DataParallel` beside it."""

    task: TaskT
    """Model, data and optimizer: what the recipe returned."""
    strategy: str = "acco"
    """ddp, zero1, dpu, wp or acco; what is set for it alone follows after colons, as in acco:first=1."""
    ranks: int = 64
    """Ranks, all in this process: memory and real time grow with them."""
    network: str = "office"
    """free, datacenter, ethernet, office, internet, or a link of every rank's own such as 100mbit,2ms."""
    micro_batch_ms: float = 100.0
    """Virtual milliseconds that one micro-batch costs."""
    step_ms: float = 0.0
    """Virtual milliseconds that one optimizer step, or preview, costs."""
    slow: dict[int, float] = dataclasses.field(default_factory=dict)
    """Ranks whose work takes longer, as 3=2.5,7=1.2."""
    jitter: float = 0.0
    """Share by which every piece of work costs more or less, drawn from the seed."""
    seed: int = 0
    """Decides initial parameters, order of the data and random draws, and whose turn it is among ranks that are
    ready at the same instant; not negative."""
    updates: int = 20
    """Committed updates after which the run ends."""
    micro_batches: int = 4
    """Micro-batches per rank and update."""
    echo: str = "none"
    """Use batches again while the next ones are on their way: as for `stretto train`."""
    slow_loader: str = "none"
    """MS[,jitter=CV]: virtual milliseconds that a rank waits for each micro-batch, read ahead in the background."""
    clock: Clock | None = None
    """MIN,MAX micro-batches per rank and round, by the virtual clock instead of a fixed number."""
    guards: tuple[str, ...] = ()
    """What watches over the job's values, separated by commas: replica, rest, audit:rate=0.01; see docs/guards.md,
    and `verified` for what travels."""
    faults: tuple[Fault, ...] = ()
    """Damage done on purpose: SITE:rank=R[:instant=N][:lasts=sticky]..., as masters:rank=1:instant=3; see
    docs/guards.md."""
    evaluate_every: int | None = None
    """Updates between evaluations of the held-out loss, beside those before and after the run."""
    run_dir: str | None = None
    """Folder for configuration, records, trace and model; None writes no files."""

    def as_run(self) -> RunConfig[TaskT]:
        """Return the same as a run that the training loop takes.

        Raises:
            UnknownName: No strategy is called so.
            ConfigError: Something cannot be, or the method is not one of ours.
        """
        arm = parse_arm(self.strategy)
        if not arm.is_ours:
            raise ConfigError(
                f"{arm.name} runs on real workers only: stretto compare RECIPE --strategies {arm.name}"
            )
        store = SlowStore.parse(self.slow_loader)
        if store is not None and store.decodes:
            raise ConfigError(
                f"slow loader {self.slow_loader!r}: what decoding takes of a core is not modelled: expected one that "
                "waits, as 30,jitter=0.5"
            )
        shared = {field.name for field in dataclasses.fields(RunConfig)}
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in shared
        }
        run = RunConfig(
            **settings, workers=self.ranks, device="cpu", checkpoint_every=None, tensorboard=False
        )
        return arm.configure(run)

    def cluster(self) -> VirtualCluster:
        """Return the cluster that the run takes place on.

        Raises:
            UnknownName: No network is called so.
            ConfigError: Something cannot be.
        """
        compute = Compute(
            micro_batch_ns=round(self.micro_batch_ms * _NANOSECONDS_PER_MILLISECOND),
            step_ns=round(self.step_ms * _NANOSECONDS_PER_MILLISECOND),
            slowness=self.slow,
            jitter=self.jitter,
        )
        return VirtualCluster(self.ranks, parse_network(self.network), compute, self.seed)


def simulate(simulation: SimulateConfig[TaskT]) -> Results[Outcome]:
    """Run `simulation` and return what every rank's run came to; all times are virtual.

    Raises:
        ConfigError: Something cannot be, or the folder holds a run already.
        StrettoError: A rank failed.
    """
    run, cluster = simulation.as_run(), simulation.cluster()
    prepare_run_folder(run)
    torch.set_num_threads(run.threads)

    def program(rank: int, group: VirtualGroup) -> Outcome:
        post = Post(
            rank=rank,
            world_size=cluster.world_size,
            device=torch.device("cpu"),
            group=group,
            now=lambda: group.now_ns / 1e9,
        )
        return train_at(post, run, STEADY_AFTER, shows_progress=False)

    results = cluster.run(program)
    if run.run_dir is not None:
        results.trace.write(Path(run.run_dir, TRACE))
    return results
