"""The container: a zip whose comment carries the format's version and a checksum of everything before it.

Every byte of the file is covered: zip's own CRCs leave headers and directory unchecked. Parquet members are stored
as they are (they compress themselves), the manifest is deflated.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib

from tracer.errors import GraphFileError, reason_of
from tracer.input_file import open_anywhere
from tracer.output_file import replaced_file, why_unwritten

VERSION = 1
"""Version of the file format. Raise it when an older reader would misread a new file."""

MANIFEST = "manifest.json"

_COMMENT = re.compile(rb"foretrace (\d+) crc32 ([0-9a-f]{8})\Z")
_CHECKSUM_BYTES = 8
_COMMENT_BYTES = 64  # more than the longest comment
_ZIP_HEAD = b"PK\x03\x04"
_OWN_HEAD = 30  # bytes of a zip member's header before its name
# A manifest holds no per-event data beyond small tables; a bigger one is an attack, not a graph.
_MAX_MANIFEST_BYTES = 256 << 20
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # the same graph gives the same bytes


def is_graph_file(head: bytes) -> bool:
    """Return whether a file's first bytes (64 are enough) are those of a saved graph or job."""
    return head.startswith(_ZIP_HEAD) and head[_OWN_HEAD: _OWN_HEAD + len(MANIFEST)] == MANIFEST.encode()


def pack(members: dict[str, bytes]) -> bytes:
    """The container's bytes. The manifest must be the first member."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name, _FIXED_TIME)
            info.compress_type = zipfile.ZIP_DEFLATED if name == MANIFEST else zipfile.ZIP_STORED
            archive.writestr(info, content, compresslevel=9)
        archive.comment = f"foretrace {VERSION} crc32 ".encode() + b"0" * _CHECKSUM_BYTES
    return seal(stream.getvalue())


def seal(data: bytes) -> bytes:
    """The same container with its last bytes, the checksum, set right."""
    body = data[:-_CHECKSUM_BYTES]
    return body + f"{zlib.crc32(body):08x}".encode()


def unpack(data: bytes, label: str) -> dict[str, bytes]:
    """The members of a container, after checking its version and checksum.

    Raises:
        GraphFileError: another format, a newer version, or a damaged file.
    """
    comment = _COMMENT.search(data[-_COMMENT_BYTES:])
    if comment is None:
        raise GraphFileError(_why_no_comment(data, label))
    version = int(comment.group(1))
    if version > VERSION:
        raise GraphFileError(
            f"{label} is of format version {version}, newer than this foretrace reads (up to {VERSION}); "
            "update foretrace or convert the traces again."
        )
    if zlib.crc32(memoryview(data)[:-_CHECKSUM_BYTES]) != int(comment.group(2), 16):
        raise corrupt(label, "its checksum does not match")
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                limit = _MAX_MANIFEST_BYTES if info.filename == MANIFEST else len(data)
                stored = info.compress_type == zipfile.ZIP_STORED
                if info.filename in members or info.file_size > limit or not (stored or info.filename == MANIFEST):
                    raise corrupt(label, f"its member {info.filename[:80]!r} is not as foretrace writes it")
                members[info.filename] = archive.read(info)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise corrupt(label, str(error)) from None
    return members


def corrupt(label: str, reason: str) -> GraphFileError:
    """The error for a damaged file."""
    return GraphFileError(f"{label} is corrupt ({reason}); copy it again or convert the traces again.")


def _why_no_comment(data: bytes, label: str) -> str:
    if not data:
        return f"{label} is empty; convert the traces again."
    if is_graph_file(data[:64]):
        return f"{label} is truncated or damaged at its end; copy it again or convert the traces again."
    what = "is a zip archive but no saved graph" if data.startswith(_ZIP_HEAD) else "is no saved graph"
    return f"{label} {what}; give a file written by foretrace convert, or a trace."


def read_file(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a local file or fsspec URL.

    Raises:
        GraphFileError: it cannot be read.
    """
    name = os.fspath(path)
    try:
        with open_anywhere(name)[0] as stream:
            return stream.read()
    except FileNotFoundError:
        raise GraphFileError(f"{name} does not exist; check the path.") from None
    except Exception as error:  # fsspec's back ends raise types of their own (missing package, bad credentials)
        raise GraphFileError(f"{name} cannot be read ({_one_line(error)}); check the path and permissions.") from None


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a local file or fsspec URL so that readers see the old content or the new one, never a part.

    Locally through a temporary file beside it, flushed to disk and renamed. Remote object stores publish an upload
    when it is complete.

    Raises:
        GraphFileError: it cannot be written; an existing file is left as it was.
    """
    name = os.fspath(path)
    try:
        if "://" in name:
            import fsspec  # slow to import, and needed for remote files only

            filesystem, remote = fsspec.core.url_to_fs(name)
            filesystem.pipe_file(remote, data)
        else:
            with replaced_file(name) as stream:
                stream.write(data)
    except OSError as error:
        raise GraphFileError(why_unwritten(name, error)) from error
    except Exception as error:  # as in read_file
        reason = _one_line(error)
        raise GraphFileError(f"{name} cannot be written ({reason}); check the folder and its free space.") from None


def _one_line(error: BaseException) -> str:
    return getattr(error, "strerror", None) or reason_of(error)
