"""Work of inference servers: attention from prompts to decoding, products of few rows, experts, samplers and states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
from kernel_models.families.gemm import gemm
from kernel_models.families.inference import moe_calls, shares, touched
from kernel_models.families.registry import assumptions_of
from kernel_models.heuristics.work import bandwidth_gbps, most_floors
from kernel_models.op_call import Family, OpCall, TensorSpec
from kernel_models.operation import Operation, calls_of, operation
from kernel_models.pricing import price
from tracer.shape_only.devices import device_names
from tracer.table_input import TableInputError
from tracer.views import Argument

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


def us(calls: OpCall | Iterable[OpCall], on: str) -> float:
    return price([calls] if isinstance(calls, OpCall) else list(calls), device(on)).total_us


# Boards with GDDR memory are corrected by what steps taught, which follows the data and is not monotonic.
PLAIN = tuple(name for name in DEVICES if not device(name).memory_kind.startswith("GDDR"))
grid = st.tuples(st.sampled_from(PLAIN), st.integers(1, 256), st.sampled_from(HEADS), st.integers(1, 700),
                 st.integers(1, 60_000))


@settings(max_examples=80, deadline=None)
@given(grid, st.integers(1, 3000), st.integers(1, 40))
def test_more_never_takes_less_no_call_exceeds_the_peaks_and_a_token_more_is_no_jump(
    at: tuple[str, int, tuple[int, int], int, int], keys_more: int, more: int,
) -> None:
    on, batch, heads, queries, context = at
    spec = device(on)
    one, next_one = (call(batch, heads, q, q + context) for q in (queries, queries + 1))
    time = us(one, on)
    for other in (call(batch, heads, queries, queries + context + keys_more),
                  call(batch + more, heads, queries, queries + context),
                  call(batch, heads, queries + more, queries + more + context)):
        assert us(other, on) >= time * 0.96  # blocks that fill the last wave better win that much back
    assert one.flops / time <= spec.peak_tflops("bf16", matrix=True) * 1e6
    # What a cache keeps moves faster than memory does.
    assert one.bytes_moved / time <= 2.0 * bandwidth_gbps(spec) * 1e3
    whole_blocks = -(-(queries + 1) * heads[0] // heads[1] // 128) * 128 / max(queries * heads[0] // heads[1], 64)
    assert us(next_one, on) <= time * max(1.3, 1.1 * whole_blocks)


@pytest.mark.parametrize("on", DEVICES)
def test_decoding_reads_its_cache_once_for_all_heads_that_share_it(on: str) -> None:
    bandwidth = device(on).memory_bandwidth_gbps * 1e3
    one, heads, keys = (call(64, each, 1, 32_768) for each in ((32, 8), (64, 8), (32, 16)))
    assert one.bytes_moved / us(one, on) > 0.55 * bandwidth
    assert us(heads, on) < 1.15 * us(one, on) < us(keys, on)


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
    ("flashinfer::single_decode_with_kv_cache", [(32, 128), (900, 8, 128), (900, 8, 128)], {},
     (1, 32, 8, 1, 900, 128, 128, 0)),
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
    for text in ("contxt=4", "kv=float99", "imbalance=-1", "context=1e9", "context=9,sequences=0"):
        code, _, told_why = run("price", "vllm::unified_attention", *sizes, "--assume", text)
        assert code == 2 and "--assume" in told_why and "Traceback" not in told_why
    done = run("price", "aten::linear", "--shapes", "8x8,8x8", "--device", "h100-sxm", "--assume", "context=3")
    assert done.code == 2 and "leaves nothing" in done.err


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 12), st.floats(0, 3), st.integers(1, 4000))
def test_visits_add_up_and_touch_no_more_experts_than_there_are(
    experts: int, visits: int, imbalance: float, tokens: int,
) -> None:
    each = shares(experts, min(visits, experts), imbalance)
    assert sum(each) == pytest.approx(min(visits, experts), rel=1e-6) and max(each) <= 1 + 1e-9
    assert list(each) == sorted(each, reverse=True)
    found = touched(tokens, experts, visits, imbalance)
    assert 0 < found <= min(experts, tokens * visits) + 1e-6
    assert found <= touched(tokens, experts, visits) + 1e-6 <= touched(tokens + 1, experts, visits) + 2e-6


def test_weights_of_experts_are_read_once_for_each_that_is_touched() -> None:
    def weights(tokens: int, **options: Any) -> float:
        return sum(call.bytes_read for call in moe_calls(tokens, 128, 8, 4096, 1536, "bf16", **options)
                   if call.kind == "grouped")

    whole = 128 * 3 * 4096 * 1536 * 2
    assert weights(1) == pytest.approx(8 / 128 * whole, rel=0.02)
    assert weights(512) == pytest.approx(whole, rel=0.05)
    assert weights(32, imbalance=2.0) < weights(32)
    assert 0.2 < weights(32, weight_dtype="fp4") / weights(32) < 0.35


def test_fused_experts_take_their_sizes_from_their_arguments() -> None:
    for weights, packing in (("fp8", 1), ("uint8", 2)):
        fused = operation("vllm::outplace_fused_experts",
                          [(64, 4096), (128, 3072, 4096 // packing), (128, 4096, 1536 // packing), (64, 8), (64, 8)],
                          ["bf16", weights, weights, "fp32", "int32"])
        first, second = [call for call in calls_of(fused) if call.kind == "grouped"]
        assert first.dims[2:] == (3072, 4096) and second.dims[2:] == (4096, 1536)
        assert "routed" in first.flags and "routed" in second.flags
        assert first.dims[0] == round(touched(64, 128, 8)) and not assumptions_of([first, second])
        assert first.dtype == "fp8" if packing == 1 else "weight_fp4" in first.flags


def test_experts_that_nothing_tells_are_assumed_and_said() -> None:
    plain = operation("vllm::moe_forward", [(888, 2880), (888, 128)], "bf16")
    assert assumptions_of(calls_of(plain)) == {
        "experts": "128", "visits": "4", "expert_width": "2880", "weights": "bf16"}
    told = Operation(plain.name, plain.arguments, told=(
        ("experts", "16"), ("visits", "4"), ("expert_width", "2880"), ("weights", "fp4")))
    assert not assumptions_of(calls_of(told))
    assert us(calls_of(told), "b200") < 0.3 * us(calls_of(plain), "b200")


@pytest.mark.parametrize("on,least", [("h100-sxm", 0.8), ("h200-sxm", 0.8), ("a100-sxm-80g", 0.7)])
def test_one_row_reads_its_weight_at_the_memorys_bandwidth(on: str, least: float) -> None:
    call = next(gemm(1, 1, 28_672, 8192, "bf16", "nt"))
    reached = call.bytes_moved / us([call], on) / 1e3 / device(on).memory_bandwidth_gbps
    assert least < reached < 1
    narrow = next(gemm(1, 1, 28_672, 8192, "bf16", "nt", weight_dtype="int4"))
    assert us([narrow], on) < 0.4 * us([call], on)


def test_rows_of_one_tile_cost_no_more_than_one() -> None:
    for m, n, k in itertools.product((8, 64), (1024, 8192), (1024, 14336)):
        one, more = (us(gemm(1, rows, n, k, "bf16", "nt"), "h100-sxm") for rows in (1, m))
        assert one <= more <= 1.25 * one


def test_samplers_states_and_gathers_move_what_they_hold() -> None:
    sample, = calls_of(operation("flashinfer::top_k_top_p_sampling_from_probs", [(32, 128_000)], "fp32"))
    assert sample.family is Family.REDUCTION and sample.bytes_read == 3 * 32 * 128_000 * 4
    state, = calls_of(operation("mamba_ssm::selective_state_update", [(300, 80, 64, 128), (32, 80, 64)], "fp32"))
    assert state.bytes_moved == 2 * 32 * 80 * 64 * 128 * 4
    expanded = Argument("long int", (888, 2880), (1, 0))
    rows, = calls_of(Operation("aten::gather", (Argument("bf16", (25_136, 2880)), Argument("Scalar", (), None, "0"),
                                                expanded)))
    assert rows.dims[1] == 2880
    each, = calls_of(operation("aten::gather", [(25_136, 2880), None, (888, 2880)], ["bf16", "", "int64"],
                               values=[None, 0, None]))
    assert each.dims[1] == 1 and us([rows], "b200") < us([each], "b200")
    assert TensorSpec((888, 2880), "int64", (1, 0)).stored == 888


def test_short_kernels_of_a_b200_take_a_floor_or_two() -> None:
    floor = device("b200").kernel_floor_us
    for op in (operation("aten::sub", [(1,), (1,)], "int32"), operation("aten::mul", [(64, 64), (64, 64)], "bf16"),
               operation("aten::native_layer_norm", [(8, 1024), None, (1024,), (1024,), None], "bf16",
                         values=[None, [1024]]),
               operation("aten::_softmax", [(8, 512), None, None], "fp32", values=[None, -1, False])):
        assert 0.9 * floor <= us(calls_of(op), "b200") <= 2.5 * floor
    assert most_floors(device("b200"), Family.NORM) < most_floors(device("a100-sxm-80g"), Family.NORM)
    assert all(1.0 < device(name).kernel_floor_us < 4.0 for name in device_names()
               if device(name).vendor in ("nvidia", "amd"))


def test_experts_of_many_rows_reach_less_where_their_weights_are_widened() -> None:
    def experts(on: str, rows: int, weight_dtype: str = "fp4") -> float:
        return us(gemm(64, rows, 2880, 2880, "bf16", "nt", kind="grouped", weight_dtype=weight_dtype,
                       flags=("routed",)), on)

    assert experts("h100-sxm", 512) > 1.8 * experts("h100-sxm", 512, "")
    # Few rows wait for weights, of which there are fewer bytes; other vendors' kernels have a share of their own.
    assert experts("h100-sxm", 1) < 1.1 * experts("h100-sxm", 1, "")
    assert experts("mi300x", 512) < 1.1 * experts("mi300x", 512, "")
    rising = [experts("h100-sxm", rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 512)]
    assert all(after >= before * 0.999 for before, after in itertools.pairwise(rising))


def test_each_group_of_a_blackwells_products_is_launched() -> None:
    for rows in (16, 128, 1024):
        few, many = (us(gemm(groups, rows, 2048, 2048, "bf16", "nt", kind="grouped"), "b200") for groups in (8, 64))
        assert many > few + 56 * 4.5
