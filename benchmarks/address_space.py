"""Every command under a limit of address space, as batch systems set one (``ulimit -v``).

    python benchmarks/address_space.py [--gib 8] [--command report ...]

Each command runs once on a recording of ``traces/``, on a small script or on a published model; what it may end with is
an answer. Ends with 1 where one did not, or where a command of ``foretrace`` is missing here.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL, LLAMA = str(ROOT / "traces" / "cpu-small"), str(ROOT / "traces" / "llama-cpu")
SCRIPT = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
batch = parser.parse_args().batch if __name__ == "__main__" else 8
def build(batch=8, device="cpu"):
    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    def step():
        layer(torch.ones(batch, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
def on_gpu(batch=8):
    return build(batch, "cuda")
if __name__ == "__main__":
    torch.set_num_threads(1)
    step = build(batch)
    for _ in range(40):
        step()
"""
RUNS: list[list[str]] = [
    ["inspect", SMALL], ["breakdown", SMALL], ["replay", SMALL], ["report", SMALL, "-o", "report.html"],
    ["diff", SMALL, SMALL, "--html", "diff.html"], ["ranks", LLAMA, "--parallel", "ddp=2"], ["overheads", SMALL],
    ["predict", SMALL, "--host", "0.5", "--html", "predict.html"], ["opportunities", SMALL],
    ["sweep", SMALL, "--host", "0.5,2", "--jobs", "2", "-o", "sweep.csv"],
    ["price", "aten::mm", "--shapes", "512x512,512x512", "--device", "h100-sxm"], ["memory", LLAMA],
    ["fit-batch", "script.py:on_gpu", "--device", "h100-sxm"],
    ["plan", "llama-3.1-8b", "--gpus", "8", "--device", "h100-sxm"],
    ["serve", "llama-3.1-8b", "--device", "h100-sxm"],
    ["price-layer", "llama-3.1-8b", "--device", "h100-sxm"], ["shapes", "llama-3.1-8b", "--device", "h100-sxm"],
    ["shard", "dlrm", "--gpus", "2"], ["comm", "predict", "all_reduce", "--bytes", "1MiB", "--topology", "dgx-h100"],
    ["validate", "script.py", "--set", "batch=8", "--set", "batch=16", "-o",
     "validated"], ["check", str(ROOT / "traces")],
    ["capture", "script.py", "--out", "captured"], ["trace", "script.py:build", "-o", "traced.foretrace"],
    ["convert", SMALL, "-o", "converted.foretrace"], ["export", SMALL, "-o", "exported.json"],
    ["campaign", "run", "smoke", "--out", "campaign", "--minutes", "1"], ["workloads"], ["doctor"],
    ["calibrate", "-o", "cpu.profile", "--on", "cpu", "--minutes", "1", "--families", "gemm"],
    ["fit", "cpu.measurements", "-o", "again.profile"], ["models", "list", "cpu.profile"], ["devices"],
    ["topologies", "dgx-h100"], ["survey", SMALL, "-o", "survey.parquet"],
]


def missing() -> set[str]:
    """Commands that no run here has."""
    sys.path.insert(0, str(ROOT))
    from foretrace.commands import COMMANDS

    return set(COMMANDS) - {run[0] for run in RUNS}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=8, help="the limit")
    parser.add_argument("--command", action="append", help="only this one (repeatable)")
    options = parser.parse_args()
    size = options.gib << 30
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    failed = len(missing())
    print(f"{'command':14} {'exit':>4} {'CPU s':>6} {'peak MB':>8}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(SCRIPT)
        for run in RUNS:
            if options.command and run[0] not in options.command:
                continue
            with (Path(folder) / "said").open("w+") as said:
                process = subprocess.Popen(
                    [sys.executable, "-m", "foretrace", *run], cwd=folder, env=environment, stdout=subprocess.DEVNULL,
                    stderr=said, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)))
                _, status, used = os.wait4(process.pid, 0)
                code = process.returncode = os.waitstatus_to_exitcode(status)
                said.seek(0)
                last = "" if code == 0 else said.read().strip().rsplit("\n", 1)[-1][:150]
            failed += code != 0
            print(f"{run[0]:14} {code:4} {used.ru_utime + used.ru_stime:6.1f} {used.ru_maxrss / 1e3:8.0f} {last}",
                  flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
