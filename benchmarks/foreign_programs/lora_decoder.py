"""Low-rank adapters on every projection of a frozen Qwen2 of Hugging Face."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

WORDS = 640


class Adapted(nn.Module):
    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + 2.0 * self.up(self.down(x))


def build(batch: int = 3, seq: int = 46, rank: int = 10) -> Callable[[], None]:
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=WORDS, hidden_size=104, intermediate_size=272, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, use_cache=False)).train()
    model.requires_grad_(False)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, Adapted):
                setattr(module, name, Adapted(child, rank))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)

    def step() -> None:
        tokens = torch.randint(WORDS, (batch, seq))
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
