"""Benchmarks a user can run: what the cache is worth, and what this machine could do at best."""
