"""Products of few rows, experts, samplers and recurrent states as inference servers run them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_models.device import device
from kernel_models.families.gemm import gemm
from kernel_models.families.inference import moe_calls, shares, touched
from kernel_models.families.registry import assumptions_of
from kernel_models.heuristics.work import most_floors
from kernel_models.op_call import Family, TensorSpec
from kernel_models.operation import Operation, calls_of, operation
from kernel_models.pricing import price
from tracer.shape_only.devices import device_names
from tracer.views import Argument


def us(calls: object, on: str) -> float:
    return price(calls, device(on)).total_us  # type: ignore[arg-type]


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
    def weights(tokens: int, imbalance: float = 0.0) -> float:
        return sum(call.bytes_read for call in moe_calls(tokens, 128, 8, 4096, 1536, "bf16", imbalance=imbalance)
                   if call.kind == "grouped")

    whole = 128 * 3 * 4096 * 1536 * 2
    assert weights(1) == pytest.approx(8 / 128 * whole, rel=0.02)
    assert weights(512) == pytest.approx(whole, rel=0.05)
    assert weights(32, 2.0) < weights(32)
    narrow = sum(call.bytes_read for call in moe_calls(32, 128, 8, 4096, 1536, "bf16", weight_dtype="fp4")
                 if call.kind == "grouped")
    assert 0.2 < narrow / weights(32) < 0.35


def test_fused_experts_take_their_sizes_from_their_arguments() -> None:
    shapes = [(64, 4096), (128, 3072, 4096), (128, 4096, 1536), (64, 8), (64, 8)]
    plain = operation("vllm::outplace_fused_experts", shapes, ["bf16", "fp8", "fp8", "fp32", "int32"])
    first, second = [call for call in calls_of(plain) if call.kind == "grouped"]
    assert first.dims[2:] == (3072, 4096) and second.dims[2:] == (4096, 1536) and first.dtype == "fp8"
    assert "routed" in first.flags and "routed" in second.flags
    assert first.dims[0] == round(touched(64, 128, 8)) and not assumptions_of([first, second])
    packed = operation("vllm::outplace_fused_experts",
                       [(64, 4096), (128, 3072, 2048), (128, 4096, 768), (64, 8), (64, 8)],
                       ["bf16", "uint8", "uint8", "fp32", "int32"])
    first, second = [call for call in calls_of(packed) if call.kind == "grouped"]
    assert "weight_fp4" in first.flags and first.dims[2:] == (3072, 4096) and second.dims[2:] == (4096, 1536)


def test_experts_that_nothing_tells_are_assumed_and_said() -> None:
    plain = operation("vllm::moe_forward", [(888, 2880), (888, 128)], "bf16")
    assert assumptions_of(calls_of(plain)) == {
        "experts": "128", "visits": "4", "expert_width": "2880", "weights": "bf16"}
    told = Operation(plain.name, plain.arguments, told=(
        ("experts", "16"), ("visits", "4"), ("expert_width", "2880"), ("weights", "fp4")))
    assert not assumptions_of(calls_of(told)) and us(calls_of(told), "b200") < 0.3 * us(calls_of(plain), "b200")


@pytest.mark.parametrize("on,least", [("h100-sxm", 0.8), ("h200-sxm", 0.8), ("a100-sxm-80g", 0.7)])
def test_one_row_reads_its_weight_at_the_memorys_bandwidth(on: str, least: float) -> None:
    call = next(gemm(1, 1, 28_672, 8192, "bf16", "nt"))
    reached = call.bytes_moved / us([call], on) / 1e3 / device(on).memory_bandwidth_gbps
    assert least < reached < 1
    narrow = next(gemm(1, 1, 28_672, 8192, "bf16", "nt", weight_dtype="int4"))
    assert us([narrow], on) < 0.4 * us([call], on)


@given(st.sampled_from((1, 2, 8, 16, 64)), st.sampled_from((1024, 4096, 8192)), st.sampled_from((1024, 4096, 14336)))
def test_rows_of_one_tile_cost_no_more_than_one(m: int, n: int, k: int) -> None:
    one, more = (us(gemm(1, rows, n, k, "bf16", "nt"), "h100-sxm") for rows in (1, m))
    assert one <= more <= 1.25 * one


def test_samplers_and_states_move_what_they_hold() -> None:
    sample, = calls_of(operation("flashinfer::top_k_top_p_sampling_from_probs", [(32, 128_000)], "fp32"))
    assert sample.family is Family.REDUCTION and sample.bytes_read == 3 * 32 * 128_000 * 4
    state, = calls_of(operation("mamba_ssm::selective_state_update", [(300, 80, 64, 128), (32, 80, 64)], "fp32"))
    assert state.bytes_moved == 2 * 32 * 80 * 64 * 128 * 4


def test_a_gather_of_whole_rows_knows_its_rows() -> None:
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


def _us(on: str, rows: int, **sort: object) -> float:
    return price(list(gemm(64, rows, 2880, 2880, "bf16", "nt", kind="grouped", **sort)), device(on)).total_us


def test_experts_of_many_rows_reach_less_where_their_weights_are_widened() -> None:
    routed = {"flags": ("routed",)}
    assert _us("h100-sxm", 512, weight_dtype="fp4", **routed) > 1.8 * _us("h100-sxm", 512, **routed)
    # Few rows wait for weights, of which there are fewer bytes; other vendors' kernels have a share of their own.
    assert _us("h100-sxm", 1, weight_dtype="fp4", **routed) < 1.1 * _us("h100-sxm", 1, **routed)
    assert _us("mi300x", 512, weight_dtype="fp4", **routed) < 1.1 * _us("mi300x", 512, **routed)
    rising = [_us("h100-sxm", rows, weight_dtype="fp4", **routed) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 512)]
    assert all(after >= before * 0.999 for before, after in itertools.pairwise(rising))


def test_each_group_of_a_blackwells_products_is_launched() -> None:
    for rows in (16, 128, 1024):
        groups = [price(list(gemm(many, rows, 2048, 2048, "bf16", "nt", kind="grouped")), device("b200")).total_us
                  for many in (8, 64)]
        assert groups[1] > groups[0] + 56 * 4.5
