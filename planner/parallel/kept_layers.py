"""Traces of a decoder's pieces, shipped and kept on disk, so that a process need not import torch.

A piece's calls follow from its sizes, the kind of device, PyTorch's version and settings, and the code that traces. The
file's name is a digest of all these (``_surroundings``), so a file that is found holds what tracing would give. Pieces
of the suite's decoders are shipped: ``ci/ship_pieces.py`` (``make pieces``) writes them as MessagePack, and a test
traces them again. They come from one version of PyTorch.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import msgspec

import kernel_models
import tracer
from graph_predictor.synthesis import step
from kernel_models.device import DeviceSpec
from tracer.capture.context import tf32_in_use
from tracer.kept_files import read_kept, write_kept
from tracer.shape_only.transformer import TransformerPart, TransformerShape

SHIPPED = Path(__file__).parent / "shipped" / "pieces.msgpack.z"
LAYERS = tuple(Path(tracer.__path__[0], "shape_only", name) for name in (
    "transformer_layers.py", "transformer_parts.py"))
"""Files with the code of the traced layers."""


class ShippedLayers(msgspec.Struct):
    """The shipped file: the PyTorch that traced, the digest of the layers' code (``layers_digest``), and the traces by
    digest of the piece (``KeptLayers``)."""

    torch: str
    layers: str
    pieces: dict[str, bytes]


@lru_cache(maxsize=1)
def _shipped() -> dict[str, bytes]:
    """Return the shipped traces by digest of their piece; none if the layers' code has changed since. They are used
    with any PyTorch and without one, because the cluster's version is unknown anyway."""
    try:
        found = msgspec.msgpack.decode(zlib.decompress(SHIPPED.read_bytes()), type=ShippedLayers)
    except (OSError, zlib.error, msgspec.MsgspecError):
        return {}
    return found.pieces if found.layers == layers_digest() else {}


def layers_digest() -> str:
    """Return a digest of the code of the traced layers."""
    # Of text, not bytes: a checkout on Windows has other line ends.
    return hashlib.sha256("".join(file.read_text(encoding="utf-8") for file in LAYERS).encode()).hexdigest()


def torch_version() -> str:
    """Return the installed PyTorch's version, such as ``2.13.0``, without importing it; "" if it is not installed."""
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
    """Write the shipped file."""
    SHIPPED.parent.mkdir(exist_ok=True)
    content = msgspec.msgpack.encode(ShippedLayers(torch_version(), layers_digest(), dict(sorted(pieces.items()))))
    SHIPPED.write_bytes(zlib.compress(content, 9))


Traced = TypeVar("Traced")
USUAL = (True, True, True, True, False, True, "torch.float32")
"""``_settings`` of a process with PyTorch's defaults."""


class KeptLayers:
    """Files of a decoder's traced pieces (block, embedding, head, …) for one kind of device.

    Args:
        device: its vendor and compute capability decide which kernels run.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self._kind = f"{device.vendor} {device.compute_capability}"

    def get(self, what: str, shape: TransformerShape, part: TransformerPart, kind: type[Traced]) -> Traced | None:
        """Return the shipped or kept trace of a piece, decoded as ``kind``; ``None`` if there is none."""
        piece = self._piece(what, shape, part)
        content = _shipped().get(piece) if _settings() == USUAL else None
        if content is None and (name := _file_name(piece)):
            content = read_kept(name)
        if content is None:
            return None
        try:
            return msgspec.msgpack.decode(content, type=kind)
        except msgspec.MsgspecError:  # a file with another version's types
            return None

    def of(self, what: str, shape: TransformerShape, part: TransformerPart, kind: type[Traced],
           trace: Callable[[], Traced]) -> Traced:
        """Return the shipped or kept trace of a piece; else trace the piece and keep the result."""
        found = self.get(what, shape, part, kind)
        if found is None:
            found = trace()
            self.put(what, shape, part, found)
        return found

    def put(self, what: str, shape: TransformerShape, part: TransformerPart, traced: object) -> None:
        """Keep a trace, if the place of kept files can be written."""
        if name := _file_name(self._piece(what, shape, part)):
            write_kept(name, msgspec.msgpack.encode(traced))

    def _piece(self, what: str, shape: TransformerShape, part: TransformerPart) -> str:
        """Return the digest that identifies a piece."""
        parts = (self._kind, what, repr(shape), repr(part), *["once"] * part.once)
        return hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]


def _file_name(piece: str) -> str:
    """Return the name of a piece's file; "" without an installed PyTorch."""
    around = _surroundings()
    if not around:
        return ""
    return f"piece-{hashlib.sha256(f'{around}{_settings()!r}'.encode()).hexdigest()[:32]}-{piece}.kept"


@lru_cache(maxsize=1)
def _surroundings() -> str:
    """Return a digest of PyTorch's version and of the code that traces; "" without an installed PyTorch."""
    version = torch_version()
    if not version:
        return ""
    found = hashlib.sha256(version.encode())
    files = [*(each for package in (tracer, kernel_models) for each in Path(package.__path__[0]).rglob("*.py")),
             Path(step.__file__), *Path(__file__).parent.glob("*.py")]
    for file in sorted(files):
        found.update(file.read_bytes())
    return found.hexdigest()


def _settings() -> tuple[object, ...]:
    """Return the settings of PyTorch that decide which kernels a step runs."""
    torch = sys.modules.get("torch")
    if torch is None:
        return USUAL
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cudnn.enabled,
            *tf32_in_use(), str(torch.get_default_dtype()))
