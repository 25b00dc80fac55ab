"""Analyse recorded steps before any simulation: which steps to use, whose host time is whose, what was lost."""
