"""Where a server's control socket is: one file per server in a private directory of the user.

    $EMBERKV_RUNTIME_DIR, else $XDG_RUNTIME_DIR/emberkv, /run/user/UID/emberkv, /tmp/emberkv-UID

The directory is 0700 and the user's own, or it is not used; the socket is 0600. A server that is
killed leaves its file behind: nobody listens there any more, and whoever comes by removes it,
under a lock on the directory so that no socket just made is taken for such a one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from emberkv.errors import ControlError, KeeperError
from emberkv.live.keeper.channel import require_same_user

RUNTIME_DIR_VARIABLE: Final = "EMBERKV_RUNTIME_DIR"
SUFFIX: Final = ".sock"
BACKLOG: Final = 64
CONNECT_S: Final = 2.0
PAUSE_S: Final = 0.01


def runtime_dirs() -> list[Path]:
    """The directories in which a socket may be, the first of them for a new one.

    A server and a shell may differ in their environment, so that a client looks in all of them.
    """
    chosen = os.environ.get(RUNTIME_DIR_VARIABLE)
    if chosen:
        return [Path(chosen)]
    uid = os.geteuid()
    session = os.environ.get("XDG_RUNTIME_DIR")
    parents = [Path(session)] if session else []
    parents.append(Path(f"/run/user/{uid}"))
    found = [parent / "emberkv" for parent in parents if os.access(parent, os.W_OK | os.X_OK)]
    return list(dict.fromkeys([*found, Path(f"/tmp/emberkv-{uid}")]))


def _open_private(directory: Path, *, make: bool) -> int | None:
    """A descriptor of a directory that only this user can enter; None if there is none.

    Raises `ControlError` if there is one that others can enter, or that can't be made.
    """
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if make:
            raise ControlError(f"{directory} can't be made: {error.strerror}") from error
        return None
    except OSError as error:
        raise ControlError(f"{directory} can't be used: {error.strerror}") from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise ControlError(
            f"{directory} must be yours alone: make it mode 0700 and your own, or set "
            f"{RUNTIME_DIR_VARIABLE}"
        )
    return fd


def _path(directory_fd: int, name: str) -> str:
    """A path to a socket through a descriptor: of any length, and past no symbolic link."""
    return f"/proc/self/fd/{directory_fd}/{name}{SUFFIX}"


@contextlib.contextmanager
def _alone_in(directory_fd: int) -> Iterator[None]:
    fcntl.flock(directory_fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(directory_fd, fcntl.LOCK_UN)


class Listener:
    """A server's listening socket. Its file goes with it, unless the process is killed."""

    def __init__(self, directory: Path, directory_fd: int, name: str, sock: socket.socket) -> None:
        self.name = name
        self.path = directory / f"{name}{SUFFIX}"
        self.sock = sock
        self._directory_fd = directory_fd
        self._pid = os.getpid()
        self._identity = _identity(directory_fd, name)

    def close(self) -> None:
        """Stop listening and remove the file, if it is still this socket's."""
        if self._directory_fd < 0:
            return
        self.sock.close()
        directory_fd, self._directory_fd = self._directory_fd, -1
        if os.getpid() == self._pid:  # never for a process that was forked from this one
            with _alone_in(directory_fd):
                if self._identity == _identity(directory_fd, self.name):
                    _unlink(directory_fd, self.name)
        os.close(directory_fd)


def listen(instance: str, directory: Path | None = None) -> Listener:
    """Listen for an instance; a second live server of it gets a name with its process's id.

    Raises `ControlError` if no directory can be used.
    """
    directory = directory or runtime_dirs()[0]
    directory_fd = _open_private(directory, make=True)
    assert directory_fd is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _alone_in(directory_fd):
            name = instance
            if not _free(directory_fd, name):
                name = f"{instance}-{os.getpid()}"
                _free(directory_fd, name)
            sock.bind(_path(directory_fd, name))
            os.chmod(_path(directory_fd, name), 0o600)
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        os.close(directory_fd)
        raise ControlError(f"can't listen in {directory}: {error.strerror}") from error
    return Listener(directory, directory_fd, name, sock)


def connect(instance: str) -> socket.socket:
    """A connection to an instance's server. Raises `ControlError` if there is none."""
    for directory in runtime_dirs():
        directory_fd = _open_private(directory, make=False)
        if directory_fd is None:
            continue
        try:
            sock = _connect(directory_fd, instance)
        finally:
            os.close(directory_fd)
        if sock is not None:
            return sock
    known = ", ".join(instances()) or "no server of yours"
    raise ControlError(f"no server '{instance}' answers; running: {known}")


def instances() -> list[str]:
    """The servers of this user for which somebody listens now, by name; others' files go."""
    names: set[str] = set()
    for directory in runtime_dirs():
        try:
            directory_fd = _open_private(directory, make=False)
        except ControlError:
            continue
        if directory_fd is None:
            continue
        with contextlib.suppress(OSError), contextlib.closing(_Descriptor(directory_fd)):
            for file in os.listdir(directory_fd):
                name = file.removesuffix(SUFFIX)
                if name != file and _is_served(directory_fd, name):
                    names.add(name)
    return sorted(names)


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


def _connect(directory_fd: int, name: str) -> socket.socket | None:
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_S)
        try:
            sock.connect(_path(directory_fd, name))
            require_same_user(sock)
        except BlockingIOError:  # its queue is full at this moment
            sock.close()
            if time.monotonic() > deadline_s:
                return None
            time.sleep(PAUSE_S)
        except (OSError, KeeperError):
            sock.close()
            return None
        else:
            return sock


def _is_served(directory_fd: int, name: str) -> bool:
    """Whether somebody listens; a file that nobody listens at is removed."""
    sock = _connect(directory_fd, name)
    if sock is not None:
        sock.close()
        return True
    with _alone_in(directory_fd):
        return not _free(directory_fd, name)


def _free(directory_fd: int, name: str) -> bool:
    """Remove a socket's file that nobody listens at; False if somebody does. Call while alone."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_S)
    try:
        sock.connect(_path(directory_fd, name))
    except ConnectionRefusedError:
        _unlink(directory_fd, name)
        return True
    except FileNotFoundError:
        return True
    except OSError:
        return False  # its queue is full: somebody is there
    finally:
        sock.close()
    return False


def _unlink(directory_fd: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{name}{SUFFIX}", dir_fd=directory_fd)


def _identity(directory_fd: int, name: str) -> tuple[int, int] | None:
    try:
        status = os.stat(f"{name}{SUFFIX}", dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
