"""Record a small real training run on the CPU: step times without a profiler, then five profiled steps.

Needs nothing but PyTorch (2.4 or newer). It writes three files into the output directory:

    kineto.json.gz   the profiler's trace of five steps, shapes recorded, Python stacks off
    et.json.gz       PyTorch's execution trace of the same five steps
    context.json     hardware, versions and what a step takes when nothing is watching

Usage: python traces/record_cpu_small.py traces/cpu-small
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import re
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 512, 64, 128, 4, 2, 16
WARM_UP_STEPS, UNPROFILED_STEPS, PROFILER_WARM_UP_STEPS, PROFILED_STEPS = 5, 30, 3, 5


class Sequences(Dataset[Tensor]):
    """Token sequences with a rule a model can learn: each token is the one before, times three, plus noise."""

    def __init__(self, steps: int) -> None:
        noise = torch.randint(0, 3, (steps * BATCH, CONTEXT + 1))
        self.tokens = torch.randint(0, VOCABULARY, (steps * BATCH, CONTEXT + 1))
        for i in range(1, CONTEXT + 1):
            self.tokens[:, i] = (3 * self.tokens[:, i - 1] + noise[:, i]) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Block(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Embeddings, a few blocks, logits over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def cpu_model() -> str:
    """The processor's model name, as the operating system gives it."""
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def store(source: Path, target: Path) -> None:
    """Gzip a trace reproducibly, without the machine's name and the output path that the profiler writes into it."""
    text = source.read_text(encoding="utf-8")
    text = re.sub(r'("traceName":\s*)"[^"]*"', rf'\1"{target.name}"', text)
    text = re.sub(r'("host_name":\s*)"[^"]*"', r'\1""', text)
    target.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def main() -> None:
    """Train, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("output", type=Path, help="directory for the three files")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads inside an operation")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = WARM_UP_STEPS + UNPROFILED_STEPS + PROFILER_WARM_UP_STEPS + PROFILED_STEPS
    batches = iter(DataLoader(Sequences(steps), batch_size=BATCH))
    losses: list[float] = []

    def train_step() -> int:
        """One step, data loading included; returns its nanoseconds."""
        start = time.perf_counter_ns()
        tokens = next(batches)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return time.perf_counter_ns() - start

    for _ in range(WARM_UP_STEPS):
        train_step()
    unprofiled_ns = [train_step() for _ in range(UNPROFILED_STEPS)]

    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        kineto, execution_trace = Path(scratch, "kineto.json"), Path(scratch, "et.json")
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=PROFILER_WARM_UP_STEPS, active=PROFILED_STEPS, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(kineto)),
            record_shapes=True,
            with_stack=False,
            execution_trace_observer=ExecutionTraceObserver().register_callback(str(execution_trace)),
        ) as profiler:
            profiled_ns = []
            for _ in range(PROFILER_WARM_UP_STEPS + PROFILED_STEPS):
                profiled_ns.append(train_step())
                profiler.step()
        store(kineto, arguments.output / "kineto.json.gz")
        store(execution_trace, arguments.output / "et.json.gz")

    context = {
        "recorded": datetime.date.today().isoformat(),
        "command": f"python traces/record_cpu_small.py traces/cpu-small --threads {arguments.threads}",
        "workload": f"decoder-only transformer, {LAYERS} layers, width {WIDTH}, {HEADS} heads, context {CONTEXT}, "
        f"vocabulary {VOCABULARY}, batch {BATCH}, float32, AdamW, DataLoader without workers",
        "parameters": sum(p.numel() for p in model.parameters()),
        "hardware": {"device": "CPU", "cpu": cpu_model(), "cores": os.cpu_count(), "architecture": platform.machine()},
        "software": {"python": platform.python_version(), "torch": torch.__version__, "system": platform.system()},
        "torch_threads": arguments.threads,
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "profiled_step_ns": profiled_ns[PROFILER_WARM_UP_STEPS:],
        "unprofiled_step_ns": unprofiled_ns,
    }
    (arguments.output / "context.json").write_text(json.dumps(context, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
