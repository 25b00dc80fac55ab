"""Where the traces of the report tests are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from micro import Micro

ROOT = Path(__file__).resolve().parents[2]
CPU_SMALL = ROOT / "traces" / "cpu-small"
DATA = Path(os.environ.get("FORETRACE_DATA") or ROOT.parent / "shared" / "data") / "traces"

REAL = ("dlrm-8xV100-2023", "resnet50-V100", "resnet50-ddp-2xA100/rank0.kineto.json.gz", "gpu-only-MI210",
        "vllm-cuda-graph", "vllm-eager-B200", "rank0-1-of-128", "rank3-of-8xA100-6steps", "linear-2080Ti",
        "triton-example/triton_example.json.gz", "cuda-sync-A100/alexnet",
        "resnet50-V100-2021/loader-workers-0.json.gz", "h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz")


def real_trace(name: str) -> Path:
    """A real trace's path; skips the test where it is absent."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is absent: set FORETRACE_DATA to the folder that holds traces/")
    return path


def worked_step() -> Micro:
    """Step 1 from 1000 to 1400, after the calibrating step 0; microseconds.

    ::

        ops      1010 |----- outer -----| 1110   1120 |- item -| 1165      1200 |after| 1210
                      1030 |inner| 1060
        calls            1040|L|1045               1125 |sync| 1160
        stream 7             1050 #################### 1150
    """
    trace = Micro().calibrate().step(1000, 1400)
    trace.op("aten::outer", 1010, 1110).op("aten::inner", 1030, 1060)
    trace.launch(1040, 5, (7, 1050, 100), name="void [red]mul<4>(float*)")
    trace.op("aten::item", 1120, 1165)
    trace.call("cudaDeviceSynchronize", 1125, 35)
    return trace.op("aten::after", 1200, 1210)


def own_program(folder: Path, width: int = 256, *, cuda: bool = True) -> str:
    """A program of one's own, `SCRIPT.py:FUNCTION`; its batch is an argument."""
    move = ".cuda()" if cuda else ""
    path = folder / "train.py"
    path.write_text(f"""
import torch

def build(batch=64):
    model = torch.nn.Linear({width}, {width}){move}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, {width}){move}
    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
""")
    return f"{path}:build"
