"""Models for GPUs that were never measured: formulas in published figures, with constants that other GPUs taught.

``TransferModel`` fits several GPUs' measurements of one family; ``TransferModel.on`` gives the model of any device.
"""

from kernel_models.transfer.figures import Figures, Metric
from kernel_models.transfer.measured import Measured
from kernel_models.transfer.model import Residuals, Size, TransferModel, TransferredModel

__all__ = ["Figures", "Measured", "Metric", "Residuals", "Size", "TransferModel", "TransferredModel"]
