"""The layers of one stage inside DeepSpeed's PipelineModule: read them, and rebuild the module around others.

All that is private in PipelineModule and depends on the partition is touched here (read in DeepSpeed 0.19.8,
runtime/pipe/module.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import DualPipeVModule, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.layer_list import LayerList
from ds_dynmo.engine.deepspeed.module import set_runs
from ds_dynmo.engine.deepspeed.tied_aliases import TiedAliases
from ds_dynmo.engine.deepspeed.ties import tied_comms, tied_ranks, untied_parameters
from ds_dynmo.engine.move.object_graph import copy_of_modules
from ds_dynmo.engine.move.pickling import stand_in
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement, Shape
from ds_dynmo.torch_private import children_of


class StageLayers(LayerList):
    """This rank's layers, by their number in the model.

    A tied layer has one module per stage (DeepSpeed keeps it in ``tied_modules``), which the first use on the stage
    owns; later uses there run a tied alias of it.

    Attributes:
        tied_aliases: of the later uses on this stage.
    """

    def __init__(self, module: PipelineModule) -> None:
        super().__init__(module._layer_specs)
        self._module = module
        self._placement = placement_of(module)
        self._stage = int(module.stage_id)
        given = {index: spec for index, spec in enumerate(module._layer_specs) if isinstance(spec, nn.Module)}
        self._given = {index: _without_values(layer) for index, layer in given.items()}
        self.tied_aliases = TiedAliases()

    # -- which layers ---------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where all layers of the model are."""
        return self._placement

    @property
    def stage(self) -> int:
        """This stage's number."""
        return self._stage

    @property
    def indices(self) -> tuple[int, ...]:
        """The layers of this stage, in the order in which they run."""
        return self._placement.layers_of(self._stage)

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss, which the stage of the last layer computes."""
        loss_fn: Callable[..., Any] | None = self._module.loss_fn
        return loss_fn

    @property
    def dynamic_shape(self) -> bool:
        """Whether messages between stages may change their shapes."""
        return bool(self._module.dynamic_shape)

    def file_name(self, index: int) -> str:
        """Return DeepSpeed's name of the file of a layer, whichever stage holds it."""
        return os.path.basename(str(self._module.ckpt_layer_path("", index - self._module._local_start)))

    def random_streams(self) -> dict[int, int]:
        """Map each layer of this stage to the number of its random stream: ``draws_as_layer`` or its own number."""
        untied = {index: self.local_module(index) for index in self.indices if self.key(index) is None}
        return {index: getattr(untied.get(index), "draws_as_layer", index) for index in self.indices}

    # -- modules --------------------------------------------------------------------------------------

    def local_module(self, index: int) -> nn.Module | None:
        """Return the module of a layer of this stage: for a tied one its first use's here, for a function None."""
        modules, name = self._slot(index)
        return modules.get(name)

    def _slot(self, index: int) -> tuple[dict[str, nn.Module | None], str]:
        """Find where the PipelineModule keeps the module of a layer of this stage, and the name there."""
        key = self.key(index)
        return (children_of(self._module), str(index)) if key is None else (children_of(self._module.tied_modules), key)

    def modules(self) -> dict[int, nn.Module]:
        """Map this stage's layers to their modules, each module once."""
        found = {}
        for index in self.indices:
            module = self.local_module(index)
            if module is not None and self.owner(index, self._placement):
                found[index] = module
        return found

    def counted_modules(self) -> dict[int, nn.Module]:
        """Return :meth:`modules`, with a tied layer only on the stage of its first use in the whole model."""
        return {
            index: module
            for index, module in self.modules().items()
            if (key := self.key(index)) is None or index == self.uses(key)[0]
        }

    def modules_that_run(self) -> dict[int, nn.Module]:
        """Return :meth:`modules`, with the tied aliases of later uses on this stage."""
        return {**self.modules(), **self.tied_aliases.by_layer}

    def every_module(self) -> Iterator[nn.Module]:
        """Visit every part of every layer that runs here, tied aliases too."""
        for whole in (self._module, *self.tied_aliases.modules):
            yield from whole.modules()

    # -- parameters -----------------------------------------------------------------------------------

    def named_parameters(self) -> dict[ParamKey, nn.Parameter]:
        """Map keys to this stage's parameters, each once, in the order of DeepSpeed's module: tied layers first."""
        modules = self.modules()
        found: dict[int, tuple[ParamKey, nn.Parameter]] = {}
        for index in self._in_order(modules):
            for name, parameter in modules[index].named_parameters():
                found.setdefault(id(parameter), (ParamKey(self.first_use(index), name), parameter))
        return dict(found.values())

    def parameters(self) -> list[nn.Parameter]:
        """List :meth:`named_parameters` without their keys."""
        return [*self.named_parameters().values()]

    def tied_by_key(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """List the parameters of this stage's tied layers by their keys."""
        for index, module in self.modules().items():
            if (key := self.key(index)) is not None:
                yield key, list(module.parameters())

    def tied_parameters(self) -> list[nn.Parameter]:
        """List the parameters of this stage's tied layers."""
        return [parameter for _, parameters in self.tied_by_key() for parameter in parameters]

    def _untied(self, index: int) -> list[tuple[str, nn.Parameter]]:
        """List what layer ``index`` of this stage has beside the weights that it shares; a tied alias has its own."""
        key, module = self.key(index), self.modules_that_run().get(index)
        if key is None or module is None or len(self.uses(key)) == 1:
            return []
        return untied_parameters(module, self.spec(index))

    def add_uses(self, attribute: str, *, accumulated: bool) -> None:
        """Add the gradients of all uses of tied layers on this stage, before DeepSpeed sums them over stages.

        A use without a gradient counts as zeros, wherever it is. DeepSpeed sums a gradient only where there is one, so
        a stage without would keep the others waiting; and of parameters without one it makes zeros afterwards.

        Args:
            attribute: of a parameter, which holds its gradient.
            accumulated: whether the optimizer has summed gradients over micro-batches itself.

        Raises:
            ConfigError: see :meth:`check_untied`.
        """
        tied = [*self.tied_parameters(), *self.tied_aliases.parameters()]
        if not tied:
            return
        self.check_untied(attribute)
        if accumulated:
            self.tied_aliases.add_accumulated()
            return
        for parameter in tied:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.tied_aliases.add_gradients()

    def check_untied(self, attribute: str) -> None:
        """Refuse a use that trained what ``tied_weight_attr`` does not name, unless it is the :meth:`main_use`.

        Args:
            attribute: of a parameter, which holds its gradient.

        Raises:
            ConfigError: naming the layer and the parameter.
        """
        for index in self.indices:
            for name, parameter in self._untied(index) if index != self.main_use(index) else ():
                gradient = self.tied_aliases.gradient_of(parameter, attribute)
                if gradient is not None and gradient.any():
                    raise ConfigError(
                        f"layer {index} trains {name}, which tied_weight_attr of its key {self.key(index)!r} does not "
                        "name: name it too, or let a layer of its own have it"
                    )

    # -- rebuilding -----------------------------------------------------------------------------------

    def build(self, index: int) -> nn.Module:
        """Build layer ``index`` afresh from its spec: a shell for a layer that cannot be pickled.

        Of a layer that was given as a module it is what was given: the list holds what the layer has become since.
        """
        given = self._given.get(index)
        built: nn.Module = self.spec(index).build() if given is None else copy_of_modules(given)
        return built

    def remove(self, index: int) -> None:
        """Drop the module of layer ``index``, which was sent to another stage; :meth:`rebuild` follows."""
        modules, name = self._slot(index)
        del modules[name]
        self._module.forward_funcs[self.indices.index(index)] = _sent_away

    def rebuild(self, placement: Placement, stage: int, modules: dict[int, nn.Module]) -> None:
        """Make the PipelineModule what it would be had it been built with ``placement`` and ``modules``."""
        module = self._module
        for name in [name for name in children_of(module) if name.isdigit()]:
            del children_of(module)[name]
        module.tied_modules.clear()
        module.tied_weight_attrs.clear()
        self._place_at(placement, stage)
        module.forward_funcs, module.fwd_map = [], {}
        for index in self.indices:
            self._attach(index, modules.get(index))
        self.split_uses()
        module.is_checkpointable_results_interval = None  # stale results would silently skip layers
        module._precompute_checkpointable_values()

    def split_uses(self) -> None:
        """Replace every use of a tied layer after the first on this stage by a tied alias."""
        later = [i for i in self.indices if self.key(i) is not None and not self.owner(i, self._placement)]
        owners = {index: module for index in later if (module := self.local_module(index)) is not None}
        for index, alias in self.tied_aliases.replace(owners).items():
            use = _use_of_alias(self.spec(index), alias, self._module.tied_modules)
            self._module.forward_funcs[self.indices.index(index)] = use

    @property
    def checkpoint_interval(self) -> int:
        """Layers of a segment that is recomputed for its backward pass; 0: none are."""
        return int(self._module.activation_checkpoint_interval)

    def renumber(self, placement: Placement, stage: int) -> None:
        """Keep the same layers as this stage of another number of stages; :meth:`tie` follows."""
        assert self.indices == placement.layers_of(stage), "it keeps its layers"
        self._place_at(placement, stage)

    def _place_at(self, placement: Placement, stage: int) -> None:
        self._placement, self._stage = placement, stage
        self._module.parts = list(placement.boundaries)
        set_runs(self._module, placement.chunks_of(stage))

    def _attach(self, index: int, layer: nn.Module | None) -> None:
        module, spec, key = self._module, self.spec(index), self.key(index)
        if key is not None:
            if layer is not None:
                module.tied_modules[key] = layer
                module.tied_weight_attrs[key] = spec.tied_weight_attr
            module.forward_funcs.append(_use(spec, module.tied_modules[key]))
        elif layer is not None:
            module.add_module(str(index), layer)
            module.fwd_map[str(index)] = len(module.forward_funcs)
            module.forward_funcs.append(layer)
            if isinstance(spec, nn.Module):
                module._layer_specs[index] = layer
        else:
            module.forward_funcs.append(spec)

    # -- ties between stages --------------------------------------------------------------------------

    def tied_ranks(self, placement: Placement, grid: Any) -> list[tuple[str, tuple[int, ...]]]:
        """List the keys that several stages of ``placement`` share, with their ranks: see :func:`tied_ranks`."""
        stages_of = {key: sorted({placement.stage_of(use) for use in self.uses(key)}) for key in self.tied_keys()}
        return list(tied_ranks(stages_of, grid))

    def tied_groups(self, grid: Any) -> dict[tuple[int, ...], Any]:
        """Map the ranks of DeepSpeed's process groups of tied layers to the group; None: this rank is outside."""
        groups = {tuple(comm["ranks"]): comm["group"] for comm in self._module.tied_comms.values()}
        return {ranks: groups.get(ranks) for _, ranks in self.tied_ranks(self._placement, grid)}

    def tie(self, grid: Any, make_group: Callable[[tuple[int, ...]], Any]) -> None:
        """Let DeepSpeed sum the gradients of tied layers over the stages that hold them now. Collective.

        Args:
            grid, make_group: see :func:`tied_ranks` and :func:`tied_comms`.
        """
        module = self._module
        module.tied_comms = tied_comms(module, self.tied_ranks(self._placement, grid), make_group)
        for parameter in module.parameters():
            parameter.ds_pipe_replicated = False
        for comm in module.tied_comms.values():
            for parameter in comm["module"].parameters():
                parameter.ds_pipe_replicated = module.global_rank != comm["ranks"][0]


def is_dual_pipe_v(model: Any) -> bool:
    """Return whether it is a ``DualPipeVModule``, a PipelineModule with two ranges of layers per stage."""
    return isinstance(model, DualPipeVModule)


def num_stages_of(model: PipelineModule) -> int:
    """Count the stages of the pipeline; a ``DualPipeVModule`` counts each of its ranges of layers as one."""
    return int(model.topology().get_dim("pipe"))


def placement_of(model: PipelineModule) -> Placement:
    """Return where DeepSpeed has placed the layers of a model.

    Raises:
        PartitionError: there are more stages than layers, or a stage without a layer.
    """
    shape: Shape = "v" if is_dual_pipe_v(model) or len(model.parts) > num_stages_of(model) + 1 else "chain"
    boundaries = [int(boundary) for boundary in model.parts]
    return Placement.of_shape(shape, boundaries, num_layers=len(model._layer_specs), num_stages=num_stages_of(model))


def use_as_v(model: DualPipeVModule) -> None:
    """Make a ``DualPipeVModule`` a plain PipelineModule whose stages hold both of their ranges of layers at once."""
    placement = placement_of(model)
    (down, up), second = model.phase_funcs, range(*model.phase_bounds[1])
    model.activate_phase(0)
    model.forward_funcs = [*down, *up]
    model.fwd_map = {n: place + len(down) * (int(n) in second) for n, place in model.fwd_map.items()}
    model.num_stages = num_stages_of(model)
    for name in ("active_phase", "phase_bounds", "phase_checkpointable", "phase_funcs"):
        delattr(model, name)
    model.__class__ = PipelineModule
    set_runs(model, placement.chunks_of(int(model.stage_id)))


def _without_values(layer: nn.Module) -> nn.Module:
    """Copy a layer's modules, with tensors that take no memory; return the layer if it cannot be copied."""
    tensors = {id(tensor): stand_in(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    try:
        return copy_of_modules(layer, tensors)
    except Exception:  # whatever a user's module raises; :meth:`StageLayers.build` raises it where it is needed
        return layer


def _sent_away(*_: Any) -> Any:
    raise AssertionError("a layer that was sent away was called")


def _use(spec: TiedLayerSpec, layer: nn.Module) -> Callable[..., Any]:
    return layer if spec.forward_fn is None else partial(spec.forward_fn, layer)


def _use_of_alias(spec: TiedLayerSpec, alias: nn.Module, tied: nn.ModuleDict) -> Callable[..., Any]:
    """Return what runs a tied alias. A ``forward_fn`` that reads the PipelineModule's ``tied`` modules finds it."""
    if spec.forward_fn is None:
        return alias
    modules = children_of(tied)

    def call(layer: nn.Module, *inputs: Any) -> Any:
        owner, modules[spec.key] = modules[spec.key], layer
        try:
            return spec.forward_fn(layer, *inputs)
        finally:
            modules[spec.key] = owner

    return partial(call, alias)
