"""Edits: changes of a step. Each is a small class that documents its assumptions."""

from graph_predictor.edits.attention import FlashAttention
from graph_predictor.edits.compile import Compile
from graph_predictor.edits.device import Device
from graph_predictor.edits.fusion import FuseElementwise
from graph_predictor.edits.host_from import HostFrom
from graph_predictor.edits.launches import CudaGraphs, FreeLaunches, NoDataLoading
from graph_predictor.edits.link import ScaleLink
from graph_predictor.edits.optimizer import FusedOptimizer
from graph_predictor.edits.overlap import HideCollectives, NoWaits, OverlapLoading
from graph_predictor.edits.peers import RanksAlike
from graph_predictor.edits.precision import Precision
from graph_predictor.edits.recompute import Recompute
from graph_predictor.edits.remove import Remove
from graph_predictor.edits.scale import ScaleBandwidth, ScaleClock, ScaleHost, ScaleKernels
from graph_predictor.edits.scale_out import ScaleOut
from graph_predictor.edits.straggler import Straggler
from graph_predictor.edits.topology import OnTopology
from graph_predictor.edits.without_profiler import TakeOutProfiler
from graph_predictor.prediction.scenario import Edit
from graph_predictor.sizes.scaling import Sizes

__all__ = [
    "Compile", "CudaGraphs", "Device", "Edit", "FlashAttention", "FreeLaunches", "FuseElementwise",
    "FusedOptimizer", "HideCollectives", "HostFrom", "NoDataLoading", "NoWaits", "OnTopology", "OverlapLoading",
    "Precision", "RanksAlike", "Recompute", "Remove", "ScaleBandwidth", "ScaleClock", "ScaleHost", "ScaleKernels",
    "ScaleLink", "ScaleOut", "Sizes", "Straggler", "TakeOutProfiler",
]
