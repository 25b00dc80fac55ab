"""Models for GPUs that were never measured: formulas in published figures, with constants that other GPUs taught.

``TransferModel`` fits several GPUs' measurements of one family; ``TransferModel.on`` gives the model of any device.
"""

from cross_device.figures import Figures, Metric
from cross_device.measured import Measured
from cross_device.model import Residuals, Size, TransferModel, TransferredModel

__all__ = ["Figures", "Measured", "Metric", "Residuals", "Size", "TransferModel", "TransferredModel"]
