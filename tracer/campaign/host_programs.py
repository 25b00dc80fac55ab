"""Small training programs of many kinds of operations, with which a host is calibrated.

They compute almost nothing, so that a step's time is the host's. They cover the ways in which host time differs:
modules and plain functions; optimizers with loops, lists or one kernel; views, random numbers, look-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], object]
Build = Callable[[str], Step]
BATCH, LONG, WIDTH, WORDS = 2, 16, 32, 50  # chosen: so small that a host's calls take longer than its arithmetic


def _trained(model: nn.Module, loss: Callable[[], Tensor], optimizer: Any) -> Step:
    """Return a step that clears gradients and runs forward, backward and optimizer."""
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def _stack(parts: Iterable[nn.Module], device: str) -> nn.Sequential:
    return nn.Sequential(*parts).to(device)


def _layers_sgd(device: str) -> Step:
    model = _stack([nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)],
                   device)
    x, y = torch.randn(BATCH, WIDTH, device=device), torch.randn(BATCH, 4, device=device)
    return _trained(model, lambda: nn.functional.mse_loss(model(x), y),
                    torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))


def _layers_adam_loop(device: str) -> Step:
    parts = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    model = _stack(parts, device)
    x = torch.randn(BATCH, WIDTH, device=device)
    return _trained(model, lambda: model(x).square().mean(), torch.optim.Adam(model.parameters(), 1e-3, foreach=False))


def _layers_fused(device: str) -> Step:
    parts = [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH))]
    model = _stack(parts, device)
    x, y = torch.randn(BATCH, WIDTH, device=device), torch.randint(WIDTH, (BATCH,), device=device)
    return _trained(model, lambda: nn.functional.cross_entropy(model(x), y),
                    torch.optim.AdamW(model.parameters(), 1e-3, fused=True))


def _convolutions(device: str) -> Step:
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    model = _stack([nn.Conv2d(3, 4, 3, stride=2), nn.MaxPool2d(2), *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                    nn.Linear(4, 5)], device)
    x, y = torch.randn(BATCH, 3, 16, 16, device=device), torch.randint(5, (BATCH,), device=device)
    return _trained(model, lambda: nn.functional.cross_entropy(model(x), y),
                    torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4))


def _residual_images(device: str) -> Step:
    first = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
    norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(4))
    model = nn.ModuleList([first, norms]).to(device)
    x = torch.randn(BATCH, 4, 8, 8, device=device)

    def loss() -> Tensor:
        found = x
        for convolution, norm in zip(first, norms, strict=True):
            found = found + nn.functional.gelu(norm(convolution(found)))
        return nn.functional.avg_pool2d(found, 2).mean()

    return _trained(model, loss, torch.optim.AdamW(model.parameters(), 1e-3, foreach=True))


def _depthwise_images(device: str) -> Step:
    deep = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(3)).to(device)
    wide = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3)).to(device)
    out = nn.Conv2d(16, 3, 1).to(device)
    x = torch.randn(BATCH, 8, 8, 8, device=device)
    model = nn.ModuleList([deep, wide, out])

    def loss() -> Tensor:
        found = x
        for one, other in zip(deep, wide, strict=True):
            found = other(nn.functional.hardswish(one(found)))
        small = nn.functional.max_pool2d(found, 2)
        up = nn.functional.interpolate(small, scale_factor=2, mode="nearest")
        return torch.sigmoid(out(torch.cat([found, up], 1))).mean()

    return _trained(model, loss, torch.optim.RMSprop(model.parameters(), 1e-3, foreach=True))


def _encoder_layers(device: str) -> Step:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, dropout=0.1)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    x = torch.randn(BATCH, LONG, WIDTH, device=device)
    return _trained(model, lambda: model(x).mean(), torch.optim.AdamW(model.parameters(), 1e-3, foreach=True))


def _attention_by_hand(device: str) -> Step:
    layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "qkv": nn.Linear(WIDTH, 3 * WIDTH),
                                          "out": nn.Linear(WIDTH, WIDTH)}) for _ in range(3)).to(device)
    x = torch.randn(BATCH, LONG, WIDTH, device=device)
    mask = torch.ones(LONG, LONG, device=device).tril() == 0

    def loss() -> Tensor:
        found = x
        for layer in layers:
            q, k, v = (part.view(BATCH, LONG, 4, -1).transpose(1, 2)
                       for part in layer["qkv"](layer["norm"](found)).split(WIDTH, 2))
            scores = (q @ k.transpose(-2, -1) / 3.0).masked_fill(mask, float("-inf"))
            mixed = torch.softmax(scores, -1) @ v
            found = found + layer["out"](mixed.transpose(1, 2).reshape(BATCH, LONG, WIDTH))
        return found.pow(2).mean()

    return _trained(layers, loss, torch.optim.AdamW(layers.parameters(), 1e-3, foreach=True))


def _decoder(device: str) -> Step:
    names = ("q", "k", "v", "o", "up", "gate", "down")
    layers = nn.ModuleList(nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names})
                           for _ in range(2))
    words = nn.Embedding(WORDS, WIDTH)
    model = nn.ModuleList([layers, words]).to(device)
    scale = nn.Parameter(torch.ones(WIDTH, device=device))
    tokens = torch.randint(WORDS, (BATCH, LONG + 1), device=device)
    turn = torch.randn(LONG, 8, device=device)

    def norm(x: Tensor) -> Tensor:
        return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def turned(x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return x * turn.cos() + torch.cat([-other, one], -1) * turn.sin()

    def loss() -> Tensor:
        found = words(tokens[:, :-1])
        for layer in layers:
            x = norm(found)
            q, k, v = (layer[name](x).view(BATCH, LONG, 4, 8).transpose(1, 2) for name in ("q", "k", "v"))
            mixed = nn.functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
            found = found + layer["o"](mixed.transpose(1, 2).contiguous().view(BATCH, LONG, WIDTH))
            x = norm(found)
            found = found + layer["down"](nn.functional.silu(layer["gate"](x)) * layer["up"](x))
        logits = found @ words.weight.t()
        return nn.functional.cross_entropy(logits.view(-1, WORDS), tokens[:, 1:].reshape(-1))

    return _trained(model, loss, torch.optim.AdamW([*model.parameters(), scale], 1e-3, foreach=True))


def _lstm_words(device: str) -> Step:
    words, cell, out = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WORDS)
    model = nn.ModuleList([words, cell, out]).to(device)
    tokens = torch.randint(WORDS, (BATCH, 8), device=device)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(out(cell(words(tokens))[0]).flatten(0, 1), tokens.flatten())

    optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _gru_loop(device: str) -> Step:
    cell, out = nn.GRUCell(WIDTH, WIDTH).to(device), nn.Linear(WIDTH, 3).to(device)
    x = torch.randn(8, BATCH, WIDTH, device=device)

    def loss() -> Tensor:
        state, found = torch.zeros(BATCH, WIDTH, device=device), []
        for at in range(8):
            state = cell(x[at], state)
            found.append(out(state))
        return nn.functional.smooth_l1_loss(torch.stack(found), torch.zeros(8, BATCH, 3, device=device))

    model = nn.ModuleList([cell, out])
    return _trained(model, loss, torch.optim.SGD(model.parameters(), 0.01, foreach=True))


def _tables(device: str) -> Step:
    tables = nn.ModuleList(nn.EmbeddingBag(WORDS, 16, mode="sum") for _ in range(5))
    dense, top = nn.Linear(8, 16), nn.Linear(16 + 15, 1)
    model = nn.ModuleList([tables, dense, top]).to(device)
    numbers, bags = torch.randn(4, 8, device=device), torch.randint(WORDS, (5, 4, 3), device=device)
    clicked = torch.randint(2, (4, 1), device=device).float()
    row, column = torch.tril_indices(6, 6, -1, device=device)

    def loss() -> Tensor:
        own = torch.relu(dense(numbers))
        every = torch.stack([own, *(table(bag) for table, bag in zip(tables, bags, strict=True))], 1)
        crossed = torch.bmm(every, every.transpose(1, 2))[:, row, column]
        return nn.functional.binary_cross_entropy_with_logits(top(torch.cat([own, crossed], 1)), clicked)

    return _trained(model, loss, torch.optim.Adagrad(model.parameters(), 0.01, foreach=True))


def _experts(device: str) -> Step:
    experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    router = nn.Linear(WIDTH, 4)
    model = nn.ModuleList([experts, router]).to(device)
    x = torch.randn(LONG, WIDTH, device=device)

    def loss() -> Tensor:
        weights, chosen = torch.softmax(router(x), -1).topk(2, -1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            mine = (chosen == number).to(x.dtype)
            found = found + expert(x) * (weights * mine).sum(-1, keepdim=True)
        order = chosen[:, 0].argsort()
        return found.index_select(0, order).abs().mean()

    return _trained(model, loss, torch.optim.AdamW(model.parameters(), 1e-3, foreach=True))


def _autocast_layers(device: str) -> Step:
    parts = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    model = _stack(parts, device)
    x = torch.randn(BATCH, WIDTH, device=device)

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return nn.functional.l1_loss(model(x).float(), x)

    return _trained(model, loss, torch.optim.AdamW(model.parameters(), 1e-3, foreach=True))


def _reshaping(device: str) -> Step:
    model = nn.Linear(WIDTH, WIDTH).to(device)
    x, index = torch.randn(BATCH, LONG, WIDTH, device=device), torch.randint(LONG, (BATCH, LONG, 8), device=device)

    def loss() -> Tensor:
        found = torch.einsum("blw,wv->blv", x, model.weight) + model.bias
        left, right = found.split([8, WIDTH - 8], -1)
        taken = torch.where(left > 0, left, 0.1 * left).gather(1, index).cumsum(1).clamp(-3, 3)
        padded = nn.functional.pad(right, (0, 8)).permute(0, 2, 1).contiguous().flip(1)
        return taken.norm() + padded.exp().log1p().std() + found.unsqueeze(1).expand(-1, 2, -1, -1).amax((-1, -2)).sum()

    return _trained(model, loss, torch.optim.NAdam(model.parameters(), 1e-3, foreach=True))


def _no_modules(device: str) -> Step:
    weights = [torch.randn(WIDTH, WIDTH, device=device, requires_grad=True) for _ in range(6)]
    x = torch.randn(BATCH, WIDTH, device=device)

    def step() -> None:
        found = x
        for weight in weights:
            found = torch.tanh(found @ weight) * 0.5 + found
        gradients = torch.autograd.grad(found.sum(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=1e-4)

    return step


PROGRAMS: dict[str, Build] = {build.__name__.removeprefix("_"): build for build in (
    _layers_sgd, _layers_adam_loop, _layers_fused, _convolutions, _residual_images, _depthwise_images,
    _encoder_layers, _attention_by_hand, _decoder, _lstm_words, _gru_loop, _tables, _experts, _autocast_layers,
    _reshaping, _no_modules)}
"""Builders by name; each makes a step that trains on a device."""
