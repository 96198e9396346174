"""The simulator: replays traces through the core that serves, on a virtual clock."""
