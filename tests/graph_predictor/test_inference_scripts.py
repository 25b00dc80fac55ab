"""No-grad steps of programs of one's own: prefill, decode over a cache of one's own, caches and generate() of
transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from said import Run

OWN = '''
import torch
import torch.nn.functional as F


def made(batch, new, tokens=2048, width=512, heads=8):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    qkv, out = torch.nn.Linear(width, 3 * width, device=device), torch.nn.Linear(width, width, device=device)
    keys, values = torch.zeros(2, batch, heads, tokens, width // heads, device=device)
    x, at = torch.zeros(batch, new, width, device=device), torch.arange(new, device=device)
    mask = torch.arange(tokens, device=device)[None] <= at[:, None]

    @torch.inference_mode()
    def step():
        q, k, v = qkv(x).view(batch, new, 3, heads, -1).permute(2, 0, 3, 1, 4)
        keys[:, :, at], values[:, :, at] = k, v
        found = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        y = x + out(found.transpose(1, 2).reshape(batch, new, width))
        return torch.multinomial(y[:, -1].softmax(-1), 1)

    return step


def decode(batch=8):
    return made(batch, 1)


def prefill(batch=8):
    return made(batch, 512)
'''
GENERATED = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

CONFIG = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=500)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate(batch=2):
    model = LlamaForCausalLM(CONFIG).to(DEVICE).eval()
    words = torch.randint(3, 500, (batch, 16), device=DEVICE)
    return lambda: model.generate(words, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)


def static(batch=2):
    model, cache = LlamaForCausalLM(CONFIG).to(DEVICE).eval(), StaticCache(config=CONFIG, max_cache_len=64)
    words = torch.randint(3, 500, (batch, 1), device=DEVICE)

    @torch.no_grad()
    def step():
        out = model(words, past_key_values=cache, use_cache=True, cache_position=torch.tensor([16], device=DEVICE))
        return out.logits[:, -1].argmax(-1)

    return step
'''


@pytest.mark.slow
def test_prefill_and_decode_over_a_cache_of_one_s_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    decode, prefill = (run("predict", f"{path}:{name}", "--device", "h100-sxm", "--json").json
                       for name in ("decode", "prefill"))
    # Both have as many operations, so that the host is alike and what the device does is not.
    assert 0.0 < decode["gpu_active_us"] < prefill["gpu_active_us"]
    assert decode["families_us"]["attention"] > 0


@pytest.mark.slow
def test_static_caches_and_generate_of_transformers(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path, out = tmp_path / "generated.py", tmp_path / "out.foretrace"
    path.write_text(GENERATED)
    assert run("predict", f"{path}:static", "--device", "h100-sxm", "--json").json["gpu_active_us"] > 0
    # Whether an answer has ended is a value, which shapes do not have.
    done = run("predict", f"{path}:generate", "--device", "h100-sxm")
    assert done.code == 2 and "--selected 0.5" in done.err
    assert run("predict", f"{path}:generate", "--device", "h100-sxm", "--selected", "0.5", "--json").code == 0
    assert run("trace", f"{path}:generate", "--device", "h100-sxm", "--selected", "0.5", "-o", out).code == 0
    assert run("predict", out, "--json").json["gpu_active_us"] > 0
