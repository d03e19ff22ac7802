"""From the kill of one of three ranks to the next update: a job that goes on, beside jobs that are started again.

Every arm trains the same model on three processes of one machine and updates with AdamW. A process is killed at a
drawn moment, and whoever supervises it starts another one in its place.

    survive-told      `stretto.survives`; whoever starts processes tells the others of a death, as `stretto train` does
    survive           the same, but nobody tells: a process is found dead by its connections and its silence
    survive-leave     a process is told to leave, by SIGTERM in the place of SIGKILL, as where machines are taken away;
                      no state is due then
    survive-shards    as survive-told, but the model is sharded by FSDP2, on three nodes of one shard: it is built anew
    torchrun          stock DDP under one torchrun: all processes are started again and read a checkpoint from disk
    torchrun-local    the same with Stretto and its `LocalCheckpoints`, from memory; each rank stands for a machine
    torchrun-nodes    as torchrun, with a torchrun for each rank, as on three machines, and its default settings
    torchrun-tuned    the same with keep_alive_interval=1, keep_alive_max_attempt=3, last_call_timeout=1
    torchft           gradients go through torchft's manager: the others leave one step out; nothing is sharded
    reconfigure       all-reduce on PyTorch's `_reconfigure` (2.14 and later); no state is kept, nobody comes again

Two numbers for each kill: seconds until an update is committed by ranks that know of the loss, and until all three
train again. Of `survives` two more: for how long no update was committed, and how many were done again.

    python benchmarks/recovery.py --out benchmarks/results/DATE-recovery
    python benchmarks/recovery.py --width 10000 --arms survive-told torchrun --kills 3 --out DIR

The second model has 100 million parameters. Needs Linux.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore

import stretto as st
from stretto.errors import LeftOut
from stretto.groups import announce_death
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.train.workers import host_store

RANKS = 3
COMPUTE_SECONDS = 0.02
"""Of an update, beside the passes of the model."""
EVERY = 5
"""Updates between two states in memory, and between two checkpoints on disk."""
RARELY = 1_000_000
"""Updates between two states where none is ever due: one is kept because a process leaves or comes."""
CALM_UPDATES = (10, 30)
"""Between two kills, drawn."""
PATIENCE_SECONDS = 100.0
"""Longer than a time-out of the group."""
LONG = timedelta(seconds=60)
LIGHTHOUSE = """import signal
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:{port}", min_replicas=1, join_timeout_ms=1000)
signal.pause()"""
"""In a process of its own, because it prints two lines for every step."""
NODES = ("torchrun-nodes", "torchrun-tuned")
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it processes that torchrun starts again find the addresses of those before (PyTorch 2.13, Gloo)."""
TUNED = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
TOLD = ("survive-told", "survive-shards")
ONE = ("torchrun", "torchrun-local")
"""One torchrun for all ranks."""
ARMS = (*TOLD, "survive", "survive-leave", *ONE, *NODES, "torchft")


def network(width: int) -> nn.Sequential:
    """Return the model; it has about width**2 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


class Told:
    """What a process tells, a line each, in a file of its own."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"{time.monotonic():.6f}-{rank}.jsonl"
        self(pid=os.getpid(), rank=rank)

    def __call__(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), **line}) + "\n")


def loss_of(model: nn.Module, draws: torch.Generator) -> Tensor:
    """Return the loss of one micro-batch, which takes a while."""
    time.sleep(COMPUTE_SECONDS)
    points = torch.randn(16, 8, generator=draws)
    return nn.functional.mse_loss(model(points), points.norm(dim=1, keepdim=True))


def summed(model: nn.Module, all_reduce: Callable[[Tensor], object]) -> None:
    """Let one all-reduce take all gradients."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    all_reduce(flat)
    for parameter, part in zip(
        parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True
    ):
        parameter.grad.copy_(part.view_as(parameter))


# What the processes of each arm do


def survive(
    told: Told, rank: int, width: int, port: int, _: Path, every: int = EVERY, *, in_shards: bool = False
) -> None:
    """Go on in the same process."""
    if in_shards:
        from torch.distributed.fsdp import fully_shard  # half a second, in which others would not start
    whole = network(width)
    optimizer_of_whole = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(rank)

    def train(term: st.Term) -> None:
        told(begins=term.number)
        model, optimizer, mesh = whole, optimizer_of_whole, None
        if in_shards:
            meshes = term.meshes()
            model, mesh = network(width), meshes["node"]
            fully_shard(model, mesh=meshes["shard"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        parallel = st.DataParallel(model, optimizer, group=term.group, mesh=mesh)
        term.go_on(parallel)
        told(loaded=term.number)
        try:
            with parallel:
                while True:
                    if (update := parallel.backward(loss_of(model, draws))) is not None:
                        told(update=update.step, ranks=term.world_size, term=term.number)
                        term.keep(parallel)
        except BaseException:
            told(heard=term.number)
            raise

    store = f"127.0.0.1:{port}"
    try:
        st.survives(train, store=store, rank=rank, ranks=RANKS, every=every, leaves_at=[signal.SIGTERM])
    except LeftOut as error:
        if not error.is_asked:
            raise


def restarted(told: Told, rank: int, width: int, _: int, folder: Path) -> None:
    """Be started again by torchrun, with all others."""
    dist.init_process_group("gloo", timeout=LONG)
    rank, term = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = nn.parallel.DistributedDataParallel(network(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path, step = folder / "checkpoint.pt", 0
    if path.exists():
        kept = torch.load(path, mmap=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    told(loaded=term)
    draws = torch.Generator().manual_seed(rank)
    while True:
        optimizer.zero_grad()
        loss_of(model, draws).backward()
        optimizer.step()
        step += 1
        told(update=step, ranks=dist.get_world_size(), term=term)
        if step % EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)


def restarted_locally(told: Told, _: int, width: int, port: int, __: Path) -> None:
    """Be started again by torchrun, with all others, and find in memory what was kept there."""
    dist.init_process_group("gloo", timeout=LONG)
    rank, term = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = network(width)
    parallel = st.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    local = st.LocalCheckpoints(_in_memory(port) / str(rank), every=EVERY, machine=f"machine {rank}")
    local.go_on(parallel)
    told(loaded=term)
    draws = torch.Generator().manual_seed(rank)
    with parallel:
        while True:
            if (update := parallel.backward(loss_of(model, draws))) is not None:
                told(update=update.step, ranks=parallel.world_size, term=term)
                local.keep(parallel)


def torchft(told: Told, rank: int, width: int, port: int, _: Path) -> None:
    """Be one replica group of torchft's."""
    from torchft import Manager, ProcessGroupGloo

    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=LONG),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=LONG,
        quorum_timeout=LONG,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"rank{rank}_",
        hostname="127.0.0.1",
    )
    draws, term, before = torch.Generator().manual_seed(rank), 0, 0
    while True:
        manager.start_quorum()
        optimizer.zero_grad()
        loss_of(model, draws).backward()
        # Its wrapper of DDP fails an assertion of its own after a loss (torchft 0.2.0 with PyTorch 2.13).
        summed(model, lambda flat: manager.allreduce(flat).wait())
        if manager.should_commit():
            optimizer.step()
            ranks = manager.num_participants()
            term += ranks != before
            before = ranks
            told(update=manager.current_step(), ranks=ranks, term=term)


def reconfigure(told: Told, rank: int, width: int, port: int, _: Path) -> None:
    """Go on with the ranks that are left, by what PyTorch has for that."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("job", store),
        rank=rank,
        world_size=RANKS,
        timeout=LONG,
        enable_reconfigure=True,
    )
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(rank)
    members, term, step = list(range(RANKS)), 0, 0
    while True:
        store.set(f"{term}/{rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{term}/{member}").decode() for member in members]
        dist._reconfigure(uuid=1 + term, handles=handles, timeout=LONG).wait()
        try:
            while True:
                optimizer.zero_grad()
                loss_of(model, draws).backward()
                summed(model, dist.all_reduce)
                optimizer.step()
                step += 1
                told(update=step, ranks=len(members), term=term)
        except RuntimeError:
            killed = int(store.get(f"killed/{term}"))  # whoever supervises says who it was
            members, term = [member for member in members if member != killed], term + 1


# Who starts them


class NotInTime(Exception):
    """An arm has not gone on."""


class Supervised:
    """An arm under way."""

    def __init__(self, arm: str, width: int, folder: Path) -> None:
        self.arm, self._width, self.folder = arm, width, folder
        folder.mkdir(parents=True)
        self._log = (folder / "log").open("w")
        self._store: Any = None
        self._others: list[subprocess.Popen[bytes]] = []
        self._seats = RANKS
        self._killed = 0
        self._port = self._meet()
        self._processes = {rank: self._start(rank, rank) for rank in range(1 if arm in ONE else RANKS)}
        self._seat_of = {rank: rank for rank in range(RANKS)}

    def _meet(self) -> int:
        """Start what the ranks meet at; return its port."""
        if self.arm.startswith("torch"):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = int(free.getsockname()[1])
            if self.arm == "torchft":
                self._others.append(self._run([sys.executable, "-c", LIGHTHOUSE.format(port=port)]))
            return port
        self._store = host_store("127.0.0.1", 0)
        return int(self._store.port)

    def _start(self, rank: int, seat: int) -> "subprocess.Popen[bytes]":
        work = [__file__, "--worker", self.arm, "--rank", str(rank), "--port", str(self._port)]
        work += ["--width", str(self._width), "--out", str(self.folder)]
        command = [sys.executable, *work]
        if self.arm.startswith("torchrun"):
            place = ["--standalone", f"--nproc-per-node={RANKS}"]
            if self.arm in NODES:
                settings = f"is_host={int(rank == 0)}" + (f",{TUNED}" if self.arm == "torchrun-tuned" else "")
                place = ["--nnodes", f"1:{RANKS}", "--nproc-per-node=1", "--rdzv-id=x", "--rdzv-backend=c10d"]
                place += ["--local-addr=127.0.0.1"]
                place += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-conf", settings]
            command = [sys.executable, "-m", "torch.distributed.run", *place, "--max-restarts=100", *work]
        return self._run(command)

    def _run(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **APART,
            },
        )

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield what all processes have told, each by which process."""
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_text().split("\n")[:-1]:
                yield {"process": path.name, **json.loads(line)}

    def kill(self, rng: random.Random) -> float:
        """Kill one of the processes that train; return when."""
        first = {line["process"]: line for line in self.lines() if "pid" in line}
        alive = [one for one in first.values() if _lives(one["pid"])]
        victim = rng.choice(alive)
        time.sleep(rng.uniform(0, 0.1))
        at = time.monotonic()
        os.kill(victim["pid"], signal.SIGTERM if self.arm == "survive-leave" else signal.SIGKILL)
        if self.arm == "reconfigure":
            self._store.set(f"killed/{self._killed}", str(victim["rank"]))
            self._killed += 1
        elif not self.arm.startswith("torchrun"):
            self._again(victim["rank"])
        return at

    def _again(self, rank: int) -> None:
        how = self._processes[rank].wait()
        if self.arm in TOLD:
            announce_death(PrefixStore("survive", self._store), self._seat_of[rank], f"exit code {how}")
        self._seat_of[rank], self._seats = self._seats, self._seats + 1  # places first, then on from there
        self._processes[rank] = self._start(rank, self._seat_of[rank])

    def wait(self, what: str, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first line of which that is true."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < ends:
            found = min(
                (line for line in self.lines() if done(line)), key=lambda line: line["at"], default=None
            )
            if found is not None:
                return found
            time.sleep(0.02)
        raise NotInTime(f"{self.arm}: no {what} within {PATIENCE_SECONDS:g} s; see {self.folder}")

    def end(self) -> None:
        """Kill all."""
        for process in (*self._processes.values(), *self._others):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()
        for line in self.lines():  # torchrun gives its workers sessions of their own
            if "pid" in line and _lives(line["pid"]):
                os.kill(line["pid"], signal.SIGKILL)
        with suppress(FileNotFoundError):
            shutil.rmtree(_in_memory(self._port))


def _in_memory(port: int) -> Path:
    """Return where an arm keeps states in the memory of this machine."""
    return Path(f"/dev/shm/stretto-recovery-{port}")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def measure(arm: str, width: int, kills: int, folder: Path, seed: int) -> list[dict[str, Any]]:
    """Kill one rank after another; return a row for each."""
    rng, rows = random.Random(seed), []
    running = Supervised(arm, width, folder)
    try:
        now = running.wait("first update", lambda line: line.get("ranks") == RANKS)
        for _ in range(kills):
            calm, since = rng.randint(*CALM_UPDATES), now["update"]
            before = running.wait(
                "calm",
                lambda line, at=now["at"], step=since + calm: (
                    line["at"] > at and line.get("update", 0) >= step
                ),
            )
            at = running.kill(rng)
            after = running.wait(
                "update after a kill",
                lambda line, at=at, term=before["term"]: (
                    line["at"] > at and "update" in line and (line["term"] > term or line["ranks"] < RANKS)
                ),
            )
            row = {"arm": arm, "to_update": after["at"] - at, "ranks": after["ranks"]}
            for phase in ("heard", "begins", "loaded"):
                if times := [
                    line["at"] - at for line in running.lines() if phase in line and line["at"] > at
                ]:
                    row[phase] = min(times)
            if arm.startswith("survive"):
                updates = [
                    line for line in running.lines() if "update" in line and line["term"] < after["term"]
                ]
                last = max(updates, key=lambda line: line["update"])
                row |= {"stood": after["at"] - last["at"], "again": last["update"] - after["update"] + 1}
            if arm == "reconfigure":
                return [row]  # nobody comes again
            now = running.wait(
                "update of all ranks",
                lambda line, at=after["at"]: line["at"] >= at and line.get("ranks") == RANKS,
            )
            rows.append({**row, "to_all": now["at"] - at})
    except NotInTime as error:
        print(error, flush=True)
        rows.append({"arm": arm, "failed": str(error)})
    finally:
        running.end()
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measure every arm in turns, or be one of its processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, "reconfigure"], default=ARMS)
    parser.add_argument(
        "--width", type=int, default=128, help="the model has about the square of it in parameters"
    )
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="in each turn")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.worker is not None:
        others = {"torchft": torchft, "reconfigure": reconfigure, "torchrun-local": restarted_locally}
        work = others.get(options.worker, restarted)
        work = survive if options.worker.startswith("survive") else work
        if options.worker == "survive-leave":
            work = functools.partial(survive, every=RARELY)
        if options.worker == "survive-shards":
            work = functools.partial(survive, in_shards=True)
        work(Told(options.out, options.rank), options.rank, options.width, options.port, options.out)
        return
    rows: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for arm in options.arms:
            rows += measure(arm, options.width, options.kills, options.out / f"{turn}-{arm}", turn)
            told = {"environment": describe_environment(), "width": options.width, "rows": rows}
            replace_json(options.out / "results.json", told)
    for arm in options.arms:
        print(summary(arm, [row for row in rows if row["arm"] == arm]))


def summary(arm: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return what an arm took, in a line."""
    failed = sum("failed" in row for row in rows)
    words = [f"{arm:14s} {len(rows):3d} kills, {failed} not within {PATIENCE_SECONDS:g} s"]
    for name in ("heard", "begins", "loaded", "to_update", "stood", "to_all"):
        if times := [row[name] for row in rows if name in row]:
            words.append(f"{name} {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})")
    again = [row["again"] for row in rows if "again" in row]
    return "; ".join(words) + f" s; updates done again: {sorted(again)}"


if __name__ == "__main__":
    main()
