"""Decoders with state-space mixers: their sizes, their kernels' time, their memory and what ranks exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graph_predictor.comm.traffic import Pass, of_block
from kernel_models.collectives import CollectiveKind
from kernel_models.collectives.topology import find_topology
from kernel_models.device import find_device
from planner.parallel.decoder import check_decoder_plan, decoder_of_config
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.plan_costs import plan_calls
from planner.parallel.published_configs import CONFIGS
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import SCAN, Piece, StateSpace, TransformerPart, TransformerShape

SMALL: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2, "expand": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2,
              "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_d_ssm": 64},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 32,
                         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "head_dim": 16,
                   "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
}
COMMON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 96, "vocab_size": 200, "tie_word_embeddings": False}


def small(kind: str) -> TransformerShape:
    return decoder_of_config({"model_type": kind, **COMMON, **SMALL[kind]}, kind, kind, ["seq=64"]).shape


@pytest.mark.parametrize("kind", SMALL)
def test_parameters_are_those_of_transformers_own_model(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in mapping:
        pytest.skip(f"this transformers has no {kind}")
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(mapping[kind](**{**COMMON, **SMALL[kind]}))
    except (KeyError, ValueError, TypeError):
        pytest.skip("this transformers names the layers' kinds otherwise")
    assert small(kind).parameters == sum(each.numel() for each in model.parameters())


def test_a_traced_block_has_the_parameters_that_are_counted() -> None:
    pytest.importorskip("torch")
    from tracer.shape_only.transformer_parts import Block

    for kind in SMALL:
        for block in small(kind).kinds:
            for tp in (1, 2) if kind != "granitemoehybrid" and kind != "falcon_h1" else (1,):
                part = TransformerPart(Piece.BLOCK, 1, tp)
                made = sum(each.numel() for each in Block(block, part).parameters())
                # Norms after the recurrence are all that has a parameter more or less where ranks share heads.
                assert made == block.block_parameters(tp)


def test_recurrence_meets_attention_where_published() -> None:
    """As quick as FlashAttention-2 from about 2,048 tokens on, 6 times at 16,384, on an A100 (Dao and Gu, 2024, section
    9.3): heads of 64, a state of 64."""
    pytest.importorskip("torch")
    pieces = LayerCosts(find_device("a100-sxm-80g"))
    attention = TransformerShape(1, 2048, 32, 32, 0, 1000, 2048, head_size=64, norms=1, rms=True, bias=False,
                                 flash_version=2)
    mixer = replace(attention, attends=False, state=StateSpace(64, 64, 64))
    ratio = {}
    for seq in (1024, 2048, 4096, 16_384):
        part, us = TransformerPart(Piece.BLOCK, 16_384 // seq), []
        for shape in (attention, mixer):
            priced = pieces.priced(replace(shape, seq=seq), part)
            us.append(sum(float(priced.times_us[row]) for row, call in enumerate(priced.index)
                          if SCAN in priced.calls[call].flags or priced.calls[call].family.value == "attention"))
        ratio[seq] = us[0] / us[1]
    assert ratio[1024] < 0.8 < 1.2 < ratio[4096] and 0.6 < ratio[2048] < 1.4
    assert ratio[16_384] == pytest.approx(6, rel=0.25)


def test_time_and_memory_of_a_mixer_grow_with_tokens_and_not_with_their_square(hopper: LayerCosts) -> None:
    pytest.importorskip("torch")
    mixer = next(kind for kind in decoder_of_config(CONFIGS["nemotron-h-8b"], "x", "x").shape.kinds if kind.state)
    part = TransformerPart(Piece.BLOCK, 1)
    short, long = (hopper.cost(replace(mixer, seq=seq), part) for seq in (8192, 32_768))
    assert long.forward.us / short.forward.us == pytest.approx(4, rel=0.05)
    assert 1.6 < short.backward.us / short.forward.us < 3
    kept = [hopper.saved_bytes(replace(mixer, seq=seq), part) for seq in (8192, 16_384)]
    assert kept[1] / kept[0] == pytest.approx(2, rel=0.01)
    # The interval is wider than that of a block whose kernels were measured.
    assert short.forward.high / short.forward.low > 1.2


def test_parts_of_a_block_decide_what_tensor_parallel_ranks_reduce() -> None:
    shape = decoder_of_config(CONFIGS["nemotron-h-8b"], "x", "x").shape
    plan = ParallelPlan(tp=2, cp=2, dp=2, sequence_parallel=True)
    calls = plan_calls(plan, shape, find_topology("dgx-h100x1"))
    for row, kind in enumerate(shape.kinds):
        assert sum(count for _, count in calls.of[(row, "block forward")]) == 2  # one part: a gather and a scatter
        there = [calls.calls[at] for at, _ in calls.of[(row, "context forward")]]
        exchanged = [call.payload_bytes for call in there if call.kind is CollectiveKind.ALL_TO_ALL]
        sizes = [kind.state.projected, kind.state.inner] if kind.state else []
        assert exchanged == [shape.seq // 2 * (size // 2) * 2 for size in sizes]
    both = of_block(1.0, sequence_parallel=False, mixed=(3.0, 2.0))
    sent = [each for each in both if each.kind is CollectiveKind.ALL_TO_ALL and each.dimension == "cp"]
    assert [each.during for each in sent] == [Pass.FORWARD] * 2 + [Pass.BACKWARD] * 2


def test_groups_and_heads_limit_how_a_mixer_is_split() -> None:
    shape, on = decoder_of_config(CONFIGS["nemotron-h-8b"], "x", "x").shape, find_topology("dgx-h100x32")
    check_decoder_plan(ParallelPlan(tp=8, cp=8), shape, on)
    for plan, says in ((ParallelPlan(tp=16), "8 groups of a state-space mixer cannot be split evenly by tp=16"),
                       (ParallelPlan(tp=8, cp=32), "128 heads of a state-space mixer cannot be split")):
        with pytest.raises(PlanError, match=says):
            check_decoder_plan(plan, shape, on)
