"""The whole story on one machine: record a training step, predict three that were never run, then run them.

    python examples/demo.py [--out DIR] [--quick]

A small GPT-2 is captured at two sizes, on the GPU if there is one and else on one thread of the CPU; the device is
calibrated for half a minute; three other sizes are predicted, each from the nearer capture, and only then run. Every
command is shown. What a step takes is the median with no profiler on; other work on the machine shows in it.

It may be run again at any time. What an earlier demo left in DIR is replaced; a calibration that was interrupted goes
on where it stopped, if the machine, the software and the settings are still the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step_views.check.validate import ValidatedProgram, Validation, predict_cases, size_label, timed_steps
from tracer.capture.context import cpu_model
from tracer.errors import ForetraceError
from tracer.output_file import Busy, DirectoryLock, whole_file

# A command reads the pipe that the demo holds open: it ends when the demo does, even if that is killed, and so writes
# nothing that the next demo has already removed.
FORETRACE = [sys.executable, "-c", """
import os, threading
threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
from foretrace.commands import main
main()
"""]
LIFELINE = os.pipe()
LAST_S = 5.0
"""Longest that an interrupted command may take to write what it has."""
WORKLOAD = "gpt2"
CAPTURED = ({"batch": 4, "seq": 64}, {"batch": 8, "seq": 192})
PREDICTED = ({"batch": 6, "seq": 128}, {"batch": 8, "seq": 96}, {"batch": 12, "seq": 224})
ON_GPU = {"device": "cuda", "width": "768", "depth": "6", "heads": "12", "dtype": "bf16-autocast"}
NOTE = "demo.json"
"""In DIR: the settings of the demo that made the files there."""


@dataclass(frozen=True)
class Amount:
    """How much is run: minutes and families of the calibration, steps of each run, options of a capture."""

    minutes: str
    families: str
    timed: int
    options: tuple[str, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        """Return the options of a capture."""
        return ("--timed", str(self.timed), *self.options, "--execution-trace", "none")


# The families are those that the workload computes: half a minute is not enough for every kind of kernel.
FULL = Amount("0.5", "gemm,attention,norm,softmax,elementwise,embedding,loss,optimizer", 40,
              ("--warmup", "10", "--steps", "5"))
QUICK = Amount("0.25", "gemm", 5, ("--warmup", "2", "--steps", "2"))


class Failed(Exception):
    """The demo cannot go on; the text says why."""


def foretrace(*arguments: str | Path, quiet: bool = False) -> None:
    """Run one command; show the command, and unless ``quiet`` the output. Raises ``Failed``."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ foretrace {shlex.join(words)}", flush=True)
    with subprocess.Popen([*FORETRACE, *words], stdin=LIFELINE[0], stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate()
        except KeyboardInterrupt:  # the command has it too
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_S)
            process.kill()
            raise
    if process.returncode:
        raise Failed(f"foretrace {words[0]} failed with exit code {process.returncode}.")
    if not quiet:
        print(printed.strip(), flush=True)


def remove(path: Path) -> None:
    """Remove a file, a directory, or a link but not what it leads to; do nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class DemoFiles:
    """The files of a demo in its directory, which may be anyone's: nothing else in it is touched.

    Attributes:
        captures, runs: directories of what is captured and of what is predicted, then run, by its label.
        profile, timeline: files.
        work: directory of the calibration's measurements.
    """

    def __init__(self, out: Path, captured: list[str], predicted: list[str]) -> None:
        self._out, self._note = out, out / NOTE
        self.captures, self.runs = [out / label for label in captured], [out / label for label in predicted]
        self.profile, self.timeline = out / "this-machine.profile", out / "timeline.json"
        self.work = out / "this-machine.measurements"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory, and keep other demos out of it. Raises ``Failed``."""
        with self._explained():
            lock = DirectoryLock(self._out)
        try:
            yield
        finally:
            lock.release()

    def clear(self, settings: dict[str, Any]) -> None:
        """Remove what an earlier demo left, but for the measurements that one of these settings did not finish.

        The order allows a kill at any moment. The measurements go before the profile, which says that they are
        complete, and before the note has the new settings. The note is there before the first capture goes.

        Raises:
            Failed: something cannot be removed or written, or is no demo's.
        """
        ours = (*self.captures, *self.runs, self.profile, self.work, self.timeline)
        # The first capture is a demo's too: of a version that left no note.
        if not os.path.lexists(self._note) and not os.path.lexists(self.captures[0]):
            for path in filter(os.path.lexists, ours):
                raise Failed(f"{path} is no demo's, and this one would replace it: name another directory with --out.")
        with self._explained():
            if self._settings() != settings or self.profile.exists() or not self.is_begun:
                self.restart()
            with whole_file(self._note) as file:
                file.write(json.dumps(settings, indent=1).encode() + b"\n")
            for path in (*self.captures, *self.runs, self.timeline):
                remove(path)

    def restart(self) -> None:
        """Remove the measurements and the profile. Raises ``OSError``."""
        remove(self.work)
        remove(self.profile)

    @property
    def is_begun(self) -> bool:
        """Return whether there are measurements that a calibration can go on from."""
        return (self.work / "campaign.json").is_file()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Busy:
            raise Failed(f"Another demo is running in {self._out}: wait for it, or name another directory with "
                         "--out.") from None
        except OSError as error:
            raise Failed(f"The demo cannot write to {self._out} ({error.strerror or error}): name another directory "
                         "with --out.") from error

    def _settings(self) -> Any:
        """Return the settings of the demo that was here last; None if they cannot be read."""
        try:
            return json.loads(self._note.read_bytes())
        except (OSError, ValueError):
            return None


def calibrate(files: DemoFiles, words: list[str]) -> None:
    """Calibrate this machine, or go on with it. Raises ``Failed``."""
    if files.is_begun:
        print("\nAn earlier demo was interrupted while it calibrated: this one goes on with its measurements.")
        try:
            foretrace(*words, "-o", files.profile, "--resume")
            return
        except Failed:
            print("\nIt cannot go on with them, and measures again.")
            files.restart()
    foretrace(*words, "-o", files.profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out") / "demo", metavar="DIR", help="where everything goes")
    parser.add_argument("--quick", action="store_true",
                        help="measure less: shows what is done, and its predictions are worse")
    arguments = parser.parse_args()
    out, amount = arguments.out, QUICK if arguments.quick else FULL
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
    program = ValidatedProgram(workload=WORKLOAD, fixed=fixed, options=amount.steps)
    calibration = ["calibrate", "--on", "cuda" if on_gpu else "cpu", "--minutes", amount.minutes, "--families",
                   amount.families]
    settings = {"calibration": calibration, "device": torch.cuda.get_device_name() if on_gpu else cpu_model(),
                "torch": str(torch.__version__)}
    files = DemoFiles(out, [size_label(sizes) for sizes in CAPTURED], [size_label(sizes) for sizes in PREDICTED])
    with files.locked():
        files.clear(settings)
        run(program, files, calibration, amount)


def run(program: ValidatedProgram, files: DemoFiles, calibration: list[str], amount: Amount) -> None:
    """Capture, calibrate, predict, run and compare. Raises ``Failed`` or ``ForetraceError``."""
    for sizes, path in zip(CAPTURED, files.captures, strict=True):
        foretrace(*program.command(sizes, path))
    calibrate(files, calibration)
    print(f"\nPredicting {', '.join(map(size_label, PREDICTED))}, which were never run.", flush=True)
    said = predict_cases(list(zip(CAPTURED, files.captures, strict=True)), PREDICTED, profiles=[str(files.profile)])
    for case in said:
        low, high = (us / 1e3 for us in case.interval_us)
        print(f"{size_label(case.sizes)}: {case.predicted_us / 1e3:.2f} ms, 80% between {low:.2f} and {high:.2f} ms; "
              f"decided by: {case.bound}")
        for warning in case.warnings:
            print(f"Warning: {warning}")

    print("\nNow the three are run.")
    for sizes, path in zip(PREDICTED, files.runs, strict=True):
        foretrace(*program.command(sizes, path))
    found = Validation(CAPTURED, [case.beside(timed_steps(path)) for case, path in zip(said, files.runs, strict=True)])
    print(f"\n{'never run before':22}{'predicted ms':>14}{'80% interval':>20}{'measured ms':>13}{'error':>9}")
    for done in found.cases:
        interval = f"{done.low_us / 1e3:.2f} to {done.high_us / 1e3:.2f}"
        print(f"{size_label(done.sizes):22}{done.predicted_us / 1e3:14.2f}{interval:>20}{done.measured_us / 1e3:13.2f}"
              f"{done.error:+9.1%}{'' if done.covered else '  outside'}")
    print(f"mean error {found.mape:.1%}, bias {found.bias:+.1%}; measured is the median of {amount.timed} steps with "
          "no profiler on")

    foretrace("replay", files.captures[0], "--timeline", files.timeline, quiet=True)
    print(f"Measured and replayed timeline: {files.timeline} (open it in ui.perfetto.dev or chrome://tracing)")


if __name__ == "__main__":
    try:
        main()
    except (ForetraceError, Failed) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted. The next demo goes on with the calibration if that had begun, and makes the rest again.")
