"""What is counted and told about the tiers: counters, request log, events."""
