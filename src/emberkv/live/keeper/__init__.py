"""The keeper: one small process per server that holds the arena and does the I/O of the tiers.

It outlives the engine, so that a restarted engine finds its chunks again, and it keeps disk I/O,
checksums and their threads out of the engine's processes. `client` and `worker` are what an
engine's processes use; everything else here runs in the keeper. It imports no engine and no torch.
"""
