"""A user's table of steps: a few image models of timm teach a profile, which predicts models of other families.

    python benchmarks/fit_steps.py CACHE [--models 6] [--cases FILE]     # CACHE: as `zoo.py trace` leaves it

Training steps in mixed precision on an RTX 3090 (timm_step_times.parquet, contiguous layout). The models that teach are
the first of as many families, in the order of a hash; judged are models of families that none of them is of. The
shipped corrections know this table, so that what a user of another GPU gains is shown by leaving them away.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import numpy as np
import pandas as pd
from zoo_parts.cases import read_table, steps_of

from kernel_models.datasets.samples import DataError
from kernel_models.device import device
from kernel_models.heuristics.corrections import Corrections, shipped_corrections
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.profile import DeviceProfile
from kernel_models.scores import errors_of
from kernel_models.step_fit import MeasuredStep, StepProblem
from kernel_models.step_profile import NamedStep, fit_steps

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--models", type=int, nargs="+", default=[6, 12, 24])
    parser.add_argument("--cases", type=Path, help="where to write every case")
    given = parser.parse_args()
    table = read_table(given.data)
    rows, steps = steps_of(table[(table.kind == "train") & (table.layout == "nchw") & ~table.compiled], given.cache)
    order = pd.Series([hashlib.sha256(name.encode()).hexdigest() for name in rows.architecture])
    first = rows.assign(order=order).sort_values("order").drop_duplicates("family")
    every = []
    for models in given.models:
        teach = first.index[:models].tolist()
        asked = np.flatnonzero(~rows.family.isin(rows.family[teach]).to_numpy())
        print(f"{models} steps of {', '.join(rows.architecture[teach][:6])}…: {len(asked)} steps of other families")
        for shipped in (False, True):
            try:
                before, after = predictions([NamedStep(rows.architecture[i], steps[i]) for i in teach],
                                            [steps[i] for i in asked.tolist()], shipped)
            except DataError as error:
                print(f"  {'shipped corrections' if shipped else 'data sheet':<20} refused: {error}")
                continue
            true = np.array([steps[i].measured_us for i in asked.tolist()])
            for name, found in (("before", before), ("after", after)):
                one = errors_of(found, true)
                print(f"  {'shipped corrections' if shipped else 'data sheet':<20} {name:<7} MAPE {one.mape:6.1%} "
                      f"median {one.median:6.1%} bias {one.bias:+6.1%} p90 {one.p90:6.1%}")
                every.append(rows.loc[asked, ["architecture", "family", "step_ms"]].assign(
                    models=models, start="shipped" if shipped else "data sheet", fitted=name,
                    predicted_ms=found / 1e3))
    if given.cases:
        pd.concat(every).to_csv(given.cases, index=False)


def predictions(teach: list[NamedStep], asked: list[MeasuredStep], shipped: bool) -> list[np.ndarray]:
    """Times of steps before and after a fit to others, µs."""
    spec = device("rtx-3090")
    profile = fit_steps(teach, spec, "timm", shipped=shipped)
    found = []
    for known in (shipped_corrections() if shipped else None, corrections_of(profile)):
        problem = StepProblem(asked, known)
        found.append(problem.times_us(np.zeros(len(problem.weights))))
    return found


def corrections_of(profile: DeviceProfile) -> Corrections | None:
    """The corrections of a profile that was fitted to steps alone: every model has the same."""
    model = profile.entries[0].model
    assert isinstance(model, RooflineModel)
    return model.corrections


if __name__ == "__main__":
    main()
