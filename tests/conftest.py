"""Puts `tests/` on the import path, so that every kind of test can use the builders in `tests/support`."""
