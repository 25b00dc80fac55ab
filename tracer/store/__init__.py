"""One-file save and load of graphs and jobs: a zip of Parquet tables and a JSON manifest. No pickle, no code."""

from tracer.store.container import is_graph_file
from tracer.store.graphs import SUFFIX, load_graph, save_graph

__all__ = ["SUFFIX", "is_graph_file", "load_graph", "save_graph"]
