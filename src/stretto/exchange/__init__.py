"""How gradients and parameters are sent between ranks: the exchange, and one file per wire format."""

from stretto.exchange.exchange import Exchange, check_nodes
from stretto.exchange.int2 import Int2
from stretto.exchange.int4 import Int4
from stretto.exchange.int8 import Int8
from stretto.exchange.publication import Publication
from stretto.exchange.rotated import Rotated
from stretto.exchange.verified import VerifiedExchange
from stretto.exchange.wire import BF16, FP32, PackedWire, PlainWire, Wire
from stretto.fields import unknown_name

WIRES: dict[str, Wire] = {
    wire.name: wire for wire in (FP32, BF16, Int8(), Int4(), Int2(), *map(Rotated, (4, 3, 2, 1)))
}


def wire_by_name(name: str) -> Wire:
    """Return the wire format of that name.

    Raises:
        UnknownName: There is no such wire format.
    """
    if name not in WIRES:
        raise unknown_name("no wire format is called", name, WIRES)
    return WIRES[name]


__all__ = [
    "BF16",
    "FP32",
    "WIRES",
    "Exchange",
    "Int2",
    "Int4",
    "Int8",
    "PackedWire",
    "PlainWire",
    "Publication",
    "Rotated",
    "VerifiedExchange",
    "Wire",
    "check_nodes",
    "wire_by_name",
]
