"""Regression checks: captures against a baseline, and limits of steps that never ran."""
