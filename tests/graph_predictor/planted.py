"""Five planted regressions of a small training step, recorded for real on a CPU with fixed seeds.

``record("item", [(folder / "before", False), (folder / "after", True)])`` records one capture without and one with the
regression. What is planted, and what a difference should name first:

* ``layer_norm``: one more layer norm, over the widest activations;
* ``item``: every sample's loss is read with ``.item()`` for a running mean;
* ``fusion``: attention written out (two products and a softmax) where the fused operator was;
* ``bucket``: the gradients of every DDP bucket are reduced twice (two ranks over gloo);
* ``sleep``: the data loader sleeps for each sample.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forks import run_ranks

KINDS = ("layer_norm", "item", "fusion", "bucket", "sleep")
RANKS = 2
SAMPLES, TOKENS, WIDTH, CLASSES, BLOCKS = 32, 16, 64, 16, 2
SLEEP_S = 0.004
"""For each of the 32 samples: 128 ms a step at the least, where the step takes some 6 on a quiet machine and several
times that on a busy one."""


def record(kind: str, captures: Sequence[tuple[Path, bool]], *, steps: int = 4, timed: int = 10,
           warmup: int = 3) -> None:
    """Record captures one after the other in one process (``bucket``: in two, as ranks of a job).

    Args:
        kind: one of ``KINDS``.
        captures: directory of each, and whether the regression is planted in it.
        steps: profiled steps of each.
        timed: steps timed with nothing watching.
        warmup: steps before.
    """
    options = {"steps": steps, "timed": timed, "warmup": warmup}
    if kind != "bucket":
        for out, planted in captures:
            _record_one(kind, out, planted, options)
        return
    store = captures[0][0].parent / f"{captures[0][0].name}.store"
    store.parent.mkdir(parents=True, exist_ok=True)
    told = [f"{out}={int(planted)}" for out, planted in captures] + [f"{k}={v}" for k, v in options.items()]
    run_ranks(RANKS, Path(__file__), store, *told)


def _record_one(kind: str, out: Path, planted: bool, options: dict[str, int]) -> None:
    import torch

    import tracer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        model = _model(kind, planted)
        if kind == "bucket":
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
            # A lambda, because DDP wants no annotations but its own.
            reduced = _reduced_twice if planted else _reduced
            model.register_comm_hook(None, lambda state, bucket: reduced(bucket))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        total = sum((1 + 3 + options["timed"] + options["steps"], options["warmup"]))
        loader = torch.utils.data.DataLoader(_Data(total * SAMPLES, SLEEP_S if planted and kind == "sleep" else 0.0),
                                             batch_size=SAMPLES)
        running = 0.0
        with tracer.capture(out, execution_trace="none", **options) as capture:
            for batch, target in capture.wrap(loader):
                optimizer.zero_grad()
                losses = torch.nn.functional.cross_entropy(model(batch), target, reduction="none")
                if planted and kind == "item":
                    for value in losses:
                        running += value.item()
                losses.mean().backward()
                optimizer.step()
                capture.step()
        assert capture.complete
    finally:
        torch.set_num_threads(threads)


class _Data:
    """Samples of random tokens, made before the run."""

    def __init__(self, samples: int, sleep_s: float) -> None:
        import torch

        self.tokens = torch.randn(samples, TOKENS, WIDTH)
        self.labels = torch.randint(0, CLASSES, (samples,))
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.tokens[index], self.labels[index]


def _model(kind: str, planted: bool) -> Any:
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            if planted and kind == "fusion":
                scores = torch.matmul(query, key.transpose(-2, -1)) * query.shape[-1] ** -0.5
                mixed = torch.matmul(torch.softmax(scores, -1), value)
            else:
                mixed = nn.functional.scaled_dot_product_attention(query, key, value)
            return self.out(mixed.transpose(1, 2).flatten(-2))

    class Block(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
            more = [nn.LayerNorm(4 * WIDTH)] if last and planted and kind == "layer_norm" else []
            self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), *more, nn.GELU(),
                                     nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm(x))
            return x + self.mlp(x)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(i == BLOCKS - 1) for i in range(BLOCKS))
            # The large layer is what DDP's buckets hold.
            wide = 1024 if kind == "bucket" else CLASSES
            self.head = nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, CLASSES))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    return Classifier()


def _reduced(bucket: Any) -> Any:
    """What DDP does without a hook: the bucket's mean over the ranks."""
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _reduced_twice(bucket: Any) -> Any:
    """The regression: somebody's own averaging was put before it."""
    import torch.distributed as dist

    dist.all_reduce(bucket.buffer().div_(RANKS))
    return _reduced(bucket)


def _rank(store: str, *told: str) -> None:
    """One rank's process: every capture, then the end."""
    import torch.distributed as dist

    pairs = [each.rsplit("=", 1) for each in told]
    options = {key: int(value) for key, value in pairs if key in ("steps", "timed", "warmup")}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=RANKS)
    for out, planted in pairs:
        if out not in options:
            _record_one("bucket", Path(out), planted == "1", options)
    dist.barrier()
    dist.destroy_process_group()
    # Threads of torch's may still run, and then abort the interpreter's end now and then: all is written, so leave.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
