"""Plans of models with experts: how tokens go to them, what hides that, graphs, kernels, modules computed again; linear
layers in fp8 and fp4."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from kernel_models.families.attention import attention
from kernel_models.op_call import Family
from kernel_models.pricing import price
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.dispatch import dispatch_us
from planner.parallel.estimate import Estimate, estimate
from planner.parallel.layer_costs import BlockKernels, LayerCosts, narrow_type, narrowed
from planner.parallel.memory import fullest_of, kept_of
from planner.parallel.plan_costs import block_part, costs_of_plan
from planner.parallel.space import Framework, exported, frameworks_of
from planner.parallel.stages import spread
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import Latent, Piece, TransformerPart, TransformerShape, expected_places

SHAPE = TransformerShape(4, 2048, 16, 16, 1024, 32_000, 2048, gated=True, rms=True, bias=False, rotary=True, experts=32,
                         top_k=4, latent=Latent(768, 512, 128, 64, 128))
PLAN = "dp=16,sharding=1,ep=16,microbatch=1,microbatches=8"


@pytest.fixture(scope="module")
def pieces() -> LayerCosts:
    return LayerCosts(device("b200"))


def estimated(pieces: LayerCosts, text: str, shape: TransformerShape = SHAPE) -> Estimate:
    cluster = CollectiveModel(find_topology("dgx-b200x2"))
    return estimate(costs_of_plan(ParallelPlan.parse(text), shape, pieces, cluster))


def test_a_token_of_several_experts_goes_to_fewer_ranks() -> None:
    assert expected_places(2, 4, 2) == pytest.approx(2 * (1 - 1 / 6))  # both of two experts among the other two of four
    assert expected_places(8, 64, 64) == pytest.approx(8)
    assert expected_places(8, 64, 1) == pytest.approx(1)


def test_a_dispatch_takes_what_its_kernels_tables_say() -> None:
    shape = replace(SHAPE, hidden=7168, experts=64, top_k=8)
    within, across = find_topology("dgx-gb200"), find_topology("dgx-h100x4")
    us = dispatch_us(4096, shape, within.place(range(8)), within)
    received = 4096 * expected_places(8, 64, 8) * 7168 * 2
    assert received / us / 1e3 == pytest.approx((764 + 737) / 2, rel=0.06)
    own = replace(shape, experts=256)
    us = dispatch_us(4096, own, across.place(range(32)), across)
    assert 4096 * expected_places(8, 256, 4) * 7168 * 2 / us / 1e3 == pytest.approx((54.5 + 56.4) / 2, rel=0.08)


def test_tokens_that_go_to_a_node_once_and_exchanges_beside_work_take_less(pieces: LayerCosts) -> None:
    plain, once, hidden = (estimated(pieces, f"{PLAN}{more}") for more in (
        "", ",dispatcher=hybridep", ",dispatcher=hybridep,expert_overlap"))
    assert once.layers < 0.6 * plain.layers and once.others < plain.others
    assert hidden.layers < 0.7 * once.layers and hidden.hidden > 5 * once.hidden and hidden.time_us < once.time_us
    assert once.products == pytest.approx(plain.products)  # the same arithmetic


def test_graphs_take_launches_from_the_host(pieces: LayerCosts) -> None:
    none, partial, whole = (estimated(pieces, f"{PLAN},dispatcher=deepep,graphs={kind}")
                            for kind in ("none", "partial", "whole"))
    assert none.host > partial.host > whole.host == pytest.approx(0.0, abs=1e-6)


def test_experts_products_are_grouped_and_may_do_what_lies_between(pieces: LayerCosts) -> None:
    part = block_part(ParallelPlan.parse(f"{PLAN},dispatcher=hybridep"), 1)
    for linears in ("", "mxfp8"):
        shape = SHAPE.in_linears(linears)
        forward = pieces._as_run(pieces._traced(shape, part).forward, shape, part)
        assert [call.kind for call in forward if call.family is Family.GEMM].count("grouped") == 2
        apart, fused = (pieces.cost(shape, part, BlockKernels(fused_experts=each)) for each in (False, True))
        assert fused.forward.others < apart.forward.others and fused.backward.others < apart.backward.others


@pytest.mark.parametrize("module", ["mla_up_proj", "moe_act", "layernorm"])
def test_a_module_that_is_computed_again_takes_time_and_frees_memory(pieces: LayerCosts, module: str) -> None:
    text = f"{PLAN},dispatcher=hybridep"
    again = f"{text},recompute=selective,recompute_modules={module}"
    assert estimated(pieces, again).time_us > estimated(pieces, text).time_us
    kept, less = (kept_of(ParallelPlan.parse(each), SHAPE, pieces, 0)[0] for each in (text, again))
    tokens = SHAPE.seq
    least = {"mla_up_proj": 16 * (192 + 192 + 128) * 2, "moe_act": 4 * 1024 * 2, "layernorm": 2 * 2048 * 2}[module]
    assert kept - less >= 0.99 * 4 * tokens * least


def test_weights_in_8_bits_alone_take_two_bytes_less(pieces: LayerCosts) -> None:
    shape = SHAPE.in_linears("mxfp8")
    both, alone = (fullest_of(ParallelPlan.parse(f"{PLAN}{more}"), shape, pieces).account.parameters
                   for more in ("", ",fp8_parameters"))
    assert both - alone == pytest.approx(2 * 4 * SHAPE.block_parameters(1, 16), rel=1e-6)


def test_a_prediction_module_counts_as_a_layer_where_the_loss_does() -> None:
    deep = replace(SHAPE, layers=61, predictions=1)
    plan = ParallelPlan.parse("dp=1,pp=4,chunks=4,schedule=interleaved,microbatches=8,loss_layer")
    counts = [sum(chunk) for chunks in zip(*spread(plan, deep), strict=True) for chunk in chunks]
    assert counts == [4] * 15 + [2]  # Et*4|(t*4|)*14tmL: one block and the module on the last
    layout = "|".join(["Etttt", *["tttt"] * 14, "tmL"])
    assert f"--pipeline-model-parallel-layout {layout}" in exported(plan, deep, Framework.MEGATRON)


def test_attention_takes_what_cudnn_publishes() -> None:
    for way, tflops in (("forward", 1324), ("backward", 1083)):
        (call,) = attention(f"cudnn_{way}", 1, 128, 128, 4096, 4096, 192, 128, "bf16", causal=True)
        us = float(price([call], device("gb200")).times_us[0])
        assert call.flops / us / 1e6 == pytest.approx(tflops, rel=0.05)
        narrow = float(price([replace(call, dtype="fp8")], device("gb200")).times_us[0])
        assert 1.1 < us / narrow < 1.6


@pytest.mark.parametrize(("text", "why"), [
    ("recompute=selective,recompute_modules=head", "none of a block's modules"),
    ("recompute_modules=mlp", "recompute=selective too"), ("expert_overlap", "ep=2 or more"),
    ("ep=2,dp=2,pp=2,expert_overlap", "interleaved"), ("dispatcher=letters", "alltoall or deepep or hybridep")])
def test_what_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        ParallelPlan.parse(text)


def test_megatron_alone_has_these_and_they_are_its_arguments() -> None:
    plan = ParallelPlan.parse(f"{PLAN},dispatcher=hybridep,expert_overlap,fused_experts,graphs=whole,fp8_attention,"
                              "recompute=selective,recompute_modules=mlp+moe_act")
    assert ParallelPlan.parse(str(plan)) == plan
    assert frameworks_of(plan, SHAPE) == (Framework.MEGATRON,)
    for argument in ("--moe-flex-dispatcher-backend hybridep", "--overlap-moe-expert-parallel-comm",
                     "--cuda-graph-impl full_iteration", "--recompute-modules mlp moe_act"):
        assert argument in exported(plan, SHAPE, Framework.MEGATRON)


@pytest.mark.parametrize(("word", "needs"), [
    ("dispatcher=deepep", "experts"), ("fused_experts", "experts"), ("fp8_parameters", "--linears fp8"),
    ("recompute=selective,recompute_modules=moe_act", "experts"),
    ("recompute=selective,recompute_modules=mla_up_proj", "latent attention")])
def test_words_of_what_a_model_has_not_are_refused(word: str, needs: str) -> None:
    dense = TransformerShape(2, 256, 4, 4, 1024, 1000, 128)
    with pytest.raises(PlanError, match=f"{needs}.*leave it out"):
        check_decoder_plan(ParallelPlan.parse(f"dp=8,microbatches=1,{word}"), dense, find_topology("dgx-h100x8"))


WIDE = TransformerShape(2, 4096, 32, 8, 14_336, 128_256, 4096, gated=True, rms=True, bias=False, rotary=True)
ROUTED = replace(WIDE, ffn=1024, experts=8, top_k=2)
PART = TransformerPart(Piece.BLOCK, 1)


@pytest.mark.parametrize(("kind", "name"), [
    ("fp8", "a100-sxm-80g"), ("mxfp8", "h100-sxm"), ("nvfp4", "h200-sxm"), ("int3", "b200")])
def test_a_type_that_a_device_lacks_is_refused(kind: str, name: str) -> None:
    with pytest.raises(PlanError, match=kind):
        narrow_type(kind, device(name))
    # Hopper's fp8 products take rows of both operands alone.
    assert [narrow_type("fp8", device(each)).copies for each in ("h100-sxm", "b200")] == [2, 1]


@pytest.mark.parametrize("shape", [WIDE, ROUTED, replace(WIDE, flash=False)])
def test_linear_layers_alone_become_narrower_and_do_the_same_arithmetic(
        pieces: LayerCosts, shape: TransformerShape) -> None:
    kind, traced = narrow_type("fp8", pieces.device), pieces._traced(shape, PART)
    for calls, products, casts in ((traced.forward, 4, 3), (traced.backward, 8, 4)):
        found = narrowed(calls, shape, kind)
        narrow = [call for call in found if call.family is Family.GEMM and call.dtype == "fp8"]
        # Of four layers' inputs two are cast by the norm before them, of experts' both where tokens are gathered.
        assert len(narrow) == products and sum(call.kind == "cast" for call in found) in (casts, casts - 1)
        flops = [sum(call.flops for call in each if call.family is Family.GEMM) for each in (found, calls)]
        assert flops[0] == flops[1]
        if shape.experts:
            assert all(8 not in call.dims[1:] for call in narrow)  # the router's stay as they are
            assert {call.dims[0] for call in narrow} == {1, 8}


def test_narrower_is_faster_and_keeps_less(pieces: LayerCosts) -> None:
    kinds = ("", "fp8", "mxfp8", "nvfp4")
    work = [pieces.cost(WIDE.in_linears(kind), PART) for kind in kinds]
    forward, backward = ([getattr(each, way).products for each in work] for way in ("forward", "backward"))
    assert forward[0] > forward[1] >= forward[2] > forward[3] and backward[0] > backward[1] >= backward[2] > backward[3]
    assert work[0].forward.others < work[1].forward.others  # casts are not free
    kept = [pieces.saved_bytes(WIDE.in_linears(kind), PART) for kind in kinds]
    assert kept[0] > kept[2] > kept[1] > kept[3] > 0
    state = [pieces.optimizer(WIDE.in_linears(kind), PART).us for kind in ("", "fp8")]
    assert state[0] < state[1] < 1.2 * state[0]
