"""Runs the demo: `make demo`, or `.venv/bin/python demo/run.py [--keep] [--dir DIR]`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # This directory's own modules are reached as `demo.…`, from the project's root.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from demo.play import main

    sys.exit(main())
