"""The whole story on one machine: record a training step, predict three that were never run, then run them.

    python examples/demo.py [--out DIR]

A small GPT-2 is captured at two sizes, on the GPU if there is one and else on one thread of the CPU; the device is
calibrated for half a minute; three other sizes are predicted from the two captures, and only then run. Every command
is shown. What a step takes is the median with no profiler on; other work on the machine shows in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

FORETRACE = [sys.executable, "-c", "from graph_predictor.cli import main; main()"]
WORKLOAD = "gpt2"
CAPTURED = ({"batch": 4, "seq": 64}, {"batch": 8, "seq": 192})
PREDICTED = ({"batch": 6, "seq": 128}, {"batch": 8, "seq": 96}, {"batch": 12, "seq": 224})
ON_GPU = {"device": "cuda", "width": "768", "depth": "6", "heads": "12", "dtype": "bf16-autocast"}
MINUTES = "0.5"
FAMILIES = "gemm,attention,norm,softmax,elementwise,embedding,loss,optimizer"
"""What the workload computes: half a minute is not enough for every kind of kernel."""
STEPS = ("--warmup", "10", "--timed", "40", "--steps", "5", "--execution-trace", "none")


def foretrace(*arguments: str | Path, quiet: bool = False) -> str:
    """Run one command and return what it printed; show the command, and unless ``quiet`` the output."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ foretrace {shlex.join(words)}", flush=True)
    done = subprocess.run([*FORETRACE, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"foretrace {words[0]} failed with exit code {done.returncode}.")
    if not quiet:
        print(done.stdout.strip(), flush=True)
    return done.stdout


def capture(sizes: dict[str, int], fixed: dict[str, str], out: Path) -> float:
    """Capture the workload at one size; its step with no profiler on, ms."""
    import tracer

    sets = [f"--set={name}={value}" for name, value in {**fixed, **sizes}.items()]
    foretrace("capture", "--workload", WORKLOAD, *sets, *STEPS, "--out", out)
    times = sorted(tracer.read_job(out).graphs[0].meta.unprofiled_step_ns)
    return times[len(times) // 2] / 1e6


def predict(sizes: dict[str, int], captures: list[Path], profile: Path) -> dict[str, Any]:
    """Predict the step at one size from all captures."""
    first, *others = captures
    also = [f"--also={path}" for path in others]
    sets = [f"--set={name}={size}" for name, size in sizes.items()]
    said = foretrace("predict", first, *also, *sets, "--profile", profile, "--json", quiet=True)
    found: dict[str, Any] = json.loads(said)
    low, high = found["interval_us"]
    print(f"{found['step_time_us'] / 1e3:.2f} ms, 80% between {low / 1e3:.2f} and {high / 1e3:.2f} ms; decided by: "
          f"{found['bound']}")
    for warning in found["warnings"]:
        print(f"Warning: {warning}")
    return found


def label(sizes: dict[str, int]) -> str:
    """Sizes as one word."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out") / "demo", metavar="DIR", help="where everything goes")
    out = parser.parse_args().out
    try:
        import torch
    except ImportError:
        sys.exit("The demo records a training step, which needs PyTorch: make demo installs it, as does "
                 "pip install '.[capture]'.")

    on_gpu = torch.cuda.is_available()
    print(f"This machine computes on {torch.cuda.get_device_name() if on_gpu else 'one thread of its CPU'}.")
    if not on_gpu:
        os.environ["OMP_NUM_THREADS"] = "1"
    fixed = ON_GPU if on_gpu else {}
    captures = [out / label(sizes) for sizes in CAPTURED]
    profile, timeline = out / "this-machine.profile", out / "timeline.json"
    try:
        # Of an earlier demo alone: the directory may be anyone's.
        for path in (*captures, *(out / label(sizes) for sizes in PREDICTED), profile, timeline):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"The demo cannot write to {out}: {error.strerror}; name another directory with --out.")

    for sizes, path in zip(CAPTURED, captures, strict=True):
        capture(sizes, fixed, path)
    foretrace("calibrate", "--on", "cuda" if on_gpu else "cpu", "--minutes", MINUTES, "--families", FAMILIES,
              "-o", profile)
    said = [predict(sizes, captures, profile) for sizes in PREDICTED]

    print("\nNow the three are run.")
    measured = [capture(sizes, fixed, out / label(sizes)) for sizes in PREDICTED]
    print(f"\n{'never run before':22}{'predicted ms':>14}{'80% interval':>20}{'measured ms':>13}{'error':>9}")
    errors = []
    for sizes, prediction, truth in zip(PREDICTED, said, measured, strict=True):
        step, (low, high) = prediction["step_time_us"] / 1e3, (us / 1e3 for us in prediction["interval_us"])
        errors.append(step / truth - 1)
        print(f"{label(sizes):22}{step:14.2f}{f'{low:.2f} to {high:.2f}':>20}{truth:13.2f}{errors[-1]:+9.1%}"
              f"{'' if low <= truth <= high else '  outside'}")
    print(f"mean error {sum(map(abs, errors)) / len(errors):.1%}, bias {sum(errors) / len(errors):+.1%}; measured is "
          "the median of 40 steps with no profiler on")

    foretrace("replay", captures[0], "--timeline", timeline, quiet=True)
    print(f"Measured and replayed timeline: {timeline} (open it in ui.perfetto.dev or chrome://tracing)")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted; the captures made so far stay, and the next demo replaces them.")
