"""A rank is killed, the others go on, and a new one comes in its place.

    python examples/survive.py

Three processes train. The second is killed after update 20. A fourth has made its imports and its model, as one that is
started again would, and comes in for it. Nothing is read from a disk.
"""

import os
import signal
from multiprocessing.synchronize import Event

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import TCPStore

import stretto

RANKS, UPDATES, VICTIM = 3, 200, 1


def work(rank: int, port: int, ready: Event, killed: Event) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    is_first_life = mp.current_process().name != "spare"
    if is_first_life:
        ready.wait()
    else:
        ready.set()
        killed.wait()

    def train(term: stretto.Term) -> None:
        parallel = stretto.DataParallel(model, optimizer, group=term.group)
        restored = term.go_on(parallel)
        if term.rank == 0:
            begin = 0 if restored is None else restored.step
            print(f"term {term.number}: {term.world_size} ranks, from update {begin}", flush=True)

        def committed(update: stretto.Update) -> None:
            if is_first_life and rank == VICTIM and update.step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            if term.rank == 0 and update.step % 50 == 0:
                print(f"update {update.step}: loss {update.loss:.4f}", flush=True)
            term.keep(parallel)

        draws = torch.Generator().manual_seed(1 + term.rank)
        points = torch.randn(UPDATES, 16, 8, generator=draws)
        with parallel:
            for batch in parallel.feed(points[parallel.steps :], on_update=committed):
                parallel.backward(nn.functional.mse_loss(model(batch), batch.norm(dim=1, keepdim=True)))
            parallel.finish()

    # In earnest the store is hosted by `stretto meet` on a machine that stays: store="host:port".
    store = TCPStore("127.0.0.1", port, is_master=False)
    stretto.survives(train, store=store, rank=rank, ranks=RANKS, every=8)


def main() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    ready, killed = context.Event(), context.Event()
    ranks = [context.Process(target=work, args=(rank, store.port, ready, killed)) for rank in range(RANKS)]
    spare = context.Process(target=work, args=(VICTIM, store.port, ready, killed), name="spare")
    for process in (*ranks, spare):
        process.start()
    ranks[VICTIM].join()
    killed.set()
    for process in (*ranks, spare):
        process.join()


if __name__ == "__main__":
    main()
