"""Served decoders against AIConfigurator's measured table (H100 and H200; vLLM, SGLang, TensorRT-LLM).

    python benchmarks/serving.py DATA                     # nothing fitted; then with ten rows of each group known
    python benchmarks/serving.py DATA --rows every        # and every case
    python benchmarks/serving.py --rows speed             # 1,000 configurations
    python benchmarks/serving.py --rows published         # batch 1 of Llama-2-7B on an A100 (gpt-fast)
    python benchmarks/serving.py --rows offline           # throughput that NVIDIA publishes of TensorRT-LLM
    python benchmarks/serving.py DATA --rows latency      # single requests, published: NeMo and gpt-fast
    python benchmarks/serving.py DATA --rows kernels      # all-reduce kernels of engines
    python benchmarks/serving.py DATA --rows anchors      # kernels of servers' traces that belong to operations

DATA is the folder of shared data. Half of the series were looked at while assumptions were set (``serving_parts.split``
says which, by a rule from before); the other half was not.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from scipy.stats import spearmanr

from benchmarks.serving_parts.rows import ServedRow, read_rows
from benchmarks.serving_parts.split import calibrates_before
from kernel_models.device import find_device
from planner.serving.calibrate import MeasuredRow, calibrate_serving
from planner.serving.serve import ServedLoad, cluster_for, serve, served_load
from planner.serving.setup import CacheAccount, Lengths, Requests, ServingSetup, cache_account, engine_of
from planner.serving.source import ServedDecoder, served_decoder
from planner.serving.step_grids import PrefillChunk
from planner.serving.steps import ServedStep, ServingModel, rates_of
from planner.serving.trace_calibration import read_anchor
from tracer.errors import ForetraceError

CALIBRATING = 10
PUBLISHED_MS = 9.53
"""Batch 1 of Llama-2-7B in 16 bits on an A100 80 GB limited to 330 W: 104.9 tokens/s (gpt-fast's README)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row and what was predicted of it."""

    row: ServedRow
    got: ServedLoad

    @property
    def tpot_error(self) -> float:
        return self.got.tpot_ms.value / self.row.tpot_ms - 1

    @property
    def ttft_error(self) -> float:
        return self.got.ttft_ms.value / self.row.ttft_ms - 1


class Predictor:
    """Predicts rows; each setup is priced once."""

    def __init__(self) -> None:
        self._decoders: dict[str, ServedDecoder] = {}
        self._models: dict[tuple[str, str, ServingSetup], ServingModel] = {}

    def model(self, row: ServedRow) -> tuple[ServingModel, CacheAccount]:
        decoder = self._decoders.setdefault(row.model, served_decoder(row.model))
        spec = find_device(row.device)
        key = row.model, row.device, row.setup
        if key not in self._models:
            self._models[key] = ServingModel(decoder.shape, row.setup, spec,
                                             cluster_for(spec, row.setup.gpus, None, None, None))
        longest = row.load.prompt.longest + row.load.output.longest
        return self._models[key], cache_account(decoder.shape, row.setup, spec, longest)

    def cases(self, rows: Iterable[ServedRow]) -> tuple[list[Case], list[tuple[ServedRow, str]]]:
        found, refused = [], []
        for row in rows:
            try:
                model, cache = self.model(row)
                found.append(Case(row, served_load(row.load, model, cache)))
            except ForetraceError as error:
                refused.append((row, str(error)))
        return found, refused


def contradicting(rows: Sequence[ServedRow]) -> set[int]:
    """Return rows that their own series contradicts: a time between tokens below 0.8 of that with fewer clients."""
    series: dict[tuple[object, ...], list[ServedRow]] = defaultdict(list)
    for row in rows:
        series[(row.model, row.device, row.setup.engine.name, row.setup.gpus, row.setup.precision,
                row.load.prompt, row.load.output)].append(row)
    return {row.number for group in series.values() for row in group
            if any(other.load.concurrency < row.load.concurrency and row.tpot_ms < 0.8 * other.tpot_ms
                   for other in group)}


def summary(title: str, cases: Sequence[Case]) -> None:
    """Print one line of figures."""
    if not cases:
        return
    tpot, ttft = (np.array([getattr(each, name) for each in cases]) for name in ("tpot_error", "ttft_error"))
    inside = [np.mean([figure.low <= measured <= figure.high for figure, measured in pairs]) for pairs in (
        [(each.got.tpot_ms, each.row.tpot_ms) for each in cases],
        [(each.got.ttft_ms, each.row.ttft_ms) for each in cases])]
    print(f"{title:<58} {len(cases):>4}  TPOT MAPE {np.abs(tpot).mean():6.1%} median {np.median(np.abs(tpot)):6.1%} "
          f"bias {tpot.mean():+6.1%} inside {inside[0]:4.0%}   TTFT {np.abs(ttft).mean():6.1%} "
          f"median {np.median(np.abs(ttft)):6.1%} bias {ttft.mean():+6.1%} inside {inside[1]:4.0%}")


def ranks(cases: Sequence[Case]) -> dict[str, float]:
    """Return the rank correlation of times between tokens within each model."""
    by: dict[str, list[Case]] = defaultdict(list)
    for each in cases:
        by[each.row.model].append(each)
    return {name: float(spearmanr([each.row.tpot_ms for each in group],
                                  [each.got.tpot_ms.value for each in group]).statistic)
            for name, group in sorted(by.items()) if len(group) > 3}


def measure(data: Path, *, half: str, every: bool) -> None:
    """Print nothing fitted, and calibrated, of one half or both."""
    predictor, rows = Predictor(), read_rows(data)
    rows = [row for row in rows if half == "both" or row.development is (half == "development")]
    odd = contradicting(rows)
    cases, refused = predictor.cases(rows)
    for half, name in ((True, "development half"), (False, "held-out half")):
        mine = [each for each in cases if each.row.development is half]
        groups: dict[str, list[Case]] = defaultdict(list)
        for each in mine:
            groups[each.row.group].append(each)
        if not mine:
            continue
        print(f"\n{name}: nothing fitted")
        for group, members in sorted(groups.items()):
            summary(group, members)
        summary("all", mine)
        kept = [each for each in mine if each.row.number not in odd]
        summary(f"all but {len(mine) - len(kept)} that their own series contradict", kept)
        print("rank within each model:", ", ".join(f"{name} {value:.3f}" for name, value in ranks(mine).items()))
        print("  without contradictions:", ", ".join(f"{name} {value:.3f}" for name, value in ranks(kept).items()))
    for row, reason in refused:
        print(f"refused: {row.model} {row.setup} {row.load.concurrency}: {reason}")
    if every:
        for each in cases:
            row = each.row
            print(f"{'dev ' if row.development else 'held'} {row.group:<60} {row.setup!s:<20} "
                  f"{row.load.prompt.most:>5} {row.load.output.most:>5} {row.load.concurrency:>4} "
                  f"TPOT {row.tpot_ms:8.2f} {each.got.tpot_ms.value:8.2f} {each.tpot_error:+7.1%}  "
                  f"TTFT {row.ttft_ms:10.1f} {each.got.ttft_ms.value:10.1f} {each.ttft_error:+7.1%}"
                  f"{'  contradicted' if row.number in odd else ''}")
    calibrated(predictor, rows, odd)


def calibrated(predictor: Predictor, rows: Sequence[ServedRow], odd: set[int]) -> None:
    """Print the rest of each group, predicted with ten of its rows known."""
    groups: dict[tuple[bool, str], list[ServedRow]] = defaultdict(list)
    for row in rows:
        groups[(row.development, row.group)].append(row)
    for half, name in ((True, "development half"), (False, "held-out half")):
        if not any(row.development is half for row in rows):
            continue
        print(f"\n{name}: ten rows of each group known")
        whole: list[Case] = []
        for (_, group), members in sorted((key, value) for key, value in groups.items() if key[0] is half):
            distinct = list({(row.ttft_ms, row.tpot_ms, row.load): row for row in members}.values())
            order = sorted(distinct, key=lambda row: calibrates_before(row.row))
            known, rest = order[:CALIBRATING], order[CALIBRATING:]
            if len(rest) < 3:
                continue
            measured = [MeasuredRow(f"row {row.number}", *predictor.model(row), row.load, row.ttft_ms, row.tpot_ms)
                        for row in known]
            found = calibrate_serving(measured, rates_of(known[0].setup))
            cases = []
            for row in rest:
                model, cache = predictor.model(row)
                cases.append(Case(row, served_load(row.load, model.with_rates(found.rates), cache, found)))
            summary(f"{group} ({found.before:.0%} → {found.after:.0%} told)", cases)
            whole += cases
        summary("all", whole)
        kept = [each for each in whole if each.row.number not in odd]
        summary("all but those that their own series contradict", kept)


def speed() -> None:
    """Print how long 1,000 configurations take: splits, chunks, clients and lengths of one model."""
    begin, number, spec = time.perf_counter(), 0, find_device("h200-sxm")
    decoder = served_decoder("llama-3.1-70b")
    for tp in (1, 2, 4, 8):
        for precision in ("bf16", "fp8"):
            setup = ServingSetup(tp=tp, precision=precision)
            model = ServingModel(decoder.shape, setup, spec, cluster_for(spec, tp, None, None, None))
            for chunk in (1024, 2048, 4096, 8192):
                own = model.with_chunk(chunk)
                for prompt, output in ((512, 128), (1024, 256), (2048, 512), (4096, 256), (1024, 1024)):
                    cache = cache_account(decoder.shape, own.setup, spec, prompt + output)
                    for clients in (1, 2, 4, 8, 16, 32, 64):
                        if cache.room <= 0:
                            continue
                        load = Requests(Lengths(prompt, prompt), Lengths(output, output), clients, count=3 * clients,
                                        warm_up=clients)
                        served_load(load, own, cache)
                        number += 1
    seconds = time.perf_counter() - begin
    print(f"{number:,} configurations in {seconds:.1f} s: {1000 * seconds / number:.1f} s for 1,000")


OFFLINE_LENGTHS = ((128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000), (1000, 2000), (2048, 128),
                   (2048, 2048), (5000, 500), (20_000, 2000))
OFFLINE_REQUESTS = (30_000, 3000, 1500, 3000, 3000, 1500, 3000, 1500, 1500, 1000)
OFFLINE = {
    ("llama-3.1-70b", "h200-sxm", 1): (3803, 4336, 2872, 3666, 2909, 2994, 442, 2003, 566, 283),
    ("llama-3.1-70b", "h100-sxm", 2): (6378, 6651, 4199, 5222, 4205, 4146, 762, 3082, 898, 437),
    ("llama-3.1-8b", "h200-sxm", 1): (27_911, 26_221, 18_027, 20_770, 17_744, 16_828, 3538, 12_194, 3902, 1804),
    ("llama-3.1-8b", "h100-sxm", 1): (28_312, 22_714, 14_325, 17_660, 15_220, 13_899, 3450, 9305, 3459, 1351)}
"""Tokens/s of TensorRT-LLM 1.0 in fp8 with all requests sent at once, by model, GPU and GPUs of a replica: NVIDIA's
"Performance overview" (docs/source/performance/perf-overview.md); all rows of Llama, 3.3 70B being 3.1's sizes."""


def offline() -> None:
    """Print throughput of NVIDIA's published offline runs."""
    errors, inside = [], []
    for (name, device, tp), rows in OFFLINE.items():
        mine = []
        for (prompt, output), count, measured in zip(OFFLINE_LENGTHS, OFFLINE_REQUESTS, rows, strict=True):
            count = min(count, 4096)
            got = serve(name, device=device, tp=tp, precision="fp8", kv_dtype="fp8", engine="trtllm", prompt=prompt,
                        output=output, concurrency=min(count, 2048), requests=count).served
            assert got is not None
            figure = got.tokens_per_second
            mine.append(figure.value / measured - 1)
            inside.append(figure.low <= measured <= figure.high)
        print(f"{name}, {tp} {device}: {', '.join(f'{each:+.1%}' for each in mine)}; MAPE "
              f"{np.abs(mine).mean():.1%}, bias {np.mean(mine):+.1%}")
        errors += mine
    print(f"all {len(errors)}: MAPE {np.abs(errors).mean():.1%}, bias {np.mean(errors):+.1%}, inside the 80% interval "
          f"{np.mean(inside):.0%}")


def published() -> None:
    """Print batch 1 of Llama-2-7B on an A100."""
    found = serve("llama-2-7b", device="a100-sxm-80g", engine="compiled", context=128)
    ms = found.decode.us / 1e3
    print(f"Llama-2-7B, fp16, batch 1, A100 80 GB: {ms:.2f} ms ({found.decode.low / 1e3:.2f} to "
          f"{found.decode.high / 1e3:.2f}), published {PUBLISHED_MS}: {ms / PUBLISHED_MS - 1:+.1%}")


LATENCY_ENGINES = {"NeMo/TensorRT-LLM": "nemo"}
LATENCY_DEVICES = {"A100-SXM-80GB": "a100-sxm-80g", "H100-SXM": "h100-sxm"}


def looked_at(row: Any) -> bool:
    """Return whether a published latency was looked at while "nemo" was set: Llama-2-7B's on A100, one request at once,
    with 200 tokens or on one GPU; all of gpt-fast's 7B too."""
    small = "7b" in row.model.lower()
    if row.engine == "compiled":
        return small
    return small and row.system.startswith("A100") and row.batch == 1 and (row.prompt == 200 or row.gpus == 1)


def latency(data: Path) -> None:
    """Print published latencies of single batches, by their parts: ms of all tokens, and of the first."""
    import pandas

    halves: dict[bool, list[tuple[str, float, int, bool]]] = {True: [], False: []}
    for row in pandas.read_csv(data / "end_to_end" / "llm_latency.csv").itertuples():
        spec, name = find_device(LATENCY_DEVICES[row.system]), row.model.lower().replace("llama 2", "llama-2")
        setup = ServingSetup(tp=row.gpus, precision=row.precision,
                             engine=engine_of(LATENCY_ENGINES.get(row.engine, row.engine)))
        shape = served_decoder(name).in_type(row.precision).shape
        model = ServingModel(shape, setup, spec, cluster_for(spec, row.gpus, None, None, None))
        each = model.time(ServedStep(row.batch, row.prompt + row.output / 2))
        first = model.time(ServedStep(0, 0, (PrefillChunk(row.batch, row.prompt),), row.batch))
        steps, begins = (1, 0) if row.what == "token" else (row.output - 1, 1)
        us, low, high = (steps * getattr(each, end) + begins * getattr(first, end) for end in ("us", "low", "high"))
        error, inside = us / 1e3 / row.ms - 1, low <= 1e3 * row.ms <= high
        group = f"{row.engine}, {row.prompt} + {row.output}"
        halves[looked_at(row)].append((group, error, row.gpus, inside))
        print(f"{'dev ' if looked_at(row) else 'held'} {row.engine:<18}{name:<15}{row.system[:4]} tp={row.gpus} "
              f"{row.precision} {row.batch} × {row.prompt}+{row.output}: {row.ms:.2f} ms, {us / 1e3:.2f} {error:+6.1%}"
              f"{'' if inside else ' outside'}; a token {each.us / 1e3:.2f}: matrix {each.products / 1e3:.2f}, others "
              f"{each.others / 1e3:.2f}, collectives {each.collectives / 1e3:.2f}, launches {each.host / 1e3:.2f}, "
              f"engine {each.engine / 1e3:.2f}; the first {first.us / 1e3:.1f}")
    for half, rows in halves.items():
        for group in (*sorted({each[0] for each in rows}), ""):
            mine = [each for each in rows if group in ("", each[0])]
            errors = np.array([each[1] for each in mine])
            slope = np.polyfit(np.log2([each[2] for each in mine]), errors, 1)[0] if len(mine) > 2 else np.nan
            print(f"{'looked at' if half else 'held out'}, {group or 'all':<26} {len(mine):>3}  MAPE "
                  f"{np.abs(errors).mean():.1%} median {np.median(np.abs(errors)):.1%} bias {errors.mean():+.1%} p90 "
                  f"{np.quantile(np.abs(errors), 0.9):.1%} largest {np.abs(errors).max():.1%} a doubling of GPUs "
                  f"{100 * slope:+.1f} points, inside {np.mean([each[3] for each in mine]):.0%}")


def kernels(data: Path) -> None:
    """Print all-reduce kernels of engines by formula and as measured."""
    import pandas

    from kernel_models.collectives.price import ENGINE_BYTES, ENGINE_SPREAD, kernel_us

    frame = pandas.read_parquet(data / "collectives" / "custom_all_reduce_h200.parquet")
    frame = frame[(frame.payload_bytes <= ENGINE_BYTES) & ~frame.backend_kernel.str.contains("eager")]
    logs = []
    for name, least in (("vLLM_custom_graph", 4.4), ("SGLang_CustomAllReduce_graph", 2.6), ("TRTLLM", 2.6)):
        rows = frame[frame.backend_kernel == name]
        us = kernel_us(rows.payload_bytes.to_numpy(float), rows.ranks.to_numpy(float), 450.0, least)
        ratio = np.log(us / rows.latency_us.to_numpy())
        logs += ratio.tolist()
        print(f"{name:<30} {len(rows):>3}  MAPE {np.abs(np.expm1(ratio)).mean():.1%} "
              f"bias {np.expm1(ratio).mean():+.1%} largest {np.abs(np.expm1(ratio)).max():.1%}")
    inside = np.mean(np.abs(logs) <= ENGINE_SPREAD)
    print(f"all {len(logs)}: 80% within e^±{np.quantile(np.abs(logs), 0.8):.2f}, {inside:.0%} within "
          f"e^±{ENGINE_SPREAD}")


ANCHORS = (("vllm-cuda-graph", "gpt-oss-20b", "mi300x", ServingSetup(experts="mxfp4")),
           ("vllm-eager-B200", "gpt-oss-120b", "b200", ServingSetup(tp=8, experts="mxfp4", kv="fp8")))
"""Traces of servers, and what they served; no trace has two steps that could judge one another."""


def anchors(data: Path) -> None:
    """Print what of recorded steps' kernels belongs to operations, and what each operation took."""
    for folder, name, device, setup in ANCHORS:
        spec = find_device(device)
        model = ServingModel(served_decoder(name).shape, setup, spec, cluster_for(spec, setup.gpus, None, None, None))
        found = read_anchor(str(data / "traces" / folder), model)
        anchored, step = found.of(model), found.steps[0]
        print(f"{folder}: {name} on {setup.gpus} {device}\n  {found}")
        was = {each.name: each for each in model.operations(step)}
        for each in sorted(anchored.operations(step), key=lambda each: -each.us):
            print(f"  {each.name:<26} measured {each.us / 1e3:8.3f} ms, predicted {was[each.name].us / 1e3:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--rows", choices=("all", "every", "speed", "published", "offline", "latency", "kernels",
                                           "anchors"),
                        default="all")
    parser.add_argument("--half", choices=("both", "development", "held-out"), default="both")
    given = parser.parse_args()
    if given.rows == "speed":
        speed()
    elif given.rows == "published":
        published()
    elif given.rows == "offline":
        offline()
    elif given.data is None:
        parser.error("name the folder of shared data")
    elif given.rows == "latency":
        latency(given.data)
    elif given.rows == "kernels":
        kernels(given.data)
    elif given.rows == "anchors":
        anchors(given.data)
    else:
        measure(given.data, half=given.half, every=given.rows == "every")


if __name__ == "__main__":
    main()
