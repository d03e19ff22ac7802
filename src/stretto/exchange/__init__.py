"""How gradients and parameters cross the wire."""

from stretto.exchange.direct import DirectExchange
from stretto.exchange.exchange import Exchange
from stretto.exchange.native import NativeExchange
from stretto.exchange.wire import narrower, wire_dtype

__all__ = ["DirectExchange", "Exchange", "NativeExchange", "narrower", "wire_dtype"]
