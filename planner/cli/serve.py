"""``foretrace serve``: times, memory and load of a served decoder, and the search for its best configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from graph_predictor.edits import registry
from graph_predictor.figures import percent
from kernel_models import device as known_devices
from planner.cli.options import CacheTokens, Engine, Precision, Profiles, PromptTokens, Tp
from planner.serving import search, steps
from planner.serving import serve as serving
from planner.serving.setup import ServingError
from step_views.cli.console import Column, Report, print_json, working
from step_views.cli.options import (
    Json,
    StepRegion,
    Top,
    chosen_edits,
    in_one_sentence,
    profile_of,
    shared,
    with_edits_but,
)

MOST_OPERATIONS = 8  # chosen: other operations are short, and more rows would not be read
MOST_CHOICES = 10  # chosen: a longer table would not be read


def report(found: serving.Served, top: int | None) -> None:
    """Print the steps, their operations, the memory, and the load."""
    out, setup, cache = Report(), found.setup, found.cache
    replicas = f"{setup.gpus} GPUs" if setup.gpus > 1 else "one GPU"
    out.line(f"{found.model} served by {setup.engine.name} on {replicas} of {found.topology} ({setup}), weights in "
             f"{setup.precision}{f', experts in {setup.experts}' if setup.experts else ''}"
             f"{f', cache in {setup.kv}' if setup.kv else ''}{''.join(f'; {edit}' for edit in found.edits)}.")
    out.table("Steps", [Column("step", name=True, whole=True), Column("ms"), Column("80% between\nms"),
                        Column("products"), Column("other\nkernels"), Column("collec-\ntives"),
                        Column("host"), Column("engine")], [
        [name, *_step(step)] for name, step in (
            (f"decode {found.batch:,} × {found.context:,}", found.decode),
            (f"prefill {setup.attention_dp if setup.attention_dp > 1 else 1:,} × {found.prompt:,}", found.prefill))])
    drafted = f", {setup.yielded:g} tokens a step" if setup.speculation is not None else ""
    out.line(f"Decoding alone yields {found.tokens_per_second:,.0f} tokens/s{drafted}.")
    _operations(out, "Decode, by operation of one GPU", found.decode_operations, top)
    _operations(out, "Prefill, by operation of one GPU", found.prefill_operations, top)
    each = cache.of(found.context)
    out.table("Memory of a GPU, GB", [Column("weights"), Column("work\nspace"), Column("room for\ncaches"),
                                      Column("cache of\nthe batch"), Column("of a\nsequence"),
                                      Column("largest\nbatch")], [[
        f"{cache.weights / 1e9:,.1f}", f"{cache.workspace / 1e9:,.1f}", f"{cache.room / 1e9:,.1f}",
        f"{each * math.ceil(found.batch / cache.groups) / 1e9:,.2f}", f"{each / 1e9:,.3f}",
        f"{found.largest_batch:,}"]])
    if found.served is not None:
        _load(out, found.served)
    out.notes(found.notes)


def report_choices(found: search.ServingChoices, top: int | None) -> None:
    """Print the best configurations."""
    out = Report()
    what = f"{found.rate:g} requests/s" if found.rate else "as many clients as there may be"
    out.line(f"{found.model} on {found.gpus} {found.device} within {found.target}: prompts of {found.prompt} tokens, "
             f"answers of {found.output}, {what}; {found.tried:,} configurations served.")
    out.table("Best configurations", [
        Column("replicas"), Column("of", name=True, whole=True), Column("chunk"), Column("clients\neach"),
        Column("tokens/s"), Column("of a\nGPU"), Column("TTFT\nms"), Column("80% between\nms"), Column("TPOT\nms"),
        Column("80% between\nms"), Column("surely", name=True)], [
        [str(row["replicas"]), row["setup"], f"{row['chunk']:,}", str(row["concurrency"] or "–"),
         f"{row['tokens_per_second']:,.0f}", f"{row['tokens_per_second_per_gpu']:,.0f}", f"{row['ttft_ms']:,.0f}",
         f"{row['ttft_low']:,.0f} – {row['ttft_high']:,.0f}", f"{row['tpot_ms']:,.2f}",
         f"{row['tpot_low']:,.2f} – {row['tpot_high']:,.2f}", "yes" if row["surely"] else ""]
        for row in found.rows()[:top or MOST_CHOICES]])
    if not found.choices:
        out.line("None is within the target.", style="bold")
    for setup, reason in found.refused:
        out.line(f"Not possible: {setup}. {reason}", indent=4)
    out.notes(found.notes)


def _step(step: steps.StepTime) -> list[str]:
    return [f"{step.us / 1e3:,.2f}", f"{step.low / 1e3:,.2f} – {step.high / 1e3:,.2f}",
            *(f"{us / 1e3:,.2f}" for us in (step.products, step.others, step.collectives, step.host, step.engine))]


def _operations(out: Report, title: str, found: Sequence[steps.ServedOperation], top: int | None) -> None:
    total = sum(each.us for each in found) or 1.0
    out.table(title, [Column("operation", name=True, whole=True), Column("kernels"), Column("ms"), Column("share"),
                      Column("bound", name=True), Column("source", name=True)], [
        [each.name, f"{each.count:,.0f}", f"{each.us / 1e3:,.3f}", percent(each.us / total), each.bound,
         max(each.sources, key=each.sources.__getitem__)] for each in found[:top or MOST_OPERATIONS]])


def _load(out: Report, served: serving.ServedLoad) -> None:
    load, got = served.load, served.requests
    what = f"{load.concurrency:,} clients" if load.concurrency else f"{load.rate:g} requests/s"
    rows = [_latency("time to first token, ms", served.ttft_ms, served.ttft_percentiles, 0),
            _latency("time between tokens, ms", served.tpot_ms, served.tpot_percentiles, 2),
            _latency("whole request, ms", served.request_ms, served.request_percentiles, 0)]
    title = (f"{what}: {load.requests:,} requests of {load.prompt} tokens, answers of {load.output}"
             f"{f'; the first {load.warm_up:,} do not count' if load.warm_up else ''}")
    out.table(title, [Column("", name=True, whole=True), Column("mean"), Column("80% between"), Column("p50"),
                      Column("p90"), Column("p99")], rows)
    out.line(f"{served.tokens_per_second.value:,.0f} tokens/s, {got.requests_per_second:,.2f} requests/s; "
             f"{got.in_flight:,.1f} requests on their way and {got.running:,.1f} sequences decoding in the mean; steps "
             f"run {percent(got.busy, 0)} of the time"
             f"{f'; {got.preempted:,} sequences thrown out for want of memory' if got.preempted else ''}.")


def _latency(name: str, figure: serving.Figure80, percentiles: Mapping[int, float], decimals: int) -> list[str]:
    if not math.isfinite(figure.value):
        return [name, *["–"] * 5]
    return [name, f"{figure.value:,.{decimals}f}", f"{figure.low:,.{decimals}f} – {figure.high:,.{decimals}f}",
            *(f"{percentiles[at]:,.{decimals}f}" if at in percentiles else "–" for at in (50, 90, 99))]


@with_edits_but("cuda-graphs")
@in_one_sentence
def serve(
    source: Annotated[str, typer.Argument(
        metavar="MODEL", help="A published model (llama-3.1-70b, qwen3-32b, deepseek-v3, gpt-oss-120b, …), a Hugging "
                              "Face config.json or its folder, or a workload (llama, gpt2, moe).")],
    device: Annotated[str, shared("--device")] = "h200-sxm",
    topology: Annotated[str | None, shared("--topology", "by default the device's usual nodes")] = None,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: Annotated[str | None, shared("--preset")] = None,
    tp: Tp = 1,
    pp: Annotated[int, typer.Option(metavar="N", help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(metavar="N", help="Groups among which whole experts are spread.")] = 1,
    attention_dp: Annotated[int, typer.Option(
        metavar="N", help="Groups of tp GPUs with sequences of their own, which share experts.")] = 1,
    precision: Precision = "",
    experts: Annotated[str, typer.Option(metavar="TYPE", help="Of experts' weights, where it is another.")] = "",
    kv_dtype: Annotated[str, typer.Option(
        metavar="TYPE", help="Of the cache: bf16, fp8 or fp4; by default the model's.")] = "",
    engine: Engine = "vllm",
    chunk: Annotated[int, typer.Option(metavar="N", help="Tokens of a step at most; by default the engine's.")] = 0,
    gpu_memory_utilization: Annotated[float, typer.Option(
        metavar="SHARE", help="Of a GPU's memory that the engine uses, as it counts it; by default its usual.")] = 0.0,
    cuda_graphs: Annotated[bool, typer.Option(
        "--cuda-graphs/--no-cuda-graphs", help="Steps that only decode run as CUDA graphs, up to the "
        "engine's largest batch of one; those with prompts never do.")] = True,
    speculate: Annotated[str | None, typer.Option(
        metavar="K:ACCEPTED", help="Speculative decoding: drafts of K tokens, ACCEPTED tokens a step in the mean, such "
                                   "as 3:2.4.")] = None,
    batch: Annotated[int, shared("--batch", "sequences that decode at once")] = 1,
    context: CacheTokens = 0,
    prompt: PromptTokens = "",
    output: Annotated[str, typer.Option(metavar="N", help="Tokens of answers, in the same way (256).")] = "",
    cached_prefix: Annotated[int, typer.Option(
        metavar="N", help="Tokens with which every prompt begins and which the cache has already.")] = 0,
    rate: Annotated[float, typer.Option(metavar="R", help="Serve requests that come by chance, R a second.")] = 0.0,
    concurrency: Annotated[int | None, typer.Option(
        metavar="N", help="Serve N clients that each ask again when they have an answer.")] = None,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests that are simulated.")] = 0,
    target: Annotated[str | None, typer.Option(
        metavar="ttft=MS,tpot=MS", help="Search splits, replicas, chunks and clients (or those that keep up with "
                                        "--rate) of --gpus for the most tokens within these means.")] = None,
    gpus: Annotated[int | None, shared("--gpus", "all replicas together, with --target (8)")] = None,
    seed: Annotated[int, shared("--seed", least=0)] = 0,
    step_us: Annotated[float | None, typer.Option(
        metavar="US", help="Host time of a step that the GPU waits for, where it is known.")] = None,
    profile: Profiles = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
    comm_choices: Annotated[str | None, shared("--comm-choices")] = None,
    runs: Annotated[str | None, shared(
        "--calibrate", "columns concurrency, prompt, output, ttft_ms, tpot_ms and, if need be, tp, ep, attention_dp"
    )] = None,
    anchor: Annotated[str | None, typer.Option(
        metavar="TRACE", help="A trace of this model served so on this device. All predictions are scaled, operation "
                              "by operation, by recorded over predicted kernel time. vLLM names its steps' sizes; "
                              "steps of other engines are taken to decode --batch × --context.")] = None,
    anchor_capture: Annotated[str | None, typer.Option(
        metavar="TRACE", help="A trace of the capture of --anchor's CUDA graphs, whose operations have their kernels."
    )] = None,
    step_region: StepRegion = None,
    top: Top = None,
    json: Json = False,
    **edits: Any,
) -> None:
    """Predict a decoder's serving: time of a prompt and of a decoding step, memory, and the largest batch. With --rate
    or --concurrency also the time to the first token, time between tokens, and throughput.

    foretrace serve llama-3.1-70b --device h200-sxm --tp 8 --batch 32 --context 4096

    foretrace serve qwen3-32b --device h100-sxm --tp 2 --precision fp8 --concurrency 64 --prompt 1024 --output 512

    foretrace serve llama-3.1-8b --gpus 8 --target ttft=500,tpot=20 --prompt 2048 --output 256

    With --target ends with status 1 where nothing meets it.
    """
    if concurrency == 0:
        raise ServingError("--concurrency 0 is no load; give 1 client or more. Without --concurrency, only steps are "
                           "priced.")
    changes = registry.made(registry.chosen(chosen_edits(edits)))
    known = profile_of(profile, known_devices.find_device(device))
    model: dict[str, Any] = {
        "device": device, "topology": topology, "settings": assignments or (), "preset": preset,
        "precision": precision, "experts": experts, "kv_dtype": kv_dtype, "engine": engine,
        "gpu_memory_utilization": gpu_memory_utilization, "cuda_graphs": cuda_graphs, "speculate": speculate,
        "prompt": prompt, "output": output, "rate": rate, "seed": seed, "profile": known,
        "comm_profile": comm_profile, "comm_choices": comm_choices, "edits": changes}
    replica: dict[str, Any] = {
        "tp": tp, "pp": pp, "ep": ep, "attention_dp": attention_dp, "chunk": chunk, "batch": batch,
        "context": context, "concurrency": concurrency or 0, "requests": requests, "cached_prefix": cached_prefix,
        "step_us": step_us, "measured": runs, "anchor": anchor, "anchor_capture": anchor_capture,
        "step_region": step_region}
    if target is not None:
        if given := [name for name, value in replica.items() if value != getattr(serving.ServeRequest, name)]:
            option = "calibrate" if given[0] == "measured" else given[0].replace("_", "-")
            raise ServingError(f"--target searches splits and loads of the engine as it is taken to be, which "
                               f"--{option} says otherwise; leave one of them out.")
        with working("Pricing and serving"):
            choices = search.serve_search(source, 8 if gpus is None else gpus, target=target, **model)
        if json:
            print_json(choices.to_json())
        else:
            report_choices(choices, top)
        if not choices.choices:
            raise typer.Exit(1)
        return
    if gpus is not None:
        raise ServingError("--gpus is of --target, which searches how to split them; give --tp, --pp, --ep and "
                           "--attention-dp for one replica.")
    with working("Pricing"):
        found = serving.serve(source, **model, **replica)
    if json:
        print_json(found.to_json())
    else:
        report(found, top)
