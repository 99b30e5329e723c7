"""A linear layer whose weights can be pruned: dense at first, then the vector of the weights that are left.

The parameter is one of these:

- the dense weight ``[outputs, inputs]``, with exact zeros where it is pruned. There ``mask``, a bool buffer in its
  shape, is False, and gradients have to be set to 0 before they are used (:class:`~ds_dynmo.models.Pruning` does).
- as soon as that is smaller, the vector of the values that are kept, beside ``index``, an int32 buffer of their places
  in the flattened weight: the CSR triple of the paper in 4 bytes per value. Gradients, fp32 master weights and
  optimizer state are vectors of that length, and so is what moves and what checkpoints hold.

The values are scattered to a dense weight for every product, or multiplied in CSR (:mod:`.kernels`). Both calculate bit
for bit what they do for a dense weight with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.pruning.kernels import (
    CSR,
    DENSE,
    NOTHING,
    TRANSPOSED,
    Kernel,
    Shape,
    can_csr,
    compressed_linear,
    dense,
)
from ds_dynmo.torch_private import buffers_of

__all__ = ["PrunableConv1D", "PrunableLinear", "dense_state_dict", "dense_tensors"]

BYTES_PER_PLACE = 4
MOST_PLACES = torch.iinfo(torch.int32).max


class PrunableLinear(nn.Module):
    """``nn.Linear``, at first dense.

    Args:
        weight: ``[outputs, inputs]``.
        csr_from: from what share of pruned weights on the layer computes in CSR, where torch can (fp32 on a CPU);
            None: never.
        bias: ``[outputs]``, which is not pruned.

    Attributes:
        scattering: the kernel that multiplies by a vector as by a dense weight.
        shape: of the dense weight.
        mask: bool in the shape of ``weight``, True where a weight is kept; None: nothing has been pruned, or the
            parameter is already the vector of kept values (:meth:`use_values`).
        index: places of the kept values in the flattened weight; None: the layer computes with the dense weight.

    A layer is in one of these states:

    ====================  ========================  ==============================================  ===============
    state                 ``weight``                ``mask``                                        ``index``
    ====================  ========================  ==============================================  ===============
    dense, without index  dense                     None, or what is kept                           None
    dense, with index     dense                     what is kept                                    of kept weights
    compressed            vector of kept values     None; after :meth:`prune` what is kept of them  of the values
    ====================  ========================  ==============================================  ===============

    A dense weight has an index where products are computed in CSR, or nothing is kept.
    """

    scattering: ClassVar[Kernel] = DENSE

    bias: nn.Parameter | None
    mask: torch.Tensor | None
    index: torch.Tensor | None

    def __init__(self, weight: nn.Parameter, csr_from: float | None = None, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.shape: Shape = (rows, columns)
        self.weight = weight
        self.register_parameter("bias", bias)
        self.csr_from = csr_from
        self.register_buffer("mask", None)
        self.register_buffer("index", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        kernel = self._kernel()
        if kernel is None:
            return self._dense_product(hidden)
        assert self.index is not None
        values = self.weight if self.is_compressed else self.weight.view(-1).index_select(0, self.index)
        return compressed_linear(hidden, values, self.index, self._features, kernel, self.bias)

    def _dense_product(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)

    @property
    def _features(self) -> Shape:
        """The numbers of outputs and inputs."""
        return self.shape

    def prune(self, mask: torch.Tensor) -> None:
        """Keep the weights where ``mask``, bool in the shape of ``weight``, is True; the others are 0 from now on."""
        self.weight.detach().masked_fill_(~mask, 0)
        if self.is_compressed:
            self.mask = None if mask.all() else mask
            return
        self.mask = mask
        places = mask.view(-1).nonzero().squeeze(1).int()
        self.index = places if not len(places) or self._is_for_csr(len(places)) else None

    def would_shrink(self, kept: int) -> bool:
        """Return whether the vector of ``kept`` values, with their places, is smaller than the parameter is."""
        if self.is_compressed:
            return kept < self.weight.numel()
        value = self.weight.element_size()
        return kept * (value + BYTES_PER_PLACE) < self.size * value and self.size <= MOST_PLACES

    def use_values(self, index: torch.Tensor) -> None:
        """Compute with the values at ``index``; the parameter is, or is about to be, the vector of these."""
        self.index, self.mask = index, None

    def compress(self) -> None:
        """Replace the parameter by the vector of kept values, without an engine, and so without optimizer state."""
        places = self.kept_places()
        self.use_values(self.index_at(places))
        self.weight = nn.Parameter(self.weight.detach().view(-1)[places], requires_grad=self.weight.requires_grad)

    def _kernel(self) -> Kernel | None:
        if self.index is None:
            return None
        if not len(self.index):
            return NOTHING
        if self._is_for_csr(len(self.index)):
            return CSR
        return self.scattering if self.is_compressed else None

    def _is_for_csr(self, kept: int) -> bool:
        is_sparse = self.csr_from is not None and self.size - kept >= self.csr_from * self.size
        return is_sparse and can_csr(self.weight.dtype, self.weight.device)

    def kept_places(self) -> torch.Tensor:
        """Return the places in the flattened parameter that are not pruned, int64 and ascending."""
        if self.mask is None:
            return torch.arange(self.weight.numel(), device=self.weight.device)
        return self.mask.view(-1).nonzero().squeeze(1)

    def index_at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the ``index`` of the parameter's elements at ``places``: their places in the flattened weight."""
        if not self.is_compressed:
            return places.int()
        assert self.index is not None
        return self.index[places]

    def dense_weight(self) -> torch.Tensor:
        """Make the weight ``[outputs, inputs]``, with zeros where it is pruned."""
        if not self.is_compressed:
            return self.weight.detach()
        assert self.index is not None
        return dense(self.weight.detach(), self.index, self.shape)

    @property
    def size(self) -> int:
        """The number of weights that the layer was built with."""
        return self.shape[0] * self.shape[1]

    @property
    def kept(self) -> int:
        """The number of weights that are not pruned."""
        return self.weight.numel() if self.mask is None else int(self.mask.sum())

    @property
    def is_compressed(self) -> bool:
        """Whether the parameter is the vector of kept values."""
        return self.weight.dim() == 1

    @property
    def computes_sparse(self) -> bool:
        """Whether the next pass multiplies by the kept values alone, in CSR."""
        return self._kernel() is CSR

    @property
    def workspace_bytes(self) -> int:
        """The bytes of the dense weight, or its gradient, that a pass makes and frees again."""
        kernel = self._kernel()
        return 0 if kernel is None else kernel.workspace_elements(self.shape) * self.weight.element_size()

    def extra_repr(self) -> str:
        outputs, inputs = self._features
        return f"{inputs}, {outputs}, csr_from={self.csr_from}"


class PrunableConv1D(PrunableLinear):
    """The ``Conv1D`` of Hugging Face's GPT-2, whose weight is ``[inputs, outputs]``; it never computes in CSR."""

    scattering: ClassVar[Kernel] = TRANSPOSED

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(hidden.view(-1, hidden.shape[-1]))
        return outputs.view(*hidden.shape[:-1], outputs.shape[-1])

    def _dense_product(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        return torch.addmm(self.bias, hidden, self.weight)

    @property
    def _features(self) -> Shape:
        return self.shape[::-1]

    def _is_for_csr(self, kept: int) -> bool:
        return False


def dense_state_dict(layer: nn.Module) -> dict[str, Any]:
    """Make the ``state_dict`` of a layer as if it had never been prunable: dense weights, zeros where it is pruned."""
    state = dict(layer.state_dict())
    for path, part in layer.named_modules():
        if isinstance(part, PrunableLinear):
            prefix = f"{path}." if path else ""
            for name in buffers_of(part):
                state.pop(prefix + name, None)
            state[f"{prefix}weight"] = part.dense_weight()
    return state


def dense_tensors(state: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Make dense weights of what a saved ``state_dict`` holds of prunable linear layers.

    Args:
        shapes: by the names of their weights.
    """
    tensors = dict(state)
    for name, shape in shapes.items():
        path = name.removesuffix("weight")
        index, _ = tensors.pop(f"{path}index", None), tensors.pop(f"{path}mask", None)
        weight = tensors.get(name)
        if weight is not None and weight.dim() == 1 and index is not None:
            tensors[name] = dense(weight, index, shape)
    return tensors
