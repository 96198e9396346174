"""The running servers of this user, as commands see them."""

from __future__ import annotations

from emberkv.errors import ControlError, UsageError
from emberkv.live.control.address import instances
from emberkv.live.control.client import ControlClient
from emberkv.live.control.messages import ServerStatus, StatusRequest


def chosen(instance: str | None) -> str:
    """The server that is meant: by its name, the beginning of it, or because there is one only.

    Raises `UsageError` if several may be meant, `ControlError` if there is none.
    """
    known = instances()
    if instance in known:
        return str(instance)
    meant = [name for name in known if instance is None or (instance and name.startswith(instance))]
    if len(meant) == 1:
        return meant[0]
    if not known:
        raise ControlError(
            "no server of yours runs here, or its control socket is off; start one with "
            "emberkv serve"
        )
    if not meant:
        raise UsageError(f"no server '{instance}'; running: {', '.join(known)}")
    raise UsageError(f"several servers run: name one of {', '.join(meant)}")


def status_of(instance: str) -> ServerStatus:
    """How a server is. Raises `ControlError`."""
    with ControlClient(instance) as client:
        return client.ask(StatusRequest(), ServerStatus)
