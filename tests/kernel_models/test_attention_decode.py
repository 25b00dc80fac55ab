"""Attention from prompts to decoding: its formula's properties, its operators, and tables of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learned_support import QUICK
from said import Run

from kernel_models import fitting
from kernel_models.datasets import DataError, read_samples
from kernel_models.device import device
from kernel_models.families.attention import attention
from kernel_models.families.registry import assumptions_of
from kernel_models.heuristics.work import bandwidth_gbps
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, calls_of, operation
from kernel_models.pricing import price
from tracer.table_input import TableInputError

DEVICES = ("a100-sxm-80g", "h100-sxm", "h200-sxm", "b200", "l40s", "mi300x")
HEADS = ((32, 8), (64, 8), (32, 32), (8, 1), (48, 8))
FLASH_DECODING = {(256, 256): 63.4, (128, 512): 67.7, (64, 1024): 77.7, (32, 2048): 58.5, (16, 4096): 57.0,
                  (8, 8192): 56.4, (4, 16384): 58.2, (2, 32768): 60.3, (1, 65536): 64.4, (1, 131072): 106.6}
"""Batch and context to µs on an A100: Dao et al., "Flash-Decoding for long-context inference" (2023), 16 heads, 2 of
keys, 128 features, fp16."""


def call(batch: int, heads: tuple[int, int], queries: int, keys: int, *, kind: str = "paged_forward", size: int = 128,
         v_size: int = 0, dtype: str = "bf16", window: int = 0, flags: tuple[str, ...] = (), kv: str = "") -> OpCall:
    return next(attention(kind, batch, *heads, queries, keys, size, v_size or size, dtype, causal=True, window=window,
                          flags=flags, kv_dtype=kv))


def us(one: OpCall, on: str) -> float:
    return float(price([one], device(on)).times_us[0])


# Boards with GDDR memory are corrected by what steps taught, which follows the data and is not monotonic.
PLAIN = tuple(name for name in DEVICES if not device(name).memory_kind.startswith("GDDR"))
grid = st.tuples(st.sampled_from(PLAIN), st.integers(1, 256), st.sampled_from(HEADS), st.integers(1, 700),
                 st.integers(1, 60_000))


@settings(max_examples=120, deadline=None)
@given(grid, st.integers(1, 3000), st.integers(1, 40))
def test_more_context_queries_and_sequences_never_take_less(
    at: tuple[str, int, tuple[int, int], int, int], keys_more: int, more: int,
) -> None:
    on, batch, heads, queries, context = at
    one = us(call(batch, heads, queries, queries + context), on)
    for other in (call(batch, heads, queries, queries + context + keys_more),
                  call(batch + more, heads, queries, queries + context),
                  call(batch, heads, queries + more, queries + more + context)):
        assert us(other, on) >= one * 0.96  # blocks that fill the last wave better win that much back


@settings(max_examples=120, deadline=None)
@given(grid)
def test_no_call_exceeds_the_devices_peaks_and_a_token_more_is_no_jump(
    at: tuple[str, int, tuple[int, int], int, int],
) -> None:
    on, batch, heads, queries, context = at
    spec = device(on)
    one, next_one = (call(batch, heads, q, q + context) for q in (queries, queries + 1))
    time = us(one, on)
    assert one.flops / time <= spec.peak_tflops("bf16", matrix=True) * 1e6
    # What a cache keeps moves faster than memory does.
    assert one.bytes_moved / time <= 2.0 * bandwidth_gbps(spec) * 1e3
    whole_blocks = -(-(queries + 1) * heads[0] // heads[1] // 128) * 128 / max(queries * heads[0] // heads[1], 64)
    assert us(next_one, on) <= time * max(1.3, 1.1 * whole_blocks)


@pytest.mark.parametrize("on", DEVICES)
def test_decoding_reads_its_cache_once_for_all_heads_that_share_it(on: str) -> None:
    bandwidth = device(on).memory_bandwidth_gbps * 1e3
    one = call(64, (32, 8), 1, 32_768)
    assert one.bytes_moved / us(one, on) > 0.55 * bandwidth
    assert us(call(64, (64, 8), 1, 32_768), on) < 1.15 * us(one, on) < us(call(64, (32, 16), 1, 32_768), on)


def test_a_window_and_narrow_caches_move_less() -> None:
    full, wide = call(32, (32, 8), 1, 16_384), call(32, (32, 8), 1, 16_384, window=16_384)
    short, alone = call(32, (32, 8), 1, 16_384, window=1024), call(32, (32, 8), 1, 1024)
    assert us(wide, "h100-sxm") == us(full, "h100-sxm")
    assert short.bytes_moved == alone.bytes_moved and us(short, "h100-sxm") == pytest.approx(us(alone, "h100-sxm"))
    for kv in ("fp8", "int8"):
        narrow = call(32, (32, 8), 1, 16_384, kv=kv)
        assert narrow.bytes_read < 0.51 * full.bytes_read and narrow != full
        assert us(narrow, "h100-sxm") < 0.6 * us(full, "h100-sxm")


def test_a_latent_cache_is_read_once_and_bound_by_arithmetic_at_many_heads() -> None:
    few, many = (call(64, (heads, 1), 1, 16_384, kind="mla_forward", size=576, v_size=512, flags=("latent",))
                 for heads in (8, 128))
    assert few.bytes_read == pytest.approx(64 * 16_384 * 576 * 2, rel=0.02)
    reached = many.flops / us(many, "h100-sxm") / 1e6
    assert 400 < reached < 700  # FlashMLA: 580 to 660 on an H800
    assert us(many, "h100-sxm") > 1.15 * us(few, "h100-sxm")
    assert few.bytes_moved / us(few, "h100-sxm") > 2_000e3  # and 3,000 GB/s


def test_flash_decodings_published_times_are_met() -> None:
    errors = [us(call(batch, (16, 2), 1, context, dtype="fp16"), "a100-sxm-80g") / measured - 1
              for (batch, context), measured in FLASH_DECODING.items()]
    assert np.mean(np.abs(errors)) < 0.15 and np.max(np.abs(errors)) < 0.3


def test_servers_operators_say_what_they_assume_and_take_it_as_told() -> None:
    shapes = [(32, 64, 128), (32, 8, 128), (32, 8, 128)]
    plain = operation("vllm::unified_attention", shapes, "bf16")
    assumed, = calls_of(plain)
    assert "assumed" in assumed.flags and assumptions_of([assumed]) == {"sequences": "1", "context": "0"}
    told, = calls_of(Operation(plain.name, plain.arguments, told=(
        ("context", "4096"), ("sequences", "32"), ("window", "1024"), ("kv", "fp8"))))
    assert "assumed" not in told.flags and told.dims == (32, 64, 8, 1, 4097, 128, 128, 1024)
    assert "kv_fp8" in told.flags
    half, = calls_of(Operation(plain.name, plain.arguments, told=(("context", "4096"),)))
    assert assumptions_of([half]) == {"sequences": "1"}
    narrow, wide = price([told], device("h100-sxm")), price([half], device("h100-sxm"))
    assert wide.high_us[0] / wide.time_us[0] > 1.3 * narrow.high_us[0] / narrow.time_us[0]


@pytest.mark.parametrize("name,shapes,values,dims", [
    ("flash_attn_3::fwd", [(32, 64, 128), (900, 64, 8, 128), (900, 64, 8, 128), *[None] * 4, (33,), *[None] * 6,
                           (32, 40)], {13: 2000}, (32, 64, 8, 1, 2000, 128, 128, 0)),
    ("_vllm_fa2_C::varlen_fwd", [(64, 32, 128), (900, 16, 8, 128), (900, 16, 8, 128), None, (9,), None, None, None,
                                 (8, 64)], {11: 700}, (8, 32, 8, 8, 700, 128, 128, 0)),
    ("flash_attn::fwd_kvcache", [(4, 1, 32, 128), (4, 2048, 8, 128), (4, 2048, 8, 128)], {},
     (4, 32, 8, 1, 2048, 128, 128, 0)),
    ("flash_attn::fwd_kvcache", [(8, 1, 32, 128), (512, 256, 8, 128), (512, 256, 8, 128), *[None] * 7, (8, 6)], {},
     (8, 32, 8, 1, 1536, 128, 128, 0)),
    ("flash_attn::fwd_kvcache", [(8, 1, 32, 128), (64, 256, 8, 128), (64, 256, 8, 128)], {},
     (8, 32, 8, 1, 2048, 128, 128, 0)),
    ("flashinfer::batch_decode_with_paged_kv_cache", [(16, 32, 128), (160, 2, 16, 8, 128)], {},
     (16, 32, 8, 1, 160, 128, 128, 0)),
    ("vllm::unified_attention_with_output", [(8, 4096), (8, 1024), (8, 1024), (8, 4096)], {},
     (1, 32, 8, 8, 8, 128, 128, 0)),
    ("vllm::unified_mla_attention", [(4, 128, 192), (4, 512), (4, 1, 64)], {}, (1, 128, 1, 4, 4, 576, 512, 0)),
])
def test_operators_over_caches_are_known(
    name: str, shapes: list[tuple[int, ...] | None], values: dict[int, int], dims: tuple[int, ...],
) -> None:
    numbers = [values.get(i) for i in range(max([len(shapes), *(at + 1 for at in values)]))]
    found, = calls_of(operation(name, shapes, "bf16", values=numbers))
    assert found.family is Family.ATTENTION and found.dims == dims


def decode_table(path: Path, seed: int = 3) -> Path:
    """A table of decoding by a formula of its own: latency and bytes, in whole waves, with 1% of noise."""
    random = np.random.default_rng(seed)
    rows = []
    for heads, kv_heads in ((32, 8), (64, 8), (32, 32), (16, 2), (40, 8), (96, 8), (8, 1), (28, 4), (48, 4), (24, 8)):
        for batch in (1, 2, 4, 8, 16, 32, 64, 128):
            for context in (128, 512, 1024, 2048, 4096, 8192, 16384, 32768):
                moved = 2 * 128 * 2.0 * batch * kv_heads * context
                waves = -(-batch * kv_heads // 132)
                time = 7.0 + 0.4 * waves + moved / 2.6e6 + 0.02 * heads * batch / 132
                rows.append({"gpu": "NVIDIA H200", "batch_size": batch, "num_heads": heads, "num_kv_heads": kv_heads,
                             "head_dim": 128, "context_len": context, "kv_cache_dtype": "bfloat16",
                             "latency_us": time * random.normal(1.0, 0.01)})
    pd.DataFrame(rows).to_parquet(path)
    return path


@pytest.mark.slow  # its formula is asked above, fits in test_fit.py
def test_a_fitted_model_prices_heads_it_never_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "BOOSTING", {Family.ATTENTION: (QUICK,)})
    sample, = read_samples([str(decode_table(tmp_path / "decode.parquet"))])
    assert sample.family is Family.ATTENTION and len(sample) == 640 and sample.device == "h200-sxm"
    assert {one.kind for one in sample.calls} == {"paged_forward"}
    entry = fitting.fit_entry(sample, device("h200-sxm"))
    held = sample.taken(sample.split("heads"))
    assert 60 < len(held) < 400
    found = entry.model.predict(held.calls).time_us
    assert np.mean(np.abs(found / held.measured_us - 1)) < 0.05


@pytest.mark.parametrize("change,said", [
    (lambda f: f.drop(columns="context_len"), "lacks"), (lambda f: f.assign(context_len=-1), "whole number"),
    (lambda f: f.assign(q_len=0), "q_len"), (lambda f: f.assign(latency_us=-1.0), "positive")])
def test_broken_tables_of_decoding_are_refused(
    tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], said: str,
) -> None:
    frame = pd.read_parquet(decode_table(tmp_path / "good.parquet")).head(20)
    change(frame).to_parquet(tmp_path / "bad.parquet")
    with pytest.raises((DataError, TableInputError), match=said):
        read_samples([str(tmp_path / "bad.parquet")])


def test_price_takes_assumptions_and_refuses_what_it_does_not_know(run: Run) -> None:
    sizes = ["--shapes", "32x64x128,32x8x128,32x8x128", "--dtype", "bf16", "--device", "h100-sxm"]
    plain = run("price", "vllm::unified_attention", *sizes, "--json").json
    told = run("price", "vllm::unified_attention", *sizes, "--json", "--assume", "context=4096,sequences=32").json
    assert plain["assumed"] == {"sequences": "1", "context": "0"} and told["assumed"] == {}
    assert told["time_us"] > 3 * plain["time_us"] and told["told"] == {"context": "4096", "sequences": "32"}
    assert "Assumed" in run("price", "vllm::unified_attention", *sizes).out
    for text in ("contxt=4", "context=x", "kv=float99", "imbalance=-1", "context=1e9", "context=9,sequences=0"):
        code, _, told_why = run("price", "vllm::unified_attention", *sizes, "--assume", text)
        assert code == 2 and "--assume" in told_why and "Traceback" not in told_why
    done = run("price", "aten::linear", "--shapes", "8x8,8x8", "--device", "h100-sxm", "--assume", "context=3")
    assert done.code == 2 and "leaves nothing" in done.err
