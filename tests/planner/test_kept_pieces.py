"""Pieces of decoders kept on disk: what is found is what tracing gives, and nothing else is taken for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_models.device import device
from planner.parallel import kept_pieces
from planner.parallel.microbatches import TracedCalls
from planner.parallel.pieces import LayerPieces
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

    for name in ("trace_part", "trace_saved", "trace_optimizer"):
        monkeypatch.setattr(transformer_parts, name, noted(name, getattr(transformer_parts, name)))
    return found


def asked(pieces: LayerPieces, shape: TransformerShape = SHAPE) -> list[object]:
    """All that is traced of a block."""
    return [pieces.cost(shape, BLOCK), pieces.optimizer(shape, BLOCK), pieces.saved_bytes(shape, BLOCK)]


def test_another_process_finds_what_was_traced(kept: Path, traces: list[str]) -> None:
    first = asked(LayerPieces(H200))
    assert sorted(traces) == ["trace_optimizer", "trace_part", "trace_saved"]
    assert asked(LayerPieces(H200)) == first
    assert len(traces) == 3
    assert len(list(kept.glob("piece-*"))) == 3


def test_damaged_files_are_traced_again(kept: Path, traces: list[str]) -> None:
    """Each of the three is damaged in a way of its own, after a first trace has said what is right."""
    first = asked(LayerPieces(H200))
    damages = (lambda content: b"", lambda content: content[:-3], lambda content: b"x" + content)
    for file, damage in zip(sorted(kept.glob("piece-*")), damages, strict=True):
        file.write_bytes(damage(file.read_bytes()))
    assert asked(LayerPieces(H200)) == first
    assert len(traces) == 6


def test_other_sizes_devices_versions_and_settings_have_files_of_their_own(
        kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def known(shape: TransformerShape = SHAPE, spec: Any = H200) -> object:
        return kept_pieces.KeptPieces(spec).get("calls", shape, BLOCK, TracedCalls)

    kept_pieces.KeptPieces(H200).put("calls", SHAPE, BLOCK, TracedCalls((), ()))
    assert known() == TracedCalls((), ())
    assert known(spec=device("h100-sxm")) == TracedCalls((), ())  # runs the same operations
    assert known(replace(SHAPE, hidden=128)) is None
    assert known(spec=device("b200")) is None
    with monkeypatch.context() as other:
        other.setattr(kept_pieces, "_settings", lambda: (False, *kept_pieces.USUAL[1:]))
        assert known() is None
    with monkeypatch.context() as other:
        other.setattr(kept_pieces, "_surroundings", lambda: "another PyTorch")
        assert known() is None
    with monkeypatch.context() as other:
        other.setattr(kept_pieces, "_surroundings", lambda: "")  # no PyTorch
        assert known() is None


def test_the_usual_settings_are_those_of_a_fresh_process() -> None:
    import torch

    before = torch.get_float32_matmul_precision()
    assert kept_pieces._settings() == kept_pieces.USUAL
    torch.set_float32_matmul_precision("high")
    try:
        assert kept_pieces._settings() != kept_pieces.USUAL
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_oldest_files_go(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pieces, "MOST_FILES", 2)
    pieces = kept_pieces.KeptPieces(H200)
    for hidden in (64, 128, 192):
        kept_pieces._tidy.cache_clear()
        pieces.put("saved", replace(SHAPE, hidden=hidden), BLOCK, hidden)
    assert len(list(kept.glob("piece-*"))) == 2


def test_a_cache_that_cannot_be_written_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pieces, "kept_folders", lambda: iter(()))
    kept_pieces.KeptPieces(H200).put("saved", SHAPE, BLOCK, 1)
    assert kept_pieces.KeptPieces(H200).get("saved", SHAPE, BLOCK, int) is None
