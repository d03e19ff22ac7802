"""Ranks are lost on real workers, again and again, at any moment: does the job go on, or say in one line why not?

Every trial is a job for `stretto.survives` on 2 to 6 nodes. Each is a network namespace with one rank and an agent that
starts it again, as `torchrun --nnodes=1 --max-restarts` would; on one more `stretto meet` hosts the store. One or two
things happen, drawn from the trial's seed: a rank is killed; a rank and its agent are killed, and nobody comes in its
place; a node is lost, and returns later; the store's host is killed; a link goes down and comes up again; a rank is
stopped and wakes. Two happen at once, or the second one while the job recovers from the first, or while a rank comes
again.

A trial fails if a process hangs, or ends in words that do not fit what was done to it; if ranks go on without one that
nothing was done to; if ranks of a term differ in members or in the update they go on from; if more updates are done
again than lie between two states; if a sample counts twice or not at all; or if models differ. Those of the ranks must
be equal to the bit; that of an exact strategy, and the model of one undisturbed rank, but for the order of sums.

    python experiments/lost_ranks.py --trials 200 --out benchmarks/results/DATE-lost-ranks

Needs Linux, root and iproute2. Processes are forked from this one, which has imported PyTorch.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it; here that is done once, for all processes
from launched import until
from numbered import Numbered
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import stretto as st
from benchmarks.namespaces import Namespaces
from stretto.machine import describe_environment
from stretto_lab.cli import main as stretto_main
from stretto_lab.observe import replace_json

STRATEGIES = {"ddp": st.DDP, "zero1": st.ZeRO1, "acco": st.ACCO}
EXACT = ("ddp", "zero1")
"""Their updates depend on the samples alone, not on how ranks and rounds share them."""
TOTAL = st.Total(12)
SILENT_SECONDS = 6.0
OUTAGE_SECONDS = (1.0, 15.0)
"""Of links, stops and lost nodes: on both sides of `SILENT_SECONDS`."""
LONG_OUTAGE_SECONDS = (15.0, 90.0)
"""Of one in six: the others have ended before."""
HANGS_AFTER = 240.0
"""Seconds after the last event and after any word of any process, on a busy machine; a store that is cut off is waited
for 11 s, and a new term 15 s."""
BEGINS_WITHIN = 600.0
"""Seconds until the first event; ten are enough on a machine that has nothing else to do."""
TOLERANCE = 1e-4
"""Between parameters after 60 steps of AdamW; sums in another order make 1e-6, and one update less 1e-2."""
PORT = 29400
KINDS = ("kill", "kill", "gone", "node", "link", "stop", "host")
_LOSSES = {"kill", "gone", "node", "link", "stop"}
COMES_AGAIN = "the other members continue without this process"
STORE = "the store of the members"
MEANT = {
    "no generation in memory is whole": _LOSSES,
    STORE: {"host", "link"},
    "no store at": {"host", "link"},
    COMES_AGAIN: _LOSSES,
    "the job ended before this process could join": {*_LOSSES, "host"},
}
"""What a rank that does not end its work may say, and after what; one that has come again may be too slow, too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What happens to one node, and when."""

    kind: str
    node: int
    after: int
    """Update that some rank has committed."""
    seconds: float
    """And so much later."""
    lasts: float
    """Seconds until a link is up again, a stopped rank wakes, or a lost node returns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One job, and what happens to it."""

    seed: int
    ranks: int
    strategy: str
    every: int
    """Updates between states."""
    rate: str
    events: tuple[Event, ...]
    updates: int = 60
    micro_batch_seconds: float = 0.01
    starts: int = 4
    """Of one node's processes, at most."""
    order: int = 0
    """Which samples have the numbers."""


def drawn(seed: int, of_kinds: Sequence[str] = KINDS) -> Trial:
    """Draw a trial in which nothing else happens than these kinds."""
    rng = random.Random(seed)
    ranks, after = rng.choice([2, 3, 3, 4, 6]), rng.randint(2, 45)
    later = rng.choice([0.0, rng.uniform(0, 3), rng.uniform(0, 12)])
    events: list[Event] = []
    for number, node in enumerate(rng.sample(range(ranks), rng.choice([1, 1, 2]))):
        kinds = [kind for kind in of_kinds if kind != "gone" or not events]  # of two ranks one is left
        lasts = rng.uniform(*rng.choice([*[OUTAGE_SECONDS] * 5, LONG_OUTAGE_SECONDS]))
        at = round(rng.uniform(0, 0.1) + number * later, 3)
        events.append(
            Event(kind=rng.choice(kinds), node=node, after=after, seconds=at, lasts=round(lasts, 1))
        )
    return Trial(
        seed=seed,
        ranks=ranks,
        strategy=rng.choice(list(STRATEGIES)),
        every=rng.choice([1, 4, 9]),
        rate=rng.choice(["none", "100mbit", "10mbit"]),
        events=tuple(events),
    )


class Built:
    """What a process builds before it gives its name; nobody waits for that."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)


class Job:
    """One rank's job in one term."""

    def __init__(self, trial: Trial, group: ProcessGroup | None, built: Built) -> None:
        self.model, self._trial = built.model, trial
        options = st.Options(silent_seconds=SILENT_SECONDS, timeout_seconds=60.0, bucket_bytes=4096)
        self.parallel = st.DataParallel(
            self.model,
            built.optimizer,
            STRATEGIES[trial.strategy](),
            micro_batches=TOTAL,
            group=group,
            options=options,
        )
        self.numbers = Numbered(self.parallel.rank, self.parallel.world_size, TOTAL)

    def train(self, on_update: Callable[[st.Update], None]) -> list[float]:
        """Return the parameters after all updates."""
        with self.parallel:
            for number in self.parallel.feed(self.numbers, updates=self._trial.updates, on_update=on_update):
                time.sleep(self._trial.micro_batch_seconds)
                inputs, targets = points(4, self._trial.order * 10**9 + number)
                self.parallel.backward((self.model(inputs) - targets).square().mean())
            self.parallel.finish()
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]).tolist()


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points with what the model should say of them."""
    inputs = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.sum(1, keepdim=True).sin()


def tell(said: Path, **line: Any) -> None:
    """Add a line to what a process has said."""
    with said.open("a") as file:
        file.write(json.dumps({"at": time.monotonic(), **line}) + "\n")


def live(trial: Trial, node: int, said: Path) -> None:
    """One process's life; it writes what it sees into a file, a line each."""

    built = Built()

    def train(term: st.Term) -> list[float]:
        tell(said, begins=term.number)
        job = Job(trial, term.group, built)
        restored = term.go_on(job.parallel, loader=job.numbers)
        if restored is not None and len(restored.loader_states) != term.world_size:
            job.numbers.deal(restored.loader_states)
        step = 0 if restored is None else restored.step
        tell(said, term=term.number, seats=term.seats, step=step)

        def on_update(update: st.Update) -> None:
            tell(said, update=update.step, samples=update.samples)
            term.keep(job.parallel, loader=job.numbers)

        model = job.train(on_update)
        tell(said, given=job.numbers.given, **job.numbers.state_dict())
        return model

    try:
        model = st.survives(
            train,
            store=f"{address_of(trial.ranks)}:{PORT}",
            rank=node,
            ranks=trial.ranks,
            every=trial.every,
            silent_seconds=SILENT_SECONDS,
            address=address_of(node),
        )
        tell(said, model=model)
    except BaseException as error:
        tell(said, error=f"{type(error).__name__}: {error}".splitlines()[0])
        traceback.print_exc()
        is_cut_off = STORE in str(error) and all(event.kind != "host" for event in trial.events)
        if is_cut_off or COMES_AGAIN in str(error):
            return
    with said.open("a") as file:
        file.write(OVER)


OVER = json.dumps({"over": True}) + "\n"
"""The last line of a process after which none is started: the work is done, or cannot go on."""


def address_of(node: int) -> str:
    """Return the address of a node's namespace."""
    return f"10.77.0.{node + 1}"


def forked(space: str, log: Path, work: Callable[[], object]) -> int:
    """Start a process in a network namespace; return its id."""
    if pid := os.fork():
        return pid
    try:
        with Path("/run/netns", space).open() as namespace:
            ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0)
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(stream, descriptor)
        torch.set_num_threads(1)
        work()
    finally:
        os._exit(0)


class Running:
    """A trial under way: its processes, by node, and when what happened."""

    def __init__(self, trial: Trial, spaces: Sequence[str], folder: Path) -> None:
        self.trial, self._spaces, self._folder = trial, spaces, folder
        self.said: list[list[Path]] = [[] for _ in range(trial.ranks)]
        self._pids: dict[int, int] = {}
        self._returns: dict[int, float] = {}
        self._gone: set[int] = set()
        (folder / "meet.log").touch()
        self._host = forked(spaces[-1], folder / "meet.log", self._meet)
        self.struck: list[tuple[Event, float]] = []
        self.hung: list[int] = []
        self._last_heard = 0
        until(lambda: "meeting at" in (folder / "meet.log").read_text(), "the store")
        for node in range(trial.ranks):
            self._start(node)

    def run(self) -> None:
        """Let everything happen, until no process is left or somebody hangs."""
        ahead = sorted(self.trial.events, key=lambda event: event.seconds)
        due: float | None = None
        undone: list[tuple[float, Callable[[], None]]] = []
        ends = time.monotonic() + BEGINS_WITHIN
        while self._pids or any(at > time.monotonic() for at in self._returns.values()):
            time.sleep(0.01)
            now = time.monotonic()
            if due is None and self._reached() >= ahead[0].after:
                due = now
            while ahead and due is not None and now >= due + ahead[0].seconds:
                event = ahead.pop(0)
                self.struck.append((event, time.monotonic()))
                undo = self._strike(event)
                undone.append((now + event.lasts, undo))
                ends = now + event.lasts + HANGS_AFTER
            for at, undo in [one for one in undone if one[0] <= now]:
                undone.remove((at, undo))
                undo()
            self._reap(is_over=self._has_ended())
            if not ahead and (heard := self._heard()) != self._last_heard:
                self._last_heard, ends = heard, max(ends, now + HANGS_AFTER)
            if now > ends:
                self.hung = list(self._pids)
                break
        for pid in (*self._pids.values(), self._host):
            _signal(pid, signal.SIGKILL)

    def _strike(self, event: Event) -> Callable[[], None]:
        node, pid = event.node, self._pids.get(event.node)
        if event.kind == "host":
            _signal(self._host, signal.SIGKILL)
        elif event.kind == "link":
            self._link(node, "down")
            return lambda: self._link(node, "up")
        elif event.kind == "stop" and pid is not None:
            _signal(pid, signal.SIGSTOP)
            return lambda: _signal(pid, signal.SIGCONT)
        elif pid is not None:
            if event.kind == "gone":
                self._gone.add(node)
            if event.kind == "node":
                self._returns[node] = time.monotonic() + event.lasts
            _signal(pid, signal.SIGKILL)
        return lambda: None

    def _link(self, node: int, way: str) -> None:
        subprocess.run(["ip", "-n", self._spaces[node], "link", "set", "eth0", way], check=True)

    def _reap(self, *, is_over: bool) -> None:
        """The agents: a process that has ended is started again, unless the job is over."""
        for node, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._pids[node]
                if node not in self._gone:
                    self._returns.setdefault(node, time.monotonic())
        for node, at in list(self._returns.items()):
            if is_over or len(self.said[node]) == self.trial.starts:
                del self._returns[node]
            elif time.monotonic() >= at and node not in self._pids:
                del self._returns[node]
                self._start(node)

    def _start(self, node: int) -> None:
        path = self._folder / f"{node}-{len(self.said[node])}.jsonl"
        self.said[node].append(path)
        path.touch()
        self._pids[node] = forked(
            self._spaces[node], self._folder / f"{node}.log", lambda: live(self.trial, node, path)
        )

    def _meet(self) -> None:
        stretto_main(["meet", "--host", address_of(self.trial.ranks), "--port", str(PORT)])

    def _reached(self) -> int:
        return max((line.get("update", 0) for path in self._paths for line in lines_of(path)), default=0)

    def _heard(self) -> int:
        """Return how many bytes all processes have written."""
        return sum(path.stat().st_size for path in self._paths)

    def _has_ended(self) -> bool:
        return any(_end_of(path) == OVER for path in self._paths)

    @property
    def _paths(self) -> list[Path]:
        return [path for paths in self.said for path in paths]


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(OVER)))
        return file.read().decode()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return what a process has said; a killed one may have left half a line."""
    lines = path.read_text().removesuffix(OVER).split("\n")[:-1]
    return [json.loads(line) for line in lines]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a trial."""

    outcome: str
    """What the job did: "went on", or the words in which it ended."""
    faults: list[str]
    """What must not be; none where all is well."""
    redone: int
    """Most updates that were done again at once."""
    seconds: tuple[float, ...]
    """From the first event until the next term has begun, a state is loaded, and an update is committed; none where
    there was no such term."""
    deviation: float | None
    """Of the parameters, at most, from those of one undisturbed rank."""


def judged(running: Running, calm: list[float] | None) -> Verdict:
    """Judge a trial that is over, by the parameters of one undisturbed rank."""
    trial = running.trial
    kinds = {event.kind for event, _ in running.struck}
    hit = {event.node for event, _ in running.struck if event.kind != "host"}
    lives = [(node, lines_of(path)) for node, paths in enumerate(running.said) for path in paths]
    faults = [f"node {node} hangs" for node in running.hung]
    errors = [(node, line["error"]) for node, lines in lives for line in lines if "error" in line]
    for node, error in errors:
        meant = next((after for words, after in MEANT.items() if words in error), set())
        if not meant & kinds or ("continue without" in error and node not in hit):
            faults.append(f"node {node} ended with {error}")
    models = [line["model"] for _, lines in lives for line in lines if "model" in line]
    if any(model != models[0] for model in models):
        faults.append("models differ")
    if not models and not errors and not running.hung:
        faults.append("nobody ended its work, and nobody says why")
    faults += _of_terms(trial, lives, hit)
    deviation = None
    if models and calm is not None and trial.strategy in EXACT:
        deviation = max(abs(one - other) for one, other in zip(models[0], calm, strict=True))
        if deviation > TOLERANCE:
            faults.append(f"parameters are {deviation:.3g} from those of one rank")
    if models:
        faults += _of_samples(trial, lives)
    return Verdict(
        outcome="went on" if models else sorted({error for _, error in errors} or {"hangs"})[0],
        faults=faults,
        redone=max((again for _, again in _redone(lives)), default=0),
        seconds=_phases(running, lives),
        deviation=deviation,
    )


def _terms(lives: Sequence[tuple[int, list[dict[str, Any]]]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for _, lines in lives:
        for line in lines:
            if "term" in line:
                found.setdefault(line["term"], []).append(line)
    return dict(sorted(found.items()))


def _of_terms(
    trial: Trial, lives: Sequence[tuple[int, list[dict[str, Any]]]], hit: set[int]
) -> Iterator[str]:
    before: list[int] = []
    for number, told in _terms(lives).items():
        if len({(tuple(line["seats"]), line["step"]) for line in told}) > 1:
            yield f"ranks of term {number} differ"
        seats = told[0]["seats"]
        for seat in before:
            if seat not in seats and seat < trial.ranks and seat not in hit:
                yield f"term {number} goes on without node {seat}, to which nothing was done"
        before = seats
    for number, again in _redone(lives):
        if again > trial.every + 1:  # one may be under way while a state is kept
            yield f"term {number} does {again} updates again, with a state every {trial.every}"


def _redone(lives: Sequence[tuple[int, list[dict[str, Any]]]]) -> Iterator[tuple[int, int]]:
    """Yield each term with the updates that it does again, by who lived through the one before."""
    for _, lines in lives:
        reached = 0
        for line in lines:
            if "term" in line:
                if reached:
                    yield line["term"], reached - line["step"]
                reached = line["step"]
            reached = line.get("update", reached)


def _of_samples(trial: Trial, lives: Sequence[tuple[int, list[dict[str, Any]]]]) -> Iterator[str]:
    counted: dict[int, tuple[int, int]] = {}  # by update, the term and the samples of when it was done last
    last = -1
    ends: list[dict[str, Any]] = []  # of the last term: what each rank was given, and its position
    for _, lines in lives:
        term = -1
        for line in lines:
            if "term" in line:
                term = line["term"]
                if term > last:
                    last, ends = term, []
            if "update" in line:
                counted[line["update"]] = max(counted.get(line["update"], (-1, 0)), (term, line["samples"]))
            if "given" in line and term == last:
                ends.append(line)
    given = sorted(number for line in ends for number in line["given"])
    if given != list(range(given[0], given[0] + len(given)) if given else []):
        yield "the samples of the last term are not one run of the order"
    total = sum(samples for _, samples in counted.values())
    read = ends[0]["begin"] + sum(line["taken"] for line in ends) if ends else 0
    if total != read or sorted(counted) != list(range(1, trial.updates + 1)):
        yield f"{total} samples count, and {read} were read"


def _phases(running: Running, lives: Sequence[tuple[int, list[dict[str, Any]]]]) -> tuple[float, ...]:
    first = running.struck[0][1] if running.struck else 0.0
    found: list[tuple[float, ...]] = []
    for _, lines in lives:
        times: list[float] = []
        ahead = ["begins", "term", "update"]
        for line in lines:
            if ahead and line["at"] > first and ahead[0] in line:
                times.append(round(line["at"] - first, 3))
                ahead.pop(0)
        if not ahead:
            found.append(tuple(times))
    return min(found, key=lambda times: times[-1], default=())


def run_trial(trial: Trial, folder: Path, calm: list[float]) -> Verdict:
    """Run one trial in this process, which has no other."""
    folder.mkdir(parents=True)
    with Namespaces(trial.ranks + 1, trial.rate) as network:
        running = Running(trial, network.spaces, folder)
        running.run()
    return judged(running, calm)


def apart(trial: Trial, folder: Path, calm: list[float]) -> Verdict:
    """Run one trial in a process of its own: namespaces are named after it."""
    found = in_a_process(lambda: dataclasses.asdict(run_trial(trial, folder, calm)))
    return Verdict("the trial broke", ["no verdict"], 0, (), None) if found is None else Verdict(**found)


def run_all(
    trials: Sequence[Any],
    run: Callable[[Any], dict[str, Any]],
    at_once: int,
    path: Path,
    told: dict[str, Any],
) -> list[dict[str, Any]]:
    """Run trials side by side; return the row of each, by seed. After each a file has all rows until then.

    Args:
        trials: To run.
        run: Makes a row of a trial, with its seed.
        at_once: How many.
        path: Of the file.
        told: What it says beside the trials.
    """
    rows: list[dict[str, Any]] = []
    ended = threading.Lock()  # trials that end together write the same file

    def note(trial: Any) -> None:
        row = run(trial)
        with ended:
            rows.append(row)
            rows.sort(key=lambda row: row["seed"])
            replace_json(path, {**told, "trials": rows})

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(note, trials))
    return rows


def in_a_process(work: Callable[[], Any]) -> Any:
    """Return what a child finds, as JSON brings it; None where it has failed. What is forked later must not have
    computed anything, so nothing is computed in this process.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as telling:
                json.dump(work(), telling)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else None


def calm_model() -> list[float]:
    """Return the parameters of the job on one rank to which nothing happens."""
    calm = dataclasses.replace(drawn(0), strategy="zero1", micro_batch_seconds=0.0)
    return Job(calm, None, Built()).train(lambda _: None)


def main(words: Sequence[str] | None = None) -> int:
    """Run the trials; return 1 if one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", choices=sorted(set(KINDS) - {"gone"}), default=KINDS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    seeds = range(options.first_seed, options.first_seed + options.trials)
    trials = [drawn(seed, options.kinds) for seed in seeds]
    calm = in_a_process(calm_model)
    options.out.mkdir(parents=True, exist_ok=True)

    def run(trial: Trial) -> dict[str, Any]:
        verdict = apart(trial, options.out / f"trial-{trial.seed}", calm)
        what = " and ".join(f"{event.kind} of {event.node}" for event in trial.events)
        print(f"{trial.seed}: {what}: {verdict.outcome}; {'; '.join(verdict.faults) or 'right'}", flush=True)
        return {**dataclasses.asdict(trial), **dataclasses.asdict(verdict)}

    told = {"environment": describe_environment()}
    rows = run_all(trials, run, options.at_once, options.out / "results.json", told)
    print(summary(rows))
    return int(any(row["faults"] for row in rows))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return what became of all trials, in a few lines."""
    right = [row for row in rows if not row["faults"]]
    went_on = [row for row in right if row["outcome"] == "went on"]
    lines = [f"{len(right)} of {len(rows)} right; {len(went_on)} went on, the others say why not"]
    for kinds in sorted({tuple(sorted(event["kind"] for event in row["events"])) for row in rows}):
        of_kind = [row for row in rows if tuple(sorted(e["kind"] for e in row["events"])) == kinds]
        seconds = [row["seconds"] for row in of_kind if row["seconds"]]
        medians = [statistics.median(one) for one in zip(*seconds, strict=True)]
        took = ""
        if medians:
            took = "; medians: next term after {:.1f} s, loaded {:.1f} s, next update {:.1f} s".format(
                *medians
            )
        went = sum(row["outcome"] == "went on" for row in of_kind)
        lines.append(f"  {' and '.join(kinds)}: {went} of {len(of_kind)} went on{took}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
