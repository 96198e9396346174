"""What the core counts: names of events, each with a tier's level."""

from __future__ import annotations

import enum


class Event(enum.Enum):
    """Something that happened to one chunk."""

    ADMITTED = "admitted"
    EVICTED = "evicted"
    LOST = "lost"  # its bytes were not what they should be
    PROMOTED = "promoted"
    WRITTEN_BEHIND = "written_behind"
    PROMOTION_FAILED = "promotion_failed"
    WRITE_BEHIND_FAILED = "write_behind_failed"
    SHED_QUEUE_FULL = "shed_queue_full"  # too many writes under way
    SHED_NO_ROOM = "shed_no_room"  # nothing evictable in the tier below
    REFUSED_NO_ROOM = "refused_no_room"  # nothing evictable in RAM
    REFUSED_UNREACHABLE = "refused_unreachable"  # the chunk before it is nowhere
    PROMOTION_CUT = "promotion_cut"  # known below, but it did not fit above
    WAIT_SPENT = "wait_spent"  # a request stopped waiting for it
