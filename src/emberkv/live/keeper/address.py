"""Where keepers are found, and how one is started.

The address is an abstract Unix socket: a name in the kernel and no file, gone with its process.
Whoever wants a keeper binds the name, listens, and starts the keeper with the listening socket, so
the name is the start lock and a connection made a moment later waits in the queue until the
keeper is up. Abstract names belong to a network namespace: containers do not see each other's.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import emberkv
from emberkv.errors import KeeperError
from emberkv.live.keeper.channel import require_same_user

BACKLOG: Final = 512
KEEPER_MODULE: Final = "emberkv.live.keeper"
START_S: Final = 20.0


def own_instance(instance: str, engine_id: str) -> str:
    """The instance of an engine that found another live engine at `instance`."""
    digest = hashlib.sha256(engine_id.encode()).hexdigest()
    return f"{instance}-{digest[:8]}"


def socket_name(instance: str) -> str:
    """The abstract socket of this user's instance."""
    return f"\0emberkv/{os.geteuid()}/{instance}"


def try_listen(instance: str) -> socket.socket | None:
    """A listening socket at the instance's address, or None if there is one already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(instance))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


def try_connect(instance: str) -> socket.socket | None:
    """A connection to the instance's keeper, or None if there is none.

    Raises `KeeperError` if the address is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(1.0)
    try:
        sock.connect(socket_name(instance))
    except OSError:
        sock.close()
        return None
    try:
        require_same_user(sock)
    except KeeperError:
        sock.close()
        raise
    return sock


class StartedKeeper:
    """A keeper that this process has started; `complaints` is what it wrote before it had a log."""

    def __init__(self, complaints_fd: int) -> None:
        self._complaints = os.fdopen(complaints_fd, "rb")

    def fileno(self) -> int:
        return self._complaints.fileno()

    def complaints(self) -> str:
        """The last line of it."""
        text = os.pread(self._complaints.fileno(), 1 << 16, 0).decode(errors="replace")
        return (text.strip().splitlines() or [""])[-1]

    def close(self) -> None:
        self._complaints.close()


def try_start(
    instance: str, log_path: Path | None, module: str = KEEPER_MODULE
) -> StartedKeeper | None:
    """Start a keeper for an instance; None if another process has just done so.

    Returns when the keeper's process has left this one's tree. Raises `KeeperError` if it can't
    be started.
    """
    listener = try_listen(instance)
    if listener is None:
        return None
    with closing(listener):
        command = [sys.executable, "-m", module]
        command += ["--instance", instance, "--listener", str(listener.fileno())]
        if log_path is not None:
            command += ["--log", str(log_path.absolute())]
        started = StartedKeeper(os.memfd_create("emberkv-keeper-start", os.MFD_CLOEXEC))
        try:
            status = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=started.fileno(),
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                env=_environment(),
            ).wait(START_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            started.close()
            raise KeeperError(f"the keeper can't be started: {error}") from error
    if status:
        reason = started.complaints() or f"exit status {status}"
        started.close()
        raise KeeperError(f"the keeper can't be started: {reason}")
    return started


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = "1"  # the keeper does no algebra; a pool of threads would cost memory
    package_dir = Path(emberkv.__file__).resolve().parents[1]
    if package_dir.name not in {"site-packages", "dist-packages"}:
        paths = [environment.get("PYTHONPATH"), str(package_dir)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def instances() -> list[str]:
    """The instances of this user for which somebody listens now, by name."""
    prefix = "@" + socket_name("")[1:]
    names: set[str] = set()
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        for line in table:
            fields = line.split()
            if len(fields) == 8 and fields[7].startswith(prefix):
                names.add(fields[7][len(prefix) :])
    return sorted(names)
