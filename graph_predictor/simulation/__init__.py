"""Simulation: computes all start and end times from durations and dependencies, and the critical path."""
