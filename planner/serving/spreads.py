"""How far off what a load gets may be beyond its steps, whose own spreads are those of planned ones.

Set so that of the looked-at half of ``benchmarks/serving.py`` about 80% lie inside; the other half judges.
"""

from __future__ import annotations

FIRST_TOKEN = 0.3
"""Standard deviation of the logarithm of a time to the first token, added to that of its steps: what is measured as its
mean depends on how a benchmark begins, and on the server's own queues."""
FIRST_LEAST = 0.5
"""Share of it that a calibration leaves at least: rows tell times between tokens far better."""
BETWEEN_TOKENS = 0.10
"""The same of the time between tokens."""
