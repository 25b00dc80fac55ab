"""The zoo as measured steps: rows of the table beside the operations of their traces, and kernels of the tables."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from default_efficiencies import trace_sets
from kernel_tables import table_sets

from kernel_models.device import DeviceSpec, device
from kernel_models.op_call import OpCall
from kernel_models.operation import calls_of, operation
from kernel_models.step_fit import MeasuredStep
from zoo_parts.traced import Traced
from zoo_parts.tracing import program_of

DEVICES = {"rtx3090": "rtx-3090", "rtx4090": "rtx-4090"}
FOLDS = 5
TABLE_WEIGHT = 160.0
"""How many steps one device's table of kernels counts as; one GPU's alignment sweeps count as many."""
KERNEL_ROWS = 600
FEW_CALLS = 10
"""Calls of a family that a trace needs to teach it anything: fewer would stand for all kernels of the family."""
LAUNCHED_US = 150.0
"""Products of the sweeps that took less were launched one by one from Python: a third of them takes the same 30 to 45
µs, from 32 to 256 rows, which no kernel does. They are judged, and not fitted to."""
ALIGNMENT_GPUS = {"a100": "a100-sxm-40g", "v100": "v100-sxm2-16g", "mi250x": "mi250"}


def read_table(data: Path) -> pd.DataFrame:
    """Measured steps of mixed precision on the GPUs at hand, with architecture, family and fold."""
    table = pd.read_parquet(data / "end_to_end" / "timm_step_times.parquet")
    wanted = (table.precision == "amp") & table.gpu.isin(list(DEVICES)) & table.batch.notna()
    table = table[wanted].reset_index(drop=True)
    table["architecture"] = table.model.str.partition(".")[0]
    modules = family_modules()
    table["family"] = [modules.get(name, name.partition("_")[0]) for name in table.architecture]
    table["fold"] = [int(hashlib.sha256(name.encode()).hexdigest(), 16) % FOLDS for name in table.family]
    return table


def family_modules() -> dict[str, str]:
    """timm's own families: the module that defines each architecture."""
    from timm.models._registry import _model_to_module

    return dict(_model_to_module)


def steps_of(table: pd.DataFrame, cache: Path) -> tuple[pd.DataFrame, list[MeasuredStep]]:
    """The rows of which a trace is at hand, each with its step."""
    specs = {gpu: device(name) for gpu, name in DEVICES.items()}
    known: dict[tuple[Path, int], Counter[OpCall]] = {}
    kept, steps = [], []
    for row in table.itertuples():
        key = (cache / f"{program_of(row).stem}.json.gz", int(row.batch))
        if key not in known:
            if not key[0].exists():
                continue
            known[key] = Traced.load(key[0]).calls(key[1])
        kept.append(row.Index)
        steps.append(MeasuredStep(known[key], specs[row.gpu], row.step_ms * 1e3))
    return table.loc[kept].reset_index(drop=True), steps


def kernel_cases(data: Path, rows: int = KERNEL_ROWS) -> tuple[pd.DataFrame, list[MeasuredStep]]:
    """Measured kernels of the tables, alignment sweeps and those traces that the defaults are fitted to."""
    found: list[tuple[str, OpCall, DeviceSpec, float, float]] = []
    for one in table_sets(data, rows):
        if one.device.vendor == "nvidia":
            sound = np.isfinite(one.measured_us) & (one.measured_us > 0)
            found += [(one.name, one.calls[i], one.device, float(one.measured_us[i]), TABLE_WEIGHT / len(one.calls))
                      for i in np.flatnonzero(sound).tolist()]
    found += alignment_cases(data)
    for name, spec, calls, times in trace_sets(data):
        if spec.vendor != "nvidia":
            continue  # one trace of one GPU: what it teaches made three others of that GPU no better
        families = Counter(call.family for call in calls)
        sound = [i for i in np.flatnonzero(np.isfinite(times) & (times > 0)).tolist()
                 if "unsized" not in calls[i].flags and calls[i].bytes_moved > 0
                 and families[calls[i].family] >= FEW_CALLS]
        found += [(f"trace {name}", calls[i], spec, float(times[i]), TABLE_WEIGHT / len(calls)) for i in sound]
    frame = pd.DataFrame({"table": [name for name, *_ in found], "true_us": [us for *_, us, _ in found],
                          "device": [spec.name for _, _, spec, *_ in found], "weight": [w for *_, w in found],
                          "fold": [zlib.crc32(str(call.dims).encode()) % FOLDS for _, call, *_ in found]})
    return frame, [MeasuredStep({call: 1.0}, spec, us, weight, True) for _, call, spec, us, weight in found]


def alignment_cases(data: Path) -> list[tuple[str, OpCall, DeviceSpec, float, float]]:
    """The sweeps through one dimension: label, call, device, µs and weight; none for what the host took."""
    table = pd.read_parquet(data / "kernels" / "gemm_alignment_fp16.parquet")
    table["us"] = 2.0 * table.batch * table["first"] * table.second * table.third / table.tflops / 1e6
    counts = table[table.us >= LAUNCHED_US].gpu.value_counts()
    return [(f"alignment {row.gpu} {row.sweep}" + ("" if row.us >= LAUNCHED_US else ", launch-bound"), _product(row),
             device(ALIGNMENT_GPUS[row.gpu]), row.us,
             3 * TABLE_WEIGHT / counts[row.gpu] if row.us >= LAUNCHED_US else 0.0) for row in table.itertuples()]


def _product(row: Any) -> OpCall:
    if row.batch > 1:
        found = operation("aten::bmm", [(row.batch, row.first, row.third), (row.batch, row.third, row.second)], "fp16")
    else:
        found = operation("aten::linear", [(row.first, row.third), (row.second, row.third), None], "fp16")
    return calls_of(found)[0]
