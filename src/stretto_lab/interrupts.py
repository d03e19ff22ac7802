"""Ctrl-C while modules are imported.

Nothing here imports more than a signal handler needs, so that Ctrl-C works from the first moment.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C; other stop signals have codes of the same kind."""


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Let Ctrl-C end the process during the block, which imports.

    A KeyboardInterrupt during imports prints a long traceback, or a C++ module swallows it and stays half imported.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted\n")  # not by print, in the midst of which the signal may have come
    os._exit(INTERRUPTED)
