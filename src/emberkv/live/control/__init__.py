"""Control: what an operator asks of a running server, over a private socket of its own.

emberkv status|control|why|top ──► socket ──► thread ──► Operations ──► manager, between steps
"""
