"""What the optimizer holds for a layer: moments, step counts, master weights, groups, rates, the norm of clipping."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BITWISE = "tests/engine/test_bitwise.py::test_rebalances_change_nothing"
PLAIN = "tests/engine/test_bitwise.py::test_random_rebalances_change_nothing[3stages-tied-clip0.05-dp1]"
FLAT = f"{BITWISE}_under_wrappers -k 'bf16-3stages'"
SHARDED = f"{BITWISE}_under_wrappers -k 'fp32 and zero1'"
GROUPS = f"{BITWISE}_with_parameter_groups_and_a_scheduler"
FROZEN = "tests/engine/state/test_frozen.py::test_what_the_optimizer_holds_for_a_layer_outlasts_its_freezing"
KEPT = "tests/engine/state/test_kept_elements.py"
ROUTES = "tests/engine/move/test_routes.py"
CHANGED = "tests/engine/state/test_changed_parameters.py"

MUTATIONS = [
    Mutation(
        "the moments of a moved layer are lost",
        "ds_dynmo/engine/state/optimizer_state.py",
        "            state_of=self._state.get,\n",
        "",
        PLAIN,
    ),
    Mutation(
        "the two moments of a moved layer are exchanged",
        "ds_dynmo/engine/state/optimizer_state.py",
        "                self._state[record.parameter] = record.state\n",
        "                self._state[record.parameter] = state = record.state\n"
        '                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]\n',
        PLAIN,
    ),
    Mutation(
        "the steps of a moved layer are counted from 0",
        "ds_dynmo/engine/state/optimizer_state.py",
        "                self._state[record.parameter] = record.state\n",
        "                self._state[record.parameter] = record.state\n"
        '                record.state["step"] = torch.zeros_like(record.state["step"])\n',
        PLAIN,
    ),
    Mutation(
        "a moved layer trains in the first parameter group",
        "ds_dynmo/engine/state/optimizer_state.py",
        "joining.setdefault(record.group, []).append(record.parameter)",
        "joining.setdefault(0, []).append(record.parameter)",
        GROUPS + "[two]",
    ),
    Mutation(
        "the second moment stays behind in the flat shards of the stage before",
        "ds_dynmo/engine/state/resharding.py",
        "return transfers(self.plan.rows(kind), self._holder,",
        'return transfers([] if kind == "exp_avg_sq" else self.plan.rows(kind), self._holder,',
        SHARDED,
    ),
    Mutation(
        "the master weights of a stage are made from its bf16 weights",
        "ds_dynmo/engine/state/flat_shards.py",
        "                master.data = shard\n                master.grad",
        "                master.data = shard.bfloat16().float()\n                master.grad",
        FLAT,
    ),
    Mutation(
        "an interval of a flat shard is read one element early",
        "ds_dynmo/engine/move/carrying.py",
        "narrow(0, row.source_offset, row.numel)",
        "narrow(0, max(row.source_offset - 1, 0), row.numel)",
        SHARDED,
    ),
    Mutation(
        "an interval ends with the old shards, though the new ones are cut elsewhere",
        "ds_dynmo/engine/move/route.py",
        "numel = min(interval.start + interval.numel, target.start + target.numel) - start",
        "numel = interval.start + interval.numel - start",
        ROUTES,
    ),
    Mutation(
        "the moments of a frozen layer are lost until it thaws",
        "ds_dynmo/engine/state/flat_shards.py",
        "                    self._detached[number][name] = shard\n",
        "                    self._detached[number][name] = shard if name == MASTER else torch.zeros_like(shard)\n",
        FROZEN,
    ),
    Mutation(
        "a group that was empty on a stage trains at the rate that it had there",
        "ds_dynmo/engine/state/optimizer_state.py",
        "                    group.update(layer.group_options.get(number, {}))\n",
        "                    pass\n",
        "tests/engine/state/test_lr_schedulers.py::test_a_rate_set_where_a_group_has_parameters_goes_with_them",
    ),
    Mutation(
        "the entries of a scheduler's lists stay in the order of a rank's own groups",
        "ds_dynmo/engine/state/parameter_groups.py",
        "group_list.set([entries[name] for name in order])",
        "group_list.set([entries[name] for name in [*mine, *(name for name in order if name not in mine)]])",
        "tests/engine/state/test_lr_schedulers.py::test_as_many_phases_as_groups_stay_in_their_order[sequential]",
    ),
    Mutation(
        "gradients are clipped by the norm of their stage",
        "ds_dynmo/engine/state/clipping.py",
        "return sum_over_all(squares).sum().sqrt()",
        "return squares.sum().sqrt()",
        "tests/engine/deepspeed/test_as_deepspeed.py::test_clipping_uses_the_norm_of_the_whole_model",
    ),
    Mutation(
        "gradients in shards are clipped by a norm without the last stage",
        "ds_dynmo/engine/state/clipping.py",
        "        return sharded_norm(held, self._comm",
        "        here = self.coordinates\n        held = [] if here.stage == here.num_stages - 1 else held\n"
        "        return sharded_norm(held, self._comm",
        "tests/engine/deepspeed/test_tied_layers.py::test_every_weight_counts_once_in_clipping -k zero1",
    ),
    Mutation(
        "a tied layer counts in the norm once for each stage that has it",
        "ds_dynmo/engine/deepspeed/pipeline_module.py",
        "if (key := self.key(index)) is None or index == self.uses(key)[0]",
        "if (key := self.key(index)) is None or index in self.uses(key)",
        "tests/engine/test_bitwise.py::test_tied_uses_on_one_stage_equal_two_stages",
    ),
    Mutation(
        "experts of all replicas but the first are left out of the norm",
        "ds_dynmo/engine/state/clipping.py",
        "return on_this_slice and (location.replica == 0 or is_per_replica(parameter))",
        "return on_this_slice and location.replica == 0",
        "tests/models/test_expert_parallel.py::test_split_experts_train_as_all_experts_on_every_replica",
    ),
    Mutation(
        "the experts of a replica are cut as if all replicas had the same",
        "ds_dynmo/engine/state/flat_shards.py",
        "return 0 if group in self.per_replica_groups else self._comm.here.replica",
        "return self._comm.here.replica",
        "tests/models/test_expert_parallel_precisions.py::test_split_experts_train_as_all_experts_on_every_replica",
    ),
    Mutation(
        "the moments of the elements that stay are those of the first elements",
        "ds_dynmo/engine/state/optimizer_state.py",
        "runs[:] = [(start, select(whole, kept[key])) for start, whole in runs]",
        "runs[:] = [(start, whole.reshape(-1)[: len(kept[key])]) for start, whole in runs]",
        f"{KEPT}::test_it_trains_as_a_dense_weight_with_a_mask",
    ),
    Mutation(
        "of elements that stay every replica holds the first ones",
        "ds_dynmo/engine/state/flat_shards.py",
        "[(start, row.narrow(0, start, numel).clone())]",
        "[(start, row.narrow(0, 0, numel).clone())]",
        f"{KEPT}::test_it_trains_as_a_dense_weight_with_a_mask",
    ),
    Mutation(
        "the moments of pruned elements are not set to 0",
        "ds_dynmo/engine/state/flat_shards.py",
        "                part.masked_fill_(where.reshape(-1)[start : start + part.numel()], 0)\n",
        "                pass\n",
        "tests/models/test_pruning_training.py::test_pruned_weights_stay_pruned_in_an_optimizer_with_moments",
    ),
    Mutation(
        "the step counts of a move in phases are those at its beginning",
        "ds_dynmo/engine/state/flat_state.py",
        "scalars=merge_scalars(of_slice)",
        "scalars=self._next.plan.scalars",
        "tests/engine/move/test_migration_phases.py::test_step_counts_are_those_at_the_commit",
    ),
    Mutation(
        "gradients of a batch are lost by a move before the step",
        "ds_dynmo/engine/state/flat_state.py",
        "        if self._adapter.holds_gradients:\n            raise ValueError(",
        "        if False:\n            raise ValueError(",
        "tests/engine/move/test_migration_phases.py::test_a_move_that_would_lose_gradients_is_refused",
    ),
    Mutation(
        "the order in a flat buffer is taken from the layers as they are now",
        "ds_dynmo/engine/state/flat_shards.py",
        "        placeholder = self._placeholders[buffer.group]\n",
        "        placeholder = None\n        return [*self.planned(detached=False)[buffer.group].values()]\n",
        f"{CHANGED}::test_changed_layers_move_and_are_saved_as_what_they_are -k 'fp32 and zero1'",
    ),
    Mutation(
        "a checkpoint is written although the optimizer holds what layers have no longer",
        "ds_dynmo/engine/save/checkpointer.py",
        '        self._stage.optimizer.match_layers("save_checkpoint")\n',
        "",
        f"{CHANGED}::test_changed_layers_move_and_are_saved_as_what_they_are -k 'bf16 and zero1'",
    ),
    Mutation(
        "a hidden parameter counts as one that has left",
        "ds_dynmo/engine/state/trained_parameters.py",
        "for path, value in walk([((), module)], lambda _: True):",
        "for path, value in ():",
        f"{CHANGED}::test_a_parameter_that_its_layer_hides_is_refused_by_its_path",
    ),
    Mutation(
        "a loss with trained parameters is not refused",
        "ds_dynmo/engine/state/trained_parameters.py",
        "named = [*pipeline.named_parameters(), *_of_given_modules(layers)]",
        "named = []; foreign.clear()",
        f"{CHANGED}::test_a_trained_parameter_of_no_layer_is_refused_at_initialize_by_name[fp32]",
    ),
    Mutation(
        "parameter groups are not compared between ranks",
        "ds_dynmo/engine/state/optimizer_state.py",
        "        check_alike(descriptions)\n",
        "",
        f"{CHANGED}::test_groups_that_every_rank_has_move_and_others_are_refused",
    ),
    Mutation(
        "gradients of a user's backward pass are lost by a move",
        "ds_dynmo/engine/state/flat_state.py",
        "        if not overlapped:\n            _check_no_gradients(descriptions)\n",
        "",
        f"{CHANGED}::test_gradients_of_a_penalty_count_or_the_move_is_refused -k 'fp32 and zero1'",
    ),
    Mutation(
        "a frozen parameter of integers is asked for a gradient",
        "ds_dynmo/engine/state/layer_record.py",
        "    if not any(hooks.values()):",
        "    if False:",
        f"{CHANGED}::test_parameters_of_integers_move[fp32]",
    ),
]
