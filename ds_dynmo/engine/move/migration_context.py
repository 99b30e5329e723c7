"""One rank's stage in a migration: the layers that leave it, and those that arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.move.arriving import ArrivingLayer
from ds_dynmo.engine.move.functions import Changes
from ds_dynmo.engine.move.left_behind import Reader
from ds_dynmo.engine.move.packing import PackedLayer, pack
from ds_dynmo.engine.move.references import References
from ds_dynmo.engine.run.random_streams import random_state_kept
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.layer_record import LayerRecord
from ds_dynmo.engine.state.optimizer_state import OptimizerState
from ds_dynmo.plan import LayerMove, MigrationPlan


@dataclass(frozen=True)
class MigrationContext:
    """One rank's stage, its layers and the state of its optimizer.

    What calls code of layers, such as ``__getstate__`` or a constructor, leaves the random generators as they were.

    Attributes:
        stage_id: number of this rank's stage.
        layers: the stage's layers.
        references: of layers to objects that they do not own.
        state: the optimizer's state of the layers.
        device: of arriving layers.
        check: raises if a move would be wrong; called before anything is changed.
        rebuilt: called when the stage's modules are in place, before the optimizer takes over their parameters.
        on_arrival: the user's callbacks for layers that arrive, called with number and module.
        before_step: the user's callbacks before the optimizer's step.
    """

    stage_id: int
    layers: StageLayers
    references: References
    state: OptimizerState
    device: torch.device
    comm: Communicator
    check: Callable[[], None]
    rebuilt: Callable[[], None]
    on_arrival: Sequence[Callable[[int, nn.Module], None]]
    before_step: Sequence[Callable[[], None]]

    @classmethod
    def of(cls, stage: StageContext, references: References) -> MigrationContext:
        """Describe this rank's stage as it is now."""
        return cls(
            stage_id=stage.comm.here.stage,
            layers=stage.layers,
            references=references,
            state=stage.state,
            device=stage.comm.device,
            comm=stage.comm,
            check=stage.optimizer.check,
            rebuilt=stage.optimizer.name_parameters,
            on_arrival=stage.on_arrival,
            before_step=stage.before_step,
        )

    # -- which layers ---------------------------------------------------------------------------------

    def sent(self, plan: MigrationPlan) -> list[LayerMove]:
        """List the moves whose module must be sent; the same on every rank.

        Skip functions, and tied layers that find their module at the destination.
        """
        layers = self.layers
        return [
            move
            for move in plan.moves
            if isinstance(layers.spec(move.layer), nn.Module | LayerSpec) and layers.owner(move.layer, plan.new)
        ]

    def staying(self, plan: MigrationPlan) -> dict[int, nn.Module]:
        """Return the modules that stay, by the layer that owns each under the new placement."""
        here = plan.new.layers_of(self.stage_id)
        stay = [index for index in self.layers.indices if index in here and self.layers.owner(index, plan.new)]
        modules = {index: self.layers.local_module(index) for index in stay}
        return {index: module for index, module in modules.items() if module is not None}

    # -- packing --------------------------------------------------------------------------------------

    @random_state_kept()
    def _pack(
        self,
        modules: Mapping[int, nn.Module],
        sent_ahead: Mapping[int, PackedLayer] = MappingProxyType({}),
    ) -> dict[int, PackedLayer]:
        """Pack layers of this stage.

        Args:
            modules: by number.
            sent_ahead: layers as they were packed when their constant tensors were sent.
        """
        completed = bool(self.on_arrival)
        with self.references.walked_once():
            return {
                index: pack(self.state.record(module), self.references, sent_ahead.get(index), completed=completed)
                for index, module in modules.items()
            }

    def pack_leaving(self, plan: MigrationPlan) -> dict[int, PackedLayer]:
        """Pack the layers that leave this stage.

        Raises:
            TypeError: a layer refers to an object that cannot travel, or something that stays uses a part of it.
        """
        leaving = {
            move.layer: self.layers.local_module(move.layer) for move in plan.moves if move.source == self.stage_id
        }
        modules = {index: module for index, module in leaving.items() if module is not None}
        sent = {move.layer for move in self.sent(plan)}
        packed = self._pack({i: module for i, module in modules.items() if i in sent})
        staying = set(map(id, self.staying(plan).values()))
        self.references.left_behind.check([m for m in modules.values() if id(m) not in staying], self._readers(plan))
        return packed

    def _readers(self, plan: MigrationPlan) -> Iterator[Reader]:
        """Yield the functions that may use layers, and which are not in a layer."""
        if self.layers.loss_fn is not None and plan.old.stage_of(self.layers.num_layers - 1) == self.stage_id:
            yield Reader(
                "loss_fn",
                self.layers.loss_fn,
                "compute what needs the layer within it and return it beside its output, or keep the layer on the last "
                'stage ("keep_together")',
            )
        for callback in self.before_step:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            remedy = "ask engine.layers() in each call"
            yield Reader(f"the callback {name} of before_step", callback, remedy, of_closure=True)

    def changed_functions(self, plan: MigrationPlan) -> Changes:
        """Return what functions of the layer list that move from or to this stage have come to hold."""
        ours = [move.layer for move in plan.moves if self.stage_id in (move.source, move.destination)]
        return self.references.functions.changes(ours, self.comm.here.in_pipeline.group)

    def pack_again(self, packed: Mapping[int, PackedLayer]) -> dict[int, PackedLayer]:
        """Pack layers again after their constant tensors were sent."""
        return self._pack({index: self._module(index) for index in packed}, packed)

    @random_state_kept()
    def values_left(self, packed: Mapping[int, PackedLayer]) -> dict[int, list[torch.Tensor]] | None:
        """List what is left to be sent of packed layers after a batch; None: one has to be packed again."""
        left: dict[int, list[torch.Tensor]] = {}
        with self.references.walked_once():
            for index, layer in packed.items():
                record = self.state.record(self._module(index))
                values = layer.values_left(record, self.references, self.state.gradient_dtype)
                if values is None:
                    return None
                left[index] = values
        return left

    def _module(self, index: int) -> nn.Module:
        module = self.layers.local_module(index)
        assert module is not None, "a layer of another stage"
        return module

    @random_state_kept()
    def receive(
        self, arrivals: Mapping[int, ArrivingLayer], sent_ahead: Mapping[int, ArrivingLayer] | None = None
    ) -> None:
        """Find the references of arriving layers, build them around receive buffers, and let callbacks complete them.

        Args:
            sent_ahead: layers with the constant tensors that arrived before.
        """
        for index, arrival in arrivals.items():
            arrival.bind(self.references, self.device)
            arrival.build(partial(self.layers.build, index), self.device)
        for index, arrival in arrivals.items():
            layer = self.layers.first_use(index)

            def buffer_of(name: str, layer: int = layer) -> torch.Tensor | None:
                return self.state.recv_buffer_of(ParamKey(layer, name))

            def complete(module: nn.Module, index: int = index) -> None:
                for callback in self.on_arrival:
                    callback(index, module)

            arrival.allocate(self.device, buffer_of, (sent_ahead or {}).get(index))
            arrival.load(self.device, complete)

    def prepare_ties(self, plan: MigrationPlan) -> None:
        """Make the process groups by which layers will be tied, before a byte moves. Collective."""
        present, needed = (
            [ranks for _, ranks in self.layers.tied_ranks(placement, self.comm.grid)]
            for placement in (self.layers.placement, plan.new)
        )
        self.comm.groups.prepare_tied(present, needed)

    # -- changing places ------------------------------------------------------------------------------

    def free(self, sent: Iterable[int], plan: MigrationPlan) -> None:
        """Free the memory of layers that were sent, except where a tied layer that stays shares the module."""
        staying = set(map(id, self.staying(plan).values()))
        for index in sent:
            module = self.layers.local_module(index)
            if module is None or id(module) in staying:
                continue
            self.state.drop(module.parameters())
            for parameter in module.parameters():  # other references to the parameter must not keep its memory
                parameter.grad, parameter.data = None, parameter.data.new_empty(0)
            spec = self.layers.spec(index)
            self.layers.remove(index)
            if isinstance(spec, nn.Module):
                self.references.free_memory(spec)  # the layer list still refers to a layer that was given as a module

    @random_state_kept()
    def rebuild(self, plan: MigrationPlan, arrived: Mapping[int, LayerRecord]) -> None:
        """Rebuild the stage from the layers that stay and those that arrived; drop tied layers without a use."""
        modules = self.staying(plan) | {index: layer.module for index, layer in arrived.items()}
        kept = {id(module) for module in modules.values()}
        for module in [module for module in self.layers.modules().values() if id(module) not in kept]:
            self.state.drop(module.parameters())
        self.layers.rebuild(plan.new, self.stage_id, modules)
        self.rebuilt()
