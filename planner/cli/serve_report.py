"""What ``foretrace serve`` shows: steps, their operations, memory, and what a load gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from graph_predictor.cli.console import Column, Report, percent
from planner.serving import search, serve, steps

MOST_OPERATIONS = 8
MOST_CHOICES = 10


def report(found: serve.Served, top: int | None) -> None:
    """Print the steps, their operations, the memory, and the load."""
    out, setup, cache = Report(), found.setup, found.cache
    copies = f"{setup.gpus} GPUs" if setup.gpus > 1 else "one GPU"
    out.line(f"{found.model} served by {setup.engine.name} on {copies} of {found.topology} ({setup}), weights in "
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
        Column("copies"), Column("of", name=True, whole=True), Column("chunk"), Column("clients\neach"),
        Column("tokens/s"), Column("of a\nGPU"), Column("TTFT\nms"), Column("80% between\nms"), Column("TPOT\nms"),
        Column("80% between\nms"), Column("surely", name=True)], [
        [str(row["copies"]), row["setup"], f"{row['chunk']:,}", str(row["concurrency"] or "–"),
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


def _load(out: Report, served: serve.ServedLoad) -> None:
    load, got = served.load, served.requests
    what = f"{load.concurrency:,} clients" if load.concurrency else f"{load.rate:g} requests/s"
    rows = [_latency("time to first token, ms", served.ttft_ms, served.ttft_percentiles, 0),
            _latency("time between tokens, ms", served.tpot_ms, served.tpot_percentiles, 2)]
    title = (f"{what}: {load.requests:,} requests of {load.prompt} tokens, answers of {load.output}"
             f"{f'; the first {load.warm_up:,} do not count' if load.warm_up else ''}")
    out.table(title, [Column("", name=True, whole=True), Column("mean"), Column("80% between"), Column("p50"),
                      Column("p90"), Column("p99")], rows)
    out.line(f"{served.tokens_per_second.value:,.0f} tokens/s, {got.requests_per_second:,.2f} requests/s; "
             f"{got.in_flight:,.1f} requests on their way and {got.running:,.1f} sequences decoding in the mean; steps "
             f"run {percent(got.busy, 0)} of the time"
             f"{f'; {got.preempted:,} sequences thrown out for want of memory' if got.preempted else ''}.")


def _latency(name: str, figure: serve.Figure80, percentiles: Mapping[int, float], decimals: int) -> list[str]:
    if not math.isfinite(figure.value):
        return [name, *["–"] * 5]
    return [name, f"{figure.value:,.{decimals}f}", f"{figure.low:,.{decimals}f} – {figure.high:,.{decimals}f}",
            *(f"{percentiles[at]:,.{decimals}f}" if at in percentiles else "–" for at in (50, 90, 99))]
