"""The figures of README and issues: `python -m benchmarks`, or `make bench`."""
