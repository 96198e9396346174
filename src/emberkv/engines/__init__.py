"""Adapters translate an engine's words into the manager's; the only imports of engines."""
