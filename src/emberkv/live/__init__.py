"""The live driver of the core: shared memory, the keeper process, and what an adapter calls."""
