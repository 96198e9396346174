"""Drills: what a server of one's own does while something goes wrong, with load running."""
