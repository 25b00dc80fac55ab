"""Prices of sending tokens to experts and back if each token goes to a rank only once (``Dispatcher.once``).

With experts drawn at random, a token of ``k`` experts goes to ``D`` of the ranks and to ``N`` of the nodes
(``expected_places``). Each rank receives as many tokens as it sends:

    t = max(tokens · D · row / links, tokens · N · (1 − 1/nodes) · row / card) + start

Rates come from the kernels' own table for 4,096 tokens of 7,168 values in 16 bits and eight experts each. They are
kernel time alone, the mean of dispatch and combine (github.com/deepseek-ai/DeepEP, docs/README_Hybrid-EP.md). On GB200
they reach these shares of a link's 900 GB/s: 0.83 at 8 ranks, 0.76 at 16, 0.72 at 24, 0.69 at 32 and 0.68 at 36. On
B200 they reach 0.78 at 8. Traffic between nodes on H100 reaches 0.72, 0.83 and 0.89 of a card's 50 GB/s at 16, 32 and
64 ranks. DeepEP's own kernels reach the same on B200 if they get 48 units instead of 16.
"""

from __future__ import annotations

from kernel_models.collectives import Placement, Topology
from planner.parallel.work import Exchange
from tracer.shape_only.transformer import TransformerShape, expected_places

LINK_SHARE, LINK_RANKS, LINK_FALL = 0.83, 8, 0.13
"""Share of a link's rate, the number of ranks that reach it, and the power by which it falls with more ranks."""
CARD_SHARE = 0.82
"""Share of a network card's rate: mean of the three shares on H100."""
START_US = 20.0
"""Time that a kernel also waits for its neighbours, µs. Set, not measured."""
SPREAD = 1.25
"""Factor to the ends of the 80% interval: about the difference of the table's two columns, and of other tokens. Set."""


def dispatch_us(tokens: float, shape: TransformerShape, place: Placement, on: Topology) -> float:
    """Return the time to send each rank's tokens to their experts, or back, µs.

    Args:
        tokens: tokens of a rank.
        shape: shape of the block.
        place: the ranks that share the experts.
    """
    row = shape.hidden * shape.element_bytes * shape.imbalance
    ranks = expected_places(shape.top_k, shape.experts, place.ranks)
    nodes = expected_places(shape.top_k, shape.experts, place.nodes) * (1.0 - 1.0 / place.nodes)
    share = LINK_SHARE * min(1.0, (LINK_RANKS * place.nodes / place.ranks) ** LINK_FALL)
    links = tokens * ranks * row / (on.node.peer_gbps * share)
    cards = tokens * nodes * row / (on.node_gbps(1) * CARD_SHARE) if place.nodes > 1 else 0.0
    return START_US + max(links, cards) * 1e-3


def dispatched(tokens: float, shape: TransformerShape, place: Placement, on: Topology) -> Exchange:
    """Return the exchanges of one pass: dispatch and combine."""
    us = 2.0 * dispatch_us(tokens, shape, place, on)
    return Exchange(us, us / SPREAD, us * SPREAD, 2, place.nodes)
