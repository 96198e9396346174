"""Policies: plain answers to plain questions. They order keys; they never count, pin or move."""
