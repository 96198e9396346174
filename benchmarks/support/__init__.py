"""What benchmarks share: timing, chains, tiers without an engine, servers, prompts, peers.

Starting and reading servers is the demo's: the repository's root, where it lives, is put on the
path after everything else.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
