"""Capture a training by Hugging Face's Trainer: python examples/hooks/trainer.py runs/trainer"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from foretrace.hooks import TrainerCapture

SENTENCES, WORDS, VOCABULARY = 4096, 32, 1000


class Sentences(torch.utils.data.Dataset):
    """Random sentences of random classes."""

    def __len__(self):
        return SENTENCES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(5, VOCABULARY, (WORDS,), generator=generator), "labels": index % 3}


def main(out):
    model = BertForSequenceClassification(BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, num_labels=3))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=60, report_to=[],
            save_strategy="no", logging_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True)
        Trainer(model, arguments, train_dataset=Sentences(),
                callbacks=[TrainerCapture(out, timed=6, stop=True)]).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="directory of the capture")
    main(parser.parse_args().out)
