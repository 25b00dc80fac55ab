"""Sweeps: every combination of many values for one source, in parallel; an interrupted sweep can be continued.

::

    axes ──> points ──(journal: which are done?)──> chunks ──(this machine, Dask, Ray)──> rows ──> table, plot
"""

from step_views.sweep.run import Goal, Sweep, feasible, ranked, sweep
from step_views.sweep.space import Axis, Point, SweepError, SweepSpace

__all__ = ["Axis", "Goal", "Point", "Sweep", "SweepError", "SweepSpace", "feasible", "ranked", "sweep"]
