"""``foretrace price-layer``: each operation of a decoder's layer on several devices, with its bound."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from graph_predictor.figures import percent
from planner.cli.options import CacheTokens, DecoderSource, Engine, Precision, PromptTokens, Tp
from planner.serving import layer_prices
from planner.serving.setup import USUAL, ServingError
from step_views.cli.console import Column, Report, print_json, working
from step_views.cli.options import Json, axis, in_one_sentence, numbers, shared


@in_one_sentence
def price_layer(
    source: DecoderSource,
    device: Annotated[str, axis("--device")] = "h200-sxm",
    phase: Annotated[str, typer.Option(metavar="NAME,…", help="decode, prefill, or both.")] = "prefill,decode",
    batch: Annotated[str, axis("--batch", "sequences that decode at once, or prompts that are read at once")] = "1",
    context: CacheTokens = 0,
    prompt: PromptTokens = "",
    tp: Tp = 1,
    precision: Precision = "",
    engine: Engine = USUAL,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    json: Json = False,
) -> None:
    """Price each operation of a decoder's layer on several devices: its time, its share of the layer, its operations a
    byte, and whether arithmetic or memory bounds it.

    foretrace price-layer llama-3.1-8b --device a100-sxm-80g,h100-sxm,b200 --batch 1,64

    A decoder with several kinds of layers is priced by the kind that it has most of.
    """
    with working("Pricing"):
        found = layer_prices.price_layer(
            source, devices=_words(device, "--device"), phases=_words(phase, "--phase"),
            batches=numbers(batch, "--batch", "1,8,64"), prompt=prompt or context,
            context=context, tp=tp, precision=precision, engine=engine, settings=assignments or ())
    if json:
        print_json(found.to_json())
    else:
        _report(found)


def _words(given: str, option: str) -> list[str]:
    words = [word.strip() for word in given.split(",")]
    if not all(words):
        raise ServingError(f"{option} {given!r} has an empty name; write names with commas between them.")
    return list(dict.fromkeys(words))


def _report(found: layer_prices.PricedLayer) -> None:
    out = Report()
    out.line(f"{found.headline()}. Bounds are the data sheet's: operations over the peak rate, or bytes over the "
             "memory's.")
    by_case: dict[tuple[str, int], dict[str, list[layer_prices.LayerOperation]]] = {}
    for each in found.operations:
        by_case.setdefault((each.phase, each.batch), {}).setdefault(each.device, []).append(each)
    for (phase, batch), devices in by_case.items():
        what = f"Decoding {batch:,} × {found.context:,}" if phase == layer_prices.PHASES[0] else (
            f"Prompts {batch:,} × {found.prompt:,}")
        columns = [Column("operation", name=True, whole=True), Column("sizes", name=True, whole=True)]
        for name in devices:
            columns += [Column(f"{name}\nµs"), Column("share"), Column("FLOP\na byte"), Column("bound", name=True)]
        priced = [_in_rows(mine) for mine in devices.values()]
        rows = [[*_named(next(mine[row] for mine in priced if row in mine)),
                 *(text for mine in priced for text in _cells(mine.get(row)))]
                for row in dict.fromkeys(row for mine in priced for row in mine)]
        rows.append(["all", ""] + [text for mine in devices.values() for text in (
            f"{sum(each.us for each in mine):,.1f}", "", "", "")])
        out.table(what, columns, rows)
    out.notes(found.notes)


def _in_rows(mine: list[layer_prices.LayerOperation]) -> dict[tuple[str, int], layer_prices.LayerOperation]:
    """Return operations by name and index among equal names: the same key on devices that compute in other types."""
    seen: Counter[str] = Counter()
    found = {}
    for each in mine:
        found[each.name, seen[each.name]] = each
        seen[each.name] += 1
    return found


def _named(each: layer_prices.LayerOperation) -> tuple[str, str]:
    """Return an operation's name, and the sizes of a product or a collective; other sizes follow from these."""
    return (f"{each.count} × {each.name}" if each.count > 1 else each.name,
            each.sizes if each.product or each.intensity is None else "")


def _cells(each: layer_prices.LayerOperation | None) -> tuple[str, str, str, str]:
    if each is None:
        return "", "", "", ""
    return (f"{each.us:,.1f}", percent(each.share), "" if each.intensity is None else f"{each.intensity:,.3g}",
            each.bound)
