"""Find the changes of the program behind the places where two aligned steps differ, in the terms of a script's author.

One change of a script affects many operations: a larger batch changes the shapes of nearly all, an optimizer without
``foreach`` replaces all of its own. If operations reveal such a change, all its places get one name:

* gradient accumulation: the backward pass runs k times, and the same parameters accumulate k times the gradients;
* checkpointing: operations that autograd records (they have a sequence number) run inside the backward pass;
* the optimizer's implementation: fused, foreach or for-loop, by its operations' names;
* gradients set to zero: the optimizer's pass fills them, and did not before;
* element types: the same operations have tensors of other types, or casts were added;
* sizes: the same operations have other sizes; of parameters, if the optimizer's operations have them too;
* layers: operations were added that the forward pass of A already has, and the optimizer has more parameters.

Any other operations of only one program are changes of their own, named by the operations.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from graph_predictor.recorded.module_paths import ACCUMULATE, plain_name
from step_views.diff.places import Hunk, HunkCause, Places
from step_views.diff.result import DifferenceKind, cause_name
from step_views.diff.step_tree import StepTree, Vocabulary
from tracer.arrays import Int64
from tracer.graph import ExecutionGraph, Phase
from tracer.input_file import DecodeError, from_json

CASTS = ("aten::to", "aten::_to_copy")
ZEROS = ("aten::zero_", "aten::_foreach_zero_")
LIKE_OTHERS = 0.8
"""Least share of an added layer's operations that the forward pass had before. Chosen: a layer may end differently."""
LEAST_SIZED = 0.25
"""Least share of aligned operations that change if inputs have other sizes. Chosen: another batch size changes most of
the forward and the backward pass; a replaced operation changes only a few neighbours."""
FEWEST_OF_LAYER = 3  # operations; chosen: fewer are added operations, not a layer


class _Program:
    """One step's operations: their names, and the content of the step's phases."""

    def __init__(self, tree: StepTree, graph: ExecutionGraph, vocabulary: Vocabulary) -> None:
        self.tree = tree
        self.names = [vocabulary.texts[code] for code in tree.name.tolist()]
        self.phase = tree.phase
        has_op = tree.op >= 0
        sequence = np.where(has_op, graph.ops.sequence[tree.op], -1) if len(graph.ops) else np.full(len(tree), -1)
        aten = np.array([name.startswith("aten::") for name in self.names], np.bool_)
        self.again = (tree.phase == Phase.BACKWARD) & (sequence >= 0) & aten
        engine = Counter(plain_name(name) for name in self.names if plain_name(name) != name)
        self.gradients = engine[ACCUMULATE]
        # Every pass runs each of its backward nodes equally often, and the loss's node once.
        self.passes = math.gcd(*engine.values())
        self.optimizer = np.flatnonzero(tree.phase == Phase.OPTIMIZER)
        own = {self.names[node] for node in self.optimizer.tolist()} - set(ZEROS)
        self.implementation = ("" if not own else "fused" if any("_fused_" in name for name in own) else
                               "foreach" if any("_foreach_" in name for name in own) else "for-loop")
        self.zeros = sum(self.names[node] in ZEROS for node in self.optimizer.tolist())
        self.parameters = Counter((int(tree.name[node]), int(tree.shapes[node])) for node in self.optimizer.tolist()
                                  if self.names[node] not in ZEROS)

    def within(self, nodes: list[int]) -> Iterator[int]:
        """Yield these nodes and all nodes below them."""
        for node in nodes:
            yield from range(node, node + int(self.tree.size[node]))

    def below(self, node: int, name: str) -> bool:
        """Return whether the node is below an operation of this name."""
        node = int(self.tree.parent[node])
        while node >= 0:
            if self.names[node] == name:
                return True
            node = int(self.tree.parent[node])
        return False


def place_changes(places: Places, hunks: list[HunkCause], trees: tuple[StepTree, StepTree],
                  graphs: tuple[ExecutionGraph, ExecutionGraph], vocabulary: Vocabulary) -> list[str]:
    """Return for each place the change of the program, in words; "" if nothing changed there."""
    sides = [_Program(tree, graph, vocabulary) for tree, graph in zip(trees, graphs, strict=True)]
    passes = _passes(*sides)
    shapes, types = _unlike(places, trees, "shapes"), _unlike(places, trees, "dtypes")
    whole = sides[0].optimizer.size == sides[1].optimizer.size  # else different parameters were matched
    typed = _most_types(np.flatnonzero(types & ~shapes), places, trees, vocabulary)
    sized = _most_sizes(np.flatnonzero(shapes), places, trees, vocabulary) if whole else ""
    found = [""] * (places.irregular + 1)
    for at in np.flatnonzero(shapes | types).tolist():
        texts = (vocabulary.texts[int(tree.shapes[node])] for tree, node in (
            (trees[0], places.left[at]), (trees[1], places.right[at])))
        if passes and trees[0].phase[places.left[at]] != Phase.OPTIMIZER:
            found[at] = passes
        elif shapes[at]:
            found[at] = sized if sized and _substituted(*texts) else ""
        else:
            found[at] = typed
    named = [_hunk_change(hunk, sides, passes, typed, sized) for hunk in places.hunks]
    for at, (own, cause) in enumerate(zip(named, hunks, strict=True)):
        found[places.of_hunk(at)] = own or named[cause.root] or cause_name(cause.kind, cause.what, cause.module)
    return found


def _hunk_change(hunk: Hunk, sides: list[_Program], passes: str, typed: str, sized: str) -> str:
    """Return the change that explains a hunk, or "". The last three are phrases to return, "" if they do not apply."""
    mine = [(side, list(side.within(nodes))) for side, nodes in zip(sides, (hunk.removed, hunk.added), strict=True)]
    first, node = next((side, nodes[0]) for side, nodes in mine if nodes)
    names = {side.names[each] for side, nodes in mine for each in nodes}
    phase = int(first.phase[node])
    if any(side.again[nodes].any() for side, nodes in mine if nodes):
        again = [int(side.again.sum()) for side in sides]
        return f"checkpointing: operations run again in the backward pass, {again[0]} → {again[1]}"
    if passes and phase != Phase.OPTIMIZER:
        return passes
    zeros = [side.zeros for side in sides]
    if (zeros[0] == 0) != (zeros[1] == 0) and (names & set(ZEROS) if phase == Phase.OPTIMIZER else
                                               first.below(node, ACCUMULATE)):
        kept = "filled with zeros, where they were freed" if zeros[1] else "freed, where they were filled with zeros"
        return f"zero_grad: gradients are {kept} (set_to_none={not zeros[1]})"
    if phase == Phase.OPTIMIZER and sides[0].implementation != sides[1].implementation:
        return f"optimizer: {sides[0].implementation or 'none'} → {sides[1].implementation or 'none'}"
    if typed and names & set(CASTS):
        return typed
    if sized and first.tree.loading[node]:
        return sized
    return _layer(hunk, sides)


def _layer(hunk: Hunk, sides: list[_Program]) -> str:
    """Return the name of added or lost operations as a layer, if the other program has enough equal operations."""
    if bool(hunk.added) == bool(hunk.removed) or sides[0].parameters == sides[1].parameters:
        return ""
    at, nodes = (1, hunk.added) if hunk.added else (0, hunk.removed)
    have, others = sides[at], sides[1 - at]
    if len(nodes) < FEWEST_OF_LAYER or have.phase[nodes[0]] != Phase.FORWARD:
        return ""
    known = set(others.tree.digest[others.phase == Phase.FORWARD].tolist())
    alike = sum(int(have.tree.digest[node]) in known for node in nodes)
    if alike < LIKE_OTHERS * len(nodes):
        return ""
    side = DifferenceKind.ADDED if at else DifferenceKind.REMOVED
    counts = Counter(have.names[node] for node in nodes).most_common(3)
    what = ", ".join(f"{name} ×{number}" if number > 1 else name for name, number in counts)
    return f"layers: more of those that there were, {side.value}: {what} …"


def _passes(one: _Program, other: _Program) -> str:
    """Return a phrase on gradient accumulation: more or fewer passes a step, with the same gradients in each pass."""
    before, after = one.passes, other.passes
    if before == after or one.gradients * after != other.gradients * before or one.parameters != other.parameters:
        return ""
    return f"gradient accumulation: forward and backward passes a step, {before} → {after}"


def _unlike(places: Places, trees: tuple[StepTree, StepTree], column: str) -> np.ndarray:
    a, b = getattr(trees[0], column)[places.left], getattr(trees[1], column)[places.right]
    return np.asarray((a != b) & (a > 0) & (b > 0))


def _most_types(at: Int64, places: Places, trees: tuple[StepTree, StepTree], vocabulary: Vocabulary) -> str:
    """Return the most frequent change of tensors' element types, in words; "" if there is none."""
    counts: Counter[str] = Counter()
    for place in at.tolist():
        texts = [tensor_types(vocabulary.texts[int(tree.dtypes[node])], vocabulary.texts[int(tree.shapes[node])])
                 for tree, node in ((trees[0], places.left[place]), (trees[1], places.right[place]))]
        if texts[0] != texts[1]:
            counts[type_words(*texts)] += 1
    if not counts:
        return ""
    words, _ = counts.most_common(1)[0]
    return f"element types: {words.replace('c10::', '').replace('BFloat16', 'bfloat16').replace('Half', 'float16')}"


def _most_sizes(at: Int64, places: Places, trees: tuple[StepTree, StepTree], vocabulary: Vocabulary) -> str:
    """Return the change of sizes in words; "" if there is none. It names the smallest size that changes by the most
    frequent ratio, because the others are its multiples."""
    counts: dict[bool, Counter[tuple[int, int]]] = {True: Counter(), False: Counter()}
    for place in at.tolist():
        left, right = int(places.left[place]), int(places.right[place])
        if trees[0].loading[left]:
            continue
        found = _substituted(vocabulary.texts[int(trees[0].shapes[left])],
                             vocabulary.texts[int(trees[1].shapes[right])])
        counts[bool(trees[0].phase[left] == Phase.OPTIMIZER)].update(found)
    of_parameters = bool(counts[True])
    chosen = counts[of_parameters]
    if not chosen or (not of_parameters and len(at) < LEAST_SIZED * places.pairs):
        return ""
    ratios: Counter[float] = Counter()
    for (old, new), number in chosen.items():
        ratios[round(new / old, 6)] += number
    ratio, _ = ratios.most_common(1)[0]
    old, new = min(pair for pair in chosen if round(pair[1] / pair[0], 6) == ratio)
    return f"sizes of {'parameters' if of_parameters else 'inputs'}: {old} → {new}"


def _substituted(before: str, after: str) -> set[tuple[int, int]]:
    """Return pairs of sizes that differ between two lists of shapes; empty if dimensions or tensors came or went."""
    try:
        return set(_differing(from_json(before.encode()), from_json(after.encode())))
    except (DecodeError, _OtherForm, RecursionError):
        return set()


class _OtherForm(Exception):
    """Two lists of shapes differ in form."""


def _differing(one: Any, other: Any) -> Iterator[tuple[int, int]]:
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            raise _OtherForm
        for a, b in zip(one, other, strict=True):
            yield from _differing(a, b)
    elif isinstance(one, int) and isinstance(other, int):
        if one != other and one > 0:
            yield one, other
    elif one != other:
        raise _OtherForm


_NAME = re.compile(r"[A-Za-z][\w:<>]*")


def tensor_types(dtypes: str, shapes: str) -> str:
    """Return the element types without those of inputs without dimensions, because a number is passed as it is or as a
    tensor, depending on the caller. "" if none remain."""
    try:
        types, sizes = from_json(dtypes.encode()), from_json(shapes.encode())
    except DecodeError:
        return dtypes
    if not isinstance(types, list) or not isinstance(sizes, list) or len(types) != len(sizes):
        return dtypes
    found = json.dumps(["" if size == [] else kind for kind, size in zip(types, sizes, strict=True)])
    return found if _NAME.search(found) else ""


def type_words(before: str, after: str) -> str:
    """Return the first types that differ between two lists: "float → double"."""
    pairs = zip(_NAME.findall(before), _NAME.findall(after), strict=False)
    return next((f"{old} → {new}" for old, new in pairs if old != new), f"{before} → {after}")
