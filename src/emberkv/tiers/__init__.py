"""Storages move bytes and nothing else: no policy, no counting, no eviction."""
