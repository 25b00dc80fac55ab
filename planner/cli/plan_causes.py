"""Reports of ``foretrace plan``, as text and as plain values. They show causes of the difference between two recipes,
changes that make a plan fit, and possible causes of the gap to a measured step."""

from __future__ import annotations

from typing import Any

from graph_predictor.figures import percent, signed_percent
from graph_predictor.request import memory_fit
from planner.parallel import compared, explained, search
from step_views.cli.console import Column, Report
from tracer.parallel_plan import PlanError


def plain_comparison(both: compared.Comparison) -> dict[str, Any]:
    """Return both recipes and the causes as plain values."""
    return {
        "recipes": [_plain_side(each) for each in (both.first, both.second)],
        "difference_ms": both.us / 1e3,
        "interval_ms": [(both.us - both.unsure_us) / 1e3, (both.us + both.unsure_us) / 1e3],
        "every_order": both.exact,
        "causes": [{
            "setting": each.setting, "before": each.before, "after": each.after, "ms": each.us / 1e3,
            "interval_ms": [(each.us - each.unsure_us) / 1e3, (each.us + each.unsure_us) / 1e3],
            "alone_ms": _ms(each.alone_us), "last_ms": _ms(each.last_us),
            "parts_ms": {name: us / 1e3 for name, us in each.parts.items()}} for each in both.causes],
        "notes": both.notes}


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def _plain_side(side: compared.RecipeSide) -> dict[str, Any]:
    e = side.estimate
    return {"recipe": side.name, "plan": str(e.plan), "gpus": e.plan.world_size, "step_ms": e.time_us / 1e3,
            "interval_ms": [e.low_us / 1e3, e.high_us / 1e3], "tokens_per_gpu_second": side.tokens_per_gpu_second,
            "memory_gb": side.memory / 1e9, "device_gb": side.limit / 1e9,
            "parts_ms": {name: us / 1e3 for name, us in search.parts_of(e).items()}}


def report_comparison(both: compared.Comparison) -> None:
    """Print both recipes and the causes of their difference."""
    out = Report()
    columns = [Column("recipe", name=True, whole=True), Column("step\nms"), Column("80% between\nms"),
               Column("tokens a second\nand GPU"), Column("memory\nGB"), Column("plan", name=True, whole=True)]
    out.table("Recipes", columns, [
        [side.name, f"{side.estimate.time_us / 1e3:,.1f}",
         f"{side.estimate.low_us / 1e3:,.1f} – {side.estimate.high_us / 1e3:,.1f}",
         f"{side.tokens_per_gpu_second:,.0f}",
         f"{side.memory / 1e9:.1f}" + f" of only {side.limit / 1e9:.1f}" * (0 < side.limit < side.memory),
         str(side.estimate.plan)] for side in (both.first, both.second)])
    first = both.first.estimate.time_us
    out.line()
    out.line(f"{both.second.name} takes {abs(both.us) / 1e3:,.1f} ms {'longer' if both.us >= 0 else 'less'} "
             f"({signed_percent(both.us / first)}), 80% between {(both.us - both.unsure_us) / 1e3:+,.1f} and "
             f"{(both.us + both.unsure_us) / 1e3:+,.1f} ms.")
    if not both.causes:
        out.line("No setting of the two differs.")
        return
    columns = [Column("setting", name=True, whole=True), Column("before", name=True, whole=True),
               Column("after", name=True, whole=True), Column("ms"), Column("of the\nfirst"), Column("± (80%)\nms"),
               Column("alone\nms"), Column("last\nms"), Column("mostly", name=True, whole=True)]
    out.table("Causes, the largest first", columns, [
        [each.setting, each.before, each.after, f"{each.us / 1e3:+,.1f}", signed_percent(each.us / first),
         f"{each.unsure_us / 1e3:,.1f}", _signed(each.alone_us), _signed(each.last_us), _mostly(each)]
        for each in both.causes] + [["together", "", "", f"{both.us / 1e3:+,.1f}", signed_percent(both.us / first),
                                     f"{both.unsure_us / 1e3:,.1f}", "", "", ""]])
    out.line("ms: the mean of what a setting's change moves the step by, over "
             + ("all orders in which" if both.exact else f"{2 * compared.ORDERS} drawn orders in which")
             + " the settings can be changed one after another; they add up to the whole. alone: changed in the first "
             "recipe; last: where all others are the second's already; –: that alone cannot be.")
    out.notes(both.notes)


def _signed(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:+,.1f}"


def _mostly(cause: compared.SettingCause) -> str:
    """Return the part of a step that a setting changes most, with its share of all changes, as text."""
    every = sum(map(abs, cause.parts.values()))
    name = max(cause.parts, key=lambda part: abs(cause.parts[part]))
    return f"{name} ({percent(abs(cause.parts[name]) / every, 0)})" if every else "–"


def report_relief(out: Report, found: search.Found) -> None:
    """Print the memory that a plan lacks, the fastest change with which it fits, and all changes."""
    needs = found.needs
    assert needs is not None
    sure = memory_fit.fit_probability(needs, found.limit_bytes)
    which = "It" if found.considered == 1 else "The plan that needs least"
    out.line(f"{which} needs {needs.account.total / 1e9:.1f} GB, 80% between {needs.low / 1e9:.1f} and "
             f"{needs.high / 1e9:.1f}, where there are {found.limit_bytes / 1e9:.1f}: it fits with a probability of "
             f"{'less than 1%' if sure < 0.01 else percent(sure, 0)}. If it did, a step would take "
             f"{found.needs_us / 1e3:,.1f} ms.")
    if not found.relief:
        return
    best = found.relief[0]
    out.line(f"The cheapest single change with which it fits: {best.change}, {best.time_us / 1e3:,.1f} ms a step "
             f"({signed_percent(best.time_us / found.needs_us - 1)}), {percent(best.probability, 0)} sure to fit."
             if best.fits else "No single change is enough.")
    columns = [Column("one change", name=True, whole=True), Column("frees\nGB"), Column("fits", name=True),
               Column("step\nms"), Column("longer\nby"), Column("plan", name=True, whole=True)]
    out.table("What would have to change, the quickest that fit first", columns, [
        [each.change, f"{each.frees_bytes / 1e9:.1f}", percent(each.probability, 0),
         *((f"{each.time_us / 1e3:,.1f}", signed_percent(each.time_us / found.needs_us - 1)) if each.fits else "––"),
         str(each.plan)] for each in found.relief])


def milliseconds_of(text: str) -> float:
    """Return the µs of a measured step's text: "37700" and "37700ms" are milliseconds, "37.7s" seconds.

    Raises:
        PlanError: the text is not a positive time.
    """
    number, factor = text.strip().lower(), 1e3
    for unit, us in (("ms", 1e3), ("us", 1.0), ("µs", 1.0), ("s", 1e6)):
        if number.endswith(unit):
            number, factor = number[:-len(unit)], us
            break
    try:
        found = float(number) * factor
    except ValueError:
        found = 0.0
    if not 0 < found < 1e18:
        raise PlanError(f"--measured {text[:40]} is no time of a step; give milliseconds, such as 812.5, or 37.7s.")
    return found


def plain_explained(found: explained.ExplainedStep) -> dict[str, Any]:
    """Return a measured step and its possible causes as plain values."""
    e = found.estimate
    return {
        "plan": str(e.plan), "measured_ms": found.measured_us / 1e3, "step_ms": e.time_us / 1e3,
        "interval_ms": [e.low_us / 1e3, e.high_us / 1e3], "inside": found.inside, "gap_ms": found.gap_us / 1e3,
        "verdict": found.verdict, "together_ms": found.together_us / 1e3,
        "causes": [_plain_cause(each) for each in found.causes],
        "other_way": [_plain_cause(each) for each in found.away], "notes": found.notes}


def _plain_cause(each: explained.Explanation) -> dict[str, Any]:
    cause = each.cause
    return {"cause": cause.name, "moves_ms": [each.low_us / 1e3, each.high_us / 1e3], "covers": each.covers,
            "reaches": each.reaches, "needed": each.needed, "unit": cause.unit, "usual": cause.usual,
            "range": [cause.least, cause.most], "source": cause.source}


def report_explained(found: explained.ExplainedStep) -> None:
    """Print a measured step, its estimate, and possible causes of the gap."""
    out, e = Report(), found.estimate
    out.line(f"Measured {found.measured_us / 1e3:,.1f} ms, estimated {e.time_us / 1e3:,.1f} (80% between "
             f"{e.low_us / 1e3:,.1f} and {e.high_us / 1e3:,.1f}): {signed_percent(found.gap_us / e.time_us)}, "
             f"{found.gap_us / 1e3:+,.1f} ms. {found.verdict}")
    columns = [Column("cause", name=True, whole=True), Column("moves the step by\nms"), Column("covers"),
               Column("reaches it with", name=True, whole=True), Column("range", name=True, whole=True),
               Column("source of the range", name=True, whole=True)]
    if found.causes:
        out.table("What may cause it, each alone", columns, [
            [each.cause.name, _moves(each), percent(each.covers, 0), _reached(each), _ranged(each.cause),
             each.cause.source] for each in found.causes])
        out.line(f"All of these that can be together, at the ends of their ranges: {found.together_us / 1e3:,.1f} ms.")
    if found.away:
        out.line("These move the step the other way alone: " + ", ".join(each.cause.name for each in found.away) + ".")
    out.notes(found.notes)


def _moves(each: explained.Explanation) -> str:
    ends = [f"{us / 1e3:+,.1f}" for us in (each.low_us, each.high_us) if us or each.cause.unit]
    return " – ".join(ends)


def _reached(each: explained.Explanation) -> str:
    if not each.reaches:
        return "no"
    assert each.needed is not None
    return f"{each.needed:,.3g} {each.cause.unit}" if each.cause.unit else f"{percent(each.needed, 0)} of it"


def _ranged(cause: explained.StepCause) -> str:
    return f"{cause.least:,.3g} – {cause.most:,.3g}" if cause.unit else "off – on"
