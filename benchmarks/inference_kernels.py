"""Kernels of inference from data sheets alone: decoding and prefill attention, products of few rows, experts, floors.

    python benchmarks/inference_kernels.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with `kernels/`
and `traces/`. No table of decoding attention is at hand. What decoding is held against: one-token sequences of
`attention_forward_causal` (to which the cost of a block was fitted), the times that Dao et al. publish
("Flash-Decoding for long-context inference", 2023; an A100 SXM 80 GB is taken), the rates of FlashMLA
(github.com/deepseek-ai/FlashMLA; an H800, whose kernels' figures are an H100's), and one step of Llama 2 7B as gpt-fast
publishes it (9.53 ms; bf16, batch 1, A100 80 GB at 330 W, github.com/meta-pytorch/gpt-fast). How served tokens slow
down on longer contexts (`serving_h100_h200`) says little of it: prompts of other requests are served in between.

Of the B200's trace and SimuMax's tables a half, by a hash of the kernels' kind or sizes, is called "chosen on":
constants were set by it. All of the trace had been seen by then.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from datasheet_traces import read_trace

from kernel_models.device import device, resolve_device
from kernel_models.families.attention import attention
from kernel_models.families.gemm import gemm
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of, operation
from kernel_models.pricing import price, sustained

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
FLASH_DECODING = ((256, 256, 63.4), (128, 512, 67.7), (64, 1024, 77.7), (32, 2048, 58.5), (16, 4096, 57.0),
                  (8, 8192, 56.4), (4, 16384, 58.2), (2, 32768, 60.3), (1, 65536, 64.4), (1, 131072, 106.6))
"""Batch, tokens of context, µs: 16 query heads and 2 of keys and values, 128 features, 16 bits."""
FLASH_MLA = {"memory-bound": (3000.0, 8), "compute-bound": (580.0, 128)}
"""GB/s and TFLOP/s, and query heads that bring a latent cache there."""
GPT_FAST_MS = 9.53
ROWS, SEED = 12_000, 20240517
SMALL_US = 8.0
"""A kernel of the B200's trace that takes no longer counts as small."""
LAYOUTS = {"fwd": "nt", "bwd_grad_act": "nn", "bwd_grad_w": "tn"}


def half_of(name: str) -> int:
    """0 ("chosen on") or 1 of a name, by its SHA-256."""
    return hashlib.sha256(name.encode()).digest()[0] % 2


def times_us(calls: Sequence[OpCall], name: str, *, busy: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Time and 80% interval of every call, µs; ``busy`` as in a step that keeps the board at its power."""
    spec = device(name)
    priced = price(calls, spec)
    priced = sustained(priced, spec) if busy else priced
    return priced.times_us, priced.low_us[priced.index], priced.high_us[priced.index]


def said(name: str, predicted: np.ndarray, measured: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Print one line of errors."""
    if not len(measured):
        return
    error = 100 * (predicted / measured - 1)
    inside = np.mean((low <= measured) & (measured <= high))
    print(f"{name:58}{len(error):>6} MAPE {np.abs(error).mean():6.1f}%  median {np.median(np.abs(error)):6.1f}%  bias "
          f"{error.mean():+6.1f}%  p90 {np.quantile(np.abs(error), 0.9):6.1f}%  inside {inside:4.0%}")


def one(kind: str, batch: int, heads: int, kv_heads: int, queries: int, keys: int, size: int, v_size: int = 0,
        dtype: str = "bf16", window: int = 0, flags: tuple[str, ...] = ()) -> OpCall:
    """One causal attention kernel."""
    return next(attention(kind, batch, heads, kv_heads, queries, keys, size, v_size or size, dtype, causal=True,
                          window=window, flags=flags))


def decoding() -> None:
    """Print published times and rates of decoding attention."""
    print("Decoding attention: Flash-Decoding's published times, A100")
    calls = [one("flash_forward", batch, 16, 2, 1, keys, 128, dtype="fp16") for batch, keys, _ in FLASH_DECODING]
    measured = np.array([us for _, _, us in FLASH_DECODING])
    found, low, high = times_us(calls, "a100-sxm-80g")
    for (batch, keys, us), predicted in zip(FLASH_DECODING, found, strict=True):
        print(f"  batch {batch:>4} context {keys:>7,}  published {us:7.1f}  ours {predicted:7.1f}  "
              f"{predicted / us - 1:+7.1%}")
    said("flash decoding", found, measured, low, high)
    print("\nLatent cache: FlashMLA's published rates, H800 as H100 (batch 128, 16,384 tokens)")
    for what, (rate, heads) in FLASH_MLA.items():
        call = one("mla_forward", 128, heads, 1, 1, 16_384, 576, 512, flags=("latent",))
        us = times_us([call], "h100-sxm")[0][0]
        ours = call.bytes_moved / us / 1e3 if what.startswith("memory") else call.flops / us / 1e6
        print(f"  {what:14}{heads:>4} heads  published {rate:7.0f}  ours {ours:7.0f}  {ours / rate - 1:+7.1%}")


def prompts(data: Path) -> None:
    """Print errors of whole prompts, and of sequences of one token."""
    print("\nAttention of prompts (attention_forward_causal; a sample of rows)")
    frame = pd.read_parquet(data / "kernels" / "attention_forward_causal.parquet")
    frame = frame[frame.kernel_source != "vllm_flash_attn_fa4"]
    for gpu, rows in frame.groupby("gpu"):
        rows = rows.sample(min(ROWS, len(rows)), random_state=SEED)
        spec = resolve_device(str(gpu))
        kind = "flash3_forward" if spec.architecture == "hopper" else "flash_forward"
        window = rows.window_size.fillna(0).astype(int).to_numpy()
        calls = [one(kind, r.batch_size, r.num_heads, r.num_kv_heads, r.seq_len, r.seq_len, r.head_dim, window=w)
                 for r, w in zip(rows.itertuples(), window, strict=True)]
        found, measured, length = times_us(calls, spec.name), rows.latency_us.to_numpy(), rows.seq_len.to_numpy()
        for name, mine in (("one token", length == 1), ("2 to 128 tokens", (length > 1) & (length <= 128)),
                           ("longer", length > 128), ("with a window", window > 0)):
            said(f"{spec.name} {name}", *_of(mine, found, measured))


def _of(mine: np.ndarray, found: tuple[np.ndarray, np.ndarray, np.ndarray], measured: np.ndarray,
        ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    time, low, high = (column[mine] for column in found)
    return time, measured[mine], low, high


def simumax(data: Path) -> None:
    """Print SimuMax's attention and grouped products."""
    frame = pd.read_parquet(data / "kernels" / "training_kernels_simumax.parquet")
    rows = list(_simumax(frame))
    for title, wanted in (("\nAttention of prompts, 4,096 tokens and more (SimuMax)", ("sdp_fwd", "sdp_bwd")),
                          ("\nGrouped products, bf16 (SimuMax), at the power of a busy step", ("group_matmul",))):
        print(title)
        for op in wanted:
            for gpu in ("b200", "a100-pcie-80g"):
                for half, name in enumerate(("chosen on", "judged")):
                    mine = [(call, us) for mine_op, mine_gpu, shape, call, us in rows
                            if (mine_op, mine_gpu) == (op, gpu) and half_of(shape) == half]
                    found, low, high = times_us([call for call, _ in mine], gpu, busy=op == "group_matmul")
                    said(f"{gpu} {op}, {name}", found, np.array([us for _, us in mine]), low, high)


def _simumax(frame: pd.DataFrame) -> Iterator[tuple[str, str, str, OpCall, float]]:
    """Operation, GPU, sizes as written, call and µs of the rows that are attention or grouped products."""
    for r in frame.itertuples():
        sizes = dict(re.findall(r"(\w+)=(\w+)", r.shape))
        if r.op == "group_matmul":
            groups, m, n, k = (int(sizes[name]) for name in ("ng", "M", "N", "K"))
            # Sizes are those of the forward product whatever the stage; weights' gradients are added up in their type.
            added = sizes["accumulate"] == "True"
            dims = {"fwd": (m, n, k), "bwd_grad_act": (m, k, n), "bwd_grad_w": (n, k, m)}[sizes["stage"]]
            call = next(gemm(groups, *dims, "bf16", LAYOUTS[sizes["stage"]], kind="grouped",
                             added="accumulate" if added else "",
                             out_dtype=sizes["main_grad_dtype"] if sizes["stage"] == "bwd_grad_w" else ""))
            flops = 2.0 * groups * m * n * k
        elif r.op in ("sdp_fwd", "sdp_bwd"):
            batch, length, heads, kv_heads, size, v_size = (int(sizes[name]) for name in (
                "batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim"))
            way, of_d, of_v = ("forward", 1, 1) if r.op == "sdp_fwd" else ("backward", 3, 2)
            call = one(f"cudnn_{way}", batch, heads, kv_heads, length, length, size, v_size)
            # The table counts all pairs, causal or not.
            flops = 2.0 * batch * heads * length * length * (of_d * size + of_v * v_size)
        else:
            continue
        yield r.op, r.gpu, r.shape, call, flops / (r.efficiency * r.peak_tflops * 1e6)


def few_rows(data: Path) -> None:
    """Print products of few rows."""
    print("\nProducts of few rows, bf16 (gemm_forward; a sample of rows)")
    frame = pd.read_parquet(data / "kernels" / "gemm_forward.parquet")
    frame = frame[(frame.dtype == "bfloat16") & (frame.m <= 64)]
    for gpu, rows in frame.groupby("gpu"):
        rows = rows.sample(min(ROWS, len(rows)), random_state=SEED)
        spec = resolve_device(str(gpu))
        calls = [next(gemm(1, int(r.m), int(r.n), int(r.k), "bf16", "nt")) for r in rows.itertuples()]
        found, measured, m = times_us(calls, spec.name), rows.latency_us.to_numpy(), rows.m.to_numpy()
        large = np.array([call.bytes_moved for call in calls]) > 6.4e7
        for name, mine in (("m up to 16", m <= 16), ("m 17 to 64", m > 16), ("weights above 64 MB", large)):
            said(f"{spec.name} {name}", *_of(mine, found, measured))


def b200_trace(data: Path) -> None:
    """Print every kind of kernel of the B200's trace, and errors of the small ones by half."""
    trace = read_trace(data / "traces" / "vllm-eager-B200" / "rank0.json.gz")
    if trace is None:
        return
    by_call: dict[tuple[OpCall, ...], list[float]] = defaultdict(list)
    for piece, us in zip(trace.pieces, trace.piece_us, strict=True):
        by_call[piece].append(float(us))
    print("\nB200, vLLM eager: kernels with recorded sizes (median of their repetitions)")
    errors: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for piece, us in sorted(by_call.items(), key=lambda row: -np.median(row[1])):
        priced = price(piece, trace.device)
        call, measured = piece[0], float(np.median(us))
        low, high = priced.total_interval_us()
        half = "chosen on" if half_of(f"{call.family.value} {call.kind}") == 0 else "judged"
        kernel = call.family.value != "transfer"
        print(f"  {call.family.value:12}{call.kind:26}{'x'.join(map(str, call.dims)):28}{measured:8.2f}"
              f"{priced.total_us:8.2f} {priced.total_us / measured - 1:+7.1%}  {half if kernel else 'copy'}")
        if kernel and measured <= SMALL_US:
            errors[half].append((priced.total_us, measured, low, high))
    for half, rows in sorted(errors.items()):
        said(f"small kernels, {half}", *np.array(rows).T)
    said("small kernels, all", *np.array([row for rows in errors.values() for row in rows]).T)
    moe = operation("vllm::moe_forward", [(888, 2880), (888, 128)], "bf16")
    told = Operation(moe.name, moe.arguments, told=(
        ("experts", "128"), ("visits", "4"), ("expert_width", "360"), ("weights", "fp4")))
    for name, calls in (("nothing told", calls_of(moe)), ("experts, visits, width and 4 bits told", calls_of(told))):
        print(f"  vllm::moe_forward, {name:40} measured  168.48  ours {price(calls, trace.device).total_us:8.1f}")


def llama_step() -> None:
    """Print the kernels of one token of Llama 2 7B beside what gpt-fast takes."""
    width, heads, inner, layers, vocabulary, context = 4096, 32, 11_008, 32, 32_000, 256
    norm = operation("_C::fused_add_rms_norm", [(1, width), (1, width), (width,)], "bf16")
    rope = operation("_C::rotary_embedding", [(1,), (1, width), (1, width)], ["int64", "bf16", "bf16"])
    gate = operation("_C::silu_and_mul", [(1, inner), (1, 2 * inner)], "bf16")
    parts: dict[str, list[OpCall]] = {
        "products": [call for n, k in ((3 * width, width), (width, width), (2 * inner, width), (width, inner))
                     for call in gemm(1, 1, n, k, "bf16", "nt")],
        "attention": [one("flash_forward", 1, heads, heads, 1, context, width // heads)],
        "norms, rope, activation": [*calls_of(norm), *calls_of(norm), *calls_of(rope), *calls_of(gate)]}
    times = {name: layers * times_us(calls, "a100-sxm-80g")[0].sum() / 1e3 for name, calls in parts.items()}
    times["head"] = times_us(list(gemm(1, 1, vocabulary, width, "bf16", "nt")), "a100-sxm-80g")[0].sum() / 1e3
    total = sum(times.values())
    print(f"\nLlama 2 7B, one token, A100 80 GB, {context} tokens of context: " + ", ".join(
        f"{name} {ms:.2f} ms" for name, ms in times.items()))
    print(f"  kernels {total:.2f} ms, gpt-fast publishes {GPT_FAST_MS} ms a token: {total / GPT_FAST_MS - 1:+.1%}")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    data = parser.parse_args().data
    decoding()
    of_data: tuple[Callable[[Path], None], ...] = (prompts, simumax, few_rows, b200_trace)
    for show in of_data:
        show(data)
    llama_step()


if __name__ == "__main__":
    main()
