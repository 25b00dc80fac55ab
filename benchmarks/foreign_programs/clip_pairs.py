"""Hugging Face's CLIP: images and texts, each pair against all others of the batch."""

from collections.abc import Callable

import torch
from transformers import CLIPConfig, CLIPModel

WORDS = 600


def build(batch: int = 5, image: int = 48, seq: int = 18) -> Callable[[], None]:
    text = {"vocab_size": WORDS, "hidden_size": 112, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": image, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=88)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), weight_decay=0.2)

    def step() -> None:
        tokens, pixels = torch.randint(3, WORDS, (batch, seq)), torch.randn(batch, 3, image, image)
        optimizer.zero_grad()
        model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
