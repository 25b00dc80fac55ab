"""Host models by name: those that are shipped, and files of one's own."""

from __future__ import annotations

import gzip
import json
import zlib
from functools import lru_cache
from pathlib import Path

from kernel_models.host.model import HostModel
from tracer.decode import DecodeError, from_json
from tracer.errors import ForetraceError
from tracer.output_file import whole_file

HOSTS = Path(__file__).resolve().parent / "models"
CPU_HOST, GPU_HOST, PLANS_HOST = "cpu-steps", "gpu-steps", "cpu-plans"
"""Hosts whose own operations compute (2 cores of an AMD EPYC), hosts of GPUs (published traces), and the first with
programs under DDP and FSDP besides, whose hooks it knows."""
_MOST_BYTES = 1 << 26
_BEGINS = b'{"host":'


def host_names() -> list[str]:
    """Return the names of shipped host models."""
    return sorted(path.name.removesuffix(".json.gz") for path in HOSTS.glob("*.json.gz"))


@lru_cache(maxsize=8)
def shipped_host(name: str) -> HostModel:
    """Return a shipped model by its name."""
    return read_host(HOSTS / f"{name}.json.gz")


def read_host(path: Path) -> HostModel:
    """Return the model of a file. Raises ``ForetraceError`` for one that is none."""
    try:
        with gzip.open(path, "rb") as stream:
            text = stream.read(_MOST_BYTES)
        return HostModel.from_dict(from_json(text))
    except (OSError, EOFError, zlib.error, DecodeError) as error:
        raise ForetraceError(f"{path} cannot be read as a host model ({error}); fit it again.") from None


def is_host_file(name: str) -> bool:
    """Return whether a path names a file that ``write_host`` wrote, by how it begins."""
    path = Path(name)
    try:
        if not path.is_file():
            return False
        with gzip.open(path, "rb") as stream:
            return stream.read(len(_BEGINS)) == _BEGINS
    except (OSError, EOFError, ValueError, zlib.error):
        return False


def write_host(model: HostModel, path: Path) -> None:
    """Write a model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as stream:
        stream.write(gzip.compress(json.dumps(model.to_dict(), separators=(",", ":")).encode(), mtime=0))
