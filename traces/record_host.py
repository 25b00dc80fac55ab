"""Record small steps of several workloads in turn, so that the machine's changing speed meets all of them alike.

    OMP_NUM_THREADS=1 python traces/record_host.py traces/host [--rounds 12] [--keep 6] [--workloads dlrm,bert]

One process builds the workloads at their preset ``tiny``, whose computing is next to nothing, and then goes round: of
each workload some steps timed with nothing watching, then some profiled, then the next workload. A virtual machine's
core is half as fast while a neighbour uses its other thread; captures made one after the other, minutes apart, differ
by that, and captures of one round do not. Each capture is a directory ``OUT/<workload>/round<n>`` that foretrace reads.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import time
from pathlib import Path

import torch

from tracer.capture import capture
from tracer.workloads import as_plain, create, parse, split

SUITE = ("dlrm", "resnet50", "bert", "llama", "gpt2", "vit", "moe", "lstm", "unet")
STEPS, TIMED, WARM_UP, FIRST_STEPS = 3, 9, 2, 20
TRIES = 4
PROBE_ROUNDS = 4000
"""Of a loop whose time tells the core's speed; about 0.1 ms."""
SLOW = 1.2
SETTLE_S = 0.5


class Core:
    """Whether this thread's core runs at its own speed: a loop takes at most ``SLOW`` times its shortest time."""

    def __init__(self) -> None:
        self.best_ns = min(self._loop_ns() for _ in range(20))

    def _loop_ns(self) -> int:
        times = []
        for _ in range(2):
            start = time.perf_counter_ns()
            for _ in range(PROBE_ROUNDS):
                pass
            times.append(time.perf_counter_ns() - start)
        return min(times)

    def calm(self) -> bool:
        """Whether it does now."""
        now = self._loop_ns()
        self.best_ns = min(self.best_ns, now)
        return now <= SLOW * self.best_ns

    def steady_state(self) -> bool:
        """Wait up to ``SETTLE_S`` until it does; whether it does."""
        end = time.monotonic() + SETTLE_S
        while not (calm := self.calm()) and time.monotonic() < end:
            time.sleep(0.01)
        return calm


def main() -> None:
    """Build, warm up, and record round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", type=int, default=6, help="rounds kept, those least disturbed")
    parser.add_argument("--workloads", default=",".join(SUITE), help="names, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.workloads.split(",")
    settings = {name: parse(name, ["optimizer=adamw-foreach"], preset="tiny") for name in names}
    built = {name: create(one) for name, one in settings.items()}
    batches = {name: workload.batches() for name, workload in built.items()}
    for name, workload in built.items():
        for _ in range(FIRST_STEPS):
            workload.step(next(batches[name]))
    gc.collect()
    gc.freeze()  # what was built is not looked through again in the middle of a step
    core = Core()
    undisturbed: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for _ in range(TRIES):
                facts = {"name": name, "settings": as_plain(settings[name]), "split": split(settings[name])}
                calm = core.settle()
                with capture(options.output / name / f"round{number}", steps=STEPS, warmup=WARM_UP, timed=TIMED,
                             execution_trace="none", form="foretrace", replace=True) as recorder:
                    recorder.facts = {"workload": facts}
                    for batch in recorder.wrap(batches[name]):
                        built[name].step(batch)
                        recorder.step()
                        if recorder.finished:
                            break
                calm = calm and core.calm()
                if calm:
                    break
            undisturbed[name].append(statistics.median(recorder.unprofiled_step_ns))
            print(name, number, "calm" if calm else "not calm", flush=True)
    shares = [[ns / statistics.median(found) for ns in found] for found in undisturbed.values()]
    rounds = sorted(range(options.rounds), key=lambda number: sum(share[number] for share in shares))
    for number in rounds[options.keep:]:
        for name in names:
            shutil.rmtree(options.output / name / f"round{number}")


if __name__ == "__main__":
    main()
