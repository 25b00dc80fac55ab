"""Edits: what could be different about a recorded step. Each is a small class that documents what it assumes."""

from graph_predictor.whatif.attention import FlashAttention
from graph_predictor.whatif.compile import Compile
from graph_predictor.whatif.device import Device
from graph_predictor.whatif.edit import Edit
from graph_predictor.whatif.fusion import FuseElementwise
from graph_predictor.whatif.host_from import HostFrom
from graph_predictor.whatif.launches import CudaGraphs, FreeLaunches, NoDataLoading
from graph_predictor.whatif.laws import SizeLaws
from graph_predictor.whatif.optimizer import FusedOptimizer
from graph_predictor.whatif.overlap import HideCollectives, NoWaits, OverlapLoading
from graph_predictor.whatif.precision import Precision
from graph_predictor.whatif.ranks import Ranks, Straggler
from graph_predictor.whatif.recompute import Recompute
from graph_predictor.whatif.scale import ScaleBandwidth, ScaleClock, ScaleHost, ScaleKernels
from graph_predictor.whatif.sizes import Sizes
from graph_predictor.whatif.topology import OnTopology

__all__ = ["Compile", "CudaGraphs", "Device", "Edit", "FlashAttention", "FreeLaunches", "FuseElementwise",
           "FusedOptimizer", "HideCollectives", "HostFrom", "NoDataLoading", "NoWaits", "OnTopology", "OverlapLoading",
           "Precision", "Ranks", "Recompute",
           "ScaleBandwidth", "ScaleClock", "ScaleHost", "ScaleKernels", "SizeLaws", "Sizes", "Straggler"]
