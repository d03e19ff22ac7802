"""The parts of a job on nodes of shards have the size that the table says, also where no memory is there for them."""

from typing import Any

from experiments import sharded_memory
from stretto.strategies import STRATEGIES
from stretto.strategies.ledger import ledger_of
from tests.processes import run_ranks

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 8000,
}
NODES, SHARDS = 2, 8


def counted(rank: int) -> tuple[int, list[dict[str, Any]]]:
    return sharded_memory.table(CONFIG, NODES, SHARDS)


def test_a_llama_on_two_nodes_of_eight_shards_takes_what_the_table_says() -> None:
    ((parameters, rows),) = run_ranks(1, counted, backend=None)
    assert {row["strategy"] for row in rows} == {
        name
        for name in STRATEGIES
        if not (ledger_of(STRATEGIES[name]()).may_average and not ledger_of(STRATEGIES[name]()).local)
    }
    for row in rows:
        strategy = STRATEGIES[row["strategy"]]()
        per_parameter = ledger_of(strategy).memory_bytes(
            strategy, parameter=4, accumulation=4, world_size=NODES
        )
        assert row["table_bytes"] == per_parameter * parameters / SHARDS
        # Shards end in padding: below a hundredth of these small tensors, and no byte is missing.
        assert row["table_bytes"] <= row["held_bytes"] < 1.01 * row["table_bytes"], row["strategy"]
