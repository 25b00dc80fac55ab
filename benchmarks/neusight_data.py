"""NeuSight's fp32 kernel measurements as calls of our families; used by the NeuSight benchmarks and tests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from cross_device import Figures, Measured

from kernel_models.device import resolve_device
from kernel_models.op_call import Family

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA") or ROOT.parent / "shared" / "data")
TRAIN_GPUS = ("Tesla P4", "Tesla P100-PCIE-16GB", "Tesla V100-PCIE-32GB", "Tesla T4", "NVIDIA A100-PCIE-40GB")
UNSEEN_GPUS = ("NVIDIA L4", "NVIDIA A100 80GB PCIe")
BINARY = ("add", "mul", "div", "pow")
"""Read two tensors; the others (with a number, or of one tensor) read one."""
UNARY = ("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh")


@dataclass(frozen=True)
class Group:
    """A row of NeuSight's tables of errors."""

    name: str
    family: Family
    operations: tuple[str, ...]
    batched: bool = False


GROUPS = (Group("elementwise", Family.ELEMENTWISE, BINARY + UNARY), Group("layer norm", Family.NORM, ("ln",)),
          Group("softmax", Family.SOFTMAX, ("softmax",)), Group("FC", Family.GEMM, ("linear",)),
          Group("BMM", Family.GEMM, ("bmm",), batched=True))


def figures(reported: str) -> Figures:
    """A device's figures from the name NeuSight reports."""
    return Figures.of(resolve_device(reported.replace("_", " ")))


def read(split: str) -> pd.DataFrame:
    """The rows of a split, convolutions (without shapes) left out."""
    table = pd.read_parquet(DATA / "kernels" / "neusight_fp32.parquet")
    return table[(table.split == split) & (table.OPName != "conv")]


def sizes(table: pd.DataFrame, family: Family) -> np.ndarray:
    """Sizes as ``DIMENSIONS`` names them, [n, d]. N is the contraction, K the output's width."""
    rows = table.B.to_numpy(float)
    if family is Family.GEMM:
        return np.stack([rows, *(table[c].to_numpy(float) for c in ("M", "K", "N"))], axis=1)
    wide = table.H.to_numpy(float)
    if family is Family.ELEMENTWISE:
        inputs = table.OPName.isin(BINARY).to_numpy() + 1.0
        return np.stack([rows * wide, inputs, rows * wide * inputs], axis=1)
    return np.stack([rows, wide, np.ones(len(table))] if family is Family.SOFTMAX else [rows, wide], axis=1)


def measured(table: pd.DataFrame, group: Group, gpu: str, *, distinct: bool = True) -> Measured:
    """One GPU's measurements of a group; repeated shapes as one, with their median time, where ``distinct``."""
    rows = table[(table.Device == gpu) & table.OPName.isin(group.operations)]
    if distinct:
        keys = ["OPName", "B", "H", "M", "N", "K"]
        rows = rows.groupby(keys, dropna=False, as_index=False).agg({"latency_us": "median", "Kernel Name": "first"})
    return Measured(figures(gpu), sizes(rows, group.family), rows.latency_us.to_numpy(float),
                    rows["Kernel Name"].to_numpy(object))
