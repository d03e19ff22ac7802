"""Links with a name, and any other link from its text form."""

from collections.abc import Mapping
from types import MappingProxyType

from stretto.errors import ConfigError, UnknownName
from stretto.fields import unknown_name
from stretto.link import Link

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "free": Link(),
        "datacenter": Link(bits_per_second=100e9, latency_seconds=5e-6),
        "ethernet": Link(bits_per_second=10e9, latency_seconds=50e-6),
        "office": Link(bits_per_second=1e9, latency_seconds=200e-6),
        "internet": Link(bits_per_second=100e6, latency_seconds=20e-3),
    }
)
"""By name; other links are written out, such as 100mbit,2ms."""


def parse_link(text: str) -> Link:
    """Return the link of that name, or the one that `text` describes.

    Raises:
        UnknownName: There is no such link.
    """
    if text in LINKS:
        return LINKS[text]
    try:
        return Link.parse(text)
    except ConfigError as error:
        known = unknown_name("no network is called", text, LINKS)
        raise UnknownName(f"{known}; {error}") from error
