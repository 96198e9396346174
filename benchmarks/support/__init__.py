"""What benchmarks share: timing, chains, tiers without an engine, servers, prompts, peers."""
