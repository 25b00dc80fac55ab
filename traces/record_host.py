"""Record small steps of several programs in turn, so that the machine's changing speed meets all of them alike.

    OMP_NUM_THREADS=1 python traces/record_host.py traces/host [--rounds 12] [--keep 6] [--workloads dlrm,bert]
                                                              [--programs distilbert,gru_tagger]
                                                              [--parallel bert:fsdp2,moe:ddp]

One process builds the workloads at their preset ``tiny``, whose computing is next to nothing, programs of others
(``benchmarks/foreign_programs``) at small sizes, and workloads under a parallel plan as rank 0 of two in a fake world,
whose collectives take no time, so that what is left of the plan is its hooks. It then goes round: of each some steps
timed with nothing watching, then some profiled, then the next one. A virtual machine's core is half as fast while a
neighbour uses its other thread; captures made one after the other, minutes apart, differ by that, and captures of one
round do not. Each capture is a directory ``OUT/<program>/round<n>`` that foretrace reads.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tracer.capture import capture
from tracer.workloads import as_plain, create, parse, split

SUITE = ("dlrm", "resnet50", "bert", "llama", "gpt2", "vit", "moe", "lstm", "unet")
_SHORT = {"batch": 1, "seq": 16}
PROGRAMS: dict[str, dict[str, int]] = {
    "distilbert": _SHORT, "gpt_neo_loop": _SHORT, "opt_loop": _SHORT, "bart_summaries": _SHORT, "electra_tags": _SHORT,
    "convnext_images": {"batch": 1, "image": 32}, "resnet_images": {"batch": 1, "image": 32}, "encoder_layers": _SHORT,
    "wide_deep": {"batch": 8}, "gru_tagger": _SHORT}
HELD_OUT: dict[str, dict[str, int]] = {
    "autocast_decoder": _SHORT, "autoencoder": {"batch": 2}, "depthwise": {"batch": 1, "image": 16},
    "lstm_language": _SHORT, "residual_images": {"batch": 1, "image": 16}, "segmenter": {"batch": 1, "image": 32},
    "seq2seq_torch": _SHORT, "temporal_convolutions": _SHORT}
"""Sizes of others' programs: of those that choices were made with, and of those that accuracy is reported of."""
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

    def settle(self) -> bool:
        """Wait up to ``SETTLE_S`` until it does; whether it does."""
        end = time.monotonic() + SETTLE_S
        while not (calm := self.calm()) and time.monotonic() < end:
            time.sleep(0.01)
        return calm


PARALLEL = (*(f"{name}:fsdp2" for name in ("bert", "lstm", "moe", "unet", "resnet50", "deepfm", "ncf")), "bert:ddp",
            "unet:ddp")
"""Workloads and plans whose hooks the models are to know."""


def main() -> None:
    """Build, warm up, and record round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", type=int, default=6, help="rounds kept, those least disturbed")
    parser.add_argument("--workloads", default=",".join(SUITE), help="names, separated by commas")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names, separated by commas")
    parser.add_argument("--parallel", default=",".join(PARALLEL), help="workload:plan, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built = {name: _workload(name) for name in _names(options.workloads)}
    built |= {name: _program(name) for name in _names(options.programs)}
    parallel = _names(options.parallel)
    world = ExitStack()
    if parallel:
        from tracer.fake_world import fake_world

        world.enter_context(fake_world(2, 0))
        built |= {name.replace(":", "_"): _spread(*name.split(":")) for name in parallel}
    names = list(built)
    for step, _ in built.values():
        for _ in range(FIRST_STEPS):
            step()
    gc.collect()
    gc.freeze()  # what was built is not looked through again in the middle of a step
    core = Core()
    undisturbed: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for _ in range(TRIES):
                step, facts = built[name]
                calm = core.settle()
                with capture(options.output / name / f"round{number}", steps=STEPS, warmup=WARM_UP, timed=TIMED,
                             execution_trace="none", form="foretrace", replace=True) as recorder:
                    recorder.facts = facts
                    while not recorder.finished:
                        step()
                        recorder.step()
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


def _spread(name: str, plan: str) -> tuple[Callable[[], object], dict[str, Any]]:
    """A step of the suite's workload under a plan on two ranks, and what its captures say of it: nothing, as its ranks
    are none."""
    from tracer.fake_world import parallelize
    from tracer.parallel_plan import ParallelPlan

    workload = parallelize(create(parse(name, ["optimizer=adamw-foreach"], preset="tiny")),
                           ParallelPlan.parse(f"{plan}=2"))
    batches = workload.batches()
    return lambda: workload.step(next(batches)), {}


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _workload(name: str) -> tuple[Callable[[], object], dict[str, Any]]:
    """A step of the suite's workload, and what its captures say of it."""
    settings = parse(name, ["optimizer=adamw-foreach"], preset="tiny")
    workload = create(settings)
    batches = workload.batches()
    return (lambda: workload.step(next(batches)),
            {"workload": {"name": name, "settings": as_plain(settings), "split": split(settings)}})


def _program(name: str) -> tuple[Callable[[], object], dict[str, Any]]:
    """A step of another's program."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "foreign_programs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return partial(module.build, **{**PROGRAMS, **HELD_OUT}[name])(), {}


if __name__ == "__main__":
    main()
