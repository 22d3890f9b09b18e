"""Simulation: traces through the real scheduler and cache, with a cost model in place of the forward pass."""
