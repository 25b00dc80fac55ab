"""``foretrace predict``: the step time of a configuration that was never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graph_predictor.cli.console import Column, Report, percent, print_json, read, working
from graph_predictor.cli.errors import one_sentence
from graph_predictor.cli.options import Debug, Json, Window
from graph_predictor.cli.work_edits import work_edits
from tracer.graph import SHAPE_ONLY

if TYPE_CHECKING:
    from graph_predictor.parallel.collective_times import CollectiveModel
    from graph_predictor.predict import Baseline
    from graph_predictor.prediction.result import Prediction
    from graph_predictor.whatif import Edit, Straggler
    from kernel_models.host.overheads import HostOverheads
    from kernel_models.profile import DeviceProfile
    from tracer.job import Job

DEFAULT_TOP = 8
DEFAULT_DEVICE = "h200-sxm"


def predict(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="The step to start from: traces, a capture, a converted file, or SCRIPT.py:FUNCTION.")],
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Another device, such as b200.")] = None,
    from_device: Annotated[str | None, typer.Option(
        metavar="NAME", help="The device it was recorded on, where the trace does not say.")] = None,
    profile: Annotated[list[str] | None, typer.Option(
        metavar="FILE", help="Fitted models of the device, or of the one recorded on (repeatable).")] = None,
    host_from: Annotated[str | None, typer.Option(
        metavar="PATH", help="The host of another capture: its time per operation and launch latencies.")] = None,
    host: Annotated[float, typer.Option(metavar="FACTOR", help="Host time × FACTOR.")] = 1.0,
    clock: Annotated[float, typer.Option(metavar="FACTOR", help="GPU clock × FACTOR.")] = 1.0,
    bandwidth: Annotated[float, typer.Option(metavar="FACTOR", help="GPU memory bandwidth × FACTOR.")] = 1.0,
    kernels: Annotated[float, typer.Option(metavar="FACTOR", help="Kernel durations × FACTOR.")] = 1.0,
    topology: Annotated[str | None, typer.Option(
        metavar="NODE[xN][@NET]", help="Collectives on this cluster, such as dgx-h200x8.")] = None,
    comm_profile: Annotated[str | None, typer.Option(
        metavar="FILE", help="Measured collectives of that cluster (foretrace comm fit).")] = None,
    from_topology: Annotated[str | None, typer.Option(
        metavar="NODE[xN]", help="The cluster of the recording; by default its device's usual nodes.")] = None,
    parallel: Annotated[str | None, typer.Option(
        metavar="PLAN", help="A workload's step on many ranks: ddp=8, fsdp2=8,tp=2, pp=4,microbatches=8, "
                             "ddp=8,accumulation=4.")] = None,
    straggler: Annotated[str | None, typer.Option(
        metavar="RANK:PERCENT%", help="One rank slower, such as 3:10%.")] = None,
    dtype: Annotated[str | None, typer.Option(
        metavar="TYPE", help="Products in bf16 or fp16 (autocast), tf32 or fp32.")] = None,
    sizes: Annotated[list[str] | None, typer.Option(
        "--set", metavar="NAME=[OLD:]NEW", help="Another size, such as batch=64, or batch=32:64 where nothing says the "
                                                "recorded one (repeatable).")] = None,
    code: Annotated[str | None, typer.Option(
        metavar="SCRIPT.py:FUNCTION", help="The program: FUNCTION takes the sizes of --set by name and returns the "
                                           "step, which is traced again.")] = None,
    also: Annotated[list[str] | None, typer.Option(
        metavar="PATH[:NAME=SIZE,…]", help="A capture of the same program at another size, such as runs/b:batch=64: "
                                           "sizes and times follow laws through the captures (repeatable).")] = None,
    unprofiled: Annotated[bool, typer.Option("--unprofiled", help="The step as it is with no profiler on.")] = False,
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs", help="Replay the step as a CUDA graph.")] = False,
    no_data_loading: Annotated[bool, typer.Option("--no-data-loading", help="Batches are always ready.")] = False,
    fused_optimizer: Annotated[bool, typer.Option(
        "--fused-optimizer", help="The optimizer's step as one fused kernel.")] = False,
    fuse_elementwise: Annotated[bool, typer.Option(
        "--fuse-elementwise", help="Chains of elementwise kernels as one kernel each.")] = False,
    flash_attention: Annotated[bool, typer.Option(
        "--flash-attention", help="Attention that is written out as a fused operator.")] = False,
    recompute: Annotated[str | None, typer.Option(
        metavar="on|off", help="Activation checkpointing of every block.")] = None,
    overlap_loading: Annotated[bool, typer.Option(
        "--overlap-loading", help="Batches loaded in the background.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile, approximately.")] = False,
    free_launches: Annotated[bool, typer.Option("--free-launches", help="Launches cost nothing.")] = False,
    no_waits: Annotated[bool, typer.Option("--no-waits", help="The host never waits for the device.")] = False,
    hide_collectives: Annotated[bool, typer.Option(
        "--hide-collectives", help="Collectives overlap with everything else.")] = False,
    step: Annotated[int | None, typer.Option(
        metavar="NUMBER",
        help="The recorded step to repeat, from 0 (-1: the last); by default the last few alike.")] = None,
    price: Annotated[float | None, typer.Option(metavar="PER_HOUR", help="Price of one device and hour.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Entries of the critical path to show.")] = DEFAULT_TOP,
    window: Window = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict the step time of a configuration that was never run.

    foretrace predict resnet50-V100/ --device a100-sxm-40g --host-from resnet50-A100/
    """
    with one_sentence(debug):
        from graph_predictor.predict import Baseline
        from graph_predictor.whatif import Unprofiled
        from graph_predictor.whatif import device as devices

        profiles = [_profile(path) for path in profile or []]
        job = read_source(source, window, device)
        recorded = None if from_device is None else devices.find_device(from_device)
        overheads = None
        if any(graph.meta.era == SHAPE_ONLY for graph in job.graphs):
            # A step that never ran has no host of its own to change: it is made with the given one.
            overheads, host_from = None if host_from is None else _overheads(host_from), None
            recorded = recorded or (devices.find_device(device) if device is not None else None)
        collectives = _collectives(topology, comm_profile)
        with working("Preparing"):
            models = next((one for one in profiles if recorded is not None and one.device.name == recorded.name), None)
            baseline = Baseline(job, step, device=recorded, models=models, host=overheads, collectives=collectives)
        baseline = baseline.with_models({one.device.name: one for one in profiles})
        if parallel is not None:
            from graph_predictor.whatif.ranks import Ranks, on_ranks

            with working("Tracing"):
                baseline = on_ranks(baseline, Ranks.parse(parallel), collectives, also=_straggling(straggler))
        edits: list[Edit] = [Unprofiled()] if unprofiled else []
        if straggler is not None:
            edits.append(_straggler(straggler))
        baseline, by_size = _sized(baseline, sizes or [], also or [], code)
        edits += by_size
        edits += _edits(device, host_from, host, clock, bandwidth, kernels, dtype, profiles,
                        cuda_graphs=cuda_graphs, no_data_loading=no_data_loading, fused_optimizer=fused_optimizer)
        edits += work_edits(recompute, fuse_elementwise=fuse_elementwise, flash_attention=flash_attention,
                            overlap_loading=overlap_loading, compiled=compiled, free_launches=free_launches,
                            no_waits=no_waits, hide_collectives=hide_collectives)
        if collectives is not None and not baseline.made_up:
            edits.append(_on_topology(collectives, from_topology))
        with working("Predicting"):
            result = baseline.predict(edits, price_per_hour=price)
        if json:
            print_json(result.to_json())
        else:
            _report(result, top)


def read_source(source: list[str], window: int, device: str | None) -> Job:
    """The job of traces, or of a step traced by shapes from SCRIPT.py:FUNCTION."""
    path, colon, function = source[0].rpartition(":")
    if len(source) == 1 and colon and path.endswith(".py") and function.isidentifier():
        from tracer.job import assemble_job
        from tracer.shape_only.script import trace_script

        with working("Tracing"):
            return assemble_job([trace_script(source[0], device or DEFAULT_DEVICE)])
    return read(source, window)


def _sized(baseline: Baseline, sets: list[str], also: list[str], code: str | None) -> tuple[Baseline, list[Edit]]:
    """Other sizes by the best way there is: the program traced again, the laws of several captures, one capture."""
    from graph_predictor.prediction.scenario import EditError
    from graph_predictor.whatif import Sizes
    from graph_predictor.whatif.named_sizes import parse_sets
    from graph_predictor.whatif.retrace import recorded_sizes, retrace, why_not

    if (also or code is not None) and not sets:
        raise EditError("--also and --code are for other sizes; name one with --set, such as --set batch=64.")
    if not sets:
        return baseline, []
    if also and code is None:
        return baseline, [_laws(baseline, also, sets)]
    reason = "" if baseline.made_up else why_not(baseline, code)
    if reason is None:
        old, new = parse_sets(sets)
        with working("Tracing"):
            return retrace(baseline, new, old, code=code), []
    if code is not None:
        raise EditError(f"{reason or 'The step was traced by shapes already'}; leave --code out.")
    if also:
        return baseline, [_laws(baseline, also, sets)]
    noted = recorded_sizes(baseline)
    return baseline, [Sizes.parse(sets, noted, reason if noted else "")]


def _laws(baseline: Baseline, also: list[str], sets: list[str]) -> Edit:
    """Another size by the laws of several captures."""
    from graph_predictor.predict import Baseline
    from graph_predictor.whatif import SizeLaws
    from graph_predictor.whatif.named_sizes import captured_sizes, parse_also, parse_sets

    old, new = parse_sets(sets)
    others = [parse_also(text) for text in also]
    captures = [baseline, *(Baseline(read([path]), device=baseline.scenario.source_device) for path, _ in others)]
    graphs = [one.built.graphs[0] for one in captures]
    return SizeLaws(captures, captured_sizes(graphs, [old, *(sizes for _, sizes in others)], new), new)


def _collectives(name: str | None, profile: str | None) -> CollectiveModel | None:
    from graph_predictor.cli.comm import profile_on
    from graph_predictor.parallel.collective_times import CollectiveModel

    if name is None and profile is None:
        return None
    known, where = profile_on(profile, name, None)
    return CollectiveModel(where, known)


def _straggler(text: str) -> Straggler:
    from graph_predictor.whatif.ranks import Straggler

    return Straggler.parse(text)


def _straggling(text: str | None) -> list[int]:
    return [] if text is None else [_straggler(text).rank]


def _on_topology(collectives: CollectiveModel, recorded: str | None) -> Edit:
    from graph_predictor.whatif import OnTopology
    from kernel_models.collectives import topology

    return OnTopology(collectives, None if recorded is None else topology(recorded))


def _overheads(path: str) -> HostOverheads:
    from graph_predictor.overheads import measure_overheads

    return measure_overheads(read([path])).overheads


def _profile(path: str) -> DeviceProfile:
    from kernel_models.profile import load_profile

    return load_profile(path)


def _edits(device: str | None, host_from: str | None, host: float, clock: float, bandwidth: float, kernels: float,
           dtype: str | None, profiles: list[DeviceProfile], *, cuda_graphs: bool, no_data_loading: bool,
           fused_optimizer: bool) -> list[Edit]:
    from graph_predictor import whatif
    from graph_predictor.whatif.device import find_device

    edits: list[Edit] = []
    if device is not None:
        spec = find_device(device)
        edits.append(whatif.Device(spec, next((p for p in profiles if p.device.name == spec.name), None)))
    if dtype is not None:
        edits.append(whatif.Precision(dtype))
    if fused_optimizer:
        edits.append(whatif.FusedOptimizer())
    for factor, edit in ((clock, whatif.ScaleClock), (bandwidth, whatif.ScaleBandwidth), (kernels, whatif.ScaleKernels),
                         (host, whatif.ScaleHost)):
        if factor != 1.0:
            edits.append(edit(factor))
    if host_from is not None:
        edits.append(whatif.HostFrom(read([host_from]).graphs, host_from))
    if no_data_loading:
        edits.append(whatif.NoDataLoading())
    if cuda_graphs:
        edits.append(whatif.CudaGraphs())
    return edits


def _report(result: Prediction, top: int) -> None:
    report = Report()
    low, high = result.interval_us
    what = "; ".join(result.edits) or "as recorded"
    report.line()
    report.line(f"Step: {_ms(result.step_time_us)} ms, 80% between {_ms(low)} and {_ms(high)} ms ({what})",
                style="bold")
    rests = ", ".join(result.steps)
    if len(result.steps) > 1:
        rests = f"{len(result.steps)} recorded steps, {result.steps[0]} to {result.steps[-1]}"
    on = f", recorded on {result.recorded_on}" if result.recorded_on else ""
    if result.recorded_us is not None:
        report.line(f"It rests on {rests}{on} ({_ms(result.recorded_us)} ms a step).")
    report.line(f"GPU active {_ms(result.gpu_active_us)} ms; decided by: {result.bound}")
    extra = []
    if result.items_per_second is not None:
        extra.append(f"{result.items_per_second:,.1f} samples/s")
    if result.mfu is not None:
        extra.append(f"{percent(result.mfu)} of the device's peak rate")
    if result.peak_memory_bytes is not None:
        extra.append(f"peak memory {result.peak_memory_bytes / 1e9:.2f} GB")
    if result.cost_per_step is not None:
        extra.append(f"{result.cost_per_step:.3g} a step")
    if extra:
        report.line("; ".join(extra))
    report.table("Critical path by bound", [Column("bound", name=True), Column("ms"), Column("share")],
                 ([name, _ms(us), percent(us / result.step_time_us if result.step_time_us else None)]
                  for name, us in result.bounds_us.items() if us > 0))
    report.table(f"Critical path: largest of {len(result.critical_path)} entries",
                 [Column("operation", name=True), Column("bound", name=True), Column("ms"), Column("share")],
                 ([e.operation, e.bound, _ms(e.time_us), percent(e.share)] for e in result.critical_path[:top]))
    report.table("Device time by family", [Column("family", name=True), Column("ms")],
                 ([name, _ms(us)] for name, us in result.families_us.items()))
    if len(result.per_rank) > 1:
        report.table("By rank", [Column("rank"), Column("step ms"), Column("GPU active ms"),
                                 Column("bound", name=True)],
                     ([str(r.rank), _ms(r.step_time_us), _ms(r.gpu_active_us), r.bound] for r in result.per_rank))
    report.line()
    shares = ", ".join(f"{name} {percent(share, 0)}" for name, share in result.sources.items())
    report.line(f"Where the times come from: {shares}")
    report.notes([*(f"Warning: {text}" for text in result.warnings), *result.notes])


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f}"
