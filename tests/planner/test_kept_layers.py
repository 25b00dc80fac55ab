"""Pieces of decoders kept on disk or shipped: what is found is what tracing gives, and nothing else is taken for it."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernel_models.device import device
from planner.parallel import kept_layers
from planner.parallel.layer_costs import LayerCosts, TracedCalls
from planner.parallel.planning import plan
from tracer import kept_files
from tracer.shape_only import transformer_parts
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

H200 = device("h200-sxm")
SHAPE = TransformerShape(1, 64, 2, 2, 128, 256, 64)
BLOCK = TransformerPart(Piece.BLOCK, 1)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "foretrace"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that traced something."""
    found: list[str] = []

    def noted(name: str, trace: Any) -> Any:
        return lambda *args: (found.append(name), trace(*args))[1]

    for name in ("trace_part", "trace_optimizer"):
        monkeypatch.setattr(transformer_parts, name, noted(name, getattr(transformer_parts, name)))
    return found


def asked(pieces: LayerCosts, shape: TransformerShape = SHAPE) -> list[object]:
    """All that is traced of a block."""
    return [pieces.cost(shape, BLOCK), pieces.optimizer(shape, BLOCK), pieces.saved_bytes(shape, BLOCK)]


def test_another_process_finds_what_was_traced_and_what_is_damaged_is_traced_again(
        kept: Path, traces: list[str]) -> None:
    first = asked(LayerCosts(H200))
    assert sorted(traces) == ["trace_optimizer", "trace_part"]
    assert asked(LayerCosts(H200)) == first and len(traces) == len(list(kept.glob("piece-*"))) == 2
    for damage in (lambda content: b"", lambda content: content[:-3], lambda content: b"x" + content):
        traces.clear()
        for file in kept.glob("piece-*"):
            file.write_bytes(damage(file.read_bytes()))
        assert asked(LayerCosts(H200)) == first and len(traces) == 2


def test_other_sizes_devices_versions_and_settings_have_files_of_their_own(
        kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def known(shape: TransformerShape = SHAPE, spec: Any = H200) -> object:
        return kept_layers.KeptLayers(spec).get("calls", shape, BLOCK, TracedCalls)

    kept_layers.KeptLayers(H200).put("calls", SHAPE, BLOCK, TracedCalls((), ()))
    assert known() == TracedCalls((), ())
    assert known(spec=device("h100-sxm")) == TracedCalls((), ())  # runs the same operations
    assert known(replace(SHAPE, hidden=128)) is None
    assert known(spec=device("b200")) is None
    for name, value in (("_settings", (False, *kept_layers.USUAL[1:])), ("_surroundings", "another PyTorch"),
                        ("_surroundings", "")):  # the last without PyTorch
        with monkeypatch.context() as other:
            other.setattr(kept_layers, name, lambda value=value: value)
            assert known() is None


def test_the_usual_settings_are_those_of_a_fresh_process() -> None:
    import torch

    before = torch.get_float32_matmul_precision()
    assert kept_layers._settings() == kept_layers.USUAL
    torch.set_float32_matmul_precision("high")
    try:
        assert kept_layers._settings() != kept_layers.USUAL
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_oldest_files_go(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "MOST_FILES", 2)
    pieces = kept_layers.KeptLayers(H200)
    for hidden in (64, 128, 192):
        kept_files._tidy.cache_clear()
        pieces.put("saved", replace(SHAPE, hidden=hidden), BLOCK, hidden)
    assert len(list(kept.glob("piece-*"))) == 2


def test_a_cache_that_cannot_be_written_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "places", lambda: iter(()))
    kept_layers.KeptLayers(H200).put("saved", SHAPE, BLOCK, 1)
    assert kept_layers.KeptLayers(H200).get("saved", SHAPE, BLOCK, int) is None


ROOT = Path(__file__).resolve().parents[2]


def test_a_first_search_of_a_decoder_of_the_suite_imports_no_torch(tmp_path: Path) -> None:
    program = ("import sys; from planner.parallel.planning import plan; plan('gpt2', 16); "
               "print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT,
                          env={"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PATH": ""})
    assert done.stdout.split() == ["False"]


def test_what_is_shipped_is_what_tracing_gives(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    assert kept_layers.torch_version() == torch.__version__.partition("+")[0]
    if kept_layers.torch_version() != _shipped().torch:
        pytest.skip("another PyTorch than the one that traced what is shipped")
    monkeypatch.setattr(kept_layers, "_shipped", dict)
    plan("gpt2", 64, pieces=LayerCosts(H200))
    traced = {file.stem.rpartition("-")[2]: file.read_bytes()[32:] for file in kept.glob("piece-*.kept")}
    assert len(traced) > 5
    other = [piece for piece, content in traced.items() if _shipped().pieces.get(piece) != content]
    assert not other, "tracing gives something else: python ci/ship_pieces.py (make pieces)"


@pytest.fixture
def unread() -> Iterator[None]:
    """Nothing shipped was read before, and what the test reads is read again."""
    kept_layers._shipped.cache_clear()
    yield
    kept_layers._shipped.cache_clear()


@pytest.mark.parametrize("version", ["2.6.0", "9.9.9", ""])
def test_what_is_shipped_serves_any_pytorch(version: str, monkeypatch: pytest.MonkeyPatch, unread: None) -> None:
    monkeypatch.setattr(kept_layers, "torch_version", lambda: version)
    assert kept_layers._shipped() == _shipped().pieces


def test_layers_of_other_code_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: None) -> None:
    changed = tmp_path / "layers.py"
    changed.write_text(kept_layers.LAYERS[0].read_text() + "WIDER = True\n")
    monkeypatch.setattr(kept_layers, "LAYERS", (changed, *kept_layers.LAYERS[1:]))
    assert kept_layers._shipped() == {}


def test_other_settings_of_pytorch_trace(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_parts, "trace_part", lambda *_: 1 / 0)
    monkeypatch.setattr(kept_layers, "_settings", lambda: (False, *kept_layers.USUAL[1:]))
    with pytest.raises(ZeroDivisionError):
        plan("gpt2", 64)


def _shipped() -> kept_layers.ShippedLayers:
    content = zlib.decompress(kept_layers.SHIPPED.read_bytes())
    return msgspec.msgpack.decode(content, type=kept_layers.ShippedLayers)
