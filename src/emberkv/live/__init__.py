"""Serving: drives the core with real threads, clocks and bytes."""
