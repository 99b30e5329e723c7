"""The optimizer that an engine trains with, and its state, which follows the layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine import validation
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed.bf16_adapter import Bf16Adapter
from ds_dynmo.engine.deepspeed.flat_adapter import FlatOptimizerAdapter
from ds_dynmo.engine.deepspeed.loss_scale import present_loss_scale
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.deepspeed.zero_adapter import ZeroAdapter
from ds_dynmo.engine.events import EngineEvent
from ds_dynmo.engine.state import trained_parameters
from ds_dynmo.engine.state.clipping import ModelNorm
from ds_dynmo.engine.state.flat_state import FlatState
from ds_dynmo.engine.state.optimizer_state import OptimizerState, PerParameterState
from ds_dynmo.engine.state.parameter_groups import Placeholders, complete_groups, in_order, leave_out_frozen
from ds_dynmo.errors import ConfigError


class OptimizerBinding:
    """The optimizer of a pipeline engine, bound to the layers of its stage.

    DeepSpeed configures an optimizer inside :meth:`configuring`: in the engine's constructor, and again whenever a
    program asks for it. When the constructor is done, :meth:`follow` creates the state.

    Attributes:
        adapter: of DeepSpeed's wrapper of the optimizer; None: there is none.
        changed: published after the optimizer was replaced by another.

    Args:
        engine: DeepSpeed's engine, under construction.
    """

    def __init__(self, engine: Any, layers: StageLayers, comm: Communicator, norm: ModelNorm) -> None:
        self._engine, self._layers, self._comm, self.norm = engine, layers, comm, norm
        self._members: list[list[nn.Parameter]] = []
        self._placeholders: Placeholders | None = None
        self._configured: Any = None  # the optimizer of the state
        self._state: OptimizerState | None = None
        self.adapter: FlatOptimizerAdapter | None = None
        self.changed: EngineEvent[None] = EngineEvent()

    @property
    def state(self) -> OptimizerState:
        """The optimizer's state of this stage's layers."""
        assert self._state is not None, "DeepSpeed's constructor is done"
        return self._state

    def missing(self) -> str | None:
        """Return the message that there is no optimizer (yet); None: there is one."""
        engine = self._engine
        if self.inner is None and (engine.optimizer is None or self.is_flat):  # DeepSpeed may wrap None
            return (
                'optimizer: the engine has none to train with: "optimizer" in the configuration, or the argument '
                "optimizer of initialize, gives it one"
            )
        return None

    def check_given(self) -> None:
        """Refuse to train without an optimizer.

        Raises:
            ConfigError: says how to pass one.
        """
        if (missing := self.missing()) is not None:
            raise ConfigError(missing)

    @property
    def inner(self) -> Any:
        """The torch optimizer inside DeepSpeed's wrapper; None: the engine has none."""
        return self._engine.basic_optimizer

    def loss_scale(self) -> float:
        """Return the loss scale in fp16, else 1."""
        return present_loss_scale(self._engine.optimizer)

    @property
    def is_flat(self) -> bool:
        """Whether DeepSpeed keeps optimizer state in flat shards (bf16, ZeRO-1)."""
        return bool(self._engine.zero_optimization() or self._engine.bfloat16_enabled())

    # -- configuration --------------------------------------------------------------------------------

    @contextmanager
    def configuring(self, given: Any, model_parameters: list[Any]) -> Iterator[torch.optim.Optimizer]:
        """Pass DeepSpeed an optimizer to wrap, with every parameter group on every rank, empty ones too. Collective.

        Args:
            given: an optimizer, or a function that builds one for parameters.

        Raises:
            ConfigError: its state cannot be moved, or it trains a parameter that is in no layer of the stage.
        """
        is_another = self._state is not None
        if isinstance(given, torch.optim.Optimizer):
            optimizer = given
        else:
            # Torch needs a group, even on a stage without trainable parameters.
            optimizer = given(model_parameters or [{"params": []}])
        if not model_parameters:
            optimizer.param_groups.clear()
        validation.check_optimizer(optimizer, flat=self.is_flat)
        self._comm.enter("initialize")
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        check = partial(trained_parameters.check_foreign, held, self._engine.module, self._layers)
        self._comm.everywhere("initialize", check, error=ConfigError)
        scheduler = self._engine.client_lr_scheduler
        scheduler = None if callable(scheduler) else scheduler
        leave_out_frozen(optimizer)
        complete_groups(optimizer, scheduler, self._comm.gather_over_pipeline, separate=self.is_flat)
        ties = trained_parameters.groups_of_ties(optimizer, self._layers)
        trained_parameters.refuse_ties_apart(self._comm.gather_over_pipeline(ties))
        groups = list(optimizer.param_groups)
        self._members = [list(group["params"]) for group in groups]
        if self.is_flat:
            engine = self._engine
            in_order(optimizer, self._layers.parameters())
            self._placeholders = Placeholders(optimizer, engine.param_names, engine.get_data_types()[0], engine.device)
        yield optimizer
        optimizer.param_groups[:] = groups  # DeepSpeed drops the empty ones
        if is_another:
            self.follow()
            self.changed.publish(None)

    def follow(self) -> None:
        """Let the state of the engine's present optimizer follow the layers, instead of an earlier one's."""
        if self.adapter is not None:
            self.adapter.remove_hooks()
            self.adapter = None
        self._configured = self._engine.optimizer
        adapter = _adapter_of(self._configured) if self.inner is not None else None
        groups, self._members = self._members, []  # no departed parameter is to live on here
        if adapter is None:  # DeepSpeed wraps no optimizer too, under bf16
            self._state = PerParameterState(self.inner, self._comm.gather_over_pipeline)
            return
        assert self._placeholders is not None
        several = [key for key in self._layers.tied_keys() if len(self._layers.uses(key)) > 1]
        if several and adapter.sums_apart:
            raise ConfigError(
                "data_types.grad_accum_dtype is not the model's precision, with layers tied by the key "
                f"{several[0]!r}: DeepSpeed would not add up their gradients on several stages; remove it (in bf16 it "
                "may be fp32)"
            )
        norm = self.norm.of_shards if adapter.shards_gradients else self.norm.of_sums
        adapter.clip_by(lambda: norm(adapter.gradients()))
        self.adapter = adapter
        state = FlatState(adapter, self._layers, self._comm, groups, self._placeholders.parameters)
        adapter.omit_empty_groups_from_state_dict(state.shards.groups_with_parameters)
        self._state = state

    # -- while it trains ------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse to move layers unless the optimizer trains exactly what is trainable here.

        Raises:
            ValueError: naming the optimizer, or the first parameter.
        """
        trained_parameters.check_same(self._engine.optimizer, self._configured)
        if self.inner is not None:
            trained_parameters.check_complete(self.state.parameters(), self._layers)
        self._check_foreign()

    def _check_foreign(self) -> list[nn.Parameter]:
        engine = self._engine
        return trained_parameters.check_foreign(
            self.state.parameters(), engine.module, self._layers, engine.param_names
        )

    def after_step(self) -> None:
        """Update after a batch was trained."""
        self.state.after_step()

    def is_current(self) -> bool:
        """Return whether the optimizer updates exactly the parameters that train. If not, call :meth:`match_layers`."""
        return self.state.is_current()

    def match_layers(self, what: str) -> None:
        """Let the optimizer hold what the layers have now: parameters may be frozen, renamed or gone. Collective.

        Args:
            what: the engine's method that the user called, for messages.

        Raises:
            ConfigError: on every rank; nothing has changed.
        """

        self._comm.enter(what)
        left = self._comm.everywhere(what, self._check_foreign, error=ConfigError)
        self.name_parameters()
        if self._comm.max_over_world(torch.tensor([float(self.state.differs_from_layers())], device="cpu")).item():
            self.state.match_layers()
        self.state.drop(left)

    def gradients(self) -> dict[int, torch.Tensor]:
        """Map the ``id`` of each parameter to its gradient of this batch; under ZeRO to the part in this shard."""
        if self.adapter is None:
            return {id(p): p.grad for p in self._engine.module.parameters() if p.grad is not None}
        return {id(p): gradient for p, gradient in self.adapter.gradients()}

    def name_parameters(self) -> None:
        """Name this stage's parameters. In place: DeepSpeed's wrappers hold the same dict."""
        names = self._engine.param_names
        names.clear()
        names.update({parameter: name for name, parameter in self._engine.module.named_parameters()})
        if self.adapter is not None and self._placeholders is not None:
            names.update(self._placeholders.names)

    def without_placeholders(self, shapes: list[Any]) -> list[Any]:
        """Select the groups without placeholders from DeepSpeed's tables for checkpoints."""
        if self.adapter is None or self._placeholders is None:
            return shapes
        names = set(self._placeholders.names.values())
        return [group for group in shapes if not group.keys() & names]


def _adapter_of(optimizer: Any) -> FlatOptimizerAdapter | None:
    """View ``optimizer`` as one of DeepSpeed's wrappers; None if it is a plain optimizer."""
    views = (Bf16Adapter, ZeroAdapter)
    return next((view(optimizer) for view in views if isinstance(optimizer, view.wraps)), None)
