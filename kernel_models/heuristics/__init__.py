"""Formulas for every family: roofline, tiles and waves, cache residency, with default or fitted efficiencies.

A family's file registers its work at published rates (``work.work_of``); ``RooflineModel`` divides it by efficiencies.
"""
