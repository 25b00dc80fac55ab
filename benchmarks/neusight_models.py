"""Whole models from NeuSight's per-operation graphs on GPUs by transfer models, against measured latencies.

    python benchmarks/neusight_models.py

A graph lists a model's operations with shapes, one layer of it; every operation is priced by the models fitted on
NeuSight's train GPUs' kernels (``neusight_protocol.py``), the layer counts as often as the labels say, and the sum is
compared with the measured latency and with the errors that NeuSight's paper reports on the same cells. Graphs depend
on the case, not on the GPU, so a case is read from whichever GPU's file has it; the times in these files are not
used. No label is fitted.

    forward          the operation's kernels
    backward         linear and matmul: two products and the bias's sum; others: kernels of PyTorch's autograd formulas
    accumulation     gradients of weights added to those there (the files count it as part of an operation)

Switch Transformers have no graph in the data; theirs is written out here from the configuration (HuggingFace's eager
model: routed experts one after the other, at most 64 tokens each).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np
import pandas as pd
from neusight_data import DATA, GROUPS, TRAIN_GPUS, figures, measured, read
from neusight_protocol import fitted

END_TO_END = DATA / "end_to_end"
CASES = {"BERT-Large": ("bert_large", 512), "GPT2-Large": ("gpt2_large", 1024), "GPT3-XL": ("gpt3_xl", 2048),
         "GPT3-2.7B": ("gpt3_27", 2048), "OPT-1.3B": ("opt_13", 2048), "SwitchTrans": ("switchxl4", 512)}
GPUS = ("NVIDIA_L4", "NVIDIA_A100_80GB_PCIe", "NVIDIA_A100-PCIE-40GB", "Tesla_V100-PCIE-32GB", "Tesla_P100-PCIE-16GB",
        "Tesla_T4")
METHODS = ("NeuSight", "Habitat", "Li et al.", "Roofline")
_LAYER = re.compile(r"(^|_)(layer|layers|h)_0_")
Shape = tuple[int, ...]


@dataclass
class Work:
    """Sizes of the kernels of one pass by group of models, as ``DIMENSIONS`` names them."""

    calls: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)

    def add(self, group: str, *sizes: float) -> None:
        """One kernel."""
        self.calls.setdefault(group, []).append(tuple(float(size) for size in sizes))

    def stream(self, read: float, written: float) -> None:
        """One elementwise kernel that reads and writes so many fp32 elements."""
        if written + read:
            self.add("elementwise", max(written, 1), 1 if read <= 1.5 * written else 2, read)

    def extend(self, other: Work) -> None:
        """All kernels of another."""
        for group, calls in other.calls.items():
            self.calls.setdefault(group, []).extend(calls)


@dataclass
class Node:
    """One operation's kernels."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)


def linear(tokens: int, inputs: int, outputs: int, *, bias: bool = True) -> Node:
    """A linear layer and its backward: gradients of input and weight, of the bias, and their accumulation."""
    node = Node()
    node.forward.add("FC", 1, tokens, outputs, inputs)
    node.backward.add("FC", 1, tokens, inputs, outputs)
    node.backward.add("FC", 1, outputs, inputs, tokens)
    if bias:
        node.backward.stream(tokens * outputs, outputs)
    node.backward.stream(2 * inputs * outputs, inputs * outputs)
    return node


def matmul(batch: int, m: int, n: int, k: int, copied: float = 0.0) -> Node:
    """A batched product and its two gradients; operands that cannot be viewed as one batch are copied first."""
    node = Node()
    node.forward.add("BMM", batch, m, n, k)
    node.backward.add("BMM", batch, m, k, n)
    node.backward.add("BMM", batch, k, n, m)
    if copied:
        node.forward.stream(copied, copied)
    return node


def pointwise(elements: float, reads: float = 1.0, backward: tuple[tuple[float, float], ...] = ()) -> Node:
    """An elementwise kernel; ``backward`` lists (tensors read, tensors written) of each backward kernel."""
    node = Node()
    node.forward.stream(reads * elements, elements)
    for read_, written in backward:
        node.backward.stream(read_ * elements, written * elements)
    return node


def layer_norm(rows: int, columns: int) -> Node:
    """A layer norm; its backward reads gradient and input twice (for the input, for the weights)."""
    node = Node()
    node.forward.add("layer norm", rows, columns)
    node.backward.stream(2 * rows * columns, rows * columns)
    node.backward.stream(2 * rows * columns, columns)
    return node


def softmax(rows: int, columns: int) -> Node:
    """A softmax; its backward reads gradient and result."""
    node = Node()
    node.forward.add("softmax", rows, columns, 1)
    node.backward.stream(2 * rows * columns, rows * columns)
    return node


def embedding(rows: float, columns: int, table: float) -> Node:
    """A lookup; its backward fills the table's gradient, adds the rows, and accumulates."""
    node = Node()
    node.forward.stream(rows * columns, rows * columns)
    node.backward.stream(0, table * columns)
    node.backward.stream(2 * rows * columns, rows * columns)
    node.backward.stream(2 * table * columns, table * columns)
    return node


def dropout(elements: float, *, training: bool) -> Node:
    """In training a kernel that writes a mask of one byte an element; in inference nothing."""
    return pointwise(elements, 1.25, ((1.25, 1.0),)) if training else Node()


_POINTWISE: dict[str, tuple[tuple[float, float], ...]] = {
    "truediv": ((1, 1),), "gelu": ((2, 1),), "relu": ((2, 1),), "tanh": ((2, 1),), "sub": (), "where": ((1.25, 1),),
    "masked_fill": ((1.25, 1),), "max": ((2.25, 1), (1, 1)), "pow": ((1, 1), (1, 1), (2, 1)),
}
"""Backward kernels of elementwise operations of one large tensor: (tensors read, written)."""
_NOTHING = {"view", "size", "permute", "transpose", "getitem", "getattr", "expand", "dim", "eq", "unsqueeze", "split",
            "to", "type", "finfo", "detach", "contiguous", "reshape", "ones", "arange", "full", "long", "type_as", "lt",
            "bool", "cumsum", "masked_fill_"}
"""No kernel, or one of a few microseconds once a model."""


def _shape(text: object) -> Shape:
    return tuple(int(number) for number in re.findall(r"\d+", str(text)))


def _shapes(text: object) -> list[Shape]:
    return [_shape(part) for part in re.findall(r"\[([\d, ]+)\]", str(text))]


def _name(row: pd.Series) -> str:
    target = str(row["target"])
    match = re.search(r"(?:built-in (?:function|method)|function|class 'torch\.) ?(\w+)", target)
    return match[1] if match else target


def node_of(row: pd.Series, before: str, *, training: bool) -> Node:
    """The kernels of one operation of a graph."""
    inputs, out = _shapes(row["input_shapes"]), _shape(row["output_shape"])
    elements = prod(out)
    if row["op"] == "call_module":
        return _module(str(row["target"]), inputs[0], out, training=training)
    name = _name(row)
    if name == "addmm":
        return linear(inputs[1][0], inputs[1][1], inputs[2][1])
    if name in ("matmul", "bmm"):
        a, b = inputs
        copied = sum(prod(s) for s in (a, b) if len(s) == 4 and s[0] > 1 and s[-1] != s[-2])
        return matmul(prod(a[:-2]), a[-2], b[-1], a[-1], copied)
    if name == "softmax":
        return softmax(elements // out[-1], out[-1])
    if name == "dropout":
        return dropout(elements, training=training)
    if name == "embedding":
        return embedding(elements / out[-1], out[-1], inputs[1][0])
    if name in ("contiguous", "reshape") and before in ("transpose", "permute"):
        return pointwise(elements)
    if row["op"] in ("get_attr", "placeholder", "output") or name in _NOTHING or elements < 1024:
        return Node()
    reads = sum(min(prod(s), elements) for s in inputs if prod(s) > 1) / elements
    if name in ("add", "iadd"):
        return pointwise(elements, reads)
    if name == "mul":
        both = len([s for s in inputs if prod(s) > 1]) > 1
        return pointwise(elements, reads, ((2, 1), (2, 1)) if both else ((1, 1),))
    if name in _POINTWISE:
        return pointwise(elements, max(reads, 1.0), _POINTWISE[name])
    raise SystemExit(f"No kernels are known for {row['op']} {row['target']} ({name}).")


def _module(target: str, given: Shape, out: Shape, *, training: bool) -> Node:
    last = target.rsplit(".", 1)[-1].lower()
    if "norm" in last or last in ("ln_1", "ln_2", "ln_f"):
        return layer_norm(prod(out) // out[-1], out[-1])
    if "dropout" in last or last == "drop":
        return dropout(prod(out), training=training)
    if last in ("word_embeddings", "wte", "embed_tokens"):
        return embedding(prod(given), out[-1], 50000)
    if "embeddings" in last or last == "wpe":
        return embedding(prod(given), out[-1], 1024)
    if last in ("activation", "activation_fn"):
        return pointwise(prod(out), 1.0, ((2, 1),))
    return linear(prod(given[:-1]), given[-1], out[-1])


def graph_work(table: pd.DataFrame, layers: int, *, training: bool) -> Work:
    """All kernels of a graph: its first layer ``layers`` times, the rest once."""
    names = [str(name) for name in table["Name"]]
    inside = [i for i, name in enumerate(names) if _LAYER.search(name)]
    first, last = inside[0], inside[-1]
    while table["op"].iloc[last + 1] == "call_function" and not names[last + 1].startswith("getitem"):
        last += 1  # the layer's closing dropout and residual sum carry no layer's name
    work = Work()
    before = ""
    for i, (_, row) in enumerate(table.iterrows()):
        node = node_of(row, before, training=training)
        before = str(row["target"])
        for _ in range(layers if first <= i <= last else 1):
            work.extend(node.forward)
            if training:
                work.extend(node.backward)
    return work


def switch_work(batch: int, *, training: bool) -> Work:
    """Switch-XL with 4 experts, 512 tokens in encoder and decoder (``neusight_model_configs/switchxl4.json``)."""
    length, width, inner, heads, head, hidden, experts, capacity = 512, 1024, 4096, 32, 128, 16384, 4, 64
    tokens, scores = batch * length, batch * heads * length * length

    def norm() -> Iterator[Node]:  # a root-mean-square norm as five elementwise steps
        yield from (pointwise(tokens * width, 1, ((1, 1), (1, 1), (2, 1))), pointwise(tokens * width),
                    pointwise(tokens * width, 1, ((1, 1),)), pointwise(tokens * width, 1, ((1, 1), (2, 1))))

    def attention() -> Iterator[Node]:
        yield from norm()
        yield from (linear(tokens, width, inner, bias=False) for _ in range(3))
        copied = 2 * tokens * inner if batch > 1 else 0
        yield matmul(batch * heads, length, length, head, copied)
        yield pointwise(scores, 2, ())
        yield softmax(batch * heads * length, length)
        yield dropout(scores, training=training)
        yield matmul(batch * heads, length, head, length, copied / 2)
        yield pointwise(tokens * inner, 1, ((1, 1),))
        yield linear(tokens, inner, width, bias=False)
        yield dropout(tokens * width, training=training)
        yield pointwise(tokens * width, 2)

    def feed_forward(rows: int) -> Iterator[Node]:
        yield linear(rows, width, hidden, bias=False)
        yield pointwise(rows * hidden, 1, ((2, 1),))
        yield dropout(rows * hidden, training=training)
        yield linear(rows, hidden, width, bias=False)

    def layer(*, cross: bool, sparse: bool) -> Iterator[Node]:
        yield from attention()
        if cross:
            yield from attention()
        yield from norm()
        if sparse:
            yield linear(tokens, width, experts, bias=False)
            yield pointwise(tokens * width)
            for _ in range(experts):
                chosen = min(batch * capacity, tokens // experts)
                yield pointwise(chosen * width, 1, ((1, 1),))
                yield from feed_forward(chosen)
                yield pointwise(chosen * width, 1, ((1, 1),))
            yield pointwise(tokens * width, 1, ((2, 1),))
        else:
            yield from feed_forward(tokens)
        yield dropout(tokens * width, training=training)
        yield pointwise(tokens * width, 2)

    work = Work()
    nodes = [node for stack in (False, True) for i in range(24) for node in layer(cross=stack, sparse=i % 2 == 1)]
    nodes += [embedding(tokens, width, 32128), embedding(tokens, width, 32128), *norm(), *norm(),
              linear(tokens, width, 32128, bias=False)]
    for node in nodes:
        work.extend(node.forward)
        if training:
            work.extend(node.backward)
    return work


def main() -> None:
    table = read("train")
    train = {group.name: [measured(table, group, gpu) for gpu in TRAIN_GPUS] for group in GROUPS}
    models = {name: model for name, (model, _) in fitted(train).items()}
    labels = pd.read_parquet(END_TO_END / "neusight_labels.parquet").set_index(["device", "case"])
    published = pd.read_parquet(END_TO_END / "neusight_published_errors.parquet")
    cells = published.pivot_table(index=["device", "mode", "model", "batch"], columns="method", values="error_percent")
    graphs: dict[str, pd.DataFrame] = {}
    for path in sorted((END_TO_END / "neusight_per_op").glob("*.parquet")):
        graphs.setdefault(path.stem.split("--")[1], pd.read_parquet(path))
    print("No measured latency of a model was fitted; * graph written from the configuration. ms, and errors in %.\n")
    print(f"{'GPU':24}{'mode':6}{'model':13}{'batch':>5}{'measured':>10}{'ours':>10}{'error':>8}   "
          + "".join(f"{method:>10}" for method in METHODS))
    rows = []
    for gpu in GPUS:
        device = figures(gpu)
        on = {name: model.on(device) for name, model in models.items()}
        for (_, mode, model, batch), errors in cells.loc[[gpu]].iterrows():
            name, length = CASES[model]
            case = f"{name}-{mode}-{length}-{batch}"
            label = labels.loc[(gpu, case)]
            training = mode == "train"
            work = switch_work(int(batch), training=training) if name == "switchxl4" else \
                graph_work(graphs[case], int(label.num_layer), training=training)
            time = sum(float(on[group].predict_dims(np.array(calls)).time_us.sum()) / 1e3
                       for group, calls in work.calls.items())
            error = 100 * (time / label.e2e_latency - 1)
            rows.append({"gpu": gpu, "mode": mode, "switch": name == "switchxl4", "ours": abs(error), "signed": error,
                         **{method: errors[method] for method in METHODS}})
            shown = model + "*" * (name == "switchxl4")
            print(f"{gpu:24}{mode:6}{shown:13}{batch:>5}{label.e2e_latency:10.1f}{time:10.1f}{error:+8.1f}   "
                  + "".join(f"{errors[method]:10.1f}" for method in METHODS))
    result = pd.DataFrame(rows)
    print("\nMean errors over cells, %")
    print(f"{'':30}{'cells':>6}{'ours':>8}{'bias':>8}" + "".join(f"{method:>10}" for method in METHODS))
    parts = [(gpu, result[result.gpu == gpu]) for gpu in GPUS]
    parts += [("inference", result[result["mode"] == "inf"]), ("training", result[result["mode"] == "train"]),
              ("cells with a graph", result[~result.switch]), ("all", result)]
    for name, part in parts:
        print(f"{name:30}{len(part):6}{part.ours.mean():8.1f}{part.signed.mean():+8.1f}"
              + "".join(f"{part[method].mean():10.1f}" for method in METHODS))
    ours, theirs = float(result.ours.mean()), float(result.NeuSight.mean())
    print(f"\nMean error over all cells {ours:.1f}%, asked < NeuSight's {theirs:.1f}%: "
          f"{'met' if ours < theirs else 'missed'}")


if __name__ == "__main__":
    main()
