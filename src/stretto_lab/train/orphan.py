"""Imported by the server that processes are forked from, before anything else: it ends with the command.

The server would notice alone, but only behind its imports, which take seconds. Linux alone can do better.
"""

import signal
import sys

_PR_SET_PDEATHSIG = 1

if sys.platform == "linux" and any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
