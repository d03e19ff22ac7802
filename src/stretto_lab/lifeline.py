"""A process that ends with its parent, at once and silently, however the parent ended."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process when the one that started it through `multiprocessing` has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="stretto-lifeline", daemon=True).start()
