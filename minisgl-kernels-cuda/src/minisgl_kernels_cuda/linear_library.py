"""The library's other product: by cuBLASLt, whose choices differ from cuBLAS's own."""

from __future__ import annotations

import torch
from torch import Tensor


class LibraryLinear:
    """The product of a decode batch with a long weight, such as that of down.

    cuBLAS splits the inputs of such a product over blocks (split-K) and adds up the parts in a
    second kernel; cuBLASLt chooses one that needs none. PyTorch calls cuBLASLt where it has a bias
    to add, so it is given zeros.
    """

    def __init__(self, weight: Tensor) -> None:
        """Keep the weight.

        Args:
            weight: ``[n, k]``.
        """
        self._weight = weight.t()
        self._zeros = weight.new_zeros(weight.shape[0])

    def __call__(self, out: Tensor, x: Tensor, num_rows: int) -> None:
        """Write the product.

        Args:
            out: ``[..., n]``, contiguous.
            x: ``[..., k]``, likewise.
            num_rows: Of both, at least 1.
        """
        rows, result = x.view(num_rows, -1), out.view(num_rows, -1)
        torch.addmm(self._zeros, rows, self._weight, out=result)
