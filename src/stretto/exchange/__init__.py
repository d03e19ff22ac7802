"""How gradients and parameters travel between ranks."""

from stretto.exchange.exchange import Exchange, WireFormat, narrower, wire_dtype
from stretto.exchange.int8 import Int8Exchange
from stretto.exchange.sums import DirectExchange, NativeExchange
from stretto.exchange.verified import VerifiedExchange

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
