"""Puts load on a server of one's own, and turns what it felt into figures and baselines."""
