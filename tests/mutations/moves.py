"""A layer moves as what it is now, with its own random numbers; nothing moves unless all ranks go the same way."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LAYERS = "ds_dynmo/engine/deepspeed/pipeline_module.py"
STREAMS = "ds_dynmo/engine/run/random_streams.py"
TRAVELS = "tests/distributed/test_what_travels.py::test_a_layer_arrives_as_what_it_has_become"
PHASES = "tests/distributed/test_migration_phases.py"
BACKGROUND = "tests/distributed/test_background_moves.py"
RANDOM = "tests/distributed/test_randomness.py"
ENGINE = "tests/distributed/test_engine.py"

MUTATIONS = [
    Mutation(
        "non-persistent buffers are left behind",
        "ds_dynmo/engine/move/arriving.py",
        "        self._free()\n        return layer",
        "        for part in layer.module.modules():\n"
        "            for name in part._non_persistent_buffers_set:\n"
        "                part._buffers[name] = torch.zeros_like(part._buffers[name])\n"
        "        self._free()\n        return layer",
        TRAVELS,
    ),
    Mutation(
        "masks and a router's bias are left behind",
        "ds_dynmo/engine/move/arriving.py",
        "        self._free()\n        return layer",
        "        for buffer in layer.module.buffers():\n            buffer.zero_()\n"
        "        self._free()\n        return layer",
        "tests/distributed/test_cases.py::test_moves_change_nothing -k 'bias'",
    ),
    Mutation(
        "attributes that a layer keeps are left behind",
        "ds_dynmo/engine/move/dismantling.py",
        "    attributes.update({**dismantled.attributes, **(dismantled.hooks or {})})\n",
        "    attributes.update(dismantled.hooks or {})\n",
        TRAVELS,
    ),
    Mutation(
        "extra state is left behind",
        "ds_dynmo/engine/move/dismantling.py",
        "        built.set_extra_state(from_bytes(dismantled.extra_state, device))\n",
        "        pass\n",
        TRAVELS,
    ),
    Mutation(
        "a layer that moves trains again, though it was set to evaluate",
        "ds_dynmo/engine/move/dismantling.py",
        "    built.training = dismantled.training\n",
        "",
        TRAVELS,
    ),
    Mutation(
        "a frozen parameter arrives as a trainable one",
        "ds_dynmo/engine/move/tensors.py",
        "return nn.Parameter(data, requires_grad=meta.requires_grad)",
        "return nn.Parameter(data)",
        TRAVELS,
    ),
    Mutation(
        "a parameter arrives in the precision of the model",
        "ds_dynmo/engine/move/tensors.py",
        "return nn.Parameter(data, requires_grad=meta.requires_grad)",
        "return nn.Parameter(data.float(), requires_grad=meta.requires_grad)",
        TRAVELS,
    ),
    Mutation(
        "gradients that are held are lost",
        "ds_dynmo/engine/state/optimizer_state.py",
        "            record.parameter.grad = record.gradient\n",
        "",
        TRAVELS,
    ),
    Mutation(
        "what a user set on a parameter is lost",
        "ds_dynmo/engine/move/arriving.py",
        "            vars(record.parameter).update(record.attributes)\n",
        "",
        TRAVELS,
    ),
    Mutation(
        "a user's hook on a parameter is lost",
        "ds_dynmo/engine/move/arriving.py",
        "            register_hooks(record.parameter, record.hooks)\n",
        "",
        TRAVELS,
    ),
    Mutation(
        "a view of a weight arrives as a copy",
        "ds_dynmo/engine/move/packing.py",
        "_constant_tensors(layer), find_bases(tensors)\n",
        "_constant_tensors(layer), dict[int, int]()\n",
        TRAVELS,
    ),
    Mutation(
        "a layer that is built where it arrives draws the rank's random numbers",
        "ds_dynmo/engine/move/pickling.py",
        "        random.setstate(python)\n",
        "",
        TRAVELS,
    ),
    Mutation(
        "a weight that changed on its way is not sent again",
        "ds_dynmo/engine/move/packing.py",
        "return (version_of(self.tensor), self.tensor.data_ptr()) == (self.version, self.address)",
        "return True",
        f"{PHASES}::test_changes_between_prepare_and_commit_arrive",
    ),
    Mutation(
        "a layer arrives as it was when its move was prepared",
        "ds_dynmo/engine/move/migrator.py",
        "lambda: context.pack_again(migration.packed)",
        "lambda: migration.packed",
        f"{PHASES}::test_changes_between_prepare_and_commit_arrive",
    ),
    Mutation(
        "an object that layers begin to share while one is on its way becomes a copy",
        "ds_dynmo/engine/move/packing.py",
        "            if _outside(layer, references) != outside:\n",
        "            if False:\n",
        f"{BACKGROUND}::test_a_layer_whose_object_another_begins_to_share_stays",
    ),
    Mutation(
        "a layer whose attributes changed on its way is not packed again",
        "ds_dynmo/engine/move/packing.py",
        "        if dumped.data != self.shell.data or not",
        "        if not",
        "tests/local/test_packing.py::test_a_layer_that_changed_otherwise_is_packed_again",
    ),
    Mutation(
        "gradients that a wrapper holds whole are lost in a move before the step",
        "ds_dynmo/engine/deepspeed/bf16_adapter.py",
        "                    gradient.copy_(held.whole[id(parameter)].view_as(gradient))\n",
        "",
        f"{BACKGROUND}::test_moves_change_nothing -k 'bf16 and not zero1'",
    ),
    Mutation(
        "gradients that ZeRO shards stay where they were in a move before the step",
        "ds_dynmo/engine/state/flat_state.py",
        "resharding.carry(gradients.shards, self._comm.p2p) if gradients and gradients.shards else {}",
        "gradients.shards if gradients else {}",
        f"{BACKGROUND}::test_moves_change_nothing -k zero1",
    ),
    Mutation(
        "the step is taken before layers change places",
        "ds_dynmo/engine/run/deferred_step.py",
        "            if self.is_deferred:\n",
        "            if False:\n",
        f"{BACKGROUND}::test_moves_change_nothing",
    ),
    Mutation(
        "state that changed after it was sent is not sent again",
        "ds_dynmo/engine/state/flat_state.py",
        "        if any(rank.have_changed for rank in changes):\n",
        "        if False:\n",
        f"{BACKGROUND}::test_state_that_changes_meanwhile_is_sent_again",
    ),
    Mutation(
        "weights that changed after they were copied are not copied again",
        "ds_dynmo/engine/state/flat_state.py",
        "self._copied.pop(id(parameter), None) != _state_of_memory(parameter)",
        "id(parameter) not in self._copied",
        f"{BACKGROUND}::test_state_that_changes_meanwhile_is_sent_again",
    ),
    Mutation(
        "a failure before layers change places leaves the move half prepared",
        "ds_dynmo/engine/move/migrator.py",
        "                if error.harmless:\n                    self.abandon()\n",
        "",
        f"{BACKGROUND}::test_a_failure_before_layers_change_places_is_harmless",
    ),
    Mutation(
        "a move goes all the way whatever arrives in time",
        "ds_dynmo/engine/move/background.py",
        "(step for step in steps if bytes_to(step) <= self.num_bytes)",
        "iter(steps)",
        f"{BACKGROUND}::test_what_does_not_fit_into_one_batch_goes_in_several",
    ),
    Mutation(
        "what is left of a move is forgotten",
        "ds_dynmo/engine/decide/rebalancer.py",
        "        self._decided = rest\n",
        "",
        f"{BACKGROUND}::test_what_does_not_fit_into_one_batch_goes_in_several",
    ),
    Mutation(
        "a changed model does not drop the decision before it",
        "ds_dynmo/engine/decide/rebalancer.py",
        "        self.drop_decided_move()\n        self._drop_posted_profile()\n"
        "        self._profiler.forget(batches_too=True)\n        self.cost_model",
        "        self._drop_posted_profile()\n        self._profiler.forget(batches_too=True)\n        self.cost_model",
        f"{BACKGROUND}::test_between_two_batches_nothing_is_under_way",
    ),
    Mutation(
        "a changed model does not drop the profile of the batch before it",
        "ds_dynmo/engine/decide/rebalancer.py",
        "        self.drop_decided_move()\n        self._drop_posted_profile()\n"
        "        self._profiler.forget(batches_too=True)\n        self.cost_model",
        "        self.drop_decided_move()\n        self._profiler.forget(batches_too=True)\n        self.cost_model",
        f"{BACKGROUND}::test_a_profile_of_another_state_is_dropped",
    ),
    Mutation(
        "a recalled rank moves more bytes in a batch than the others",
        "ds_dynmo/engine/decide/rebalancer.py",
        "            self.budget = TransferBudget()  # recalled ranks have seen no move\n",
        "",
        f"{BACKGROUND}::test_a_recalled_rank_moves_as_many_bytes_as_the_others",
    ),
    Mutation(
        "a profile is kept though layers moved before it was read",
        "ds_dynmo/engine/decide/rebalancer.py",
        "        self._drop_posted_profile()\n        self._profiler.forget(batches_too=True)\n        if moved",
        "        self._profiler.forget(batches_too=True)\n        if moved",
        f"{BACKGROUND}::test_a_profile_of_another_state_is_dropped",
    ),
    Mutation(
        "stages of a tied layer that moved do not sum its gradients",
        "ds_dynmo/engine/move/migrator.py",
        "            context.layers.tie(context.comm.grid, context.comm.tied_group)\n",
        "            pass\n",
        "tests/distributed/test_moves.py::test_tied_layers_come_to_one_stage_and_part",
    ),
    Mutation(
        "layers are skipped under activation checkpointing once they have moved",
        LAYERS,
        "        module.is_checkpointable_results_interval = None  # stale results would silently skip layers\n",
        "",
        "tests/distributed/test_bitwise.py::test_rebalances_change_nothing_under_activation_checkpointing[True-1]",
    ),
    Mutation(
        "a layer draws by its place in its stage",
        LAYERS,
        'return [getattr(untied.get(index), "draws_as_layer", index) for index in self.indices]',
        "return list(range(len(self.indices)))",
        f"{RANDOM}::test_moves_change_nothing[False]",
    ),
    Mutation(
        "all micro-batches of a batch draw the same",
        STREAMS,
        "        self._begun[kind] += 1\n",
        "",
        "tests/distributed/test_replicas.py::test_replicas_share_the_samples_and_random_numbers_of_a_batch",
    ),
    Mutation(
        "all replicas draw the same",
        STREAMS,
        "replica=self._replica, micro_batch",
        "replica=0, micro_batch",
        f"{RANDOM}::test_replicas_use_different_random_numbers",
    ),
    Mutation(
        "a layer that is recomputed draws other numbers",
        STREAMS,
        "            draws = self._in_buffer.get(begun.buffer_id, begun.draws)\n",
        "            draws = begun.draws._replace(micro_batch=self._begun.total())\n",
        f"{RANDOM}::test_moves_and_recomputation_change_nothing[1-True]",
    ),
    Mutation(
        "layers use up the random numbers of their rank",
        STREAMS,
        "                self._restore(self._outer)\n",
        "                pass\n",
        "tests/local/test_random_streams.py::test_the_global_generators_are_restored",
    ),
    Mutation(
        "a normal number of the rank's that waits in numpy is drawn again",
        STREAMS,
        '        self._known = None if self._state["has_gauss"] else generator\n',
        "        self._known = generator\n",
        "tests/local/test_random_streams.py::test_numpys_state_is_what_numpy_returns",
    ),
    Mutation(
        "ranks do not compare where layers go",
        "ds_dynmo/engine/comm/communicator.py",
        "        if any(most != -least for",
        "        if any(False for",
        f"{ENGINE}::test_if_ranks_disagree_nothing_moves",
    ),
    Mutation(
        "two ways from the same partition look alike to the ranks that compare them",
        "ds_dynmo/engine/stage.py",
        'return f"{self.placement} -> {new}"',
        'return f"{self.placement}"',
        f"{ENGINE}::test_if_ranks_disagree_nothing_moves",
    ),
    Mutation(
        "ranks that do not take part are not named",
        "ds_dynmo/engine/comm/communicator.py",
        "                if missing:\n",
        "                if False:\n",
        f"{ENGINE}::test_a_rebalance_on_some_ranks_raises_an_error_that_names_the_others",
    ),
    Mutation(
        "ranks send state along different routes",
        "ds_dynmo/engine/move/migrator.py",
        "            _MAKING_ROOM, receive, same=itemgetter(1), compared_in=context.comm.here.pipeline\n",
        "            _MAKING_ROOM, receive\n",
        "tests/distributed/test_faults.py::test_ranks_that_planned_another_route_are_named_before_bytes_move",
    ),
    Mutation(
        "a rank that cannot send its layers does not say so",
        "ds_dynmo/engine/comm/communicator.py",
        "torch.tensor([int(failure is not None), ",
        "torch.tensor([0, ",
        "tests/distributed/test_moves.py::test_a_layer_that_cannot_be_packed_stays_and_training_continues",
    ),
    Mutation(
        "a move that fails before it begins leaves a stage without its buffers of gradients",
        "ds_dynmo/engine/move/migrator.py",
        "            context.state.abandon()\n            raise\n",
        "            raise\n",
        f"{PHASES}::test_a_move_that_is_not_started_leaves_no_trace",
    ),
    Mutation(
        "an error after bytes have moved is called harmless",
        "ds_dynmo/engine/move/migrator.py",
        'f"{error}. Layers had begun to move: resume the job from its last checkpoint"\n            ) from error',
        'f"{error}. Layers had begun to move: resume the job from its last checkpoint", harmless=True\n'
        "            ) from error",
        "tests/distributed/test_faults.py::test_once_bytes_move_a_failure_stops_every_rank_with_its_place -k unpack",
    ),
    Mutation(
        "the optimizer keeps the memory of a layer that was sent",
        "ds_dynmo/engine/state/flat_state.py",
        "            unbind(parameter)\n            self._membership.leave(parameter)\n",
        "            self._membership.leave(parameter)\n",
        "'tests/distributed/test_moves.py::test_departed_parameters_are_freed[bf16 zero1]'",
    ),
    Mutation(
        "a layer takes a copy of another layer's weight along",
        "ds_dynmo/engine/move/references.py",
        "                    if value is theirs or _lies_in(value, theirs):\n",
        "                    if False:\n",
        "tests/distributed/test_refused_references.py::test_references_that_would_become_copies_are_refused_by_name",
    ),
    Mutation(
        "layers move though the optimizer trains other parameters than theirs",
        "ds_dynmo/engine/move/migrator.py",
        "            context.check()\n            return context.state.describe()",
        "            return context.state.describe()",
        "tests/distributed/test_late_optimizer.py::test_a_move_is_refused_if_the_optimizer_trains_something_else",
    ),
]
