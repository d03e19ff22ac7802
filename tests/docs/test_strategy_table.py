"""The table in docs/strategies.md says what the ledger says."""

import pytest

from stretto.strategies import STRATEGIES, LocalSGD, PAFTSync, Strategy
from stretto.strategies.ledger import ledger_of
from tests.docs.pages import DOCS, table

ROWS = {
    row["strategy"].strip("`"): row
    for row in table(DOCS / "strategies.md", "tests/docs/test_strategy_table.py")
}

WIRES = {"traffic, bf16 wire": 2, "traffic, fp32 wire": 4}
"""Column to bytes per element."""

MODELS = {
    "memory, fp32 model": (4, 4),
    "memory, bf16 model": (2, 4),
    "memory, bf16 model and accumulation": (2, 2),
}
"""Column to bytes of a parameter and of an element of the gradient buffer."""


def formula(strategy: Strategy, parameter: int, accumulation: int) -> str:
    """Bytes per parameter as the docs write them, with N for the number of ranks."""
    ledger = ledger_of(strategy)

    def on(world_size: int) -> float:
        return ledger.memory_bytes(
            strategy, parameter=parameter, accumulation=accumulation, world_size=world_size
        )

    shared = 2 * (on(1) - on(2))  # on(N) = whole + shared / N
    whole = on(1) - shared
    assert on(8) == whole + shared / 8
    return f"{whole:g} + {shared:g}/N" if shared else f"{whole:g}"


def test_every_strategy_has_a_row_in_the_order_of_the_code() -> None:
    assert list(ROWS) == list(STRATEGIES)


def traffic(name: str, bytes_per_element: int) -> str:
    """Bytes per parameter and update as the docs write them."""
    if name.startswith("paft"):
        plain, *averaged = (
            ledger_of(kind).wire_bytes(bytes_per_element)
            for kind in (STRATEGIES["ddp"](), *(PAFTSync(interval=every) for every in (1, 2, 5)))
        )
        assert averaged == pytest.approx([plain + (averaged[0] - plain) / every for every in (1, 2, 5)])
        return f"{plain:g} + {averaged[0] - plain:g}/interval"
    if name in ("average", "diloco"):
        always, *rarely = (
            ledger_of(STRATEGIES[name](every, parts)).wire_bytes(bytes_per_element)
            for every, parts in ((1, 1), (2, 1), (5, 5), (10, 4))
        )
        assert rarely == pytest.approx([always / every for every in (2, 5, 10)])
        return f"{always:g}/{'every' if name == 'average' else 'interval'}"
    if name != "local":
        return f"{ledger_of(STRATEGIES[name]()).wire_bytes(bytes_per_element):g}"
    always = ledger_of(LocalSGD(rate=1)).wire_bytes(bytes_per_element)
    for rate in (0.5, 0.2):
        assert ledger_of(LocalSGD(rate=rate)).wire_bytes(bytes_per_element) == pytest.approx(always * rate)
    return f"{always:g} × rate"


@pytest.mark.parametrize("name", STRATEGIES)
def test_traffic_in_the_docs_is_the_ledgers(name: str) -> None:
    expected = {column: traffic(name, size) for column, size in WIRES.items()}
    assert {column: ROWS[name][column] for column in WIRES} == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_in_the_docs_is_the_ledgers(name: str) -> None:
    strategy = STRATEGIES[name]()
    expected = {column: formula(strategy, *sizes) for column, sizes in MODELS.items()}
    assert {column: ROWS[name][column] for column in MODELS} == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_on_nodes_of_shards_is_that_of_as_many_ranks_divided_by_the_shards(name: str) -> None:
    strategy = STRATEGIES[name]()
    ledger = ledger_of(strategy)
    of_nodes = ledger.memory_bytes(strategy, parameter=4, accumulation=4, world_size=2)
    does_not_work = ledger.may_average and not ledger.local  # refused with shards
    expected = "no" if does_not_work else f"{of_nodes / 8:g}"
    assert ROWS[name]["the same, fp32, on 2 nodes of 8 shards"] == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_staleness_in_the_docs_is_the_strategys(name: str) -> None:
    assert ROWS[name]["staleness"].split(",")[0] == str(STRATEGIES[name].staleness)
