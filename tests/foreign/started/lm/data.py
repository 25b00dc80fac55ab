import torch


def batches(batch: int, seq: int, vocabulary: int):
    while True:
        yield torch.randint(vocabulary, (batch, seq))
