"""Shipped pieces of decoders: a search finds them without torch, they are what tracing gives, and of one PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kernel_models.device import device
from planner.parallel import kept_pieces, shipped_pieces
from planner.parallel.pieces import LayerPieces
from planner.parallel.planning import plan
from tracer.shape_only import transformer_parts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, empty."""
    monkeypatch.setattr(kept_pieces, "kept_folders", lambda: iter([tmp_path]))
    return tmp_path


def test_a_first_search_of_a_decoder_of_the_suite_imports_no_torch(tmp_path: Path) -> None:
    program = ("import sys; from planner.parallel.planning import plan; plan('gpt2', 64); "
               "print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT,
                          env={"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PATH": ""})
    assert done.stdout.split() == ["False"]


def test_what_is_shipped_is_what_tracing_gives(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    if shipped_pieces.torch_version() != _shipped().torch:
        pytest.skip("another PyTorch than the one that traced what is shipped")
    monkeypatch.setattr(kept_pieces, "shipped_piece", lambda piece: None)
    pieces = LayerPieces(device("h200-sxm"))
    plan("gpt2", 64, pieces=pieces)
    traced = {file.stem.rpartition("-")[2]: file.read_bytes()[32:] for file in empty.glob("piece-*.kept")}
    assert len(traced) > 5
    other = [piece for piece, content in traced.items() if _shipped().pieces.get(piece) != content]
    assert not other, "tracing gives something else: python ci/ship_pieces.py (make pieces)"


def test_another_pytorch_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = next(iter(_shipped().pieces))
    shipped_pieces._shipped.cache_clear()
    assert shipped_pieces.shipped_piece(piece)
    for version, found in (("1.0.0", False), ("", True)):
        shipped_pieces._shipped.cache_clear()
        with monkeypatch.context() as other:
            other.setattr(shipped_pieces, "torch_version", lambda version=version: version)
            assert (shipped_pieces.shipped_piece(piece) is not None) is found
    shipped_pieces._shipped.cache_clear()


def test_other_settings_of_pytorch_trace(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def trace(*_: object) -> None:
        asked.append("traced")
        raise ZeroDivisionError

    monkeypatch.setattr(transformer_parts, "trace_part", trace)
    monkeypatch.setattr(kept_pieces, "_settings", lambda: (False, *kept_pieces.USUAL[1:]))
    with pytest.raises(ZeroDivisionError):
        plan("gpt2", 64)
    assert asked == ["traced"]


def test_the_version_is_the_installed_one() -> None:
    torch = pytest.importorskip("torch")
    assert shipped_pieces.torch_version() == torch.__version__.partition("+")[0]


def _shipped() -> shipped_pieces.ShippedPieces:
    import zlib

    content = zlib.decompress(shipped_pieces.SHIPPED.read_bytes())
    return msgspec.msgpack.decode(content, type=shipped_pieces.ShippedPieces)
