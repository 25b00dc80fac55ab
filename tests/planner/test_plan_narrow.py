"""Linear layers in fp8 and fp4: which products become narrower, what is cast, and who has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.device import device
from kernel_models.op_call import Family
from planner.parallel.layer_costs import LayerCosts, narrow_type, narrowed
from tracer.parallel_plan import PlanError
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

SHAPE = TransformerShape(2, 4096, 32, 8, 14_336, 128_256, 4096, gated=True, rms=True, bias=False, rotary=True)
ROUTED = replace(SHAPE, ffn=1024, experts=8, top_k=2)
PART = TransformerPart(Piece.BLOCK, 1)


@pytest.fixture(scope="module")
def pieces() -> LayerCosts:
    return LayerCosts(device("b200"))


def test_a_type_that_a_device_lacks_is_refused() -> None:
    assert narrow_type("", device("a100-sxm-80g")) is None
    for kind, name in (("fp8", "a100-sxm-80g"), ("mxfp8", "h100-sxm"), ("nvfp4", "h200-sxm"), ("int3", "b200")):
        with pytest.raises(PlanError, match=kind):
            narrow_type(kind, device(name))
    hopper, blackwell = (narrow_type("fp8", device(name)) for name in ("h100-sxm", "b200"))
    assert hopper is not None and blackwell is not None
    assert (hopper.copies, blackwell.copies) == (2, 1)  # Hopper's fp8 products take rows of both operands alone


@pytest.mark.parametrize("shape", [SHAPE, ROUTED, replace(SHAPE, flash=False)])
def test_linear_layers_alone_become_narrower_and_do_the_same_arithmetic(
        pieces: LayerCosts, shape: TransformerShape) -> None:
    kind = narrow_type("fp8", pieces.device)
    assert kind is not None
    traced = pieces._traced(shape, PART)
    for calls, products, casts in ((traced.forward, 4, 3), (traced.backward, 8, 4)):
        found = narrowed(calls, shape, kind)
        narrow = [call for call in found if call.family is Family.GEMM and call.dtype == "fp8"]
        # Of four layers' inputs two are cast by the norm before them, of experts' both where tokens are gathered.
        assert len(narrow) == products and sum(call.kind == "cast" for call in found) in (casts, casts - 1)
        assert sum(call.flops for call in found if call.family is Family.GEMM) == sum(
            call.flops for call in calls if call.family is Family.GEMM)
        if shape.experts:
            assert all(8 not in call.dims[1:] for call in narrow)  # the router's stay as they are
            assert {call.dims[0] for call in narrow} == {1, 8}


def test_narrower_is_faster_and_keeps_less(pieces: LayerCosts) -> None:
    kinds = ("", "fp8", "mxfp8", "nvfp4")
    work = [pieces.cost(SHAPE.in_linears(kind), PART) for kind in kinds]
    forward, backward = ([getattr(each, way).products for each in work] for way in ("forward", "backward"))
    assert forward[0] > forward[1] >= forward[2] > forward[3] and backward[0] > backward[1] >= backward[2] > backward[3]
    assert work[0].forward.others < work[1].forward.others  # casts are not free
    kept = [pieces.saved_bytes(SHAPE.in_linears(kind), PART) for kind in kinds]
    assert kept[0] > kept[2] > kept[1] > kept[3] > 0
    state = [pieces.optimizer(SHAPE.in_linears(kind), PART).us for kind in ("", "fp8")]
    assert state[0] < state[1] < 1.2 * state[0]


def test_the_command_plans_in_fp8() -> None:
    command = ["plan", "llama", "--preset", "8b", "--gpus", "8", "--device", "h100-sxm", "--parallel",
               "dp=2,tp=4,sharding=1"]
    said = CliRunner().invoke(app, [*command, "--linears", "fp8"])
    assert said.exit_code == 0 and "linear layers in fp8" in plain(said.output)
    refused = CliRunner().invoke(app, [*command, "--linears", "nvfp4"])
    assert refused.exit_code == 2 and "do not have nvfp4" in plain(refused.output)
