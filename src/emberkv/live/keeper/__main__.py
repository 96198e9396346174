"""The keeper's process: `python -m emberkv.live.keeper`, started by a client."""

from __future__ import annotations

import argparse
import os


def detach() -> None:
    """Leave the starter's process tree: who ends the engine's children must not end the keeper."""
    if os.fork():
        os._exit(0)


def main() -> None:
    """Serve one instance on an inherited listening socket until nothing is left to keep."""
    parser = argparse.ArgumentParser(prog="emberkv-keeper", description=main.__doc__)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--listener", required=True, type=int, help="descriptor of the socket")
    parser.add_argument("--log", help="file to append to (default: none)")
    arguments = parser.parse_args()
    detach()
    # Imported after the fork, so that the starter does not wait for it.
    from emberkv.live.keeper.process import run

    run(arguments.listener, arguments.instance, arguments.log)


if __name__ == "__main__":
    main()
