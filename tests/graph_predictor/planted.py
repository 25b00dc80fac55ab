"""Planted regressions of a small training step, recorded for real on a CPU with fixed seeds.

``record("item", [(folder / "before", False), (folder / "after", True)])`` records one capture without and one with the
regression. What is planted, and what a difference should name first:

* ``layer_norm``: one more layer norm, over the widest activations;
* ``item``: every sample's loss is read with ``.item()`` for a running mean;
* ``fusion``: attention written out (two products and a softmax) where the fused operator was;
* ``bucket``: the gradients of every DDP bucket are reduced twice (two ranks over gloo);
* ``sleep``: the data loader sleeps for each sample.

``CAUSES`` has more kinds with the words that a user would call each by. ``python benchmarks/check_alarms.py --causes``
records them and looks for these words in the first cause that the gate names.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forks import run_ranks

KINDS = ("layer_norm", "item", "fusion", "bucket", "sleep")
RANKS = 2
SAMPLES, TOKENS, WIDTH, CLASSES, BLOCKS = 32, 16, 64, 16, 2
SLEEP_S = 0.004
"""For each of the 32 samples: 128 ms a step at the least, where the step takes some 6 on a quiet machine and several
times that on a busy one."""



@dataclass(frozen=True)
class Settings:
    """The program's settings; every field but the first is one that a planted cause changes."""

    kind: str = ""
    optimizer: str = "foreach"
    reads: bool = False
    sample_sleep_s: float = 0.0
    step_sleep_s: float = 0.0
    samples: int = SAMPLES
    autocast: bool = False
    dtype: str = "float32"
    blocks: int = BLOCKS
    hidden: int = 4 * WIDTH
    attention: str = "fused"
    norm: str = "fused"
    more_norm: bool = False
    clones: bool = False
    strided: bool = False
    checkpointed: bool = False
    micro_batches: int = 1
    zeros: bool = False
    logged: bool = False
    threads: int = 1
    twice: bool = False


@dataclass(frozen=True)
class Planted:
    """A cause: the settings before and after it, and what the first cause named must match (a regular expression)."""

    after: dict[str, Any]
    named: str
    before: dict[str, Any] | None = None


CAUSES = {
    "layer_norm": Planted({"more_norm": True}, "aten::layer_norm"),
    "item": Planted({"reads": True}, r"sync: aten::item ×32"),
    "fusion": Planted({"attention": "written out"}, "scaled_dot_product_attention → aten::matmul ×2"),
    "sleep": Planted({"sample_sleep_s": SLEEP_S}, "data loading: fetching a batch"),
    "bucket": Planted({"twice": True}, "allreduce"),
    "for_loop": Planted({"optimizer": "for-loop"}, "optimizer: foreach → for-loop"),
    "unfused": Planted({"optimizer": "foreach"}, "optimizer: fused → foreach", {"optimizer": "fused"}),
    "pause": Planted({"step_sleep_s": 0.05}, "outside operations"),
    "batch": Planted({"samples": 2 * SAMPLES}, "sizes of inputs: 32 → 64"),
    "autocast": Planted({"autocast": True}, "element types: float → bfloat16"),
    "float64": Planted({"dtype": "float64"}, "element types: float → double"),
    "block": Planted({"blocks": BLOCKS + 1}, r"layers: .*only in B"),
    "wider": Planted({"hidden": 8 * WIDTH}, "sizes of parameters: 256 → 512"),
    "clones": Planted({"clones": True}, "only in B: aten::clone"),
    "strided": Planted({"strided": True}, "only in B: .*aten::(contiguous|clone)"),
    "checkpoint": Planted({"checkpointed": True}, "checkpointing: .*run again in the backward"),
    "accumulation": Planted({"micro_batches": 2}, "gradient accumulation: .*1 → 2"),
    "zeros": Planted({"zeros": True}, "zero_grad"),
    "norm": Planted({"norm": "written out"}, "aten::layer_norm → aten::"),
    "hook": Planted({"logged": True}, "outside operations"),
    "threads": Planted({"threads": 1}, "threads: 2 → 1", {"threads": 2}),
}
"""Kinds and the words expected of the first cause. The words were written before anything was recorded."""


def settings_of(kind: str, planted: bool) -> Settings:
    """Return the program's settings without or with a cause; of no cause, ``unchanged``."""
    if kind == "unchanged":
        return Settings(kind)
    cause = CAUSES[kind]
    return replace(Settings(kind), **(cause.after if planted else cause.before or {}))


def record(kind: str, captures: Sequence[tuple[Path, bool]], *, steps: int = 4, timed: int = 10,
           warmup: int = 3) -> None:
    """Record captures one after the other in one process (``bucket``: in two, as ranks of a job).

    Args:
        kind: one of ``CAUSES``, or ``unchanged``.
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

    chosen = settings_of(kind, planted)
    threads = torch.get_num_threads()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    try:
        model = _model(chosen).to(getattr(torch, chosen.dtype))
        if kind == "bucket":
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
            # A lambda, because DDP wants no annotations but its own.
            reduced = _reduced_twice if chosen.twice else _reduced
            model.register_comm_hook(None, lambda state, bucket: reduced(bucket))
        # Its own operations are many, so that their implementation is seen in the time too.
        kinds = {"for_loop": torch.optim.AdamW, "unfused": torch.optim.AdamW}
        optimizer = kinds.get(kind, torch.optim.SGD)(
            model.parameters(), lr=1e-3, foreach=chosen.optimizer == "foreach", fused=chosen.optimizer == "fused")
        total = sum((1 + 3 + options["timed"] + options["steps"], options["warmup"]))
        loader = torch.utils.data.DataLoader(_Data(total * chosen.samples, chosen), batch_size=chosen.samples)
        running = 0.0
        with tracer.capture(out, execution_trace="none", **options) as capture:
            for batch, target in capture.wrap(loader):
                optimizer.zero_grad(set_to_none=not chosen.zeros)
                for part, labels in zip(batch.chunk(chosen.micro_batches), target.chunk(chosen.micro_batches),
                                        strict=True):
                    with torch.autocast("cpu", torch.bfloat16) if chosen.autocast else nullcontext():
                        losses = torch.nn.functional.cross_entropy(model(part), labels, reduction="none")
                    if chosen.reads:
                        for value in losses:
                            running += value.item()
                    losses.mean().backward()
                optimizer.step()
                if chosen.step_sleep_s:
                    time.sleep(chosen.step_sleep_s)
                capture.step()
        assert capture.complete
    finally:
        torch.set_num_threads(threads)


class _Data:
    """Samples of random tokens, made before the run."""

    def __init__(self, samples: int, chosen: Settings) -> None:
        import torch

        self.tokens = torch.randn(samples, TOKENS, WIDTH, dtype=getattr(torch, chosen.dtype))
        self.labels = torch.randint(0, CLASSES, (samples,))
        self.sleep_s = chosen.sample_sleep_s

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.tokens[index], self.labels[index]


def _model(chosen: Settings) -> Any:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class WrittenOutNorm(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias

    norm = nn.LayerNorm if chosen.norm == "fused" else WrittenOutNorm

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            if chosen.attention == "fused":
                mixed = nn.functional.scaled_dot_product_attention(query, key, value)
            else:
                scores = torch.matmul(query, key.transpose(-2, -1)) * query.shape[-1] ** -0.5
                mixed = torch.matmul(torch.softmax(scores, -1), value)
            return self.out(mixed.transpose(1, 2).flatten(-2))

    class Block(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.norm, self.attention = norm(WIDTH), Attention()
            more = [norm(chosen.hidden)] if last and chosen.more_norm else []
            self.mlp = nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, chosen.hidden), *more, nn.GELU(),
                                     nn.Linear(chosen.hidden, WIDTH))

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm(x))
            if chosen.clones:
                x = x.clone()
            return x + self.mlp(x)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(i == BLOCKS - 1) for i in range(chosen.blocks))
            # The large layer is what DDP's buckets hold.
            wide = 1024 if chosen.kind == "bucket" else CLASSES
            self.head = nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, CLASSES))

        def forward(self, x: Any) -> Any:
            if chosen.strided:
                # Another layout of the same values: the samples' numbers vary fastest.
                x = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if chosen.checkpointed else block(x)
            return self.head(x.mean(1))

    model = Classifier()
    if chosen.logged:
        seen: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_hook(lambda module, inputs, output, name=name: seen.append(
                "".join(f"{name}: {number}\n" for number in range(2000))))
    return model


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
