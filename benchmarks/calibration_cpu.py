"""How well three minutes of calibration know this machine's CPU: held-out shapes of every family, against 15% MAPE.

    OMP_NUM_THREADS=1 python benchmarks/calibration_cpu.py [--minutes 3] [--seed 0] [--interrupt-after SECONDS]

Runs `foretrace calibrate --on cpu` into a temporary folder. With `--interrupt-after` it is ended by an interrupt
after so many seconds and resumed: what had been measured must all be there afterwards. The shapes that judge are of
the third of all drawn that their hash holds out, and no model sees them. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET = 0.15
ROOT = Path(__file__).resolve().parents[1]
COMMAND = "import sys; sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())"


def start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", COMMAND, "calibrate", *arguments], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)


def lines_of(work: Path) -> dict[str, Any]:
    text = (work / "items.jsonl").read_text(encoding="utf-8")
    return {line["id"]: line for line in map(json.loads, text.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interrupt-after", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    print(f"load before: {os.getloadavg()[0]:.1f} on {cores} cores")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "cpu.measurements"
        arguments = ["-o", str(Path(folder) / "cpu.profile"), "--on", "cpu", "--minutes", str(options.minutes),
                     "--seed", str(options.seed), "--json"]
        kept: dict[str, Any] = {}
        if options.interrupt_after:
            process = start(arguments)
            time.sleep(options.interrupt_after)
            os.kill(process.pid, signal.SIGINT)
            process.communicate()
            kept = lines_of(work)
            print(f"interrupted after {options.interrupt_after:.0f} s with exit status {process.returncode}: "
                  f"{len(kept)} measurements kept")
            arguments.append("--resume")
        begun = time.monotonic()
        out, _ = start(arguments).communicate()
        took = time.monotonic() - begun
        if not out:
            sys.exit("the calibration failed; run foretrace calibrate --on cpu to see why")
        told = json.loads(out)
        if kept:
            after = lines_of(work)
            still = sum(name in after for name in kept)
            print(f"after resuming: {still} of {len(kept)} still there, {len(after)} in all")
    measured = sum(sum(sides.values()) for sides in told["benchmarks"].values())
    spec = told["device"]
    print(f"{measured} measurements, {took:.0f} s; fp32 {spec['vector_tflops']['fp32'] * 1e3:.0f} GFLOP/s, bf16 "
          f"{spec['vector_tflops']['bf16'] * 1e3:.0f} GFLOP/s, memory {spec['memory_bandwidth_gbps']:.1f} GB/s")
    print(f"\n{'family':<12} {'model':<9} {'fitted':>6} {'held out':>8} {'MAPE':>6} {'median':>6} {'bias':>6} "
          f"{'p90':>6} {'max':>7} {'cover':>6} {'formulas':>8}")
    missed = []
    for model in told["models"]:
        held = model.get("held_out") or {"n": 0}
        if not held["n"]:
            print(f"{model['family']:<12} {model['kind']:<9} {model['rows']:>6} {0:>8}")
            continue
        fine = held["mape"] <= TARGET
        missed += [] if fine else [model["family"]]
        numbers = [held[name] * 100 for name in ("mape", "median", "bias", "p90", "max", "coverage")]
        formulas = model["candidates"]["roofline"]["mape"] * 100
        print(f"{model['family']:<12} {model['kind']:<9} {model['rows']:>6} {held['n']:>8} "
              + " ".join(f"{number:>{width}.1f}" for number, width in zip(numbers, (6, 6, 6, 6, 7, 6), strict=True))
              + f" {formulas:>8.1f}  {'ok' if fine else 'MISSED'}")
    print(f"\n{len(told['models']) - len(missed)} of {len(told['models'])} families within {TARGET:.0%}"
          + (f"; not {', '.join(missed)}" if missed else ""))
    for note in told["notes"]:
        print(f"Note: {note}")


if __name__ == "__main__":
    main()
