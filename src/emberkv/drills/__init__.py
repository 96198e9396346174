"""Faults on purpose, for servers that `emberkv drill` starts for itself. Serving needs none of it.

Nothing here is loaded by an ordinary server: the spec in `spec.py` is named by no option, and it
refuses to be built in a process that no drill has started.
"""
