"""``foretrace predict``: the step time of a configuration that has never run."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from graph_predictor.figures import part_percent, percent, small_percent
from graph_predictor.prediction import result as prediction_result
from graph_predictor.recorded import facts
from graph_predictor.request import study as request_study
from kernel_models import device as known_devices
from kernel_models import op_call
from step_views.cli import mixture
from step_views.cli.console import Column, Report, print_json, read, working
from step_views.cli.options import (
    Cycle,
    Html,
    Json,
    Profiled,
    Step,
    StepRegion,
    Top,
    Window,
    check_html,
    chosen_edits,
    in_one_sentence,
    loaded_profiles,
    shared,
    with_edits,
    write_html,
)
from step_views.pages import overview


@with_edits
@in_one_sentence
def predict(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="The step to start from: traces, a capture, a converted file, or SCRIPT.py:FUNCTION.")],
    device: Annotated[str | None, shared("--device", "another than the recorded one")] = None,
    from_device: Annotated[str | None, shared("--from-device")] = None,
    profile: Annotated[list[str] | None, shared("--profile", "or of the one recorded on; repeatable")] = None,
    host_from: Annotated[str | None, shared("--host-from", "its time per operation and launch latencies")] = None,
    topology: Annotated[str | None, shared("--topology", "collectives there")] = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
    comm_backend: Annotated[str | None, shared("--comm-backend")] = None,
    comm_choices: Annotated[str | None, shared("--comm-choices")] = None,
    from_topology: Annotated[str | None, shared("--from-topology")] = None,
    parallel: Annotated[str | None, shared(
        "--parallel", "a workload's step on many ranks; also pp=4,microbatches=8 or ddp=8,accumulation=4")] = None,
    sizes: Annotated[list[str] | None, shared("--set", "batch=32:64 where nothing says the recorded one")] = None,
    code: Annotated[str | None, shared(
        "--code", "FUNCTION takes the sizes of --set by name and returns the step")] = None,
    selected: Annotated[float | None, shared("--selected", "by default as recorded")] = None,
    also: Annotated[list[str] | None, shared(
        "--also", "such as runs/b:batch=64; the nearest capture is scaled")] = None,
    step: Step = None,
    price: Annotated[float | None, shared("--price", least=0)] = None,
    html: Html = None,
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    profiled: Profiled = False,
    json: Json = False,
    **edits: Any,
) -> None:
    """Predict the step time of a configuration that was never run.

    foretrace predict resnet50-V100/ --device a100-sxm-40g --host-from resnet50-A100/
    """
    check_html(html, source)
    wanted = request_study.Configuration(
        device=device, parallel=parallel, topology=topology, from_topology=from_topology,
        comm_profile=comm_profile, comm_backend=comm_backend, comm_choices=comm_choices, host_from=host_from,
        sizes=tuple(sizes or ()), also=tuple(also or ()), code=code, selected=selected, edits=chosen_edits(edits))
    script = source[0] if request_study.is_script(source, step_region) else None
    job = read(source, window, step_region=step_region, cycle=cycle) if script is None else None
    with working("Preparing"):
        study = request_study.Study(job, step, recorded_on=None if from_device is None
                                    else known_devices.find_device(from_device), profiles=loaded_profiles(profile),
                                    code=script, device=device, profiled=profiled,
                                    read=partial(read, step_region=step_region, cycle=cycle))
    with working("Tracing" if parallel is not None or sizes or script is not None else "Preparing"):
        study.check_profiles([wanted])
        prepared = study.prepared(wanted)
    with working("Predicting"):
        result = prepared.predict(price_per_hour=price, evidence=True)
        mixed = prepared.mixture()
        single = result if mixed is None or not mixed.switched else study.prepared(
            wanted, mixed.best_single).predict()
    write_html(html, source, lambda where: overview.prediction_page(
        result, prepared.start.simulated(prepared.edits), where, job))
    if json:
        print_json(result.to_json(top) | ({} if mixed is None else mixture.mixture_json(
            mixed, result.step_time_us, single.step_time_us)))
    else:
        _report(result, top or 8)
        if mixed is not None:
            mixture.report_mixture(mixed, result.step_time_us, single.step_time_us)


def _report(result: prediction_result.Prediction, top: int) -> None:
    report = Report()
    unedited = "as recorded" if result.as_measured else "its steady state, not as measured"
    what = "; ".join(result.edits) or (unedited if result.ran
                                                  else f"as traced for {result.device}")
    report.line()
    step = facts.step_line(result.times, result.step_time_us, result.interval_us, what, result.cycle)
    # For a recording, the recorded time comes first; for a changed step, the predicted time.
    lines = [step] if result.recorded is None else [facts.recorded_line(result.recorded), step]
    for line in reversed(lines) if result.edits else lines:
        report.line(line, style="bold")
    rests = ", ".join(result.steps)
    if len(result.steps) > 1:
        unit = "steps" if result.cycle == 1 else f"cycles of {result.cycle} steps"
        rests = f"{len(result.steps)} recorded {unit}, {result.steps[0]} to {result.steps[-1]}"
    if result.ran:
        report.line(f"It rests on {rests}"
                    + (f", recorded on {result.recorded_on}." if result.recorded_on else "."))
    report.line(facts.decided_line(result.gpu_active_us, result.bound,
                                   result.gpu_active_interval_us))
    if savings := facts.savings_line(result.savings_us, result.step_time_us):
        report.line(savings)
    extra = []
    if result.items_per_second is not None:
        extra.append(f"{result.items_per_second:,.1f} samples/s")
    if result.mfu is not None:
        extra.append(f"{small_percent(result.mfu)} of the device's peak rate")
    if result.peak_memory_bytes is not None:
        extra.append(f"peak memory {result.peak_memory_bytes / 1e9:.2f} GB")
    if result.cost_per_step is not None:
        extra.append(f"{result.cost_per_step:.3g} a step")
    if extra:
        report.line("; ".join(extra))
    report.table("Critical path by bound", [Column("bound", name=True), Column("ms"), Column("share")],
                 ([name, _ms(us), percent(us / result.step_time_us if result.step_time_us
                                          else None)]
                  for name, us in result.bounds_us.items() if us > 0))
    report.table(f"Critical path: largest of {len(result.critical_path)} entries",
                 [Column("operation", name=True), Column("bound", name=True), Column("ms"), Column("share")],
                 ([e.operation, e.bound, _ms(e.time_us), percent(e.share)]
                  for e in result.critical_path[:top]))
    report.table("Device time by family", [Column("family", name=True), Column("ms")],
                 ([name, _ms(us)] for name, us in result.families_us.items()))
    if len(result.per_rank) > 1:
        report.table("By rank", [Column("rank"), Column("step ms"), Column("GPU active ms"),
                                 Column("bound", name=True)],
                     ([str(r.rank), _ms(r.step_time_us), _ms(r.gpu_active_us), r.bound]
                      for r in result.per_rank))
    report.line()
    report.line(f"Where the times come from: {_shares(result)}")
    report.notes([*(f"Warning: {text}" for text in result.warnings), *result.notes])


def _shares(result: prediction_result.Prediction) -> str:
    """Return the sources of all host and device times of the step."""
    shares = ", ".join(f"{name} {part_percent(share)}" for name, share in result.sources.items())
    if result.edits and set(result.sources) == {op_call.Source.MEASURED.label}:
        return f"{shares} (of what is left; none of it was changed)"
    return shares


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f}"
