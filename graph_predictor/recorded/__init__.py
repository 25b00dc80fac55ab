"""Recorded steps before any simulation: which stand for the step, whose host time is whose, what was lost."""
