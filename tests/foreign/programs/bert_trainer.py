"""Fine-tune a small BERT classifier with the Hugging Face Trainer, on random tokens."""

import argparse
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

VOCABULARY = 2000


class Sentences(Dataset):
    def __init__(self, count: int, seq: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(5, VOCABULARY, (count, seq), generator=generator)
        self.labels = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[index]}


def make_model() -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(
        vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=3, num_attention_heads=6, intermediate_size=768,
        max_position_embeddings=512, num_labels=3))


def build(batch: int = 4, seq: int = 48):
    """What the Trainer does in a step: forward, backward, clipping, AdamW, a schedule."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device).train()
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
                                  lr=5e-5, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 100)
    data = Sentences(batch, seq)

    def step() -> None:
        items = [data[index] for index in range(batch)]
        inputs = {key: torch.stack([item[key] for item in items]).to(device) for key in items[0]}
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=48)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=options.batch, max_steps=options.steps, weight_decay=0.01,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available())
        data = Sentences(options.batch * 40, options.seq)
        Trainer(model=make_model(), args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
