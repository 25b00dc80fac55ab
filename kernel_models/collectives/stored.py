"""The types of what a profile of collectives keeps: what is read back is one of these, or the file is damaged."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kernel_models.collectives.call import DTYPES, CollectiveKind
from kernel_models.collectives.measurements import LEAST_US, MOST_BYTES, MOST_US, Setting
from tracer.ranks import MOST_RANKS

Size = Annotated[float, msgspec.Meta(gt=0, le=MOST_BYTES)]
Bytes = Annotated[float, msgspec.Meta(ge=0, le=MOST_BYTES)]
Micros = Annotated[float, msgspec.Meta(ge=LEAST_US, le=MOST_US)]
Cost = Annotated[float, msgspec.Meta(ge=0, le=MOST_US)]
"""A latency or a time for each byte, µs: zero is possible."""
LogRatio = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Spread = Annotated[float, msgspec.Meta(ge=0, le=100)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
StoredSetting = tuple[int, str, _Ranks, _Ranks, _Ranks, _Ranks]
"""A ``Setting`` with the dtype's name."""


def stored_setting(stored: StoredSetting) -> Setting:
    """Return the setting of its stored form. Raises ``ValueError`` for a collective or dtype that is none."""
    kind, dtype, ranks, nodes, widest, narrowest = stored
    if dtype not in DTYPES:
        raise ValueError(f"{dtype[:40]!r} is no element type")
    if not nodes <= ranks or not narrowest <= widest <= ranks:
        raise ValueError("a group's ranks do not lie on its nodes")
    return int(CollectiveKind(kind)), DTYPES.index(dtype), ranks, nodes, widest, narrowest
