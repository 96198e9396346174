"""Test support that ships: conformance suites, strategies and small models."""
