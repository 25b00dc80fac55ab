"""Simulation: durations and dependencies in, when everything happens out; replay and the critical path with it."""
