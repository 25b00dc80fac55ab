"""Small training programs that are hard to capture, as scripts: ``python unusual.py NAME DEVICE [SNAPSHOT]``.

Each prints the device's peak memory, "peak BYTES", if it reaches its end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH, STEPS, FAILS_AT = 512, 64, 32, 8  # chosen: steps of milliseconds, a few before the failing one
NO_MEMORY_HAS = 1 << 50  # a petabyte

Step = Callable[[Tensor], object]


class UnusualProgram:
    """A model with an optimizer; ``step`` is one training step."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model: Callable[[Tensor], Tensor] = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)  # type: ignore[attr-defined]

    def backward(self, x: Tensor) -> None:
        """Run forward and backward."""
        self.model(x).square().mean().backward()

    def step(self, x: Tensor) -> None:
        """Run one training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.backward(x.to(self.device, non_blocking=True))
        self.optimizer.step()


def reduce_overhead(program: UnusualProgram) -> Step:
    """Compile the model with ``mode="reduce-overhead"``, which records its own CUDA graphs."""
    program.model = torch.compile(program.model, mode="reduce-overhead")
    return program.step


def graph(program: UnusualProgram) -> Step:
    """Record forward and backward in the program's own CUDA graph; the optimizer runs outside."""
    x = torch.zeros(BATCH, WIDTH, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            program.backward(x)
    torch.cuda.current_stream().wait_stream(side)
    program.optimizer.zero_grad(set_to_none=True)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        program.backward(x)

    def step(batch: Tensor) -> None:
        x.copy_(batch)
        recorded.replay()
        program.optimizer.step()

    return step


def streams(program: UnusualProgram) -> Step:
    """Run a product on a second stream in parallel with the step; both join before the optimizer."""
    side, a = torch.cuda.Stream(), torch.ones(WIDTH, WIDTH, device="cuda")

    def step(batch: Tensor) -> None:
        program.optimizer.zero_grad(set_to_none=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a @ a
        program.backward(batch.to("cuda"))
        torch.cuda.current_stream().wait_stream(side)
        program.optimizer.step()

    return step


def failing(fail: Callable[[], object]) -> Callable[[UnusualProgram], Step]:
    """Return a builder of steps that are normal except for one that fails."""
    def build(program: UnusualProgram) -> Step:
        done = 0

        def step(batch: Tensor) -> None:
            nonlocal done
            done += 1
            if done == FAILS_AT:
                fail()
            program.step(batch)

        return step

    return build


def out_of_memory() -> object:
    """Allocate more memory than exists."""
    return torch.empty(NO_MEMORY_HAS, dtype=torch.uint8, device=sys.argv[2])


def interrupted() -> None:
    """Send SIGINT, after setting Python's handler, since shells start background jobs with the signal ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


PROGRAMS: dict[str, Callable[[UnusualProgram], Step]] = {
    "plain": lambda program: program.step, "loader": lambda program: program.step,
    "snapshot": lambda program: program.step, "reduce-overhead": reduce_overhead, "graph": graph, "streams": streams,
    "oom": failing(out_of_memory), "ctrl-c": failing(interrupted),
}


def main(name: str, device: str, snapshot: str = "") -> None:
    """Run some steps of the named program on "cuda" or "cpu"; with ``snapshot`` write its memory history there."""
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    program = UnusualProgram(device)
    step = PROGRAMS[name](program)
    batches: Any = [(torch.randn(BATCH, WIDTH),) for _ in range(STEPS)]
    if name == "loader":
        batches = DataLoader(TensorDataset(torch.randn(STEPS * BATCH, WIDTH)), BATCH, num_workers=2)
    for (batch,) in batches:
        step(batch)
    if snapshot:
        torch.cuda.memory._dump_snapshot(snapshot)
    if device == "cuda":
        sys.stdout.write(f"peak {torch.cuda.max_memory_allocated()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
