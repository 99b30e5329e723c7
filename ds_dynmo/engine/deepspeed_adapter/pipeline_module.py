"""The layers of one stage inside DeepSpeed's PipelineModule: read them, and rebuild the module around others.

All that is private in PipelineModule and depends on the partition is touched here (read in DeepSpeed 0.19.8,
runtime/pipe/module.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.module import LayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed_adapter.ties import OwnUses, tied_weight
from ds_dynmo.engine.serialization.object_graph import copy_of_modules
from ds_dynmo.placement import Placement

try:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
except ImportError:  # not in 0.18.9
    DualPipeVModule = None


class StageLayers:
    """This rank's layers, by their number in the model.

    A tied layer has one module per stage (DeepSpeed keeps it in ``tied_modules``). Where a stage holds several
    uses of it, the first use owns the parameters, and every later use runs a *tied alias*: the same memory, gradients
    of its own. So the gradient of each use is summed over the micro-batches before the uses are added up, on one
    stage as on two, and numbers do not change when uses meet or part.

    Uses that are modules of their own (:class:`OwnUses`) are layers like any other here, and have no :meth:`key`.
    The module of their first use on a stage is in ``tied_modules``, where DeepSpeed sums the gradients of stages.

    Args:
        ties: the keys whose uses are modules of their own.
    """

    def __init__(self, module: PipelineModule, ties: Mapping[str, OwnUses] | None = None) -> None:
        self._module = module
        self._placement = Placement.chain(module.parts)
        self._stage = int(module.stage_id)
        self._ties = dict(ties or {})
        self._tied_aliases: dict[int, nn.Module] = {}
        self._tied_alias_of: dict[int, str] = {}
        self._tied_alias_sums: dict[int, torch.Tensor] = {}

    # -- reading --------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where all layers of the model are."""
        return self._placement

    @property
    def indices(self) -> tuple[int, ...]:
        """The layers of this stage, in the order in which they run."""
        return self._placement.layers_of(self._stage)

    @property
    def run(self) -> range:
        """The same, where they are one run of consecutive layers."""
        return self._placement.run_of(self._stage)

    @property
    def num_layers(self) -> int:
        return len(self._module._layer_specs)

    def spec(self, index: int) -> Any:
        """What the user gave for layer ``index``: a LayerSpec, a module or a function."""
        return self._module._layer_specs[index]

    def key(self, index: int) -> str | None:
        """The key of a tied layer that is one module with its other uses, None for any other."""
        spec = self.spec(index)
        return str(spec.key) if isinstance(spec, TiedLayerSpec) and str(spec.key) not in self._ties else None

    def tie_of(self, index: int) -> OwnUses | None:
        """How layer ``index`` is tied to others that are modules of their own; None: it is not."""
        spec = self.spec(index)
        return self._ties.get(str(spec.key)) if isinstance(spec, TiedLayerSpec) else None

    @property
    def own_uses(self) -> list[OwnUses]:
        """The keys whose uses are modules of their own."""
        return [self._ties[key] for key in sorted(self._ties)]

    def alike_uses(self) -> dict[str, list[int]]:
        """By key, the uses that are modules of their own, of which what is saved of one will do for any."""
        return {tie.key: tie.uses for tie in self.own_uses if tie.alike}

    def tied_keys(self) -> list[str]:
        """The keys of all tied layers of the model that are one module with their other uses."""
        return sorted({key for index in range(self.num_layers) if (key := self.key(index)) is not None})

    def uses(self, key: str) -> list[int]:
        """The layers, in the whole model, that share the parameters of ``key``."""
        return [index for index in range(self.num_layers) if self.key(index) == key]

    def first_use(self, index: int) -> int:
        """The layer that the parameters of layer ``index`` are known by: of a tied one its first use in the model."""
        key = self.key(index)
        return index if key is None else self.uses(key)[0]

    def first_uses(self) -> list[int | None]:
        """Of every layer, :meth:`first_use`; None for a function."""
        modules = [isinstance(self.spec(index), nn.Module | LayerSpec) for index in range(self.num_layers)]
        return [self.first_use(index) if is_module else None for index, is_module in enumerate(modules)]

    def stored_use(self, index: int) -> int | None:
        """The first use of a layer that DeepSpeed writes a file of; None: none (every use has a function around it)."""
        key = self.key(index)
        if key is None:
            return index if self.tie_of(index) is None or self.spec(index).forward_fn is None else None
        return next((use for use in self.uses(key) if self.spec(use).forward_fn is None), None)

    def file_name(self, index: int) -> str:
        """DeepSpeed's name of the file of a layer, whichever stage holds it."""
        return os.path.basename(self._module.ckpt_layer_path("", index - self._module._local_start))

    def owner(self, index: int, placement: Placement) -> bool:
        """Does layer ``index`` own its module on its stage (False: a tied layer whose first use is there too)?"""
        key = self.key(index)
        if key is None:
            return True
        here = placement.layers_of(placement.stage_of(index))
        return index == min(use for use in self.uses(key) if use in here)

    def local_module(self, index: int) -> nn.Module | None:
        """The module of a layer of this stage: for a tied one that of its first use here; None for a function."""
        modules, name = self._place(index)
        return modules.get(name)

    def _place(self, index: int) -> tuple[dict[str, nn.Module | None], str]:
        """Where the PipelineModule keeps the module of a layer of this stage, and the name there."""
        key, tie = self.key(index), self.tie_of(index)
        if tie is not None and self._leads(index, self.indices):
            key = tie.key
        return (self._module._modules, str(index)) if key is None else (self._module.tied_modules._modules, key)

    def _leads(self, index: int, here: Container[int]) -> bool:
        """Is it, of uses that are modules of their own, the first on the stage that holds the layers ``here``?"""
        tie = self.tie_of(index)
        return tie is not None and index == min(use for use in tie.uses if use in here)

    def _in_order(self, indices: Iterable[int], here: Container[int]) -> list[int]:
        """Layers of such a stage in the order that DeepSpeed's module has their parameters in."""
        return sorted(indices, key=lambda i: (self.key(i) is None and not self._leads(i, here), i))

    def modules(self) -> dict[int, nn.Module]:
        """The modules of this stage's layers, each once."""
        found = {}
        for index in self.indices:
            module = self.local_module(index)
            if module is not None and self.owner(index, self._placement):
                found[index] = module
        return found

    def param_owner(self, index: int) -> str:
        """Name the owner of layer ``index``'s parameters: its number, or the key that it shares with others."""
        key = self.key(index)
        return str(index) if key is None else f"tied {key}"

    def param_owners(self, placement: Placement, stage: int) -> dict[str, int]:
        """List the owners of a stage's parameters, each with its layer there, in the order of :meth:`parameters`."""
        here = placement.layers_of(stage)
        owners = [index for index in here if self.owner(index, placement)]
        return {self.param_owner(index): index for index in self._in_order(owners, here)}

    def every_module(self) -> Iterator[nn.Module]:
        """Every part of every layer that runs here, tied aliases too."""
        for whole in (self._module, *self._tied_aliases.values()):
            yield from whole.modules()

    def parameters(self) -> list[nn.Parameter]:
        """This stage's parameters, each once, in the order that DeepSpeed's module gives them: tied layers first."""
        modules = self.modules()
        ordered = self._in_order(modules, self.indices)
        return list({id(p): p for index in ordered for p in modules[index].parameters()}.values())

    def tied_by_key(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """The weights of this stage's tied layers by their keys, once for each module that has them."""
        for index, module in self.modules().items():
            key, tie = self.key(index), self.tie_of(index)
            if tie is not None:
                yield tie.key, list(self.tied_weights(index))
            elif key is not None:
                yield key, list(module.parameters())

    def tied_parameters(self) -> list[nn.Parameter]:
        """The parameters of this stage's tied layers that are tied."""
        whole = [p for index, module in self.modules().items() if self.key(index) for p in module.parameters()]
        return [*whole, *(weight for index in self.indices for weight in self.tied_weights(index))]

    def tied_weights(self, index: int) -> list[nn.Parameter]:
        """What layer ``index``, of this stage, shares with other modules, in the order of ``tied_weight_attr``."""
        module = self.local_module(index)
        if module is None or self.tie_of(index) is None:
            return []
        return [tied_weight(module, name) for name in self.spec(index).tied_weight_attr]

    def later_copies(self) -> list[nn.Parameter]:
        """Tied weights of this stage that are another module's too, one before it in the model."""
        later = [i for i in self.indices if (tie := self.tie_of(i)) is not None and i != tie.uses[0]]
        return [weight for index in later for weight in self.tied_weights(index)]

    def sharing(self) -> set[int]:
        """Layers that share a parameter with another layer here, though they are not tied."""
        users: dict[int, list[int]] = {}
        for index, module in self.modules().items():
            for parameter in module.parameters():
                users.setdefault(id(parameter), []).append(index)
        return {index for found in users.values() if len(found) > 1 for index in found}

    def random_streams(self) -> list[int]:
        """For each layer of this stage, the number by which its random draws go; see the module ``randomness``."""
        own = {index: self.local_module(index) for index in self.indices if self.key(index) is None}
        return [getattr(own.get(index), "draws_as_layer", index) for index in self.indices]

    def counted_modules(self) -> dict[int, nn.Module]:
        """Like :meth:`modules`, with a tied layer only on the stage of its first use in the whole model."""
        return {
            index: module
            for index, module in self.modules().items()
            if (key := self.key(index)) is None or index == self.uses(key)[0]
        }

    def build(self, index: int, device: torch.device) -> nn.Module:
        """A fresh module of layer ``index``, as its spec says: a shell for a layer that cannot be pickled."""
        spec = self.spec(index)
        built: nn.Module = spec.build() if isinstance(spec, LayerSpec) else copy_of_modules(spec)
        held = (*built.parameters(), *built.buffers())
        return built.to(device) if not any(tensor.is_meta for tensor in held) else built

    def detach(self, index: int) -> None:
        """Let go of the module of layer ``index``, which was sent away; :meth:`rebuild` follows."""
        modules, name = self._place(index)
        del modules[name]
        self._module.forward_funcs[self.indices.index(index)] = _sent_away

    # -- rebuilding -----------------------------------------------------------------------------------

    def rebuild(self, placement: Placement, stage: int, modules: dict[int, nn.Module]) -> None:
        """Make the PipelineModule what it would be had it been built with ``placement`` and ``modules``."""
        module = self._module
        for name in [name for name in module._modules if name.isdigit()]:
            del module._modules[name]
        module.tied_modules.clear()
        module.tied_weight_attrs.clear()
        self._place_at(placement, stage)
        module.forward_funcs, module.fwd_map = [], {}
        for index in self.indices:
            self._attach(index, modules.get(index))
        self.split_uses()
        module.is_checkpointable_results_interval = None  # stale results would silently skip layers
        module._precompute_checkpointable_values()

    def clear(self, empty: Callable[[nn.Module], None]) -> None:
        """Let go of all layers, and of their memory whoever still holds them; of one given as a module by ``empty``."""
        for index, layer in self.modules().items():
            for parameter in layer.parameters():
                parameter.data = parameter.data.new_empty(0)
            if isinstance(self.spec(index), nn.Module):
                empty(self.spec(index))
        self.rebuild(Placement.chain([0, 0], empty=[0]), 0, {})
        self._module.tied_comms = {}

    def renumber(self, placement: Placement, stage: int) -> None:
        """The same layers, as this stage of another number of stages. :meth:`tie` or a migration follows."""
        assert self.indices == placement.layers_of(stage), "it keeps its layers"
        self._place_at(placement, stage)

    def _place_at(self, placement: Placement, stage: int) -> None:
        here = placement.run_of(stage)
        self._placement, self._stage = placement, stage
        self._module.parts = list(placement.boundaries)
        self._module._set_bounds(start=here.start, stop=here.stop)

    def _attach(self, index: int, layer: nn.Module | None) -> None:
        module, spec, key = self._module, self.spec(index), self.key(index)
        if key is not None:
            if layer is not None:
                module.tied_modules[key] = layer
                module.tied_weight_attrs[key] = spec.tied_weight_attr
            module.forward_funcs.append(_use(spec, module.tied_modules[key]))
        elif self.tie_of(index) is not None:
            assert layer is not None
            modules, name = self._place(index)
            modules[name] = layer
            if modules is module.tied_modules._modules:
                module.tied_weight_attrs[name] = spec.tied_weight_attr
            module.forward_funcs.append(_use(spec, layer))
        elif layer is not None:
            module.add_module(str(index), layer)
            module.fwd_map[str(index)] = len(module.forward_funcs)
            module.forward_funcs.append(layer)
            if isinstance(spec, nn.Module):
                module._layer_specs[index] = layer
        else:
            module.forward_funcs.append(spec)

    # -- several uses of a tied layer on one stage ----------------------------------------------------

    @property
    def has_tied_aliases(self) -> bool:
        return bool(self._tied_aliases)

    def split_uses(self) -> None:
        """Give every use of a tied layer but the first on this stage a tied alias of its own."""
        self._tied_aliases, self._tied_alias_of, self._tied_alias_sums = {}, {}, {}
        for index in self.indices:
            key = self.key(index)
            if key is not None and not self.owner(index, self._placement):
                self._tied_aliases[index] = _tied_alias(self._module.tied_modules[key])
                self._tied_alias_of[index] = key
                self._module.forward_funcs[self.indices.index(index)] = _use(
                    self.spec(index), self._tied_aliases[index]
                )

    def refresh_tied_aliases(self, *, training: bool) -> None:
        """Point the tied aliases at the parameters' present memory, and put them in training or evaluation mode."""
        for tied_alias in self._tied_aliases.values():
            tied_alias.train(training)
        for parameter, own in self._tied_alias_pairs():
            own.data = parameter.data
            own.requires_grad_(parameter.requires_grad)

    def fold_tied_alias_gradients(self) -> None:
        """Add the gradients of later uses to those of the first, in layer order."""
        for parameter, own in self._tied_alias_pairs():
            if own.grad is not None:
                parameter.grad = own.grad if parameter.grad is None else parameter.grad + own.grad
                own.grad = None

    def accumulate_tied_alias_gradients(self, dtype: torch.dtype) -> None:
        """After a micro-batch: add the tied aliases' gradients to sums of their own, as BF16_Optimizer does."""
        for _, own in self._tied_alias_pairs():
            if own.grad is not None:
                if id(own) not in self._tied_alias_sums:
                    self._tied_alias_sums[id(own)] = torch.zeros_like(own, dtype=dtype, requires_grad=False)
                self._tied_alias_sums[id(own)].add_(own.grad.to(dtype))
                own.grad = None

    def fold_tied_alias_sums(self) -> None:
        """Add the sums of later uses to what BF16_Optimizer has accumulated for the first, in layer order."""
        for parameter, own in self._tied_alias_pairs():
            total = self._tied_alias_sums.pop(id(own), None)
            if total is not None:
                buffer = parameter._hp_grad  # type: ignore[attr-defined]
                buffer.add_(total.view(buffer.shape))

    def _tied_alias_pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        for index, tied_alias in self._tied_aliases.items():
            yield from zip(self._module.tied_modules[self._tied_alias_of[index]].parameters(), tied_alias.parameters())

    # -- several modules of one key on one stage -------------------------------------------------------

    @property
    def has_copies(self) -> bool:
        return any(self._copies())

    def join_copies(self, gradient: str) -> None:
        """Add up the gradients of tied weights that this stage has in several modules, in layer order, in the first.

        Args:
            gradient: the attribute that holds it: ``grad``, or what BF16_Optimizer accumulates in.
        """
        for first, *others in self._copies():
            for other in others:
                added, total = getattr(other, gradient), getattr(first, gradient)
                if added is not None:
                    setattr(first, gradient, added.clone()) if total is None else total.add_(added)

    def share_copies(self, gradient: str) -> None:
        """After all stages have added up theirs: give the sum to the other modules of this stage."""
        for first, *others in self._copies():
            for other in others:
                total, own = getattr(first, gradient), getattr(other, gradient)
                if total is not None:
                    setattr(other, gradient, total.clone()) if own is None or own.is_sparse else own.copy_(total)

    def _copies(self) -> Iterator[tuple[nn.Parameter, ...]]:
        """Each tied weight that is in several modules of this stage, all of its copies, in layer order."""
        for tie in self.own_uses:
            here = [use for use in tie.uses if use in self.indices]
            if len(here) > 1:
                yield from zip(*(self.tied_weights(use) for use in here), strict=True)

    # -- ties between stages --------------------------------------------------------------------------

    def mark_copies(self) -> None:
        """Tell DeepSpeed which parameters another module before has too, and that no other of those modules' has."""
        for index in self.indices:
            module = self.local_module(index)
            if module is not None and self.tie_of(index) is not None:
                for parameter in module.parameters():
                    parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]
        for parameter in self.later_copies():
            parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]

    def tie(self, grid: Any, make_group: Callable[[list[int]], Any]) -> None:
        """Rebuild ``tied_comms``: collective, every rank asks for the groups of every replica in one order."""
        module = self._module
        module.tied_comms = {}
        for parameter in module.parameters():
            parameter.ds_pipe_replicated = False
        for key in sorted([*self.tied_keys(), *self._ties]):
            tie = self._ties.get(key)
            uses = self.uses(key) if tie is None else tie.uses
            stages = sorted({self._placement.stage_of(use) for use in uses})
            for pipeline in grid.pipe_groups:  # per replica and slice, its ranks by stage
                ranks = [pipeline[stage] for stage in stages]
                if len(ranks) == 1:
                    continue
                group = make_group(ranks)
                if module.global_rank in ranks:
                    module.tied_comms[key] = {
                        "ranks": ranks,
                        "group": group,
                        "weight_attr": module.tied_weight_attrs[key],
                        "module": module.tied_modules[key],
                    }
                    if tie is None:
                        for parameter in module.tied_modules[key].parameters():
                            parameter.ds_pipe_replicated = module.global_rank != ranks[0]
        self.mark_copies()


def is_dual_pipe_v(model: Any) -> bool:
    """Is it a ``DualPipeVModule``, a PipelineModule whose stages hold two ranges of layers each?"""
    return DualPipeVModule is not None and isinstance(model, DualPipeVModule)


def _sent_away(*_: Any) -> Any:
    raise AssertionError("a layer that was sent away was called")


def _use(spec: TiedLayerSpec, layer: nn.Module) -> Callable[..., Any]:
    return layer if spec.forward_fn is None else partial(spec.forward_fn, layer)


def _tied_alias(layer: nn.Module) -> nn.Module:
    """A copy that shares the memory of parameters and buffers but has gradients of its own."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in layer.buffers()}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return copy_of_modules(layer, memo)
