"""foretrace: capture a real PyTorch training step once, then know what any other step would cost.

    import foretrace

    job = foretrace.read("runs/a")                                    # or a trace, a glob of ranks, a URL
    foretrace.predict(job, device="h200-sxm", sizes={"batch": 64})    # another GPU and batch
    foretrace.breakdown(foretrace.replay(job, profiled=False))        # where the time goes without the profiler
    foretrace.plan("llama", 64, preset="70b").to_pandas()             # the best parallel plans on a cluster

Everything is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.errors import ForetraceError
from tracer.lazy import lazily
from tracer.versions import installed_version

if TYPE_CHECKING:
    from foretrace import edits
    from graph_predictor.prediction.replay import replay
    from graph_predictor.request.predict import predict
    from graph_predictor.request.program_memory import fit_batch
    from graph_predictor.synthesis.baseline import baseline_of, retraced
    from kernel_models.device import find_device as device
    from planner.parallel.comm_study import comm_study
    from planner.parallel.planning import plan
    from planner.parallel.shape_search import shape_search
    from planner.parallel.shapes import shapes
    from planner.serving.layer_prices import price_layer
    from planner.serving.search import serve_search
    from planner.serving.serve import serve
    from planner.serving.step_predictor import step_predictor
    from planner.sharding.planning import shard
    from step_views.check.gate import check_directory as check
    from step_views.diff.jobs import diff_jobs as diff
    from step_views.exports.export import export
    from step_views.exports.tables import log
    from step_views.functions import ranks, report, sweep
    from step_views.reports.breakdown import breakdown
    from step_views.reports.opportunities import opportunities
    from step_views.reports.timeline import write_timeline
    from step_views.survey.fleet import fleet
    from step_views.survey.run import survey
    from tracer import hooks
    from tracer.capture import capture
    from tracer.device_memory import memory_timeline
    from tracer.hooks import handler
    from tracer.job import read_job as read
    from tracer.memory_snapshot import snapshot_timeline
    from tracer.shape_only import trace_step as trace
    from tracer.shape_only.devices import device_names

_HOMES = {
    "baseline_of": "graph_predictor.synthesis.baseline",
    "breakdown": "step_views.reports.breakdown",
    "capture": "tracer.capture",
    "check": "step_views.check.gate:check_directory",
    "comm_study": "planner.parallel.comm_study",
    "device": "kernel_models.device:find_device",
    "device_names": "tracer.shape_only.devices",
    "diff": "step_views.diff.jobs:diff_jobs",
    "edits": "foretrace.edits:",
    "export": "step_views.exports.export",
    "fit_batch": "graph_predictor.request.program_memory",
    "fleet": "step_views.survey.fleet",
    "handler": "tracer.hooks",
    "hooks": "foretrace.hooks:",
    "log": "step_views.exports.tables",
    "memory_timeline": "tracer.device_memory",
    "opportunities": "step_views.reports.opportunities",
    "plan": "planner.parallel.planning",
    "predict": "graph_predictor.request.predict",
    "price_layer": "planner.serving.layer_prices",
    "ranks": "step_views.functions",
    "read": "tracer.job:read_job",
    "replay": "graph_predictor.prediction.replay",
    "report": "step_views.functions",
    "retraced": "graph_predictor.synthesis.baseline",
    "serve": "planner.serving.serve",
    "serve_search": "planner.serving.search",
    "shape_search": "planner.parallel.shape_search",
    "shapes": "planner.parallel.shapes",
    "shard": "planner.sharding.planning",
    "snapshot_timeline": "tracer.memory_snapshot",
    "step_predictor": "planner.serving.step_predictor",
    "survey": "step_views.survey.run",
    "sweep": "step_views.functions",
    "trace": "tracer.shape_only:trace_step",
    "write_timeline": "step_views.reports.timeline",
}

__all__ = [
    "ForetraceError", "baseline_of", "breakdown", "capture", "check", "comm_study", "device", "device_names",
    "diff", "edits", "export", "fit_batch", "fleet", "handler", "hooks", "log", "memory_timeline",
    "opportunities", "plan", "predict", "price_layer", "ranks", "read", "replay", "report", "retraced", "serve",
    "serve_search", "shape_search", "shapes", "shard", "snapshot_timeline", "step_predictor", "survey", "sweep",
    "trace", "write_timeline",
]

_lazy, __dir__ = lazily(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    """Return a public name, imported at this moment, or ``__version__``."""
    if name == "__version__":
        return installed_version("foretrace")
    return _lazy(name)
