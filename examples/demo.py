"""The whole story on one machine: record a training step, predict three that were never run, then run them.

    python examples/demo.py [--out DIR]

A small GPT-2 is captured at two sizes, on the GPU if there is one and else on one thread of the CPU; the device is
calibrated for half a minute; three other sizes are predicted from the two captures, and only then run. Every command
is shown. What a step takes is the median with no profiler on; other work on the machine shows in it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

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
    from graph_predictor.check.validate import ValidatedProgram, Validation, predict_cases, size_label, timed_steps

    program = ValidatedProgram(workload=WORKLOAD, fixed=fixed, options=STEPS)
    captures = [out / size_label(sizes) for sizes in CAPTURED]
    profile, timeline = out / "this-machine.profile", out / "timeline.json"
    try:
        # Of an earlier demo alone: the directory may be anyone's.
        for path in (*captures, *(out / size_label(sizes) for sizes in PREDICTED), profile, timeline):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"The demo cannot write to {out}: {error.strerror}; name another directory with --out.")

    for sizes, path in zip(CAPTURED, captures, strict=True):
        foretrace(*program.command(sizes, path))
    foretrace("calibrate", "--on", "cuda" if on_gpu else "cpu", "--minutes", MINUTES, "--families", FAMILIES,
              "-o", profile)
    print(f"\nPredicting {', '.join(map(size_label, PREDICTED))}, which were never run.", flush=True)
    said = predict_cases(list(zip(CAPTURED, captures, strict=True)), PREDICTED, profiles=[str(profile)])
    for case in said:
        low, high = (us / 1e3 for us in case.interval_us)
        print(f"{size_label(case.sizes)}: {case.predicted_us / 1e3:.2f} ms, 80% between {low:.2f} and {high:.2f} ms; "
              f"decided by: {case.bound}")
        for warning in case.warnings:
            print(f"Warning: {warning}")

    print("\nNow the three are run.")
    for sizes in PREDICTED:
        foretrace(*program.command(sizes, out / size_label(sizes)))
    found = Validation(CAPTURED, [case.beside(timed_steps(out / size_label(case.sizes))) for case in said])
    print(f"\n{'never run before':22}{'predicted ms':>14}{'80% interval':>20}{'measured ms':>13}{'error':>9}")
    for done in found.cases:
        interval = f"{done.low_us / 1e3:.2f} to {done.high_us / 1e3:.2f}"
        print(f"{size_label(done.sizes):22}{done.predicted_us / 1e3:14.2f}{interval:>20}{done.measured_us / 1e3:13.2f}"
              f"{done.error:+9.1%}{'' if done.covered else '  outside'}")
    print(f"mean error {found.mape:.1%}, bias {found.bias:+.1%}; measured is the median of 40 steps with no profiler "
          "on")

    foretrace("replay", captures[0], "--timeline", timeline, quiet=True)
    print(f"Measured and replayed timeline: {timeline} (open it in ui.perfetto.dev or chrome://tracing)")


if __name__ == "__main__":
    from tracer.errors import ForetraceError

    try:
        main()
    except ForetraceError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted; the captures made so far stay, and the next demo replaces them.")
