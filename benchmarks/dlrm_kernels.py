"""Look-ups of a recorded 8-rank DLRM step (V100, FBGEMM): each rank's forward and backward, predicted three ways.

    python benchmarks/dlrm_kernels.py [DATA]

DATA is the folder with `traces/dlrm-8xV100-2023` (PARAM, MIT licence). Predicted from the data sheet as the trace
stands, which says how many look-ups and rows but not of which tables; with the tables' sizes and bag lengths; and with
efficiencies fitted to the other seven ranks. The step ran the model of MLPerf's DLRM v2 on Criteo's features: its 26
tables and their look-ups a sample are public (MLCommons training, recommendation_v2/torchrec_dlrm), and of a rank's
three tables the rows and look-ups add up to what the trace recorded, which tells which they are.
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kernel_models.device import device
from kernel_models.heuristics.efficiency import fit_efficiencies
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.op_call import Family, OpCall, TablePart
from kernel_models.trace_calls import graph_calls
from tracer import read_job

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
DEVICE = "v100-sxm2-32g"
ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
        11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)
LOOKUPS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
SAMPLES, SMALL = 128, 1
WAYS = ("sheet, trace alone", "sheet, tables told", "seven other ranks")
OPTIMIZER = "adagrad"


@dataclass(frozen=True)
class RecordedLookup:
    """One rank's look-up or its gradient: as recorded, and with its tables told."""

    rank: int
    backward: bool
    call: OpCall
    measured_us: float

    @property
    def told(self) -> OpCall:
        """The call with the tables that its rows and look-ups add up to."""
        lookups, _, rows, columns, tables = self.call.dims
        for chosen in itertools.combinations(range(len(ROWS)), tables):
            if (abs(sum(ROWS[i] for i in chosen) - rows * tables) < tables
                    and sum(LOOKUPS[i] for i in chosen) * SAMPLES == lookups):
                return replace(self.call, accesses=tuple(
                    TablePart(ROWS[i], columns, "fp32", LOOKUPS[i] * SAMPLES, SAMPLES, LOOKUPS[i],
                              optimizer=OPTIMIZER) for i in chosen))
        raise SystemExit(f"rank {self.rank}: no {tables} tables of the model have {rows * tables:,} rows in all")


def recorded(data: Path) -> list[RecordedLookup]:
    """The sharded tables' look-ups of every rank; a table of few rows, which every rank holds, is left out."""
    found = []
    for rank, graph in enumerate(read_job(data / "traces" / "dlrm-8xV100-2023").graphs):
        pieces = graph_calls(graph)
        for row in range(len(pieces)):
            calls = pieces.calls_of_row(row)
            if calls[0].family is Family.EMBEDDING and calls[0].dims[0] > SMALL * SAMPLES:
                found.append(RecordedLookup(rank, "backward" in calls[0].kind, calls[0], pieces.time_ns[row] / 1e3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=DATA)
    spec = device(DEVICE)
    every = recorded(parser.parse_args().data)
    for backward, title in ((False, "Look-ups"), (True, "Their gradients, with the optimizer")):
        rows = [one for one in every if one.backward == backward]
        print(f"\n{title}: µs measured, and predicted (error)")
        print(f"{'rank':>4} {'look-ups':>9} {'longest bag':>12} {'measured':>9}  {'sheet, trace alone':>19}  "
              f"{'sheet, tables told':>19}  {'seven other ranks':>19}")
        errors: list[list[float]] = [[], [], []]
        for one in rows:
            others = [other for other in every if other.rank != one.rank]
            fitted = fit_efficiencies([other.told for other in others], [other.measured_us for other in others], spec)
            line = f"{one.rank:4d} {one.call.dims[0]:9,} {max(p.longest for p in one.told.accesses):12d} "
            line += f"{one.measured_us:9.0f}"
            for i, (call, efficiencies) in enumerate(((one.call, None), (one.told, None), (one.told, fitted))):
                time = float(RooflineModel(Family.EMBEDDING, spec, efficiencies).predict([call]).time_us[0])
                errors[i].append(time / one.measured_us - 1)
                line += f"  {time:9.1f} ({errors[i][-1]:+7.1%})"
            print(line)
        for label, values in zip(WAYS, errors, strict=True):
            far = np.abs(values)
            print(f"  {label:20} MAPE {far.mean():.1%}, median {np.median(far):.1%}, bias {np.mean(values):+.1%}, "
                  f"max {far.max():.1%}")


if __name__ == "__main__":
    main()
