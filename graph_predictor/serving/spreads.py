"""How far off a served step and what a load gets may be."""

from __future__ import annotations

from graph_predictor.parallel.spreads import PlanSpreads

STEPS = PlanSpreads(step=0.10, products=0.14, others=0.34, collectives=0.28, host=1.01)
"""Standard deviations of logarithms of a served step, by what it is made of (``parallel.spreads`` says how); engines
and their versions differ from each other by more than training programs do."""
FIRST_TOKEN = 0.40
"""Standard deviation of the logarithm of a time to the first token, added to that of its steps: what is measured as its
mean depends on how a benchmark begins, and on the server's own queues."""
BETWEEN_TOKENS = 0.06
"""The same of the time between tokens."""
