"""Numbers that a program reads: those that constants decide are known, those of data are stand-ins or assumed."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.stand_ins import CountOfData, NumberOfData, OfData, stand_in
from tracer.shape_only.trace import trace_script, trace_step

SCRIPT = """
import torch
from torch import nn

def made(width, weight=None):
    layer = nn.Linear(3, int(width))
    if weight is not None:
        weight(layer.weight)
    return lambda: layer(torch.randn(2, 3)).sum()

def computed():
    rates = [rate.item() for rate in torch.linspace(0, 8, 5, device="cpu")]
    assert rates == [0.0, 2.0, 4.0, 6.0, 8.0]
    sizes = torch.cat([torch.arange(3) * 2, torch.tensor([7])])
    sizes += 1
    assert sizes.tolist() == [1, 3, 5, 8] and bool((sizes > 0).all()) and f"{sizes.sum():3d}" == " 17"
    halves = torch.round(torch.arange(16, dtype=torch.float32) / 2)
    kept = torch.nonzero(halves[1:] != halves[:-1])
    assert kept.numpy().shape == (8, 1) and torch.equal(halves, halves.clone()) and len(torch.unique(halves)) == 9
    kinds = torch.arange(12).reshape(2, 6) % 3
    assert kinds[0][torch.ones(2, 6, dtype=torch.long)[0].bool()].tolist() == [0, 1, 2, 0, 1, 2]
    wide = (torch.arange(64) % 4 == 1).reshape(2, 32, 1).expand(2, 32, 1 << 15)
    assert wide.any() and not wide.all() and torch.randn(2, 32, 1 << 15)[wide].numel() == 16 << 15
    listed = torch.tensor([torch.arange(4).sum(), torch.ones(()), [torch.tensor(1)][0]])
    assert listed.tolist() == [6, 1, 1] and torch.as_tensor([[listed[0], 1]], device="cuda").tolist() == [[6, 1]]
    scores = torch.rand(2, 3)
    kinds = torch.cat([torch.full_like(scores, fill_value=kind, dtype=torch.long) for kind in (1, 4)])
    kinds = torch.cat([kinds, torch.zeros_like(kinds), kinds.new_full((1, 3), 3)])
    assert torch.unique(kinds).tolist() == [0, 1, 3, 4] and kinds.new_ones(2).tolist() == [1, 1]
    return made(listed.sum())

def truncated():
    return made(8, lambda weight: nn.init.trunc_normal_(weight, std=0.02))

def masked():
    mask = torch.ones(2, 8, dtype=torch.bool)
    layer = nn.Linear(3, 8)
    def step():
        x = torch.randn(2, 3)
        return layer(x[mask.any(1)] if mask.all() else torch.cat([x, x])).sum()
    return step

def finite():
    layer = nn.Linear(3, 8)
    def step():
        out = layer(torch.randn(2, 3))
        large = torch.empty(1 << 40)
        if not torch.isfinite(out).all() or out.isnan().any() or torch.isinf(large).any():
            raise ValueError("no")
        return out.sum() if torch.rand(1) > 0.1 else layer(out).sum()
    return step

def replaced():
    table = torch.zeros(2, 4)
    row = table[0]
    table.data = torch.ones(2, 4)
    assert table.sum() == 8 and row.sum() == 0
    table[0] += 1
    assert table.tolist() == [[2] * 4, [1] * 4] and row.tolist() == [0] * 4
    data = torch.zeros(4)
    data.data = torch.rand(4)
    data.data = row
    row += 1
    assert data.tolist() == [1] * 4
    zeros, ones = torch.zeros(4), torch.ones(8)
    torch.utils.swap_tensors(zeros, ones)
    assert ones.tolist() == [0] * 4
    sizes, source = torch.zeros(4), torch.ones(8)
    sizes.set_(source)
    assert sizes.tolist() == [1] * 8
    sizes.set_(torch.arange(8.0).untyped_storage(), 0, (4,), (1,))
    sizes.set_(source.untyped_storage(), 0, (8,), (1,))
    assert sizes.sum() == 8
    sizes = torch.arange(4).reshape(2, 2)
    other = sizes.t()
    sizes.t_()
    assert sizes.tolist() == other.tolist() == [[0, 2], [1, 3]]
    sizes.unsqueeze_(0)
    assert sizes.tolist() == [[[0, 2], [1, 3]]] and other.tolist() == [[0, 2], [1, 3]]
    sizes.squeeze_().transpose_(0, 1)
    assert sizes.tolist() == [[0, 1], [2, 3]] and sizes.clone().resize_(4).tolist() == [0, 1, 2, 3]
    assert torch.full((2,), 1j).conj().tolist() == [-1j, -1j]
    return made(sizes.sum() + 2)

def halved():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3, 4))
            self.register_buffer("places", torch.zeros(3, 4))
    for model in (Biased().half(), Biased().to("cuda", torch.float16)):
        for one in (model.bias, model.places):
            assert one[:, torch.arange(2)].dtype == one.dtype == torch.float16
            assert one.tolist() == [[0] * 4] * 3
    return made(8)

def drawn():
    return made(int(torch.empty(1).uniform_(6.0, 10.0).item()))
"""


ASSUMED = """
import torch
from torch import nn

@torch.library.custom_op("foretrace_test::kept", mutates_args=())
def kept(scores: torch.Tensor) -> torch.Tensor:
    return (scores > 0).nonzero()[:, 0]

@kept.register_fake
def _(scores):
    return scores.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)

def chosen():
    layer = nn.Linear(3, 8).cuda()
    def step():
        out = layer(torch.randn(16, 3, device="cuda"))
        scores = out[:, 0]
        mask = scores > 0
        places = torch.where(mask)[0]
        assert len(out[mask]) == len(places) == int(mask.sum()) == len(scores.masked_select(mask)) == 8, len(places)
        large = torch.zeros(1 << 12, 1 << 10, device="cuda").fill_(scores[0]) > 0
        assert len(large.nonzero()) == 1 << 21 and len(kept(scores)) == 8
        out[mask] = out[mask] * 2
        for expert in (out.sum(0) > 0).nonzero():
            if expert == 7:
                out = out + 1
        out[places].sum().backward()
    return step

def pasted():
    layer = nn.Linear(64, 4).cuda()
    def step():
        found = layer(torch.randn(16, 64, device="cuda"))
        xs, ys = found[:, 0::2].clamp(min=0, max=640), found[:, 1::2].clamp(0, 480)
        boxes = torch.stack((xs, ys), dim=2).reshape(16, 4)
        wide = (boxes[:, 2] - boxes[:, 0] > 1).nonzero()[:, 0]
        assert len(wide) == 8, wide
        boxes = boxes[wide][found[:4, 0].topk(4).indices]
        larger = torch.zeros_like(boxes)
        larger[:, 2:] = boxes[:, 2:] * 2
        larger[:, :2] = boxes[:, :2]
        assert len(larger[larger[:, 0] < larger[:, 2]]) == 2
        larger = larger.to(torch.long)
        sizes = [(int(box[2] - box[0]), int(box[3] - box[1])) for box in larger]
        assert sizes == [(800, 600)] * 4, sizes
        image = torch.zeros(480, 640, device="cuda")
        left, right = max(larger[0][0], 0), min(larger[0][2] + 1, 640)
        image[:, left:right] = found.sum()
        assert image[:, left:right].shape == (480, 480)
    return step

def generated():
    layer = nn.Linear(64, 1001).cuda()
    def step():
        tokens = torch.arange(4, device="cuda")[:, None]
        for _ in range(2):
            last = layer(torch.randn(4, 64, device="cuda")).argmax(-1)
            tokens = torch.cat([tokens, last[:, None]], dim=1)
            if (last == 7).all():
                break
        assert tokens[:, 1:].tolist() == [[250] * 2, [417] * 2, [583] * 2, [750] * 2], tokens[:, 1:].tolist()
        if (torch.rand(4, 100, device="cuda") < 0).any() or f"{tokens[0, 1]}" != "250":
            raise ValueError("no")
        return layer(torch.randn(4, 64, device="cuda")).sum()
    return step

def experts():
    def step():
        x, chosen = torch.randn(30, 8), torch.randn(30, 3).argmax(-1)
        return sum(x[chosen == one].sum() for one in range(3) if (chosen == one).any())
    return step

def split():
    def step():
        x, chosen = torch.randn(30, 8), torch.randn(30, 3).argmax(-1)
        parts = x.split(torch.bincount(chosen, minlength=4).tolist())
        assert [len(part) for part in parts] == [8, 8, 7, 7]
        return torch.cat(parts).sum()
    return step
"""
"""Masks, places, tokens and experts that data choose, and tokens that are split by how many each expert has."""


@pytest.mark.parametrize(("name", "share", "assumed"), [
    ("chosen", 0.5, ["taken to select 0.5 of"]),
    ("pasted", 0.5, ["fill the middle 0.5 of", "taken to select 0.5 of"]),
    ("generated", 0.5, ["fill the middle 0.5 of"]),
    ("experts", 0.2, ["fill the middle 0.2 of", "taken to select 0.2 of"]),
    ("split", 0.2, ["all are taken to be there as often"])])
def test_what_data_decide_is_assumed_only_where_a_share_is_given(
        written: Callable[[str], str], name: str, share: float, assumed: list[str]) -> None:
    script = f"{written(ASSUMED)}:{name}"
    with pytest.raises(ShapeOnlyError, match="--selected") as refused:
        trace_script(script)
    assert name != "chosen" or "shape depends on values (aten.nonzero.default)" in str(refused.value)
    notes = trace_script(script, selected=share).meta.loss.notes
    said = {text for text in ("taken to select", "fill the middle", "there as often")
            if any(text in note for note in notes)}
    assert said == {text for text in ("taken to select", "fill the middle", "there as often")
                    if any(text in one for one in assumed)}
    assert all(sum(text in note for note in notes) == 1 for text in assumed)


RANGES = """
import torch
def build():
    def step():
        found = torch.randn(2, 5).clamp_(-1, 1)
        assert found[1].tolist() == [-1, -0.5, 0, 0.5, 1]
        assert torch.randn(9).argmax().item() == 4
        assert torch.randint(3, 6, (3,)).tolist() == [3, 4, 5]
        return found.sin()
    return step
"""


def test_a_share_of_1_fills_the_whole_range_and_2_is_none(written: Callable[[str], str]) -> None:
    script = f"{written(RANGES)}:build"
    trace_script(script, selected=1.0)
    with pytest.raises(ShapeOnlyError, match="selected=2 is no share"):
        trace_script(script, selected=2)


@pytest.mark.parametrize("name", ["computed", "truncated", "masked", "finite", "drawn", "replaced", "halved"])
def test_what_constants_decide_is_read(written: Callable[[str], str], name: str) -> None:
    graph = trace_script(f"{written(SCRIPT)}:{name}")
    text = [graph.string(code) for code in graph.ops.shapes.tolist() if code >= 0]
    assert any("[3,8]" in one.replace(" ", "") or "[8,3]" in one.replace(" ", "") for one in text), text
    for assumed in ("whether values are finite", "the middle of its range"):
        count = sum(assumed in note for note in graph.meta.loss.notes)
        assert count == (name == "finite") or (name == "drawn" and "middle" in assumed)


@pytest.mark.parametrize("statements", [
    "sizes = torch.rand(3).argmax() + 1", "sizes.copy_(torch.rand(4))", "sizes[torch.randperm(4)] = 2",
    "sizes = torch.tensor([torch.rand(3).sum(), 1.0])", "sizes.data = torch.rand(4)",
    "torch.utils.swap_tensors(sizes, torch.rand(4))", "sizes.set_(torch.rand(4))",
    "sizes = torch.ones(2).resize_(4)"])
def test_what_chance_or_data_decide_is_not(written: Callable[[str], str], statements: str) -> None:
    text = f"{SCRIPT}\ndef build():\n    sizes = torch.ones(4)\n    {statements}\n    return made(sizes.sum())\n"
    with pytest.raises(ShapeOnlyError, match="reads a tensor's values"):
        trace_script(f"{written(text)}:build")


def test_what_torch_computes_for_real_is_left_alone() -> None:
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    found = []

    def build() -> Callable[[], object]:
        with unset_fake_temporarily():
            counted = torch.arange(4)
            counted.add_(1)
            found.append((counted == 2).nonzero().tolist())
            found.append(counted.tolist())
        layer = torch.nn.Linear(2, 2)
        return lambda: layer(torch.ones(1, 2)).sum()

    trace_step(build)
    assert found == [[[1]], [1, 2, 3, 4]]


# --- numbers of data -------------------------------------------------------------------------------------------------


PROGRAM = """
import math
import torch

def build(batch=4):
    net = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    x, y = torch.randn(batch, 8), torch.randint(3, (batch,))
    total, hits = 0.0, 0

    def step():
        nonlocal total, hits
        optimizer.zero_grad()
        out = net(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        loss.backward()
READ
    return step
"""
LOG = """\
        optimizer.step()
        total += loss.item() * batch
        hits += (out.argmax(1) == y).sum().item()
        print(f"{loss.item():.3f} {loss:.2f} {hits:d} {hits / 10:.1%} {round(total, 3)}")
        if not math.isfinite(loss.item()):
            raise SystemExit(1)
"""
SCALED = """\
        scaler.scale(net(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() > 0
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a program, and returns its path."""
    def write(text: str) -> str:
        (tmp_path / "user.py").write_text(text)
        return str(tmp_path / "user.py")

    return write


@pytest.fixture
def traced(written: Callable[[str], str]) -> Callable[[str], Any]:
    """A function that traces the program with statements of its step."""
    return lambda read: trace_script(f"{written(PROGRAM.replace('READ', read))}:build", "cpu")


def test_numbers_that_are_logged_are_read(traced: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    graph = traced(LOG)
    names = [graph.string(code) for code in graph.ops.name]
    assert names.count("aten::_local_scalar_dense") == 5  # each read is work of the step
    assert capsys.readouterr().out.splitlines()[0] == "1.000 1.00 1 100.0% 1.0"
    (note,) = (text for text in graph.meta.loss.notes if "reads numbers of its data" in text)
    assert "user.py:19 (`total += loss.item() * batch`)" in note


@pytest.mark.parametrize(("read", "says"), [
    ("if loss.item() < 9.0: optimizer.step()", "decides by a number that it read"),
    ("net(x[:(out.argmax(1) == y).sum().item()])", "decides by a number that it read"),
    ("torch.zeros(int(loss.item()))", "decides by a number that it read"),
    ("torch.zeros(int(torch.tensor([0.5, loss.item()])[1]))", "reads a tensor's values")])
def test_numbers_that_decide_are_refused(traced: Callable[[str], Any], read: str, says: str) -> None:
    with pytest.raises(ShapeOnlyError, match=says) as told:
        traced(f"        {read}\n")
    assert f"(`{read}" in str(told.value)


def test_a_gradient_scaler_of_the_cpu_takes_its_step(traced: Callable[[str], Any]) -> None:
    graph = traced(SCALED)
    names = {graph.string(code) for code in graph.ops.name}
    assert {"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_", "aten::add_",
            "aten::_local_scalar_dense"} <= names
    assert any("goes on as it does where all of them are" in text for text in graph.meta.loss.notes)


def test_arithmetic_keeps_the_kind() -> None:
    loss, hits = stand_in(0.5), stand_in(3)
    assert isinstance(loss, NumberOfData) and isinstance(hits, CountOfData) and not isinstance(hits, int)
    for made in (loss + 1, 2 - loss, loss * hits, hits / 2, 1 / hits, -loss, abs(loss), loss ** 2, round(loss, 2),
                 sum([loss, loss]), 1.5 + hits):
        assert isinstance(made, NumberOfData)
    for made in (hits + 1, 2 * hits, hits // 2, sum([hits, hits])):
        assert isinstance(made, CountOfData)
    assert math.isfinite(loss) and math.isfinite(hits) and json.dumps({"loss": loss}) == '{"loss": 1.0}'
    assert f"{hits:5d}{loss:6.2f}{hits}" == "    1  1.001"


@pytest.mark.parametrize("number", [stand_in(0.5), stand_in(3)])
def test_what_decides_is_refused_and_a_count_is_no_size(number: OfData) -> None:
    asked: list[Callable[[Any], object]] = [
        bool, int, round, math.floor, lambda one: one < 2, lambda one: one == 2, lambda one: max(one, 2),
        lambda one: one >= 2]
    if isinstance(number, CountOfData):
        asked += [range, operator.index, lambda one: [1, 2][one], lambda one: [1, 2][:one]]
    for each in asked:
        with pytest.raises(ShapeOnlyError, match="decides by a number"):
            each(number)
