"""``.npy`` members of files we wrote: their bytes as an array, after a look at what the header claims."""

from __future__ import annotations

import io
import math
import tokenize
from typing import Any

import numpy as np
import numpy.typing as npt

_KINDS = "biuf"
_MOST_HEADER = 4096


def array_from(data: bytes) -> npt.NDArray[Any]:
    """Return the array of a member's bytes; nothing is allocated that the bytes do not hold.

    Raises:
        ValueError: the header cannot be read, claims another size than there is, or elements that are no numbers.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"an array is of the unknown format {version}")
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, kind = read(stream, max_header_size=_MOST_HEADER)
    except (SyntaxError, tokenize.TokenError, RecursionError, MemoryError, TypeError, LookupError,
            AttributeError) as error:
        raise ValueError(f"the header of an array is damaged ({type(error).__name__})") from None
    body = data[stream.tell():]
    if kind.kind not in _KINDS or kind.hasobject or kind.itemsize == 0:
        raise ValueError("an array holds no numbers")
    if any(size < 0 for size in shape) or len(shape) > 8 or math.prod(shape) * kind.itemsize != len(body):
        raise ValueError("an array is not as large as its header says")
    found = np.frombuffer(body, kind).reshape(shape, order="F" if fortran else "C").copy()
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError("an array holds numbers that are none")
    return found
