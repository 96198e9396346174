"""The tiers' decisions, without I/O, clock, threads or engine: method calls in, effects out."""
