"""What-if edits against the truth on this CPU: a step captured without a change, predicted with it, then run with it.

    OMP_NUM_THREADS=1 python benchmarks/whatif_cpu.py [--only optimizer]

Every case is two programs, before and after the change. The one before is captured in `ROUNDS` rounds; each capture
also times steps with nothing watching. Others on a machine only ever make a step slower, so that what a step takes is
the median of the quickest fifth of all rounds' steps. The prediction is made from the round whose recorded steps were
quickest, its profiler taken out.

The truth: the programs before and after the change run in turn, `BLOCK` steps each, in one process that nothing
watches; the median ratio of neighbouring blocks times the step before is what the step after takes. Two processes
minutes apart differ by more than most of the changes save. Nothing is fitted to these cases; all of them are printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.edits import (
    Compile,
    Edit,
    FlashAttention,
    FusedOptimizer,
    NoDataLoading,
    OverlapLoading,
    Recompute,
)
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.synthesis.baseline import baseline_of
from tracer.errors import ForetraceError
from tracer.job import read_job

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "import sys; from foretrace.commands import main; sys.argv[0] = 'foretrace'; sys.exit(main())"
TIMED, ROUNDS = 30, 2
QUICKEST = 0.2
BLOCK, BLOCKS = 6, 15
"""Steps of a program in turn, the first of which is left out; how often each has its turn."""


@dataclass(frozen=True)
class Case:
    """One change: the program before and after it, as workload settings or as a variant of one of the scripts below."""

    kind: str
    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    edit: Edit


def _suite(workload: str, *settings: str) -> tuple[str, ...]:
    return ("--workload", workload, *(word for setting in settings for word in ("--set", setting)))


CASES = [
    *(Case("optimizer", f"{workload}: foreach → fused AdamW", _suite(workload, "optimizer=adamw-foreach"),
           _suite(workload, "optimizer=adamw-fused"), FusedOptimizer())
      for workload in ("llama", "bert", "vit", "unet")),
    *(Case("optimizer", f"{workload}: looped → fused AdamW", _suite(workload, "optimizer=adamw"),
           _suite(workload, "optimizer=adamw-fused"), FusedOptimizer()) for workload in ("llama", "bert")),
    *(Case("recompute", f"{workload}: recomputation on", _suite(workload, "depth=4", "batch=8", "checkpointing=false"),
           _suite(workload, "depth=4", "batch=8", "checkpointing=true"), Recompute(True))
      for workload in ("gpt2", "llama", "vit")),
    *(Case("recompute", f"{workload}: recomputation off", _suite(workload, "depth=4", "batch=8", "checkpointing=true"),
           _suite(workload, "depth=4", "batch=8", "checkpointing=false"), Recompute(False))
      for workload in ("gpt2", "llama", "vit")),
    *(Case("attention", f"attention of {tokens} tokens: math → flash", ("attention", "math", str(tokens)),
           ("attention", "flash", str(tokens)), FlashAttention()) for tokens in (128, 512)),
    Case("loading", "loader: none", ("loading", "inline"), ("loading", "ready"), NoDataLoading()),
    Case("loading", "loader: one worker", ("loading", "inline"), ("loading", "worker"), OverlapLoading()),
    Case("compile", "gpt2: torch.compile", _suite("gpt2", "compile=false"), _suite("gpt2", "compile=true"), Compile()),
]


def main() -> None:
    """Run the cases and print every one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases of one kind")
    parser.add_argument("--record", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--in-turn", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_turn:
        print(in_turn(*(program.split() for program in arguments.in_turn)))
        return
    if arguments.record:
        _record(*arguments.record)
        return
    print(f"{'case':<44} {'before':>8} {'predicted':>20} {'80% between':>20} {'run':>8} {'error':>7}")
    errors, inside = [], 0
    with tempfile.TemporaryDirectory() as folder:
        done: dict[tuple[str, ...], list[Path]] = {}
        for case in CASES:
            if arguments.only not in (None, case.kind):
                continue
            if case.before not in done:
                done[case.before] = [_capture(case.before, Path(folder) / f"{len(done)}-{number}")
                                     for number in range(ROUNDS)]
            before, was = _quickest(done[case.before]), _unwatched(done[case.before])
            truth = was * _ratio(case)
            try:
                result = before.predict([case.edit])
            except ForetraceError as error:
                print(f"{case.name:<44} {error}")
                continue
            error = result.step_time_us / truth - 1
            low, high = result.interval_us
            errors.append(error)
            inside += low <= truth <= high
            print(f"{case.name:<44} {was / 1e3:8.2f} {result.step_time_us / 1e3:17.2f} ms "
                  f"{f'{low / 1e3:.2f} … {high / 1e3:.2f}':>20} {truth / 1e3:8.2f} {error:+7.1%}", flush=True)
    off = np.abs(errors)
    print(f"{len(errors)} cases: MAPE {off.mean():.1%}, median {np.median(off):.1%}, bias {np.mean(errors):+.1%}, p90 "
          f"{np.quantile(off, 0.9):.1%}, max {off.max():.1%}; {inside} of {len(errors)} within the 80% interval")


def _capture(program: tuple[str, ...], out: Path) -> Path:
    """A capture of a program, in a process of its own."""
    if program[0] == "--workload":
        command = [sys.executable, "-c", COMMAND, "capture", *program, "--timed", str(TIMED), "--execution-trace",
                   "none", "--out", str(out)]
    else:
        command = [sys.executable, __file__, "--record", str(out), *program]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths})
    return out


def _ratio(case: Case) -> float:
    """A step after the change over one before it, both programs in turn in a process of their own."""
    programs = [" ".join(word for word in program if word not in ("--workload", "--set"))
                for program in (case.before, case.after)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run([sys.executable, __file__, "--in-turn", *programs], check=True, stdout=subprocess.PIPE,
                          text=True, env={**os.environ, "PYTHONPATH": paths}).stdout
    return float(said.split()[-1])


def in_turn(before: list[str], after: list[str]) -> float:
    """The median ratio of neighbouring blocks of steps of two programs (see ``_step_of``)."""
    import torch

    torch.set_num_threads(1)
    steps = [_step_of(before), _step_of(after)]
    times = np.zeros((BLOCKS + 1, 2, BLOCK))
    for block in times:
        for step, row in zip(steps, block, strict=True):
            for i in range(BLOCK):
                begin = time.perf_counter()
                step()
                row[i] = time.perf_counter() - begin
    blocks = np.median(times[1:, :, 1:], axis=2)  # without each program's first block, and each block's first step
    return float(np.median(blocks[:, 1] / blocks[:, 0]))


def _unwatched(captures: list[Path]) -> float:
    """A step with nothing watching, µs: the median of the quickest fifth of all captures' steps."""
    steps = np.sort(np.concatenate([read_job(str(one)).graphs[0].meta.unprofiled_step_ns for one in captures]))
    return float(np.median(steps[:max(round(QUICKEST * len(steps)), 1)])) / 1e3


def _quickest(captures: list[Path]) -> Baseline:
    """The capture whose recorded steps were quickest, with the unwatched step of them all."""
    graphs = [read_job(str(one)).graphs[0] for one in captures]
    best = min(graphs, key=lambda graph: float(np.median(graph.steps.duration_ns)))
    best.meta.unprofiled_step_ns = [round(_unwatched(captures) * 1e3)]
    return baseline_of(best)


def _record(out: str, *program: str) -> None:
    """Capture a step of a program that is none of the suite's."""
    import torch

    import tracer

    torch.set_num_threads(1)
    step = _step_of(program)
    with tracer.capture(out, execution_trace="none", timed=TIMED) as capture:
        while not capture.complete:
            step()
            capture.step()


def _step_of(program: Sequence[str]) -> Callable[[], None]:
    """A training step of a program: attention by PyTorch's math or flash kernels, a loader of each sort, or one of the
    suite's workloads with settings."""
    import torch

    torch.manual_seed(0)
    if program[0] == "attention":
        return _attention(program[1], int(program[2]))
    if program[0] == "loading":
        return _loading(program[1])
    from tracer import workloads

    training = workloads.create(workloads.parse(program[0], list(program[1:])))
    batches = iter(training.batches())
    return lambda: training.step(next(batches))


def _attention(variant: str, tokens: int) -> Callable[[], None]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    width, heads = 256, 8
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({
        "qkv": torch.nn.Linear(width, 3 * width), "out": torch.nn.Linear(width, width)}) for _ in range(4))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, foreach=True)
    batch = torch.randn(4, tokens, width)
    backend = SDPBackend.MATH if variant == "math" else SDPBackend.FLASH_ATTENTION

    def step() -> None:
        optimizer.zero_grad()
        x = batch
        with sdpa_kernel(backend):
            for layer in layers:
                q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in layer["qkv"](x).chunk(3, -1))
                y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
                x = x + layer["out"](y.transpose(1, 2).flatten(-2))
        x.square().mean().backward()
        optimizer.step()

    return step


def _loading(variant: str) -> Callable[[], None]:
    import torch

    worker = {"num_workers": 1, "prefetch_factor": 4} if variant == "worker" else {}
    loader = torch.utils.data.DataLoader(_Slow(), batch_size=32, **worker)  # type: ignore[arg-type]
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)), torch.nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    batches = itertools.repeat(next(iter(loader))) if variant == "ready" else iter(loader)

    def step() -> None:
        optimizer.zero_grad()
        model(next(batches)).square().mean().backward()
        optimizer.step()

    return step


class _Slow:
    """Samples that take the host some 0.1 ms each."""

    def __len__(self) -> int:
        return 512 * 32

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.randn(512, generator=torch.Generator().manual_seed(index)).sort().values


if __name__ == "__main__":
    main()
