"""``foretrace plan``: the best way to spread a decoder's step over a cluster.

The report has the best plans, how sure their order is, what separates them, the Pareto front, and the best plan as a
framework's arguments, as text or plain values. For several devices and figures it has each case's best plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from graph_predictor.comm import traffic
from graph_predictor.figures import percent
from graph_predictor.request import memory_fit
from kernel_models import device as known_devices
from kernel_models import op_call
from planner.cli import plan_causes
from planner.cli.options import DecoderSource, Profiles, TrainedPreset
from planner.parallel import compared, explained, exploration, layer_costs, page, planning, search
from planner.parallel import space as frameworks
from step_views.cli.console import Column, Report, print_json, working
from step_views.cli.options import (
    Html,
    Json,
    Top,
    Workers,
    axis,
    check_html,
    in_one_sentence,
    numbers,
    profile_of,
    shared,
    write_html,
)
from tracer import cluster, output_kind
from tracer.parallel_plan import ParallelPlan, PlanError, Recomputation, Schedule, Sharding
from tracer.shape_only import transformer

BEST = 10  # chosen: a longer table would not be read


@in_one_sentence
def plan(
    source: DecoderSource = "",
    gpus: Annotated[str, typer.Option(metavar="N,…", help="GPUs of the job; several sizes are compared.")] = "",
    device: Annotated[str, axis("--device", "are compared")] = "h200-sxm",
    topology: Annotated[str | None, axis("--topology", "one for each device; by default its usual nodes")] = None,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: TrainedPreset = None,
    global_batch: Annotated[int | None, shared(
        "--global-batch", "by default what the source does, on every GPU", least=1)] = None,
    only: Annotated[str | None, shared("--parallel", "this one alone, such as dp=8,tp=4,pp=2,microbatches=16")] = None,
    framework: Annotated[str, typer.Option(
        metavar="NAME", help="Plans that megatron, torchtitan or fsdp has, or any of them; nanotron or deepspeed too.")
    ] = "any",
    export: Annotated[str | None, typer.Option(
        metavar="NAME", help="Print the best plan as arguments of megatron or torchtitan too.")] = None,
    memory_limit: Annotated[str | None, shared(
        "--memory-limit", "a bare number is in GB; by default all it has")] = None,
    price: Annotated[str | None, axis("--price", "one for each device")] = None,
    profile: Profiles = None,
    comm_profile: Annotated[str | None, shared(
        "--comm-profile", "or measured busbw as a table or as numbers, such as 1:458/265/265,16:52/27/27")] = None,
    comm_choices: Annotated[str | None, shared("--comm-choices")] = None,
    linears: Annotated[str, typer.Option(
        metavar="TYPE", help="What linear layers' products are computed in: fp8, fp8_block, mxfp8 or nvfp4; by default "
        "as everything else.")] = "",
    clock: Annotated[str | None, typer.Option(
        metavar="FACTOR,…", help="The device's clock × FACTOR, or a value such as 2100MHz; several are compared.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(
        metavar="FACTOR,…", help="Its memory's bandwidth × FACTOR, or a value such as 6TB/s; several are compared.")
    ] = None,
    memory: Annotated[str | None, typer.Option(
        metavar="FACTOR,…", help="Another device with its memory × FACTOR, or such as 192GB; several are compared. "
        "What a plan may use of this one is --memory-limit.")] = None,
    link: Annotated[str | None, typer.Option(
        metavar="FACTOR,…", help="Links between its GPUs and nodes × FACTOR, or a value such as 900GB/s of a GPU in "
                                 "its node; several are compared.")] = None,
    power: Annotated[str | None, typer.Option(
        metavar="FACTOR,…", help="The board's power limit × FACTOR, or a value such as 1200W; several are compared.")
    ] = None,
    launch_us: Annotated[float | None, typer.Option(
        min=0, metavar="US", help="Host time of a kernel's launch, µs, where it is known.")] = None,
    host: Annotated[float, shared("--host", "of what a launch takes")] = 1.0,
    host_from: Annotated[str | None, shared("--host-from", "what a launch takes")] = None,
    runs: Annotated[str | None, shared(
        "--calibrate", "plans with columns plan, step_ms and, if need be, gpus, model, preset and set; kernels, "
        "collectives and host are fitted to them")] = None,
    compare: Annotated[tuple[str, str] | None, typer.Option(
        metavar="A.toml B.toml", help="Two recipes: files of what these options say (gpus, parallel, device, set, …). "
        "What causes the difference of their steps, setting by setting.")] = None,
    measured: Annotated[str | None, typer.Option(
        metavar="MS", help="What a step of the plan of --parallel took, ms (or such as 37.7s): by which parts the "
        "estimate may differ, each cause with its range.")] = None,
    timeline: Annotated[str | None, shared("--timeline", "the best plan's step: tasks of a rank of each stage")] = None,
    html: Html = None,
    workers: Workers = "local",
    top: Top = None,
    json: Json = False,
) -> None:
    """Find the best parallel plan of all that Megatron-Core, torchtitan or FSDP have: data, tensor, sequence, pipeline,
    context and expert parallelism, schedules, micro-batches, recomputation and sharding.

    foretrace plan llama --preset 70b --gpus 64 --device h200-sxm --topology dgx-h200x8

    foretrace plan llama --gpus 8 --device a100-sxm-80g,h100-sxm,b200 --price 1.5,2.5,5

    foretrace plan llama --gpus 8 --device h100-sxm --bandwidth 1,2 --link 0.5,1,2

    foretrace plan --compare before.toml after.toml

    Ends with status 1 where no plan is possible.
    """
    planning.check_finite(launch_us, "--launch-us", "the host time of a launch in µs")
    planning.check_finite(host, "--host", "a factor of the host time")
    if compare is None and not (source and gpus):
        raise PlanError(f"Nothing says {'how many GPUs the job has' if source else 'what is planned'}; give SOURCE and "
                        "--gpus, such as foretrace plan llama --gpus 64.")
    sizes = numbers(gpus or "1", "--gpus", "64,128,256")
    check_html(html, [])
    if timeline is not None:
        output_kind.check_output(timeline, [], output_kind.TIMELINE)
        if len(sizes) > 1:
            raise _of_one("--timeline")
    wanted, target = planning.framework_of(framework), None if export is None else planning.framework_of(export)
    if target is not None and wanted not in (None, target):
        raise PlanError(f"--framework {framework} looks for plans that --export {export} need not have; give both "
                        "the same name, or one of them.")
    limit = None if memory_limit is None else traffic.parse_memory(memory_limit, "--memory-limit", "80GiB")
    changes = {"clock": clock, "bandwidth": bandwidth, "memory": memory, "link": link, "power": power}
    cases = exploration.cases_of(device, topology, price, changes, max(sizes))
    if workers != "local" and len(cases) == len(sizes) == 1:
        raise PlanError("--workers shares searches of several sizes or devices among processes, and this is one; leave "
                        "it out.")
    case = cases[0]
    request = planning.PlanRequest(
        source, sizes[0], settings=assignments or (), preset=preset, global_batch=global_batch, only=only,
        framework=framework if target is None else target.value, memory_limit=limit, linears=linears.strip().lower(),
        launch_us=launch_us, host=host, host_from=host_from)
    if compare is not None or measured is not None:
        asked = "--measured" if compare is None else "--compare"
        for option, given in (("--timeline", timeline), ("--html", html), ("--export", export),
                              ("--calibrate", runs if compare else None), ("--measured", measured if compare else None),
                              ("--gpus with several sizes", gpus[:len(sizes) - 1]),
                              ("--device with several cases", device[:len(cases) - 1])):
            if given:
                raise PlanError(f"{option} does not go with {asked}; leave one of them out.")
        with working("Tracing and pricing"):
            request = replace(
                request, device=case.device, topology=case.topology, technology=case.technology, measured=runs,
                profile=profile_of(profile, known_devices.find_device(case.device)), comm_profile=comm_profile,
                comm_choices=comm_choices)
            both = None if compare is None else compared.compare(compare, request)
            one = None if measured is None else _explained(request, measured)
        if both is not None:
            (print_json(plan_causes.plain_comparison(both)) if json else plan_causes.report_comparison(both))
        if one is not None:
            (print_json(plan_causes.plain_explained(one)) if json else plan_causes.report_explained(one))
        return
    if len(cases) > 1:
        for name, value in (("--export", export), ("--profile", profile), ("--comm-profile", comm_profile),
                            ("--comm-choices", comm_choices), ("--calibrate", runs),
                            ("--memory-limit", memory_limit), ("--timeline", timeline), ("--html", html)):
            if value:
                raise _of_one(name)
        if len(sizes) > 1:
            raise _of_one(f"--gpus {gpus}")
        with cluster.open_workers(workers) as shared_by, working("Tracing and pricing"):
            explored = exploration.explore(cases, request, shared_by)
        if json:
            print_json(plain_exploration(explored))
        else:
            report_exploration(explored)
        if not any(each.plans.plans for each in explored):
            raise typer.Exit(1)
        return
    with working("Tracing and pricing"):
        spec = known_devices.find_device(case.device)
        known = profile_of(profile, spec)
        request = replace(request, device=case.device, topology=case.topology, technology=case.technology,
                          pieces=layer_costs.LayerCosts(case.technology.device(spec), known, profile=request.runs),
                          profile=known,
                          comm_profile=comm_profile, comm_choices=comm_choices, measured=runs,
                          best=max(search.BEST, top or 0))
        # What is measured is fitted once, for the first size.
        found = [planning.find_plans(request)] if runs is not None or len(sizes) == 1 else []
        if rest := sizes[len(found):]:
            fitted = found[0].calibration if found else None
            with cluster.open_workers(workers) as shared_by:
                found += shared_by.each(planning.find_plans, [
                    replace(request, gpus=size, measured=fitted) for size in rest])
    if timeline is not None and any(each.plans for each in found):
        assert found[0].schedule is not None
        page.write_step_timeline(page.StepTimeline.of(found[0].schedule, found[0].plans[0].estimate), timeline)
    if html is not None:
        write_html(html, [source], lambda where: page.plans_page(found, where))
    if json:
        print_json(plain(found, case.price, top, target))
    else:
        report(found, case.price, top or BEST, target)
    if not any(each.plans for each in found):
        raise typer.Exit(1)


def _explained(request: planning.PlanRequest, measured: str) -> explained.ExplainedStep:
    """Explain a measured step. Raises ``PlanError`` without a named plan, or if the time cannot be read."""
    us = plan_causes.milliseconds_of(measured)
    if request.only is None:
        raise PlanError("A measured step is of one plan; give it with --parallel, such as --parallel dp=8,tp=4.")
    job = planning.job_of(request)
    plan = job.request.named_plan(job.shape, job.per_gpu)
    assert plan is not None
    return explained.explain(job, plan, us)


def _of_one(name: str) -> Exception:
    return PlanError(f"{name} is of one device and one size of a job, and several cases are compared; leave it out, or "
                     "name one device without several factors.")


MOST_FRONT = 6
"""Rows of the table of plans that trade time for memory and GPUs."""
_SCHEDULES = {Schedule.GPIPE: "gpipe", Schedule.ONE_F_ONE_B: "1f1b", Schedule.INTERLEAVED: "inter",
              Schedule.ZERO_BUBBLE: "zero-b"}


def plain(found: Sequence[planning.Plans], price: float | None, top: int | None, target: frameworks.Framework
          | None) -> dict[str, Any]:
    """Return all results as plain values; for several sizes, each size's results and the common Pareto front."""
    every = [_plain_size(each, price, top, target) for each in found]
    return every[0] if len(every) == 1 else {
        "sizes": every, "front": [_figures(each, price) for each in search.front(_all(found))]}


def _all(found: Sequence[planning.Plans]) -> list[search.Ranked]:
    return [ranked for each in found for ranked in each.plans]


def _plain_size(found: planning.Plans, price: float | None, top: int | None, target: frameworks.Framework
                | None) -> dict[str, Any]:
    values = {
        "model": found.model, "parameters": found.shape.parameters, "shape": asdict(found.shape), "gpus": found.gpus,
        "device": found.device, "topology": found.topology, "considered": found.considered,
        "plans": [_plain_plan(each, found.plans[0], price) for each in found.plans[:top or None]],
        "front": [_figures(each, price) for each in search.front(found.plans)],
        "slower": {"plans": found.slower, "least_ms": found.slower_us / 1e3 if found.slower else None},
        "refused": [asdict(each) for each in found.refused], "notes": found.notes}
    if found.stages:
        values["stages"] = [{
            "stage": each.stage, "fullest_at": each.moment, "allocated_gb": each.allocated / 1e9,
            "total_gb": each.account.total / 1e9,
            "memory_gb": [each.low / 1e9, each.high / 1e9],
            "timeline": [{"task": at.task, "microbatch": at.microbatch, "chunk": at.chunk, "before_gb": at.before / 1e9,
                          "peak_gb": at.peak / 1e9} for at in points]} for each, points in found.stages]
    if found.relief:
        values["relief"] = [{"change": each.change, "plan": str(each.plan), "frees_gb": each.frees_bytes / 1e9,
                             "fits": each.fits, "fits_probability": each.probability,
                             "step_ms": each.time_us / 1e3 or None} for each in found.relief]
    if found.needs is not None:
        values["needs"] = {"memory_gb": found.needs.account.total / 1e9, "has_gb": found.limit_bytes / 1e9,
                           "interval_gb": [found.needs.low / 1e9, found.needs.high / 1e9],
                           "fits_probability": memory_fit.fit_probability(found.needs, found.limit_bytes),
                           "step_ms": found.needs_us / 1e3}
    if found.calibration is not None:
        values["calibration"] = found.calibration.to_dict()
    if target is not None and found.plans:
        values["export"] = {target.value: frameworks.exported(found.plans[0].plan, found.shape, target)}
    return values


def _cost(each: search.Ranked, price: float | None) -> float | None:
    return None if price is None else price * each.plan.world_size * each.estimate.time_us / 3.6e9


def _figures(each: search.Ranked, price: float | None) -> dict[str, Any]:
    e = each.estimate
    return {"plan": str(e.plan), "gpus": e.plan.world_size, "step_ms": e.time_us / 1e3,
            "memory_gb": each.memory.total / 1e9, "sequences_per_second": e.plan.global_batch / e.time_us * 1e6,
            "gpu_seconds_per_sequence": e.plan.world_size * e.time_us / e.plan.global_batch / 1e6,
            "cost_per_step": _cost(each, price)}


def _plain_plan(each: search.Ranked, first: search.Ranked, price: float | None) -> dict[str, Any]:
    e, m = each.estimate, each.memory
    return {
        **_figures(each, price), "frameworks": [name.value for name in each.frameworks],
        "interval_ms": [e.low_us / 1e3, e.high_us / 1e3], "exposed_communication_ms": e.exposed_us / 1e3,
        "bubble": e.bubble, "bound": e.bound, "tied_with_first": search.tied(first.estimate, e),
        "more_than_first_ms": {name: us / 1e3 for name, us in search.differences(first.estimate, e).items()},
        "parts_ms": {name: getattr(e, name) / 1e3 for name in (
            "products", "others", "host", "layers", "pipeline", "data", "optimizer", "fixed", "stragglers", "hidden")},
        "fits": each.fit.value, "fits_probability": each.probability,
        "memory_parts_gb": {name: size / 1e9 for name, size in m.parts.items()},
        "sources": {op_call.Source(source).label: share for source, share in e.sources.items()}}


def heads_text(shape: transformer.TransformerShape, *, sized: bool = False) -> str:
    """Describe a decoder's attention heads, with the width of a head if ``sized``. With state-space mixers, also give
    the numbers of layers with attention and with mixers."""
    mixed = sum(run.layers for run in shape.runs if run.state is not None)
    attended = [run for run in shape.runs if run.attends]
    heads = f"{attended[0].heads} heads" if attended else "no attention"
    if attended and sized:
        heads += f" of {attended[0].width_of_head}"
    if not mixed:
        return heads
    of = f" in {sum(run.layers for run in attended)} of them" if attended else ""
    return f"{heads}{of}, state-space mixers in {mixed}"


def report(found: Sequence[planning.Plans], price: float | None, top: int, target: frameworks.Framework | None) -> None:
    """Print the tables of every size, and the Pareto front over all sizes."""
    out, shape = Report(), found[0].shape
    count = shape.parameters
    said = f"{count / 1e9:,.3g} billion" if count >= 1e8 else f"{count / 1e6:,.3g} million"
    routed = next((run for run in shape.runs if run.experts), None)
    experts = "" if routed is None else f", {routed.experts} experts of which {routed.top_k} work"
    out.line(f"{found[0].model}: a decoder of {said} parameters ({shape.layers} layers of width {shape.hidden:,}, "
             f"{heads_text(shape)}{experts}, vocabulary {shape.vocab:,}, "
             f"{shape.dtype}{f', linear layers in {shape.linears}' * bool(shape.linears)}"
             f"{', unfused attention' * (not shape.flash)}{f', dropout {shape.dropout:g}' * bool(shape.dropout)}), "
             f"sequences of {shape.seq:,} tokens.")
    for each in found:
        _report_size(out, each, price, top)
    _report_front(out, found, price)
    for each in found:
        if target is not None and each.plans:
            out.line()
            out.line(f"{each.plans[0].plan} as {target.value}'s arguments", style="bold")
            for line in frameworks.exported(each.plans[0].plan, shape, target).splitlines():
                out.line(line)
    out.notes(note for each in found for note in each.notes)


def _report_size(out: Report, found: planning.Plans, price: float | None, top: int) -> None:
    plans = "plan" if found.considered == 1 else "plans"
    possible = f"{len(found.plans):,} estimated" if found.slower else f"{len(found.plans):,} possible"
    # A topology's name includes its device. The device is named too if it was changed or differs from the topology's.
    on = f" ({found.device})" if "(" in found.device else ""
    out.line(f"{found.gpus:,} GPUs of {found.topology}{on}: {found.considered:,} {plans}, {possible}.")
    batches = sorted({each.plan.global_batch for each in found.plans})
    if batches:
        out.line(f"Sequences of a step: {', '.join(f'{batch:,}' for batch in batches)}.")
    first = found.plans[0].estimate if found.plans else None
    columns = [Column("dp"), Column("tp"), Column("pp", name=True), Column("cp"), Column("ep"),
               Column("micro-\nbatches"), Column("ZeRO"), Column("re-\ncompute", name=True), Column("step\nms"),
               Column("80% between\nms"), Column("tie", name=True), Column("memory\nGB"), Column("exposed\nms"),
               Column("bubble"), Column("binds", name=True), Column("has it", name=True)]
    if price is not None:
        columns.insert(-2, Column("cost\na step"))
    if not any(run.experts for run in found.shape.runs):
        columns = [column for column in columns if column.title != "ep"]
    rows = []
    for each in found.plans[:top]:
        e = each.estimate
        assert first is not None
        cells = {**_sizes(e.plan), "step\nms": f"{e.time_us / 1e3:,.1f}",
                 "80% between\nms": f"{e.low_us / 1e3:,.1f} – {e.high_us / 1e3:,.1f}",
                 "tie": "=" if search.tied(first, e) else "",
                 "memory\nGB": f"{each.memory.total / 1e9:.1f}{'?' if each.fit is memory_fit.Fit.TIGHT else ''}",
                 "exposed\nms": f"{e.exposed_us / 1e3:,.1f}", "bubble": percent(e.bubble), "binds": e.bound,
                 "has it": " ".join(name.value[0].upper() for name in each.frameworks) or "none",
                 "cost\na step": f"{_cost(each, price) or 0:.3g}"}
        rows.append([cells[column.title] for column in columns])
    out.table("Best plans, fastest first", columns, rows)
    if first is not None:
        _report_order(out, found, top)
    if found.refused:
        out.line()
        out.line("Not possible", style="bold")
    for refused in found.refused:
        number = f"{refused.count:,} {'plan' if refused.count == 1 else 'plans'}"
        out.line(f"{number}: {refused.reason} Such as {refused.such_as}.", indent=4)
    if found.slower:
        out.line(f"{found.slower:,} plans were not estimated: by the arithmetic and the collectives of their layers "
                 f"alone each takes {found.slower_us / 1e3:,.1f} ms or more.", indent=4)
    if not found.plans:
        out.line()
        out.line("No plan is possible.", style="bold")
    if len(found.stages) > 1:
        columns = [Column("stage"), Column("fullest at", name=True), Column("allocated\nGB"), Column("in all\nGB"),
                   Column("80% between\nGB"), Column("kept for\nbackward GB")]
        out.table("Memory of the stages", columns, [
            [str(each.stage), each.moment, f"{each.allocated / 1e9:.1f}", f"{each.account.total / 1e9:.1f}",
             f"{each.low / 1e9:.1f} – {each.high / 1e9:.1f}", f"{each.account.activations / 1e9:.1f}"]
            for each, _ in found.stages])
    if found.stages and found.plans and found.plans[0].fit is memory_fit.Fit.TIGHT:
        out.line(f"It fits with a probability of {percent(found.plans[0].probability, 0)}.")
    if found.needs is not None:
        plan_causes.report_relief(out, found)


def _report_order(out: Report, found: planning.Plans, top: int) -> None:
    """Print which plans the estimate cannot tell apart, and what separates the first plan from the next."""
    first = found.plans[0].estimate
    ties = sum(search.tied(first, each.estimate) for each in found.plans[1:])
    out.line()
    away = "; h: the optimizer in the hosts' memory" * any(each.plan.offload_optimizer for each in found.plans[:top])
    has_it = {name for each in found.plans[:top] for name in each.frameworks}
    names = "N: nanotron" if frameworks.Framework.NANOTRON in has_it else (
        "D: DeepSpeed" if frameworks.Framework.DEEPSPEED in has_it else "M, T, F: Megatron-Core, torchtitan, FSDP")
    out.line(f"s: sequence parallelism, o: its collectives overlapped; ×: copies of sharded state{away}; {names}. "
             "exposed: communication that no work of the rank hides.")
    if any(each.fit is memory_fit.Fit.TIGHT for each in found.plans[:top]):
        out.line("?: may not fit: the memory of fragmentation and of communication buffers is not known that exactly.")
    if ties:
        out.line(f"= {ties:,} {'plan ties' if ties == 1 else 'plans tie'} with the first: the difference is smaller "
                 "than its uncertainty.")
    if len(found.plans) == 1:
        return
    second = found.plans[1].estimate
    out.line(f"The second against the first: {search.separation(first, second)}.")
    apart = next((each.estimate for each in found.plans[1:] if not search.tied(first, each.estimate)), None)
    if apart is not None and apart is not second:
        out.line(f"The first that is surely slower ({apart.plan}): {search.separation(first, apart)}.")


def _report_front(out: Report, found: Sequence[planning.Plans], price: float | None) -> None:
    every = search.front(_all(found))
    if len(every) < 2:
        return
    columns = [Column("GPUs"), Column("step\nms"), Column("sequences\na second"), Column("memory\nGB"),
               Column("GPU seconds\na sequence"), Column("plan", name=True, whole=True)]
    if price is not None:
        columns.insert(-1, Column("cost\na step"))
    rows = []
    for each in every[:MOST_FRONT]:
        values = _figures(each, price)
        row = [f"{values['gpus']:,}", f"{values['step_ms']:,.1f}", f"{values['sequences_per_second']:,.3g}",
               f"{values['memory_gb']:.1f}", f"{values['gpu_seconds_per_sequence']:,.4g}", values["plan"]]
        if price is not None:
            row.insert(-1, f"{values['cost_per_step']:.3g}")
        rows.append(row)
    out.table("Pareto front: no other plan is faster with as little memory and as few GPUs", columns, rows)


def _sizes(plan: ParallelPlan) -> dict[str, str]:
    """Return a plan's cells of a table."""
    shared = plan.sharding is not Sharding.NONE
    again = f"{plan.recompute.value} {plan.recompute_layers or '+'.join(plan.recompute_modules)}".rstrip()
    return {
        "dp": str(plan.dp), "tp": f"{plan.tp}{'s' * plan.sequence_parallel}{'o' * plan.tensor_overlap}",
        "pp": str(plan.pp) if plan.pp == 1 else f"{plan.pp} {_SCHEDULES[plan.schedule]}"
        + (f" {plan.chunks}" if plan.chunks > 1 else ""),
        "cp": str(plan.cp), "ep": f"{plan.ep}" + ("/1" if plan.etp == 1 and plan.tp > 1 else ""),
        "micro-\nbatches": f"{plan.passes} × {plan.samples}",
        "ZeRO": f"{int(plan.sharding)}{'h' * plan.offload_optimizer}"
        + (f" ×{plan.replicate}" if shared and plan.replicate > 1 else ""),
        "re-\ncompute": "none" if plan.recompute is Recomputation.NONE else again}


def plain_exploration(found: Sequence[exploration.Explored]) -> dict[str, Any]:
    """Return all cases as plain values."""
    return {"model": found[0].plans.model, "gpus": found[0].plans.gpus, "cases": [_values(each) for each in found],
            "notes": list(dict.fromkeys(note for each in found for note in each.plans.notes))}


def _values(each: exploration.Explored) -> dict[str, Any]:
    best = each.best
    return {
        "device": each.plans.device, "topology": each.plans.topology, "factors": asdict(each.case.technology),
        "power_w": each.spec.power_w, "memory_gb_device": each.spec.memory_gb,
        "sources": {key: text for key, text in each.spec.sources.items() if ", × " in text},
        "plan": None if best is None else str(best.estimate.plan),
        "step_ms": None if best is None else best.estimate.time_us / 1e3,
        "interval_ms": None if best is None else [best.estimate.low_us / 1e3, best.estimate.high_us / 1e3],
        "memory_gb": None if best is None else best.memory.total / 1e9,
        "tokens_per_gpu_second": each.tokens_per_gpu_second, "joules_per_token": each.joules_per_token,
        "cost_per_million_tokens": each.cost_per_million_tokens, "binds": each.binds, "gains": dict(each.gains)}


def report_exploration(found: Sequence[exploration.Explored]) -> None:
    """Print the table of all cases and, if two figures change, the map of bounds."""
    out, first = Report(), found[0].plans
    out.line(f"{first.model} on {first.gpus} GPUs, the best plan of each device that was asked for.")
    columns = [Column("device", name=True, whole=True), Column("step\nms"), Column("80% between\nms"),
               Column("tokens a second\nand GPU"), Column("memory\nGB"), Column("J a\ntoken"),
               Column("binds", name=True, whole=True), Column("twice as much of it\nsaves"),
               Column("plan", name=True, whole=True)]
    priced = any(each.case.price is not None for each in found)
    if priced:
        columns.insert(6, Column("cost of 10⁶\ntokens"))
    rows = []
    for each in found:
        best, joules, cost = each.best, each.joules_per_token, each.cost_per_million_tokens
        row = [each.plans.device, *(("–",) * 4 if best is None else (
            f"{best.estimate.time_us / 1e3:,.1f}",
            f"{best.estimate.low_us / 1e3:,.1f} – {best.estimate.high_us / 1e3:,.1f}",
            f"{each.tokens_per_gpu_second:,.0f}", f"{best.memory.total / 1e9:.1f}")),
            "–" if joules is None else f"{joules:.3g}", each.binds,
            percent(each.gains[each.binds]) if each.binds in each.gains else "–",
            "none fits" if best is None else str(best.estimate.plan)]
        if priced:
            row.insert(6, "–" if cost is None else f"{cost:.3g}")
        rows.append(row)
    out.table("Devices", columns, rows)
    out.line("J a token: every board at its power limit all the time. What binds is what the same plan would be "
             "quickest with twice as much of: compute with the power that feeds it, power alone, the memory's "
             "bandwidth, the network; capacity: the best plan of all with twice the memory.")
    _report_map(out, found)
    for line in _sources(found):
        out.line(line)
    out.notes(dict.fromkeys(note for each in found for note in each.plans.notes))


def _sources(found: Sequence[exploration.Explored]) -> list[str]:
    """Return sentences on the sources of each changed device's figures, joined for figures of one source."""
    lines = {}
    for each in found:
        keys: dict[str, dict[str, None]] = {}
        for key, text in each.spec.sources.items():
            if ", × " in text:
                keys.setdefault(text, {})[key.partition(".")[0] if "tflops" in key else key] = None
        if keys:
            lines[each.spec.name] = f"{each.spec.name}: " + "; ".join(
                f"{', '.join(names)} from {text}" for text, names in keys.items()) + "."
    return list(lines.values())


def _report_map(out: Report, found: Sequence[exploration.Explored]) -> None:
    """Print the bound for each pair of values of two figures, and the step's time relative to the unchanged device."""
    values = {axis: list(dict.fromkeys(getattr(each.case.technology, axis) for each in found))
              for axis in exploration.AXES}
    axes = [axis for axis, factors in values.items() if len(factors) > 1]
    if len(axes) != 2 or len({each.case.device for each in found}) > 1:
        return
    down, across = axes
    by = {(getattr(each.case.technology, down), getattr(each.case.technology, across)): each for each in found}
    # Times are relative to the case nearest to the unchanged device.
    start = min(found, key=lambda each: abs(getattr(each.case.technology, down) - 1)
                + abs(getattr(each.case.technology, across) - 1)).best

    def cell(each: exploration.Explored) -> str:
        if each.best is None or start is None:
            return each.binds
        return f"{each.binds} ×{each.best.estimate.time_us / start.estimate.time_us:.2f}"

    out.table("What binds, and the step's time beside the one nearest to the device as it is", [
        Column(f"{down} \\ {across}", name=True), *(Column(f"× {value:g}", name=True, whole=True)
                                                   for value in values[across])], [
        [f"× {one:g}", *(cell(by[one, other]) for other in values[across])] for one in values[down]])
