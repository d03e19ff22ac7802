"""The server of forked processes imports this first, so that it ends with the command.

Without this the server would notice the end of the command only after its imports, which take seconds. Only Linux can
do better.
"""

import signal
import sys

_PR_SET_PDEATHSIG = 1

if sys.platform == "linux" and any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
