"""What a dynamic model may ask of the engine: sums over ranks, magnitudes of gradients, weights set to zero."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.deepspeed_adapter.optimizer_wrappers import ZeroWrapper
from ds_dynmo.engine.deepspeed_adapter.patches import PatchedPipelineEngine
from ds_dynmo.engine.optimizer.clipping import gradient_magnitudes
from ds_dynmo.errors import ConfigError

Callback = Callable[[], None]


class ModelApiEngine(PatchedPipelineEngine):
    """The engine as models see it; all of it needs a "dynmo" block, which may be switched off."""

    def __init__(self, *args: Any, dynmo: DynMoConfig | None, **kwargs: Any) -> None:
        super().__init__(*args, dynmo=dynmo, **kwargs)
        self._step_callbacks: list[Callback] = []

    @abstractmethod
    def _set_instructions(self) -> None:
        """Make what carries out the instructions of a batch anew."""

    def before_step(self, callback: Callback) -> None:
        """Call ``callback`` on this rank in every batch, between the reduction of gradients and the step."""
        self._require_block("before_step")
        self._step_callbacks.append(callback)
        self._set_instructions()

    def sum_over_stages(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise sum of a tensor over the stages of this rank's pipeline. Collective."""
        self._require_block("sum_over_stages")
        return self._comm.sum_over_stages(numbers)

    def sum_over_replicas(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise sum of a tensor over the data-parallel replicas of this rank's stage. Collective."""
        self._require_block("sum_over_replicas")
        return self._comm.sum_over_replicas(numbers)

    def sum_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise sum of a tensor over all ranks, replicas too. Collective."""
        self._require_block("sum_over_world")
        return self._comm.sum_over_world(numbers)

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        """Set elements of a parameter of this stage to 0, with their fp32 master weights and optimizer state.

        Where the gradient is 0 from then on too, an elementwise optimizer keeps them at exactly 0. Between batches;
        not collective, but every replica has to make the same call.

        Args:
            where: bool in the parameter's shape, on its device.
        """
        self._require_block("zero_elements")
        self._state.zero_elements(parameter, where)

    def zero_gradients(self, elements: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Set elements of the batch's gradients to 0. For :meth:`before_step`; before the norm is taken for clipping.

        Not collective, but every replica has to make the same call.

        Args:
            elements: parameters of this stage, each with a bool in its shape: where its gradient is to be 0.
        """
        self._require_block("zero_gradients")
        reduced = self.stage.optimizer.gradients()
        for parameter, where in elements:
            gradient = reduced.get(id(parameter))
            if gradient is None:
                continue
            if gradient.numel() < parameter.numel():  # this rank's part
                held = self._state.state_of(parameter).values()
                start = next(part[0] for part in held if isinstance(part, tuple))
                where = where.reshape(-1)[start : start + gradient.numel()]
            gradient.masked_fill_(where.reshape(gradient.shape), 0)

    def gradient_magnitudes(self) -> torch.Tensor:
        """Per layer of the model, this rank's share of the sum of its gradients' magnitudes; the world's adds up.

        For :meth:`before_step`: gradients are those of the batch, averaged over the replicas. Each number is held by
        one rank, under ZeRO by one rank in parts of each gradient.

        Returns:
            fp64 ``[num_layers]`` on the CPU; 0 where a layer is elsewhere, counted elsewhere, or frozen.
        """
        self._require_block("gradient_magnitudes")
        sharded = isinstance(self._wrapper, ZeroWrapper)
        replica, norm = self.grid.get_data_parallel_id(), self.stage.optimizer.norm
        reduced = self.stage.optimizer.gradients()
        return gradient_magnitudes(
            self._layers.counted_modules() if sharded or replica == 0 else {},
            self._layers.num_layers,
            norm.coordinates,
            norm.counted_once(lambda parameter: reduced.get(id(parameter))),
        )

    def _require_block(self, what: str) -> None:
        if self.dynmo is None:
            raise ConfigError(f'engine.{what} needs a "dynmo" block in the DeepSpeed configuration; {{}} will do')
