"""How well collectives are predicted, against what was asked, as one table.

    python benchmarks/collectives.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with
`collectives/` (AIConfigurator's, vTrain's and Vidur's measurements) and `traces/dlrm-8xV100-2023`
(HolisticTraceAnalysis). Repeats are aggregated first. A size is left out in every dtype, every collective and every
rank count of a GPU at once, and all choices (interpolation, cuts, intervals) are made on what is left. Errors are
predicted over measured, less one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from kernel_models.collectives import (
    CollectiveBatch,
    CollectiveKind,
    CollectiveMeasurements,
    CommProfile,
    CommTimes,
    Level,
    Placement,
    find_topology,
    make_measurements,
)
from kernel_models.collectives.datasheet import DatasheetModel
from kernel_models.collectives.fitted import FittedModel
from kernel_models.collectives.measured import MeasuredModel
from kernel_models.collectives.measurements import join
from kernel_models.collectives.tuner import backends_of, choose, crossovers

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
NODES = {"A100-SXM4-80GB": "dgx-a100", "H100-SXM5-80GB": "dgx-h100", "H200-SXM-141GB": "dgx-h200", "L40S": "pcie-l40s"}
NVLINK = tuple(NODES)[:3]
LARGE = 16 * 2**20
HEAD = f"{'what':56}{'points':>7}{'median':>8}{'p90':>8}{'bias':>8}{'in 80%':>8}   asked"


class Errors:
    """Relative errors of many points, gathered."""

    def __init__(self) -> None:
        self.error: list[np.ndarray] = []
        self.inside: list[np.ndarray] = []

    def add(self, times: CommTimes, measured_us: np.ndarray) -> None:
        self.error.append(times.time_us / measured_us - 1)
        self.inside.append((measured_us >= times.low_us) & (measured_us <= times.high_us))

    def show(self, what: str, asked: dict[str, float] | None = None) -> None:
        """Print a row; ``asked`` holds the largest "median" and "p90" that is met."""
        if self.error:
            e, inside = np.concatenate(self.error), np.concatenate(self.inside)
            found = {"median": float(np.median(abs(e))), "p90": float(np.quantile(abs(e), 0.9))}
            print(f"{what:56}{len(e):7}{found['median']:8.2%}{found['p90']:8.2%}{e.mean():+8.2%}"
                  f"{inside.mean():8.0%}   {verdict(found, asked)}")


def verdict(found: dict[str, float], asked: dict[str, float] | None) -> str:
    """What was asked, and whether it was met; "-" where nothing was."""
    if not asked:
        return "-"
    words = ", ".join(f"{name} <= {most:.1%}" for name, most in asked.items())
    return f"{words}: {'met' if all(found[name] <= most for name, most in asked.items()) else 'missed'}"


def nccl(folder: Path) -> dict[str, CollectiveMeasurements]:
    """Aggregated single-node measurements by GPU."""
    table = pd.read_parquet(folder / "nccl_single_node.parquet")
    return {gpu: make_measurements((r.collective, r.dtype, Placement((r.ranks,)), r.payload_bytes, r.latency_us)
                                   for r in table[table.gpu == gpu].itertuples()).aggregated() for gpu in NODES}


def leave_sizes_out(data: dict[str, CollectiveMeasurements]) -> None:
    """Sizes left out of the measured and of the fitted model."""
    fits: list[tuple[str, Callable[[CollectiveMeasurements, str], MeasuredModel | FittedModel],
                     dict[str, float] | None, dict[str, float] | None]] = [
        ("measured curve, a size left out",
         lambda m, gpu: MeasuredModel.fit(m, shared_link=gpu == "L40S", intervals=False),
         {"median": 0.025, "p90": 0.10}, {"p90": 0.20}),
        ("fitted alpha-beta alone, a size left out", lambda m, gpu: FittedModel.fit(m, find_topology(NODES[gpu])),
         {"median": 0.05}, None)]
    for label, fit, asked, asked_l40s in fits:
        groups = {"NVLink": Errors(), "L40S": Errors()}
        for gpu, rows in data.items():
            for size in np.unique(rows.batch.payload_bytes):
                out = rows.batch.payload_bytes == size
                left = rows.take(out)
                groups["L40S" if gpu == "L40S" else "NVLink"].add(fit(rows.take(~out), gpu).predict(left.batch),
                                                                  left.time_us)
        groups["NVLink"].show(f"{label}, NVLink", asked)
        groups["L40S"].show(f"{label}, L40S", asked_l40s)


def falling_steps(data: dict[str, CollectiveMeasurements]) -> None:
    """Sizes at which a larger collective is predicted to be faster, at each level and of the whole profile.

    Groups of 2 to 64 ranks on one and several nodes; the fits are also of the measurements of 1 MiB and more alone, so
    that the levels meet within a curve.
    """
    sizes = np.geomspace(1, 2**31, 3000)
    groups = [Placement((n,)) for n in range(2, 9)] + [Placement((1, 1)), Placement((4, 4)), Placement((8,) * 8),
                                                       Placement((8, 3))]
    counts: dict[str, list[int]] = {}
    for gpu, rows in data.items():
        where = find_topology(f"{NODES[gpu]}x8")
        large = rows.take(rows.batch.payload_bytes >= 2**20)
        models = [("datasheet", DatasheetModel(where).predict)]
        for part in (rows, large):
            profile = CommProfile.fit(part, where)
            models += [("measured", profile.backends["nccl"].measured.predict),
                       ("fitted", profile.backends["nccl"].fitted.predict), ("all levels together", profile.predict)]
        for name, predict in models:
            for kind in (*CollectiveKind,)[:5]:
                for placement in groups:
                    times = predict(CollectiveBatch.of(kind, sizes, placement, "float16"))
                    time_us = times.time_us[times.level != int(Level.UNKNOWN)]
                    count = counts.setdefault(name, [0, 0])
                    count[0] += max(len(time_us) - 1, 0)
                    count[1] += int((np.diff(time_us) < -1e-9 * time_us[1:]).sum())
    for name, (steps, drops) in counts.items():
        print(f"{'falling steps, ' + name:48}{steps:15,}{drops:8,}{'':24}   none: {'missed' if drops else 'met'}")


def leave_ranks_out(data: dict[str, CollectiveMeasurements]) -> None:
    """Whole rank counts left out."""
    for left_out, asked in ((4, {"median": 0.06}), (8, {"median": 0.08})):
        groups = {"NVLink": Errors(), "L40S": Errors()}
        for gpu, rows in data.items():
            out = rows.batch.ranks == left_out
            left = rows.take(out)
            model = MeasuredModel.fit(rows.take(~out), shared_link=gpu == "L40S")
            groups["L40S" if gpu == "L40S" else "NVLink"].add(model.predict(left.batch), left.time_us)
        others = "2 and 8" if left_out == 4 else "2 and 4"
        groups["NVLink"].show(f"{left_out} ranks from {others}, NVLink", asked)
        groups["L40S"].show(f"{left_out} ranks from {others}, L40S")


def datasheet(data: dict[str, CollectiveMeasurements]) -> None:
    """Published constants only."""
    for label, low, high, gpus, asked in (
            ("datasheet, NVLink, >= 16 MiB", LARGE, np.inf, NVLINK,
             {"median": 0.12, "p90": 0.25}),
            ("datasheet, NVLink, 128 KiB to 16 MiB", 131072, LARGE, NVLINK, None),
            ("datasheet, NVLink, < 128 KiB", 0, 131072, NVLINK, None),
            ("datasheet, L40S, >= 16 MiB", LARGE, np.inf, ("L40S",), None)):
        errors = Errors()
        for gpu in gpus:
            rows = data[gpu]
            rows = rows.take((rows.batch.payload_bytes >= low) & (rows.batch.payload_bytes < high))
            errors.add(DatasheetModel(find_topology(NODES[gpu])).predict(rows.batch), rows.time_us)
        errors.show(label, asked)


def datasheet_pooled(folder: Path, data: dict[str, CollectiveMeasurements]) -> None:
    """Coverage of the data sheet's intervals on all tables of a kind of machine, each table counting the same."""
    tables: list[tuple[str, str, str, CollectiveMeasurements]] = [
        ("PCIe node" if gpu == "L40S" else "switched node", f"AIConfigurator {gpu}", NODES[gpu], rows)
        for gpu, rows in data.items()]
    vtrain = pd.read_parquet(folder / "all_reduce_vtrain.parquet")
    vtrain = vtrain[vtrain.payload_bytes % 2**23 == 0]
    for gpu, node, kind in (("A100", "dgx-a100", "switched node"), ("V100", "dgx-v100", "meshed node")):
        tables.append((kind, f"vTrain {gpu}", node, make_measurements(
            ("all_reduce", "float32", Placement((r.ranks,)), r.payload_bytes, r.latency_us)
            for r in vtrain[vtrain.gpu == gpu].itertuples())))
    vidur = pd.read_parquet(folder / "vidur_all_reduce_send_recv.parquet")
    for (system, what, several), part in vidur.assign(several=vidur.ranks > vidur.ranks_per_node).groupby(
            ["topology", "collective", "several"]):
        if several and system == "a100_pairwise_nvlink":
            continue
        node = {"a100_dgx": "dgx-a100x2", "h100_dgx": "dgx-h100x2", "a100_pairwise_nvlink": "hgx-a100-4"}[system]
        kind = "two nodes" if several else "meshed node" if system == "a100_pairwise_nvlink" else "switched node"
        tables.append((kind, f"Vidur {system} {what}", node, make_measurements(
            (what, "float16", Placement.even(r.ranks, r.ranks_per_node), r.payload_bytes, r.median_us)
            for r in part.itertuples())))
    bands = ((0.0, 2.0**20, "< 1 MiB"), (2.0**20, 2.0**24, "1 to 16 MiB"), (2.0**24, np.inf, ">= 16 MiB"))
    print(f"\n{'data sheet intervals':56}{'tables':>7}{'in 80%':>8}   of each table")
    for kind in dict.fromkeys(table[0] for table in tables):
        for low, high, band in bands:
            covered = []
            for _, _, node, rows in (table for table in tables if table[0] == kind):
                rows = rows.aggregated()
                rows = rows.take((rows.batch.payload_bytes >= low) & (rows.batch.payload_bytes < high))
                if len(rows) >= 20:
                    times = DatasheetModel(find_topology(node)).predict(rows.batch)
                    covered.append(float(((rows.time_us >= times.low_us) & (rows.time_us <= times.high_us)).mean()))
            print(f"{kind + ', ' + band:56}{len(covered):7}{np.mean(covered):8.0%}   "
                  + " ".join(f"{value:.0%}" for value in covered))


def two_nodes(folder: Path) -> None:
    """Two nodes of A100: a tenth of the sizes measured, and two parameters fitted to that tenth."""
    table = pd.read_parquet(folder / "vidur_all_reduce_send_recv.parquet")
    table = table[(table.topology == "a100_dgx") & (table.collective == "all_reduce")]
    table = table[table.ranks > table.ranks_per_node]
    where = find_topology("dgx-a100x2")
    for (ranks, per_node), part in table.groupby(["ranks", "ranks_per_node"]):
        rows = make_measurements(("all_reduce", "float16", Placement.even(ranks, per_node), r.payload_bytes,
                                  r.median_us)
                                 for r in part.itertuples()).aggregated()
        order = np.argsort(rows.batch.payload_bytes)
        results = {"measured": Errors(), "two parameters": Errors(), "three lines": Errors(), "datasheet": Errors()}
        for offset in (0, 3, 7):
            kept = np.zeros(len(rows), bool)
            kept[order[offset::10]] = True
            fit, left = rows.take(kept), rows.take(~kept)
            results["measured"].add(MeasuredModel.fit(fit).predict(left.batch), left.time_us)
            results["two parameters"].add(FittedModel.fit(fit, where, most_pieces=1).predict(left.batch), left.time_us)
            results["three lines"].add(FittedModel.fit(fit, where).predict(left.batch), left.time_us)
        results["datasheet"].add(DatasheetModel(where).predict(rows.batch), rows.time_us)
        asked = {"measured": {"median": 0.02}, "two parameters": {"median": 0.10}}
        for name, errors in results.items():
            errors.show(f"2 nodes A100, {ranks} ranks ({per_node} a node), {name}", asked.get(name))


def other_tables(folder: Path) -> None:
    """The same rules on tables that none of them was looked at with: vTrain's A100, Vidur's single nodes."""
    vtrain = pd.read_parquet(folder / "all_reduce_vtrain.parquet")
    vtrain = vtrain[vtrain.gpu == "A100"]
    rows = make_measurements(("all_reduce", "float32", Placement((r.ranks,)), r.payload_bytes, r.latency_us)
                             for r in vtrain[vtrain.payload_bytes % 2**23 == 0].itertuples()).aggregated()
    sheet = Errors()
    large = rows.take(rows.batch.payload_bytes >= LARGE)
    sheet.add(DatasheetModel(find_topology("dgx-a100")).predict(large.batch), large.time_us)
    sheet.show("vTrain A100, datasheet, >= 16 MiB, 2 to 8 ranks")
    for left_out, fitted in ((4, (2, 8)), (8, (2, 4)), (5, (3, 8))):
        errors = Errors()
        left = rows.take(rows.batch.ranks == left_out)
        errors.add(MeasuredModel.fit(rows.take(np.isin(rows.batch.ranks, fitted))).predict(left.batch), left.time_us)
        errors.show(f"vTrain A100, {left_out} ranks from {fitted[0]} and {fitted[1]}")
    vidur = pd.read_parquet(folder / "vidur_all_reduce_send_recv.parquet")
    vidur = vidur[(vidur.collective == "all_reduce") & (vidur.ranks == vidur.ranks_per_node)]
    for cluster, node in (("a100_dgx", "dgx-a100"), ("h100_dgx", "dgx-h100")):
        part = vidur[vidur.topology == cluster]
        rows = make_measurements(("all_reduce", "float16", Placement((r.ranks,)), r.payload_bytes, r.median_us)
                                 for r in part.itertuples()).aggregated()
        kept = np.zeros(len(rows), bool)
        kept[np.lexsort((rows.batch.payload_bytes, rows.batch.ranks))[::10]] = True
        left = rows.take(~kept)
        where = find_topology(node)
        results = {"a tenth measured": MeasuredModel.fit(rows.take(kept)),
                   "two parameters": FittedModel.fit(rows.take(kept), where, most_pieces=1),
                   "three lines": FittedModel.fit(rows.take(kept), where)}
        for name, model in results.items():
            errors = Errors()
            errors.add(model.predict(left.batch), left.time_us)
            errors.show(f"Vidur {cluster}, 2 to 8 ranks, {name}")
        errors = Errors()
        large = rows.take(rows.batch.payload_bytes >= LARGE)
        errors.add(DatasheetModel(where).predict(large.batch), large.time_us)
        errors.show(f"Vidur {cluster}, 2 to 8 ranks, datasheet, >= 16 MiB")


def dlrm(folder: Path) -> None:
    """Collective kernels' times removed and predicted, eight ranks simulated together."""
    from graph_predictor.comm.recorded_calls import find_collectives, with_transfers
    from graph_predictor.simulation.build import build_program
    from graph_predictor.simulation.engine import simulate
    from graph_predictor.simulation.program import step_items
    from tracer.job import read_job

    built = build_program(read_job(folder / "traces" / "dlrm-8xV100-2023").graphs)
    where = find_topology("dgx-v100")
    table = pd.read_parquet(folder / "collectives" / "all_reduce_vtrain.parquet")
    table = table[table.gpu == "V100"]
    profile = CommProfile.fit(make_measurements(("all_reduce", "float32", Placement((r.ranks,)), r.payload_bytes,
                                                 r.latency_us)
                                                for r in table.itertuples()), where)
    sheet = DatasheetModel(where)

    def predict(batch: CollectiveBatch) -> CommTimes:
        out = sheet.predict(batch)
        reduces = batch.kind == int(CollectiveKind.ALL_REDUCE)
        out.put(reduces, profile.predict(batch.take(reduces)))
        return out

    measured = {(a, b): float(built.program.recorded_item_end[b] - built.program.recorded_item_end[a])
                for _, _, a, b in step_items(built.program)}
    found, _ = find_collectives(built, where)
    time_us = predict(CollectiveBatch.from_calls([each.call for each in found])).time_us
    priced = with_transfers(built, found, time_us)
    print(f"\n{'DLRM 8xV100, all collectives':56}{'mean |e|':>9}{'worst':>9}   asked")
    for label, factor in (("predicted (datasheet + V100 all-reduce table)", 1.0), ("free (how much they matter)", 0.0),
                          ("ten times the prediction", 10.0)):
        grouped = built.program.kernel_group >= 0
        duration = np.where(grouped, (priced.kernel_duration * factor).astype(np.int64),
                            built.program.kernel_duration)
        simulated = simulate(built.program.with_durations(duration))
        error = [float(simulated.item_end[b] - simulated.item_end[a]) / ns - 1 for (a, b), ns in measured.items()]
        errors = {"mean": float(np.mean(np.abs(error))), "worst": float(np.abs(error).max())}
        asked = {"mean": 0.05, "worst": 0.10} if factor == 1.0 else None
        print(f"  {label:54}{errors['mean']:9.3%}{errors['worst']:9.3%}   {verdict(errors, asked)}")
    print(f"  {'collective':14}{'bytes':>10}{'recorded us':>13}{'predicted us':>14}")
    for collective, us in zip(found, time_us, strict=True):
        call = collective.call
        print(f"  {call.kind.label:14}{call.payload_bytes:10,.0f}{collective.recorded_ns / 1e3:13.1f}"
              f"{us:14.1f}")


def custom_all_reduce(folder: Path) -> CollectiveMeasurements:
    """All-reduce on H200 by the kernels of serving engines, each a backend."""
    table = pd.read_parquet(folder / "custom_all_reduce_h200.parquet")
    return join(make_measurements((("all_reduce", "half", Placement((r.ranks,)), r.payload_bytes, r.latency_us)
                                   for r in part.itertuples()), name) for name, part in table.groupby("backend_kernel"))


def tuner(folder: Path, data: dict[str, CollectiveMeasurements]) -> None:
    """Winners on H200: NCCL and the custom kernels of serving engines (in CUDA graphs)."""
    rows = join([data["H200-SXM-141GB"], custom_all_reduce(folder)])
    backends = backends_of([CommProfile.fit(rows, find_topology("dgx-h200"))])
    for label, names in (("in CUDA graphs", [n for n in backends if not n.endswith("eager")]),
                         ("eager", ["nccl", *(n for n in backends if n.endswith("eager"))])):
        print(f"\nall-reduce on H200, custom kernels {label}: the winner changes at (ties within 5% stay)")
        some = {n: backends[n] for n in names}
        for ranks in (2, 4, 8):
            placement = Placement((ranks,))
            first = choose(some, CollectiveKind.ALL_REDUCE, placement, [512.0])[0]
            found = crossovers(some, CollectiveKind.ALL_REDUCE, placement, 512.0, 2.0**29)
            print(f"  {ranks} GPUs: {first.winner} (x{first.gain('nccl') + 1:.1f} faster than NCCL at 512 B)"
                  + "".join(f", from {c.payload_bytes / 2**20:.3g} MiB {c.after}" for c in found))


def speed(data: dict[str, CollectiveMeasurements]) -> None:
    """Evaluations a second on one core."""
    profile = CommProfile.fit(data["H100-SXM5-80GB"], find_topology("dgx-h100x512"))
    rng = np.random.default_rng(0)
    n = 10**6
    one = CollectiveBatch.of(CollectiveKind.ALL_REDUCE, np.exp(rng.uniform(6, 20, n)), Placement((8,)), "float16")
    ranks = rng.choice([2, 4, 8, 16, 64], n)
    widest = np.minimum(ranks, 8)
    mixed = CollectiveBatch(rng.integers(0, 4, n), one.payload_bytes, one.dtype, ranks, ranks // widest, widest, widest)
    print()
    for label, batch in (("one setting", one), ("20 settings, all levels", mixed)):
        begin = time.process_time()
        profile.predict(batch)
        rate = n / (time.process_time() - begin)
        print(f"{'evaluations a second and core, ' + label:56}{rate:15,.0f}   1,000,000: "
              f"{'met' if rate >= 1e6 else 'missed'}")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    folder = parser.parse_args().data
    if not (folder / "collectives").is_dir():
        print(f"{folder / 'collectives'} does not exist; name the folder that holds it, or set FORETRACE_DATA.",
              file=sys.stderr)
        return 2
    data = nccl(folder / "collectives")
    print(HEAD)
    leave_sizes_out(data)
    falling_steps(data)
    leave_ranks_out(data)
    datasheet(data)
    datasheet_pooled(folder / "collectives", data)
    two_nodes(folder / "collectives")
    other_tables(folder / "collectives")
    dlrm(folder)
    tuner(folder / "collectives", data)
    speed(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
