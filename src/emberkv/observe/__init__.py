"""What an operator sees: metrics and request log lines, as plain data."""
