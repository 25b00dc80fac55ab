"""Parallel plans of a training step on a cluster: their memory, schedule, collectives and time."""
