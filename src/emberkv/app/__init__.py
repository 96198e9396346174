"""What a user runs: the command line."""
