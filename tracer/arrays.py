"""Types of the arrays that all tables and columns consist of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int8 = npt.NDArray[np.int8]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
