"""The keeper's process: `python -m emberkv.live.keeper`, started by a client."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberkv.live.keeper.disk import OpenStorage


def detach() -> None:
    """Leave the starter's process tree: who ends the engine's children must not end the keeper."""
    if os.fork():
        os._exit(0)


def main(load: Callable[[], OpenStorage] | None = None) -> None:
    """Serve one instance on an inherited listening socket until nothing is left to keep.

    `load`, called in the keeper's own process, gives what opens the disk tier instead of a slab.
    """
    parser = argparse.ArgumentParser(prog="emberkv-keeper", description=__doc__)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--listener", required=True, type=int, help="descriptor of the socket")
    parser.add_argument("--log", help="file to append to (default: none)")
    arguments = parser.parse_args()
    detach()
    # Imported after the fork, so that the starter does not wait for it.
    from emberkv.live.keeper.disk import open_slab
    from emberkv.live.keeper.process import run

    open_storage = open_slab if load is None else load()
    run(arguments.listener, arguments.instance, arguments.log, open_storage=open_storage)


if __name__ == "__main__":
    main()
