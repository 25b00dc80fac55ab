"""Programs in which sizes coincide: is another size scaled rightly from one capture, or refused?

    python benchmarks/equal_sizes.py [--foreign] [--each]

Each program takes its sizes by name and is traced by shapes twice: where two or more of its sizes are equal, and again
where the one that is asked for has grown. The first trace is scaled to that size as ``predict --set`` does; the second
is the truth. An operation is off by the elements of its arguments that differ; a case is *right* within 15% of all
elements, *refused* where ``predict`` would not answer, and else *quiet*: a wrong number without a word.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tracer
from graph_predictor.prediction.scenario import EditError
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from graph_predictor.sizes.scaling import unrolled_size
from kernel_models.operation import Operation
from tracer.graph import ExecutionGraph

RIGHT = 0.15
"""Largest share of elements that may differ."""
Step = Callable[[], Any]
Builder = Callable[..., Step]


def _training(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def encoder(batch: int = 16, seq: int = 16, width: int = 48, heads: int = 4, vocabulary: int = 100) -> Step:
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(vocabulary, width), layer, nn.Linear(width, vocabulary))

    def loss() -> Tensor:
        x = torch.randint(0, vocabulary, (batch, seq))
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    return _training(model, loss)


class _Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int, written: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.written = heads, written

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(
            2, 0, 3, 1, 4).unbind(0)
        if self.written:
            mask = torch.full((tokens, tokens), -math.inf).triu(1)
            y = ((q @ k.transpose(-2, -1)) / math.sqrt(width) + mask).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(x)))


def decoder(batch: int = 8, seq: int = 64, width: int = 96, heads: int = 4, vocabulary: int = 200,
            written: bool = False, layers: int = 2, longest: int = 1024) -> Step:
    embed, places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
    blocks, head = nn.Sequential(*(_Block(width, heads, written) for _ in range(layers))), nn.Linear(width, vocabulary)
    model = nn.ModuleList([embed, places, blocks, head])

    def loss() -> Tensor:
        x = torch.randint(0, vocabulary, (batch, seq))
        logits = head(blocks(embed(x) + places(torch.arange(seq))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    return _training(model, loss)


def written_decoder(**sizes: int) -> Step:
    return decoder(written=True, **sizes)


def sequence_first(batch: int = 12, seq: int = 12, width: int = 40, vocabulary: int = 90) -> Step:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0)
    model = nn.Sequential(nn.Embedding(vocabulary, width), layer, nn.Linear(width, vocabulary))

    def loss() -> Tensor:
        x = torch.randint(0, vocabulary, (seq, batch))
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    return _training(model, loss)


def recurrent(batch: int = 12, seq: int = 12, width: int = 64, vocabulary: int = 100) -> Step:
    embed, net, head = nn.Embedding(vocabulary, 32), nn.LSTM(32, width, batch_first=True), nn.Linear(width, vocabulary)

    def loss() -> Tensor:
        x = torch.randint(0, vocabulary, (batch, seq))
        return F.cross_entropy(head(net(embed(x))[0]).flatten(0, 1), x.flatten())

    return _training(nn.ModuleList([embed, net, head]), loss)


def carried(batch: int = 32, seq: int = 20, width: int = 32, hidden: int = 40, vocabulary: int = 80) -> Step:
    """Truncated back-propagation through time: the state goes on from step to step."""
    embed, net, head = (nn.Embedding(vocabulary, width), nn.LSTM(width, hidden, batch_first=True),
                        nn.Linear(hidden, vocabulary))
    state = (torch.zeros(1, batch, hidden), torch.zeros(1, batch, hidden))

    def loss() -> Tensor:
        nonlocal state
        x = torch.randint(0, vocabulary, (batch, seq + 1))
        y, (first, second) = net(embed(x[:, :-1]), state)
        state = first.detach(), second.detach()
        return F.cross_entropy(head(y).flatten(0, 1), x[:, 1:].flatten())

    return _training(nn.ModuleList([embed, net, head]), loss)


def features(batch: int = 24, seq: int = 24, width: int = 40, classes: int = 7) -> Step:
    """A sequence of features, no integers in it but the targets."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
    head = nn.Linear(width, classes)

    def loss() -> Tensor:
        x, y = torch.randn(batch, seq, width), torch.randint(0, classes, (batch,))
        return F.cross_entropy(head(layer(x).mean(1)), y)

    return _training(nn.ModuleList([layer, head]), loss)


def regression(batch: int = 32, seq: int = 32, width: int = 20) -> Step:
    """The same without any integers."""
    below, above = nn.Linear(width, 64), nn.Linear(64, 1)

    def loss() -> Tensor:
        x = torch.randn(batch, seq, width)
        return F.mse_loss(above(F.relu(below(x)).mean(1)), torch.randn(batch, 1))

    return _training(nn.ModuleList([below, above]), loss)


def classifier(batch: int = 32, features: int = 50, hidden: int = 80, classes: int = 10) -> Step:
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return _training(model, lambda: F.cross_entropy(model(torch.randn(batch, features)),
                                                    torch.randint(0, classes, (batch,))))


def images(batch: int = 8, image: int = 32, channels: int = 16, classes: int = 10) -> Step:
    model = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
                          nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(channels, classes))
    return _training(model, lambda: F.cross_entropy(model(torch.randn(batch, 3, image, image)),
                                                    torch.randint(0, classes, (batch,))))


def sound(batch: int = 20, time: int = 20, channels: int = 24, classes: int = 6) -> Step:
    model = nn.Sequential(nn.Conv1d(8, channels, 3, padding=1), nn.GELU(), nn.Conv1d(channels, channels, 3, padding=1),
                          nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, classes))
    return _training(model, lambda: F.cross_entropy(model(torch.randn(batch, 8, time)),
                                                    torch.randint(0, classes, (batch,))))


def translation(batch: int = 6, source: int = 24, target: int = 24, width: int = 40, vocabulary: int = 80) -> Step:
    net = nn.Transformer(width, 4, 1, 1, 2 * width, 0.0, batch_first=True)
    first, second, head = (nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width),
                           nn.Linear(width, vocabulary))

    def loss() -> Tensor:
        x, y = torch.randint(0, vocabulary, (batch, source)), torch.randint(0, vocabulary, (batch, target))
        return F.cross_entropy(head(net(first(x), second(y))).flatten(0, 1), y.flatten())

    return _training(nn.ModuleList([net, first, second, head]), loss)


def graph_network(nodes: int = 48, features: int = 20, width: int = 32, classes: int = 5, edges: int = 200) -> Step:
    first, second = nn.Linear(features, width), nn.Linear(width, classes)

    def loss() -> Tensor:
        x, ends = torch.randn(nodes, features), torch.randint(0, nodes, (2, edges))
        y = F.relu(first(x))
        y = torch.zeros_like(y).index_add(0, ends[0], y[ends[1]])
        return F.cross_entropy(second(y), torch.randint(0, classes, (nodes,)))

    return _training(nn.ModuleList([first, second]), loss)


def contrastive(batch: int = 16, seq: int = 16, width: int = 48, vocabulary: int = 60) -> Step:
    left, right = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)

    def loss() -> Tensor:
        a, b = (torch.randint(0, vocabulary, (batch, seq)) for _ in range(2))
        return F.cross_entropy(left(a).mean(1) @ right(b).mean(1).t(), torch.arange(batch))

    return _training(nn.ModuleList([left, right]), loss)


def bags(batch: int = 32, each: int = 32, width: int = 16, dense: int = 13) -> Step:
    tables = nn.ModuleList(nn.EmbeddingBag(1000, width, mode="sum") for _ in range(3))
    below, above = nn.Linear(dense, width), nn.Linear(4 * width, 1)

    def loss() -> Tensor:
        found = [table(torch.randint(0, 1000, (batch, each))) for table in tables]
        return above(torch.cat([below(torch.randn(batch, dense)), *found], 1)).mean()

    return _training(nn.ModuleList([tables, below, above]), loss)


def _language(model: nn.Module, batch: int, seq: int, vocabulary: int, **inputs: Tensor) -> Step:
    """A model of ``transformers`` that takes its labels."""
    def loss() -> Tensor:
        x = torch.randint(1, vocabulary, (batch, seq))
        found: Tensor = model(input_ids=x, labels=inputs.get("labels", x)).loss
        return found

    return _training(model, loss)


def gpt2(batch: int = 4, seq: int = 24, width: int = 96, heads: int = 4) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel
    return _language(GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=2, n_head=heads, vocab_size=300,
                                                n_positions=512)), batch, seq, 300)


def llama(batch: int = 4, seq: int = 24, width: int = 96, heads: int = 4, shared: int = 2) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM
    return _language(LlamaForCausalLM(LlamaConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=shared,
        intermediate_size=2 * width, vocab_size=300)), batch, seq, 300)


def bert(batch: int = 4, seq: int = 24, width: int = 96, heads: int = 4) -> Step:
    from transformers import BertConfig, BertForMaskedLM
    return _language(BertForMaskedLM(BertConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=2 * width,
        vocab_size=300)), batch, seq, 300)


def t5(batch: int = 4, seq: int = 24, target: int = 16, width: int = 96, heads: int = 4) -> Step:
    from transformers import T5Config, T5ForConditionalGeneration
    model = T5ForConditionalGeneration(T5Config(
        d_model=width, d_kv=width // heads, num_layers=2, num_heads=heads, d_ff=2 * width, vocab_size=300,
        decoder_start_token_id=0, pad_token_id=0))
    return _language(model, batch, seq, 300, labels=torch.randint(1, 300, (batch, target)))


def vit(batch: int = 4, image: int = 32, width: int = 96, heads: int = 4, classes: int = 10) -> Step:
    from transformers import ViTConfig, ViTForImageClassification
    model = ViTForImageClassification(ViTConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=2 * width,
        image_size=image, patch_size=8, num_labels=classes))

    def loss() -> Tensor:
        found: Tensor = model(torch.randn(batch, 3, image, image), labels=torch.randint(0, classes, (batch,))).loss
        return found

    return _training(model, loss)


@dataclass(frozen=True)
class Case:
    """A program at sizes that coincide, and the size that is asked for."""

    program: Builder
    sizes: dict[str, int]
    name: str
    new: int
    said: str = ""
    """How the size is called, where not as the program does."""

    @property
    def label(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.program.__name__} {sizes}: {self.said or self.name}={self.sizes[self.name]}:{self.new}"


def _case(program: Builder, name: str, new: int, said: str = "", **sizes: int) -> Case:
    return Case(program, sizes, name, new, said)


CASES = (
    _case(encoder, "seq", 64, batch=16, seq=16),
    _case(encoder, "batch", 64, batch=16, seq=16),
    _case(encoder, "batch", 64, "nonsense", batch=16, seq=16),
    _case(encoder, "seq", 32, batch=6, seq=8, heads=8),
    _case(encoder, "batch", 24, batch=8, seq=12, heads=8),
    _case(encoder, "seq", 36, batch=6, seq=12, heads=4),  # width of a head is 12
    _case(encoder, "heads", 16, batch=8, seq=12, heads=8, width=64),
    _case(encoder, "seq", 128, batch=4, seq=48),
    _case(encoder, "batch", 96, batch=48, seq=12),
    _case(decoder, "seq", 128, batch=32, seq=32),
    _case(decoder, "batch", 96, batch=32, seq=32),
    _case(decoder, "seq", 72, batch=6, seq=24, heads=4),
    _case(decoder, "batch", 72, batch=24, seq=10, heads=4),
    _case(decoder, "seq", 64, batch=4, seq=8, heads=8),
    _case(decoder, "seq", 64, batch=8, seq=8, heads=8),
    _case(decoder, "batch", 64, batch=8, seq=8, heads=8),
    _case(decoder, "seq", 300, batch=4, seq=100, vocabulary=100),
    _case(written_decoder, "seq", 128, batch=32, seq=32),
    _case(written_decoder, "batch", 96, batch=32, seq=32),
    _case(written_decoder, "seq", 72, batch=6, seq=24, heads=4),
    _case(written_decoder, "seq", 32, batch=4, seq=8, heads=8),
    _case(written_decoder, "batch", 64, batch=8, seq=8, heads=8),
    _case(sequence_first, "seq", 48, batch=12, seq=12),
    _case(sequence_first, "batch", 48, batch=12, seq=12),
    _case(recurrent, "seq", 48, batch=12, seq=12),
    _case(recurrent, "batch", 48, batch=12, seq=12),
    _case(recurrent, "seq", 128, batch=5, seq=32),
    _case(carried, "batch", 8, batch=32, seq=20),
    _case(carried, "batch", 8, batch=32, seq=20, hidden=160),  # as many gates as tokens
    _case(carried, "batch", 8, batch=32, seq=20, hidden=32),
    _case(features, "seq", 96, batch=24, seq=24),
    _case(features, "batch", 96, batch=24, seq=24),
    _case(features, "seq", 28, batch=5, seq=7, classes=7),
    _case(regression, "seq", 128, batch=32, seq=32),
    _case(regression, "batch", 128, batch=32, seq=32),
    _case(regression, "seq", 80, batch=6, seq=20),
    _case(classifier, "batch", 128, batch=32, features=32),
    _case(classifier, "batch", 40, batch=10, classes=10),
    _case(classifier, "batch", 128, "rows", batch=32, hidden=32, features=32, classes=32),
    _case(classifier, "features", 96, batch=32, features=32),
    _case(images, "batch", 64, batch=32, image=32),
    _case(images, "image", 64, batch=32, image=32),
    _case(images, "image", 48, batch=6, image=16, channels=16),
    _case(images, "batch", 48, batch=16, image=16, channels=16, classes=16),
    _case(sound, "time", 80, batch=20, time=20),
    _case(sound, "batch", 80, batch=20, time=20),
    _case(sound, "time", 96, batch=6, time=24, channels=24),
    _case(translation, "source", 72, batch=6, source=24, target=24),
    _case(translation, "target", 72, batch=6, source=24, target=24),
    _case(translation, "batch", 48, batch=12, source=12, target=12),
    _case(graph_network, "nodes", 96, nodes=32, width=32),
    _case(graph_network, "edges", 400, nodes=48, edges=200),
    _case(graph_network, "nodes", 144, nodes=48, edges=48),
    _case(graph_network, "nodes", 300, nodes=150, edges=400),
    _case(contrastive, "batch", 64, batch=16, seq=16),
    _case(contrastive, "seq", 64, batch=16, seq=16),
    _case(contrastive, "batch", 96, batch=48, seq=10),
    _case(bags, "batch", 96, batch=32, each=32),
    _case(bags, "each", 96, batch=32, each=32),
    _case(bags, "batch", 64, batch=16, each=5, width=16),
)

FOREIGN = (
    _case(gpt2, "seq", 64, batch=16, seq=16),
    _case(gpt2, "batch", 64, batch=16, seq=16),
    _case(gpt2, "seq", 72, batch=4, seq=24, heads=4),
    _case(gpt2, "seq", 32, batch=6, seq=8, heads=8),
    _case(gpt2, "seq", 40, batch=6, seq=10),
    _case(gpt2, "batch", 32, batch=8, seq=12, heads=8),
    _case(llama, "seq", 64, batch=16, seq=16),
    _case(llama, "batch", 64, batch=16, seq=16),
    _case(llama, "seq", 72, batch=4, seq=24, heads=4),
    _case(llama, "seq", 32, batch=6, seq=8, heads=8),
    _case(llama, "seq", 16, batch=6, seq=4, heads=8, shared=4),
    _case(llama, "shared", 8, batch=4, seq=12, heads=8, shared=4),
    _case(llama, "batch", 16, batch=4, seq=12, heads=8, shared=4),
    _case(bert, "seq", 64, batch=16, seq=16),
    _case(bert, "seq", 72, batch=4, seq=24),
    _case(bert, "seq", 32, batch=6, seq=8, heads=8),
    _case(bert, "batch", 16, batch=4, seq=24, heads=4),
    _case(t5, "seq", 72, batch=4, seq=24, target=24),
    _case(t5, "seq", 60, batch=4, seq=20, target=12),
    _case(t5, "target", 36, batch=4, seq=20, target=12),
    _case(t5, "batch", 36, batch=12, seq=20, target=12),
    _case(vit, "batch", 48, batch=16, image=32),  # 16 patches, and a class token
    _case(vit, "batch", 51, batch=17, image=32),
    _case(vit, "batch", 40, batch=10, image=32, classes=10),
    _case(vit, "image", 64, batch=8, image=32),
)


@dataclass
class Found:
    """How a case ended."""

    case: Case
    verdict: str
    off: float = 0.0
    why: str = ""
    worst: list[str] = field(default_factory=list)


def traced(case: Case, size: int) -> ExecutionGraph:
    """The program's step where the size that is asked for is ``size``."""
    return tracer.trace_step(lambda: case.program(**{**case.sizes, case.name: size}), device="cpu")


def judged(case: Case) -> Found:
    """A case's verdict."""
    old = case.sizes[case.name]
    before, truth = traced(case, old), traced(case, case.new)
    scaled = ScaledShapes(before, ((case.said or case.name, old, case.new),))
    try:
        scaled.check()
    except EditError as error:
        return Found(case, "refused", why=str(error))
    if (size := unrolled_size(scaled)) is not None:
        return Found(case, "refused", why=f"goes along {size}")
    if len(before.ops) != len(truth.ops):
        return Found(case, "quiet", math.inf, f"{len(before.ops)} operations, truly {len(truth.ops)}")
    wrong = of = undecided = 0.0
    worst: list[tuple[float, str]] = []
    for row in range(len(truth.ops)):
        mine, true = scaled.operation_of(row), Operation.from_graph(truth, row)
        a, b = list(_elements(mine)), list(_elements(true))
        off = sum(abs(x - y) for x, y in zip(a, b, strict=False))
        wrong, of = wrong + off, of + sum(b)
        undecided += scaled.undecided(row) * sum(b)
        if off:
            shapes = [[argument.shape for argument in one.arguments] for one in (mine, true)]
            worst.append((off, f"{true.name} {shapes[0]} truly {shapes[1]}"))
    off, doubt = wrong / max(of, 1.0), undecided / max(of, 1.0)
    lines = [text for _, text in sorted(worst, reverse=True)[:6]]
    if doubt > 0.05:
        return Found(case, "refused", off, f"{doubt:.0%} undecided", lines)
    return Found(case, "right" if off <= RIGHT else "quiet", off, "", lines)


def _elements(operation: Operation) -> Iterator[float]:
    for argument in operation.arguments:
        yield from (float(math.prod(shape)) for shape in _tensors(argument.shape))


def _tensors(shape: Any) -> Iterator[tuple[int, ...]]:
    if shape and all(isinstance(one, int) for one in shape):
        yield shape
    elif shape:
        for one in shape:
            yield from _tensors(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true", help="print why, and what is most off")
    parser.add_argument("--foreign", action="store_true", help="models of transformers, which nothing was tuned on")
    parser.add_argument("--only", default="")
    wanted = parser.parse_args()
    found = [judged(case) for case in (FOREIGN if wanted.foreign else CASES) if wanted.only in case.label]
    for one in found:
        print(f"{one.verdict:8}{one.off:8.1%}  {one.case.label}")
        if wanted.each:
            for line in (*[one.why] * bool(one.why), *one.worst):
                print(f"                  {line[:200]}")
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("right", "refused", "quiet")}
    print(f"{len(found)} cases: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.items()))


if __name__ == "__main__":
    main()
