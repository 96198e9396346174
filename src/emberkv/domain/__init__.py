"""Values only: ids, chains, layouts, namespaces. No I/O, no clock, no engine."""
