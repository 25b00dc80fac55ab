"""Many configurations of one source: every combination, in parallel, resumable.

::

    axes ──> points ──(journal: which are done?)──> chunks ──(this machine, Dask, Ray)──> rows ──> table, plot
"""

from step_views.sweep.run import Goal, Sweep, feasible, ranked, sweep
from step_views.sweep.space import Axis, Point, SweepError, SweepSpace

__all__ = ["Axis", "Goal", "Point", "Sweep", "SweepError", "SweepSpace", "feasible", "ranked", "sweep"]
