"""The calculator's table of real jobs is what `stretto estimate` says, and the table of wires what it rests on."""

from stretto import ACCO, ZeRO1
from stretto.exchange import WIRES
from stretto_lab.estimate import EstimateConfig, estimate
from stretto_lab.estimate.times import ELEMENT_BYTES, kept_by_wire
from stretto_lab.evidence import OF_WIRES
from tests.docs.pages import DOCS, table

TABLE = table(DOCS / "calculator.md", "tests/docs/test_estimate.py")


def test_every_row_is_what_the_command_says() -> None:
    for row in TABLE:
        config = EstimateConfig(
            parameters=row["parameters"],
            update_seconds=float(row["computing"]),
            ranks=4,
            network=row["link"],
        )
        rows, choice = estimate(config.work)
        assert list(row.values())[3:] == [
            f"{rows[0].time.wire_seconds:.3g}",
            f"`{choice.strategy}:wire={choice.wire}`",
            f"{choice.time.seconds:.3g}",
        ]


def test_three_sizes_stand_beside_three_links() -> None:
    assert len({(row["parameters"], row["link"]) for row in TABLE}) == 9


def test_the_table_of_wires_has_all_of_them_with_their_bits_what_they_keep_and_what_they_cost() -> None:
    rows = {
        name.strip("` "): row
        for row in table(DOCS / "slow-links.md", "tests/docs/test_estimate.py")
        for name in row["wire"].split(",")
    }
    assert rows.keys() == WIRES.keys()
    for name, row in rows.items():
        place = row["wire"].split(", ").index(f"`{name}`")
        assert float(row["bits of a value"].split(", ")[place]) == 8 * ELEMENT_BYTES[name]
        kept = [kept_by_wire(strategy, name, 4) for strategy in (ZeRO1(), ACCO())]
        assert row["kept, bytes per parameter: `zero1`, `acco`"] == ", ".join(map(str, kept))
        if name in OF_WIRES:
            nats = OF_WIRES[name].nats
            assert row["costs in loss, here"] == (f"{nats:.2f} nats" if nats else "nothing")
