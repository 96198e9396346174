"""Hints that could not be used: counted by kind, and named once each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from emberkv.observe.metrics import HINTS_UNUSABLE
from emberkv.observe.tally import Tally

MAX_NAMED: Final = 32
"""Hints that are complained of by name; later ones are only counted."""

logger = logging.getLogger(__name__)


class Complaints:
    """What requests have said that nobody understands; they are served all the same."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._named: set[tuple[str, str]] = set()

    def take(self, unusable: Sequence[tuple[str, str]]) -> None:
        """A request has said these, as (kind, name)."""
        for kind, name in unusable:
            self._tally.add(HINTS_UNUSABLE, (kind,), 1)
            if len(self._named) < MAX_NAMED and (kind, name) not in self._named:
                self._named.add((kind, name))
                logger.warning("hints: %s '%s' is left out, here and from now on", kind, name)
