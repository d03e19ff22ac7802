"""A loop that goes on without ranks that are lost: one process per rank, started again by whoever has started it.

    python examples/cluster/survive.py --store head:29400

`RANK` and `WORLD_SIZE`, or srun, say which rank this process is. `stretto meet` hosts the store. At a SIGTERM a process
leaves the others, who lose nothing by it.
"""

import argparse
import signal

import torch
from torch import nn

import stretto


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument(
        "--every", type=int, help="updates between two states; the library chooses without it"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Before `survives` gives this process a name: the others wait for nothing that is built here.
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(term: stretto.Term) -> None:
        parallel = stretto.DataParallel(model, optimizer, micro_batches=stretto.Total(12), group=term.group)
        term.go_on(parallel)
        if term.rank == 0:
            print(f"term {term.number}: seats {list(term.seats)}, from update {parallel.steps}", flush=True)
        draws = torch.Generator().manual_seed(1_000_000 * term.rank + parallel.steps)
        with parallel:
            while parallel.steps < options.updates:
                points = torch.randn(16, 8, generator=draws)
                loss = nn.functional.mse_loss(model(points), points.norm(dim=1, keepdim=True))
                if (update := parallel.backward(loss)) is not None:
                    if term.rank == 0 and update.step % 100 == 0:
                        print(f"update {update.step}: loss {update.loss:.4f}", flush=True)
                    term.keep(parallel)
            parallel.finish()

    try:
        stretto.survives(train, store=options.store, every=options.every, leaves_at=[signal.SIGTERM])
    except stretto.errors.LeftOut as error:
        if not error.is_asked:  # who has left as asked need not be started again
            raise


if __name__ == "__main__":
    main()
