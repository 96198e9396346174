"""The whole error tree, drawn.

EmberError
├── UsageError        the user's mistake: one line, what to do, exit status 2
│   └── ConfigError   a key or value of the configuration
├── WorldError        the world's fault: counted, degraded, never an engine crash
│   ├── StorageError  a tier's device or files
│   ├── KeeperError   the keeper process can't be reached or refused
│   └── ControlError  a running server can't be asked, or did not do as it was told
└── InvariantError    ours: a rule of the core is broken; loud in tests, contained in production
"""

from __future__ import annotations


class EmberError(Exception):
    """Root of every error that emberkv raises on purpose."""


class UsageError(EmberError):
    """Something the user asked for can't be done as asked; the message says what to do."""


class ConfigError(UsageError):
    """A configuration key is unknown, or its value can't be used."""


class WorldError(EmberError):
    """Something outside the program failed."""


class StorageError(WorldError):
    """A tier's files or device can't be used."""


class KeeperError(WorldError):
    """The keeper process can't be reached, or refused."""


class ControlError(WorldError):
    """A running server can't be reached or asked, or could not do what it was told."""


class InvariantError(EmberError):
    """A rule of the core is broken: a defect of emberkv."""
