"""Traced pieces of the suite's decoders, shipped: a first search for a plan imports no torch.

``ci/ship_pieces.py`` (``make pieces``) writes them, as MessagePack by piece, and a test traces them again. They are of
one PyTorch; under another, pieces are traced.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

SHIPPED = Path(__file__).parent / "shipped" / "pieces.msgpack.z"


class ShippedPieces(msgspec.Struct):
    """The file: the PyTorch that traced, and what tracing gave by digest of the piece (``KeptPieces``)."""

    torch: str
    pieces: dict[str, bytes]


def shipped_piece(piece: str) -> bytes | None:
    """Return what was shipped of a piece; ``None`` where nothing was, or another PyTorch is installed."""
    found = _shipped()
    return found.get(piece) if found else None


@lru_cache(maxsize=1)
def _shipped() -> dict[str, bytes]:
    try:
        found = msgspec.msgpack.decode(zlib.decompress(SHIPPED.read_bytes()), type=ShippedPieces)
    except (OSError, zlib.error, msgspec.MsgspecError):
        return {}
    return found.pieces if torch_version() in ("", found.torch) else {}


def torch_version() -> str:
    """Return the installed PyTorch's version, such as ``2.13.0``, without importing it; empty where there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    said = re.search(r"^__version__ = '([\w.]+)", text, re.MULTILINE)
    return said.group(1) if said else "unknown"


def ship(pieces: dict[str, bytes]) -> None:
    """Write the file."""
    SHIPPED.parent.mkdir(exist_ok=True)
    content = msgspec.msgpack.encode(ShippedPieces(torch_version(), dict(sorted(pieces.items()))))
    SHIPPED.write_bytes(zlib.compress(content, 9))
