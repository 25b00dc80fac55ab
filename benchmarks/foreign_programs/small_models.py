"""Small models of transformers, timm and torchvision, each in a plain loop with the optimizer that its row names.

Rows are of the libraries' own classes and architectures; only widths and depths are set, so that computing is next to
nothing. A program is named by its row: ``build(name="t5")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from timm_images import name_torchvision_operators

TOKENS = 1000
_NARROW = {"vocab_size": TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_NARROW, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A row.

    Attributes:
        library: "transformers", "timm" or "torchvision".
        model: its class or architecture there.
        optimizer: a key of ``OPTIMIZERS``.
        settings: of its configuration.
        inputs: "tokens", "sequences" (tokens to tokens), "classes" (tokens to a class), "images" or "sounds".
        clipped: whether gradients are clipped.
    """

    library: str
    model: str
    optimizer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "images"
    clipped: bool = False


def _of(library: str, inputs: str = "images") -> Callable[..., SmallModel]:
    def row(model: str, optimizer: str, clipped: bool = False, takes: str = inputs, **settings: Any) -> SmallModel:
        return SmallModel(library, model, optimizer, settings, takes, clipped)

    return row


_hf, _timm, _tv = _of("transformers", "tokens"), _of("timm"), _of("torchvision")

MODELS: dict[str, SmallModel] = {
    "t5": _hf("T5ForConditionalGeneration", "adamw", takes="sequences", vocab_size=TOKENS, d_model=64, d_kv=16,
              d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "albert": _hf("AlbertForMaskedLM", "foreach", **_NARROW, embedding_size=32),
    "roberta": _hf("RobertaForSequenceClassification", "fused", True, "classes", **_NARROW),
    "deberta": _hf("DebertaV2ForSequenceClassification", "adamw", False, "classes", **_NARROW, relative_attention=True,
                   pos_att_type=["p2c", "c2p"]),
    "mistral": _hf("MistralForCausalLM", "foreach", True, **_GROUPED),
    "qwen2": _hf("Qwen2ForCausalLM", "fused", **_GROUPED),
    "gemma2": _hf("Gemma2ForCausalLM", "adamw", True, **_GROUPED, head_dim=16),
    "mixtral": _hf("MixtralForCausalLM", "foreach", **_GROUPED, num_local_experts=4),
    "bloom": _hf("BloomForCausalLM", "sgd", vocab_size=TOKENS, hidden_size=64, n_layer=2, n_head=4),
    "xlnet": _hf("XLNetLMHeadModel", "adamw", vocab_size=TOKENS, d_model=64, n_layer=2, n_head=4, d_inner=128),
    "gpt_neox": _hf("GPTNeoXForCausalLM", "foreach", **_NARROW),
    "falcon": _hf("FalconForCausalLM", "sgd", True, **_NARROW),
    "mamba": _hf("MambaForCausalLM", "foreach", vocab_size=TOKENS, hidden_size=64, num_hidden_layers=2, state_size=8),
    "mpnet": _hf("MPNetForMaskedLM", "fused", **_NARROW),
    "funnel": _hf("FunnelForMaskedLM", "adamw", vocab_size=TOKENS, block_sizes=[1, 1], num_decoder_layers=1,
                  d_model=64, n_head=4, d_head=16, d_inner=128),
    "vit_hf": _hf("ViTForImageClassification", "foreach", takes="images", **_NARROW, image_size=32, patch_size=8),
    "swin_hf": _hf("SwinForImageClassification", "adamw", True, "images", image_size=32, patch_size=2, embed_dim=32,
                   depths=[1, 1], num_heads=[2, 4], window_size=4),
    "segformer": _hf("SegformerForImageClassification", "sgd", takes="images", hidden_sizes=[16, 32, 48, 64],
                     depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=32),
    "wav2vec2": _hf("Wav2Vec2ForSequenceClassification", "foreach", takes="sounds", **_NARROW,
                    conv_dim=[32, 32, 32], conv_stride=[5, 4, 4], conv_kernel=[10, 4, 4],
                    num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
                    mask_time_prob=0.0, layerdrop=0.0),
    "mobilenet3": _timm("mobilenetv3_small_050", "sgd"),
    "timm_convnext": _timm("test_convnext", "foreach", True),
    "timm_gn": _timm("test_efficientnet_gn", "adamw"),
    "timm_nfnet": _timm("test_nfnet", "sgd"),
    "timm_mambaout": _timm("test_mambaout", "foreach"),
    "timm_byob": _timm("test_byobnet", "fused", True),
    "mixer": _timm("mixer_s32_224", "foreach", img_size=32),
    "regnet": _timm("regnetx_002", "sgd"),
    "resmlp": _timm("resmlp_12_224", "adamw", img_size=32),
    "ghostnet": _timm("ghostnet_050", "foreach"),
    "levit": _timm("levit_128s", "fused", img_size=64, embed_dim=(32, 48, 64), num_heads=(2, 3, 4), depth=(1, 1, 1)),
    "densenet": _timm("densenet121", "sgd", growth_rate=8, block_config=(2, 3, 3, 2)),
    "edgenext": _timm("edgenext_xx_small", "adamw", True),
    "resnet18": _tv("resnet18", "sgd"),
    "mobilenet2": _tv("mobilenet_v2", "foreach"),
    "shufflenet": _tv("shufflenet_v2_x0_5", "adamw"),
    "squeezenet": _tv("squeezenet1_1", "sgd", True),
    "mnasnet": _tv("mnasnet0_5", "fused"),
    "googlenet": _tv("googlenet", "foreach", aux_logits=False, init_weights=False),
    "regnet_tv": _tv("regnet_y_400mf", "sgd", True),
    # Recorded later than those above, on another machine; none of these was at hand when a law was chosen.
    "phi": _hf("PhiForCausalLM", "adamw", **_NARROW),
    "olmo": _hf("OlmoForCausalLM", "foreach", True, **_GROUPED),
    "stablelm": _hf("StableLmForCausalLM", "sgd", **_GROUPED),
    "starcoder2": _hf("Starcoder2ForCausalLM", "fused", **_GROUPED),
    "gptj": _hf("GPTJForCausalLM", "foreach", vocab_size=TOKENS, n_embd=64, n_layer=2, n_head=4, rotary_dim=8,
                bos_token_id=1, eos_token_id=2),
    "roformer": _hf("RoFormerForMaskedLM", "adamw", True, **_NARROW),
    "convbert": _hf("ConvBertForMaskedLM", "foreach", **_NARROW),
    "mobilebert": _hf("MobileBertForMaskedLM", "sgd", True, **_NARROW, embedding_size=32, intra_bottleneck_size=32),
    "squeezebert": _hf("SqueezeBertForMaskedLM", "fused", **_NARROW, embedding_size=64),
    "marian": _hf("MarianMTModel", "adamw", False, "sequences", vocab_size=TOKENS, d_model=64, encoder_layers=2,
                  decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
                  decoder_ffn_dim=128, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1),
    "pegasus": _hf("PegasusForConditionalGeneration", "foreach", True, "sequences", vocab_size=TOKENS, d_model=64,
                   encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                   encoder_ffn_dim=128, decoder_ffn_dim=128, decoder_start_token_id=0),
    "dinov2": _hf("Dinov2ForImageClassification", "foreach", takes="images", hidden_size=64, num_hidden_layers=2,
                  num_attention_heads=4, image_size=32, patch_size=8),
    "beit": _hf("BeitForImageClassification", "adamw", takes="images", **_NARROW, image_size=32, patch_size=8),
    "poolformer": _hf("PoolFormerForImageClassification", "sgd", True, "images", hidden_sizes=[16, 32, 48, 64],
                      depths=[1, 1, 1, 1]),
    "hubert": _hf("HubertForSequenceClassification", "sgd", takes="sounds", **_NARROW, conv_dim=[32, 32, 32],
                  conv_stride=[5, 4, 4], conv_kernel=[10, 4, 4], num_feat_extract_layers=3, num_conv_pos_embeddings=16,
                  num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0),
    "timm_test_vit2": _timm("test_vit2", "adamw", True),
    "repvgg": _timm("repvgg_a0", "sgd"),
    "lcnet": _timm("lcnet_050", "foreach"),
    "dla": _timm("dla46_c", "sgd", True),
    "hardcorenas": _timm("hardcorenas_a", "adamw"),
    "pit": _timm("pit_ti_224", "foreach", img_size=64),
    "xcit": _timm("xcit_nano_12_p16_224", "fused", True, img_size=32),
    "efficientnet_tv": _tv("efficientnet_b0", "foreach"),
    # Chosen and recorded after the law was: held out.
    "codegen": _hf("CodeGenForCausalLM", "adamw", vocab_size=TOKENS, n_embd=64, n_layer=2, n_head=4, rotary_dim=8,
                   bos_token_id=1, eos_token_id=2),
    "gpt_bigcode": _hf("GPTBigCodeForCausalLM", "foreach", True, vocab_size=TOKENS, n_embd=64, n_layer=2, n_head=4,
                       n_inner=128, bos_token_id=1, eos_token_id=2),
    "cohere": _hf("CohereForCausalLM", "fused", **_GROUPED),
    "nystromformer": _hf("NystromformerForMaskedLM", "sgd", **_NARROW, num_landmarks=8, segment_means_seq_len=16),
    "layoutlm": _hf("LayoutLMForMaskedLM", "foreach", **_NARROW),
    "rembert": _hf("RemBertForMaskedLM", "adamw", True, **_NARROW, input_embedding_size=32, output_embedding_size=32),
    "ernie": _hf("ErnieForMaskedLM", "sgd", True, **_NARROW),
    "xglm": _hf("XGLMForCausalLM", "foreach", vocab_size=TOKENS, d_model=64, ffn_dim=128, num_layers=2,
                attention_heads=4),
    "m2m100": _hf("M2M100ForConditionalGeneration", "fused", False, "sequences", vocab_size=TOKENS, d_model=64,
                  encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                  encoder_ffn_dim=128, decoder_ffn_dim=128, decoder_start_token_id=2),
    "deit": _hf("DeiTForImageClassification", "adamw", takes="images", **_NARROW, image_size=32, patch_size=8),
    "convnextv2": _hf("ConvNextV2ForImageClassification", "foreach", takes="images", hidden_sizes=[16, 32, 48, 64],
                      depths=[1, 1, 1, 1]),
    "mobilevit": _timm("mobilevit_xxs", "sgd", img_size=64),
    "tinynet": _timm("tinynet_e", "foreach"),
    "semnasnet": _timm("semnasnet_050", "fused", True),
    "mobilenet3_tv": _tv("mobilenet_v3_small", "foreach"),
}
OPTIMIZERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True),
}


def build(batch: int = 2, seq: int = 16, image: int = 32, name: str = "t5") -> Callable[[], None]:
    row = MODELS[name]
    model = _model(row).train()
    optimizer = OPTIMIZERS[row.optimizer](model.parameters())
    loss_of = _loss(row, model, batch, seq, int(row.settings.get("img_size", image)))

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        if row.clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _model(row: SmallModel) -> Any:
    settings = dict(row.settings)
    name_torchvision_operators()  # transformers imports it too, where it is
    if row.library == "transformers":
        import transformers

        kind = getattr(transformers, row.model)
        return kind(kind.config_class(**settings))
    if row.library == "timm":
        import timm

        return timm.create_model(row.model, num_classes=10, **settings)
    from torchvision.models import get_model

    return get_model(row.model, weights=None, num_classes=10, **settings)


def _loss(row: SmallModel, model: Any, batch: int, seq: int, image: int) -> Callable[[], torch.Tensor]:
    def tokens() -> torch.Tensor:
        return torch.randint(3, TOKENS, (batch, seq))

    def of_tokens() -> torch.Tensor:
        given = tokens()
        return model(input_ids=given, labels=given).loss

    def of_classes() -> torch.Tensor:
        return model(input_ids=tokens(), labels=torch.randint(2, (batch,))).loss

    def of_sequences() -> torch.Tensor:
        return model(input_ids=tokens(), labels=tokens()).loss

    def of_sounds() -> torch.Tensor:
        return model(input_values=torch.randn(batch, 2000), labels=torch.randint(2, (batch,))).loss

    def of_images() -> torch.Tensor:
        found = model(torch.randn(batch, 3, image, image))
        return torch.nn.functional.cross_entropy(getattr(found, "logits", found), torch.randint(2, (batch,)))

    return {"tokens": of_tokens, "classes": of_classes, "sequences": of_sequences, "sounds": of_sounds,
            "images": of_images}[row.inputs]


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    torch.manual_seed(0)
    step = build(name=given.name)
    for _ in range(given.steps):
        step()
