"""What a cluster, a server, a set of tables or a network would need: analytic models above one step's prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from planner.parallel.comm_study import comm_study
    from planner.parallel.planning import plan
    from planner.parallel.shapes import shapes
    from planner.serving.layer_prices import price_layer
    from planner.serving.search import serve_search
    from planner.serving.serve import serve
    from planner.sharding.planning import shard

_HOMES = {
    "comm_study": "planner.parallel.comm_study",
    "plan": "planner.parallel.planning",
    "price_layer": "planner.serving.layer_prices",
    "serve": "planner.serving.serve",
    "serve_search": "planner.serving.search",
    "shapes": "planner.parallel.shapes",
    "shard": "planner.sharding.planning",
}

__all__ = ["comm_study", "plan", "price_layer", "serve", "serve_search", "shapes", "shard"]

__getattr__, __dir__ = lazily(__name__, _HOMES)
