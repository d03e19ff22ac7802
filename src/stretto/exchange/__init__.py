"""How gradients and parameters cross the wire."""

from stretto.exchange.direct import DirectExchange
from stretto.exchange.exchange import Exchange
from stretto.exchange.int8 import Int8Exchange
from stretto.exchange.native import NativeExchange
from stretto.exchange.verified import VerifiedExchange
from stretto.exchange.wire import WireFormat, narrower, wire_dtype

__all__ = [
    "DirectExchange",
    "Exchange",
    "Int8Exchange",
    "NativeExchange",
    "VerifiedExchange",
    "WireFormat",
    "narrower",
    "wire_dtype",
]
