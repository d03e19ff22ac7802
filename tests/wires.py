"""The wires of the library that fit gradients, by name."""

from stretto.exchange import WIRES

OF_GRADIENTS = tuple(name for name, wire in WIRES.items() if wire.fits_gradients)
