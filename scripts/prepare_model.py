"""Prepare SmolLM2-135M-Instruct in the user's cache (once) and print its directory, last.

Use: .venv/bin/python scripts/prepare_model.py
"""

from __future__ import annotations

import sys

from emberkv.errors import UsageError
from emberkv.testing.models import prepare_smollm2


def main() -> int:
    try:
        directory = prepare_smollm2()
    except UsageError as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 2
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
