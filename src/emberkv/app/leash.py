"""`python -m emberkv.app.leash COMMAND …`: become a command that ends when its starter does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Ask the kernel for SIGTERM at the parent's end, then run the command in place of this."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before it could be asked for
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
