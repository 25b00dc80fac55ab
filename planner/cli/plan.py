"""``foretrace plan``: the best way to spread a decoder's step over a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from graph_predictor.cli.console import print_json, working
from graph_predictor.cli.options import (
    Html,
    Json,
    Top,
    axis,
    check_html,
    in_one_sentence,
    numbers,
    profile_of,
    shared,
    write_html,
)
from graph_predictor.comm import traffic
from kernel_models import device_choice
from planner.cli.plan_report import plain, plain_exploration, report, report_exploration
from planner.parallel import exploration, layer_costs, page, planning, search
from planner.parallel import timeline as parallel_timeline
from tracer import output_kind
from tracer.parallel_plan import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence


BEST = 10


@in_one_sentence
def plan(
    source: Annotated[str, typer.Argument(
        metavar="SOURCE", help="A workload (llama, gpt2, moe), a capture or shape-only trace of one, a model's "
                               "config.json or its folder, or a published model (deepseek-v3, gpt-oss-120b, …).")],
    gpus: Annotated[str, typer.Option(metavar="N,…", help="GPUs of the job; several sizes are compared.")],
    device: Annotated[str, axis("--device", "are compared")] = "h200-sxm",
    topology: Annotated[str | None, axis("--topology", "one for each device; by default its usual nodes")] = None,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: Annotated[str | None, shared(
        "--preset", "or a trained model: llama 8b, 70b, 405b; gpt2 xl, 175b; moe 8x7b; the first by default")] = None,
    global_batch: Annotated[int | None, shared(
        "--global-batch", "by default what the source does, on every GPU", least=1)] = None,
    only: Annotated[str | None, shared("--parallel", "this one alone, such as dp=8,tp=4,pp=2,microbatches=16")] = None,
    framework: Annotated[str, typer.Option(
        metavar="NAME", help="Plans that megatron, torchtitan or fsdp has, or any of them.")] = "any",
    export: Annotated[str | None, typer.Option(
        metavar="NAME", help="Print the best plan as arguments of megatron or torchtitan too.")] = None,
    memory_limit: Annotated[str | None, shared(
        "--memory-limit", "a bare number is in GB; by default all it has")] = None,
    price: Annotated[str | None, axis("--price", "one for each device")] = None,
    profile: Annotated[list[str] | None, shared("--profile", "repeatable; the first of the device counts")] = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
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
        metavar="FACTOR,…", help="Its memory × FACTOR, or a value such as 192GB; several are compared.")] = None,
    link: Annotated[str | None, typer.Option(
        metavar="FACTOR,…", help="Links between its GPUs and nodes × FACTOR, or a value such as 900GB/s of a GPU in "
                                 "its node; several are compared.")] = None,
    launch_us: Annotated[float | None, typer.Option(
        min=0, metavar="US", help="Host time of a kernel's launch, µs, where it is known.")] = None,
    host: Annotated[float, shared("--host", "of what a launch takes")] = 1.0,
    host_from: Annotated[str | None, shared("--host-from", "what a launch takes")] = None,
    runs: Annotated[str | None, shared(
        "--calibrate", "plans with columns plan, step_ms and, if need be, gpus, model, preset and set; kernels, "
        "collectives and host are fitted to them")] = None,
    timeline: Annotated[str | None, shared("--timeline", "the best plan's step: tasks of a rank of each stage")] = None,
    html: Html = None,
    top: Top = None,
    json: Json = False,
) -> None:
    """Find the best parallel plan of all that Megatron-Core, torchtitan or FSDP have: data, tensor, sequence, pipeline,
    context and expert parallelism, schedules, micro-batches, recomputation and sharding.

    foretrace plan llama --preset 70b --gpus 64 --device h200-sxm --topology dgx-h200x8
    foretrace plan llama --gpus 8 --device a100-sxm-80g,h100-sxm,b200 --price 1.5,2.5,5
    foretrace plan llama --gpus 8 --device h100-sxm --bandwidth 1,2 --link 0.5,1,2

    Ends with status 1 where no plan is possible.
    """
    planning.check_finite(launch_us, "--launch-us", "the host time of a launch in µs")
    planning.check_finite(host, "--host", "a factor of the host time")
    sizes = numbers(gpus, "--gpus", "64,128,256")
    check_html(html, [])
    if timeline is not None:
        output_kind.check_output(timeline, [], output_kind.TIMELINE)
    wanted, target = planning.framework_of(framework), None if export is None else planning.framework_of(export)
    if target is not None and wanted not in (None, target):
        raise _contradiction(framework, export)
    limit = None if memory_limit is None else traffic.parse_memory(memory_limit, "--memory-limit", "80GiB")
    changes = {"clock": clock, "bandwidth": bandwidth, "memory": memory, "link": link}
    cases = exploration.cases_of(device, topology, price, changes, max(sizes))
    case = cases[0]
    request = planning.PlanRequest(
        source, sizes[0], settings=assignments or (), preset=preset, global_batch=global_batch, only=only,
        framework=(target or wanted or "any"), memory_limit=limit, linears=linears.strip().lower(),
        launch_us=launch_us, host=host, host_from=host_from)
    if len(cases) > 1:
        for name, value in (("--export", export), ("--profile", profile), ("--comm-profile", comm_profile),
                            ("--comm-choices", comm_choices), ("--calibrate", runs),
                            ("--memory-limit", memory_limit), ("--timeline", timeline), ("--html", html)):
            if value:
                raise _of_one(name)
        if len(sizes) > 1:
            raise _of_one(f"--gpus {gpus}")
        with working("Tracing and pricing"):
            explored = exploration.explore(cases, request)
        if json:
            print_json(plain_exploration(explored))
        else:
            report_exploration(explored)
        if not any(each.plans.plans for each in explored):
            raise typer.Exit(1)
        return
    with working("Tracing and pricing"):
        spec = device_choice.find_device(case.device)
        known = profile_of(profile, spec)
        request = replace(request, device=case.device, topology=case.topology, technology=case.technology,
                          pieces=layer_costs.LayerCosts(case.technology.device(spec), known), profile=known,
                          comm_profile=comm_profile, comm_choices=comm_choices, measured=runs,
                          best=max(search.BEST, top or 0))
        found = [planning.find_plans(request)]
        for size in sizes[1:]:
            found.append(planning.find_plans(replace(request, gpus=size, measured=found[0].calibration or runs)))
    if timeline is not None and any(each.plans for each in found):
        _write_timeline(found, timeline)
    if html is not None:
        write_html(html, [source], lambda where: page.plans_page(found, where))
    if json:
        print_json(plain(found, case.price, top, target))
    else:
        report(found, case.price, top or BEST, target)
    if not any(each.plans for each in found):
        raise typer.Exit(1)


def _write_timeline(found: Sequence[planning.Plans], path: str) -> None:
    """Write the step of the only size. Raises ``ForetraceError``."""
    if len(found) > 1:
        raise _of_one("--timeline")
    assert found[0].schedule is not None
    parallel_timeline.write_step_timeline(parallel_timeline.StepTimeline.of(
        found[0].schedule, found[0].plans[0].estimate), path)


def _of_one(name: str) -> Exception:
    return PlanError(f"{name} is of one device and one size of a job, and several cases are compared; leave it out, or "
                     "name one device without several factors.")


def _contradiction(framework: str, export: str | None) -> Exception:
    return PlanError(f"--framework {framework} looks for plans that --export {export} need not have; give both the "
                     "same name, or one of them.")
