"""The README's table of real jobs is what `stretto estimate` says."""

from stretto_lab.estimate import EstimateConfig, estimate
from tests.docs.pages import README, table

TABLE = table(README, "tests/docs/test_estimate.py")


def test_every_row_is_what_the_command_says() -> None:
    for row in TABLE:
        seconds = row["computing"].removesuffix(" s")
        config = EstimateConfig(
            parameters=row["parameters"], update_seconds=float(seconds), ranks=4, network=row["link"]
        )
        rows, choice = estimate(config.work)
        exact = rows[0].time
        assert list(row.values())[3:] == [
            f"{exact.wire_seconds:.3g} s",
            f"{exact.seconds:.3g} s",
            f"`{choice.options}`",
            f"{choice.time.seconds:.3g} s",
            f"{choice.time.memory_bytes / 1e9:.3g} GB",
        ]


def test_three_sizes_stand_beside_three_links() -> None:
    assert len({(row["parameters"], row["link"]) for row in TABLE}) == 9
