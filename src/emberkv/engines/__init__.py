"""Adapters to engines; the only modules that import one."""
