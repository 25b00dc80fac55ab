"""Edits: what could be different about a recorded step. Each is a small class that documents what it assumes."""

from graph_predictor.whatif.device import Device
from graph_predictor.whatif.edit import Edit
from graph_predictor.whatif.host_from import HostFrom
from graph_predictor.whatif.launches import CudaGraphs, NoDataLoading
from graph_predictor.whatif.optimizer import FusedOptimizer
from graph_predictor.whatif.precision import Precision
from graph_predictor.whatif.scale import ScaleBandwidth, ScaleClock, ScaleHost, ScaleKernels
from graph_predictor.whatif.sizes import Sizes

__all__ = ["CudaGraphs", "Device", "Edit", "FusedOptimizer", "HostFrom", "NoDataLoading", "Precision",
           "ScaleBandwidth", "ScaleClock", "ScaleHost", "ScaleKernels", "Sizes"]
