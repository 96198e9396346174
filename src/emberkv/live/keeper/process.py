"""What makes a process the keeper: its name, signals, log, and the loop it runs until the end."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Final

from emberkv.live.keeper.disk import OpenStorage, open_slab
from emberkv.live.keeper.loop import Loop
from emberkv.live.keeper.server import Keeper, Patience

PROCESS_NAME: Final = b"emberkv-keeper"
SWITCH_INTERVAL_S: Final = 0.0005
"""How soon the loop gets the interpreter back from a thread that computes."""

_PR_SET_NAME: Final = 15
_log = logging.getLogger(__name__)


def run(
    listener_fd: int,
    instance: str,
    log_path: str | None = None,
    *,
    open_storage: OpenStorage = open_slab,
    patience: Patience | None = None,
) -> None:
    """Be the keeper of an instance; ends the process.

    `listener_fd` is a listening Unix socket, from now on the keeper's.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, PROCESS_NAME, 0, 0, 0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _spread_out()
    _redirect(log_path)
    loop = Loop()
    keeper = Keeper(loop, socket.socket(fileno=listener_fd), instance, open_storage, patience)
    signal.signal(signal.SIGTERM, lambda *_: loop.post(keeper.terminate))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _log.info("keeping instance '%s'", instance)
    loop.run()
    keeper.close()
    _log.info("the keeper of instance '%s' ends", instance)
    logging.shutdown()
    # Not by way of the interpreter: it would wait for a thread that hangs in a device.
    os._exit(0)


def _spread_out() -> None:
    """Use every processor: the starter may have been bound to some of them."""
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.chdir("/")


def _redirect(log_path: str | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        fd = os.open(log_path or os.devnull, flags, 0o600)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s emberkv keeper %(process)d: %(message)s",
    )
