import pytest

from stretto.errors import ConfigError
from stretto.link import Link


@pytest.mark.parametrize(
    ("text", "bits_per_second", "latency_seconds"),
    [
        ("100mbit", 100e6, 0.0),
        ("1gbit", 1e9, 0.0),
        ("2.5Gbit", 2.5e9, 0.0),
        ("50mbit,2ms", 50e6, 2e-3),
        ("800kbit, 150us", 800e3, 150e-6),
        ("none", None, 0.0),
        ("none,1s", None, 1.0),
    ],
)
def test_a_link_is_read_from_rate_and_latency(
    text: str, bits_per_second: float, latency_seconds: float
) -> None:
    assert Link.parse(text) == Link(bits_per_second=bits_per_second, latency_seconds=latency_seconds)


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100mb", "-1mbit", "0mbit", "1gbit,", "1gbit,2", "1gbit,2ms,3ms"]
)
def test_an_unreadable_link_names_the_forms_that_are_read(text: str) -> None:
    with pytest.raises(ConfigError, match="'50mbit,2ms'"):
        Link.parse(text)


def test_a_link_cannot_deliver_before_it_was_sent() -> None:
    with pytest.raises(ConfigError, match=r"-0.5 s"):
        Link(latency_seconds=-0.5)


def test_a_byte_occupies_eight_bits() -> None:
    assert Link.parse("8mbit,5ms").occupied_seconds(1_000_000) == 1.0
    assert Link.parse("none,5ms").occupied_seconds(1_000_000) == 0.0
