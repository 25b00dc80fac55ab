"""Edits: what could be different about a step. Each is a small class that documents what it assumes.

Those that an option names declare it in their own file (``registry``); names are here for ``foretrace.edits``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from graph_predictor.edits.attention import FlashAttention
    from graph_predictor.edits.compile import Compile
    from graph_predictor.edits.device import Device
    from graph_predictor.edits.fusion import FuseElementwise
    from graph_predictor.edits.host_from import HostFrom
    from graph_predictor.edits.launches import CudaGraphs, FreeLaunches, NoDataLoading
    from graph_predictor.edits.optimizer import FusedOptimizer
    from graph_predictor.edits.overlap import HideCollectives, NoWaits, OverlapLoading
    from graph_predictor.edits.precision import Precision
    from graph_predictor.edits.recompute import Recompute
    from graph_predictor.edits.scale import ScaleBandwidth, ScaleClock, ScaleHost, ScaleKernels
    from graph_predictor.edits.straggler import Straggler
    from graph_predictor.edits.topology import OnTopology
    from graph_predictor.prediction.edit import Edit
    from graph_predictor.sizes.laws import SizeLaws
    from graph_predictor.sizes.sizes import Sizes

_HOMES = {
    "Compile": "graph_predictor.edits.compile",
    "CudaGraphs": "graph_predictor.edits.launches",
    "Device": "graph_predictor.edits.device",
    "Edit": "graph_predictor.prediction.edit",
    "FlashAttention": "graph_predictor.edits.attention",
    "FreeLaunches": "graph_predictor.edits.launches",
    "FuseElementwise": "graph_predictor.edits.fusion",
    "FusedOptimizer": "graph_predictor.edits.optimizer",
    "HideCollectives": "graph_predictor.edits.overlap",
    "HostFrom": "graph_predictor.edits.host_from",
    "NoDataLoading": "graph_predictor.edits.launches",
    "NoWaits": "graph_predictor.edits.overlap",
    "OnTopology": "graph_predictor.edits.topology",
    "OverlapLoading": "graph_predictor.edits.overlap",
    "Precision": "graph_predictor.edits.precision",
    "Recompute": "graph_predictor.edits.recompute",
    "ScaleBandwidth": "graph_predictor.edits.scale",
    "ScaleClock": "graph_predictor.edits.scale",
    "ScaleHost": "graph_predictor.edits.scale",
    "ScaleKernels": "graph_predictor.edits.scale",
    "SizeLaws": "graph_predictor.sizes.laws",
    "Sizes": "graph_predictor.sizes.sizes",
    "Straggler": "graph_predictor.edits.straggler",
}

__all__ = [
    "Compile",
    "CudaGraphs",
    "Device",
    "Edit",
    "FlashAttention",
    "FreeLaunches",
    "FuseElementwise",
    "FusedOptimizer",
    "HideCollectives",
    "HostFrom",
    "NoDataLoading",
    "NoWaits",
    "OnTopology",
    "OverlapLoading",
    "Precision",
    "Recompute",
    "ScaleBandwidth",
    "ScaleClock",
    "ScaleHost",
    "ScaleKernels",
    "SizeLaws",
    "Sizes",
    "Straggler",
]

__getattr__, __dir__ = lazily(__name__, _HOMES)
