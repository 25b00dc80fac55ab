"""Hugging Face's Whisper learns to transcribe: a convolution over frames, an encoder, a decoder of labels."""

from collections.abc import Callable

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

MELS, WORDS = 40, 500


def build(batch: int = 3, frames: int = 120, labels: int = 14) -> Callable[[], None]:
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=WORDS, num_mel_bins=MELS, d_model=96, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=288, decoder_ffn_dim=288, max_source_positions=frames // 2,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        sound, text = torch.randn(batch, MELS, frames), torch.randint(3, WORDS, (batch, labels))
        loss = model(input_features=sound, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
