"""Decoders as numbers: parameters by formula are those of the modules that are traced, and the work is what it should
be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("torch")

import torch

from graph_predictor.synthesis.step import calls_by_operation
from kernel_models.device import device, shape_device
from kernel_models.op_call import Family, OpCall
from tracer.graph import ExecutionGraph, Phase
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import Latent, Piece, TransformerPart, TransformerShape
from tracer.shape_only.transformer_parts import Block, trace_part

PLAIN = TransformerShape(1, 256, 8, 4, 512, 512, 128, gated=True, rms=True, bias=False, rotary=True)
LATENT = replace(PLAIN, latent=Latent(96, 64, 32, 16, 24))
ROUTED = replace(PLAIN, experts=8, top_k=2, ffn=128)
SHAPES = {
    "grouped queries": PLAIN,
    "head size apart, normalised queries": replace(PLAIN, head_size=64, qk_norm=True),
    "biases of queries, keys and values alone": replace(PLAIN, qkv_bias=True),
    "LayerNorm, biases, no gate": replace(PLAIN, gated=False, rms=False, bias=True, rotary=False),
    "norms on both sides": replace(PLAIN, norms=4), "one norm for both": replace(PLAIN, norms=1),
    "latent attention": LATENT, "latent attention, whole queries": replace(LATENT, latent=Latent(0, 64, 32, 16, 24)),
    "experts": ROUTED, "experts with biases": replace(ROUTED, bias=True),
    "shared experts": replace(ROUTED, shared_ffn=256), "prediction module": replace(ROUTED, merges=True),
}
H200 = shape_device(device("h200-sxm"))
PARTS = [TransformerPart(Piece.BLOCK, 1), TransformerPart(Piece.BLOCK, 1, tp=2, ep=4),
         TransformerPart(Piece.BLOCK, 1, tp=4, ep=2, sequence_parallel=True, etp=1)]


@cache
def traced(shape: TransformerShape, part: TransformerPart) -> ExecutionGraph:
    return trace_part(shape, part, H200)


def calls(shape: TransformerShape, part: TransformerPart, *, backward: bool = False) -> list[OpCall]:
    """Device work of one direction of a part."""
    graph = traced(shape, part)
    rows = [row for row in range(len(graph.ops)) if bool(graph.ops.phase[row] == Phase.BACKWARD) is backward]
    return [call for of in calls_by_operation(graph, rows).values() for call in of]


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_have_their_modules_parameters_and_are_traced_both_ways(name: str) -> None:
    shape = SHAPES[name]
    for part in PARTS:
        with torch.device("meta"):
            block = Block(shape, part)
        assert sum(p.numel() for p in block.parameters()) == shape.block_parameters(part.tp, part.ep, part.etp)
    products = [sum(call.flops for call in calls(shape, PARTS[-1], backward=back) if call.family is Family.GEMM)
                for back in (False, True)]
    # Each product has two in backward, the first one too; what adds a bias to a product counts with it.
    assert products[1] == pytest.approx(2 * products[0], rel=0.01)


def attention(shape: TransformerShape, part: TransformerPart = PARTS[0], *, backward: bool = False) -> OpCall:
    (found,) = (call for call in calls(shape, part, backward=backward) if call.family is Family.ATTENTION)
    return found


def test_a_window_bounds_the_attended_keys() -> None:
    full, near = attention(PLAIN), attention(replace(PLAIN, window=32))
    assert (full.dims[-1], near.dims[-1]) == (0, 32)
    assert near.flops / full.flops == pytest.approx((32 * 33 / 2 + 96 * 32) / (128 * 129 / 2))
    assert attention(replace(PLAIN, window=128)) == full
    assert attention(replace(PLAIN, window=32), backward=True).dims[-1] == 32


def test_latent_attention_has_wide_queries_and_narrow_values() -> None:
    assert attention(LATENT, TransformerPart(Piece.BLOCK, 1, tp=2)).dims[1:7] == (4, 4, 128, 128, 48, 24)
    assert LATENT.kv_width == 8 * (48 + 24)


def test_experts_are_two_grouped_products_of_the_most_loaded_ranks_rows() -> None:
    def rows(shape: TransformerShape, part: TransformerPart) -> list[tuple[int, ...]]:
        return [call.dims for call in calls(shape, part) if call.family is Family.GEMM and call.dims[0] > 1]

    # 128 tokens to 2 of 8 experts each: 32 rows an expert, whoever has it.
    assert rows(ROUTED, TransformerPart(Piece.BLOCK, 1)) == [(8, 32, 256, 256), (8, 32, 256, 128)]
    assert rows(ROUTED, TransformerPart(Piece.BLOCK, 1, ep=4)) == [(2, 128, 256, 256), (2, 128, 256, 128)]
    assert rows(replace(ROUTED, imbalance=1.5), TransformerPart(Piece.BLOCK, 1, ep=4))[0][1] == 192
    # Ranks that share their experts gather each other's tokens; ranks with experts of their own keep a quarter of them.
    shared = TransformerPart(Piece.BLOCK, 1, tp=4, ep=2, sequence_parallel=True)
    assert rows(ROUTED, shared)[0] == (4, 64, 64, 256)
    assert rows(ROUTED, replace(shared, etp=1))[0] == (4, 16, 256, 256)


def test_tied_matrices_count_once_and_modules_do_not_count() -> None:
    tied = replace(PLAIN, tied=True)
    assert PLAIN.parameters - tied.parameters == PLAIN.vocab * PLAIN.hidden
    assert tied.head_parameters() == PLAIN.head_parameters()
    assert replace(PLAIN, predictions=1).parameters == PLAIN.parameters
    assert replace(PLAIN, rotary=False).embedding_parameters() - PLAIN.embedding_parameters() == 128 * 256
    assert replace(PLAIN, rotary=False, positions=0).embedding_parameters() == PLAIN.embedding_parameters()
    assert ROUTED.parameters - ROUTED.active_parameters == 6 * 3 * 256 * 128


@pytest.mark.parametrize(("shape", "part"), [(replace(ROUTED, shared_ffn=250), PARTS[-1]),
                                             (ROUTED, TransformerPart(Piece.BLOCK, 1, ep=3))])
def test_what_does_not_divide_is_refused(shape: TransformerShape, part: TransformerPart) -> None:
    with pytest.raises(ShapeOnlyError, match="cannot be split evenly"):
        trace_part(shape, part, H200)
