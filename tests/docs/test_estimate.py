"""The README's table of real jobs is what `stretto estimate` says."""

from stretto_lab.estimate import EstimateConfig, estimate
from tests.docs.pages import README, table

TABLE = table(README, "tests/docs/test_estimate.py")


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
