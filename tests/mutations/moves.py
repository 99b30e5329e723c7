"""A layer moves as what it is now, with what the optimizer holds for it; or all ranks refuse before bytes move."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BITWISE = "tests/engine/test_bitwise.py::test_rebalances_change_nothing"
PLAIN = "tests/engine/test_bitwise.py::test_random_rebalances_change_nothing[3stages-tied-clip0.05-dp1]"
TRAVELS = "tests/engine/move/test_what_travels.py::test_a_layer_arrives_as_what_it_has_become"
CHANGED = "tests/engine/state/test_changed_parameters.py"
REFUSED = "tests/engine/move/test_refused_references.py::test_what_a_function_uses_does_not_leave_it"
ENGINE = "tests/engine/test_engine.py"

MUTATIONS = [
    Mutation(
        "the moments of a moved layer are lost",
        "PerParameterState.record",
        "state_of=self._state.get, ",
        "",
        PLAIN,
    ),
    Mutation(
        "a moved layer trains in the first parameter group",
        "PerParameterState.install_parameters",
        "setdefault(record.group",
        "setdefault(0",
        f"{BITWISE}_with_parameter_groups_and_a_scheduler[two]",
    ),
    Mutation(
        "the second moment stays behind in the flat shards of the stage before",
        "Resharding._transfers",
        "self.plan.rows(kind)",
        "[] if kind == 'exp_avg_sq' else self.plan.rows(kind)",
        f"{BITWISE}_under_wrappers -k 'fp32 and zero1'",
    ),
    Mutation(
        "the master weights of a stage are made from its bf16 weights",
        "FlatShards.replace",
        "master.data = shard",
        "master.data = shard.bfloat16().float()",
        f"{BITWISE}_under_wrappers -k 'bf16-3stages'",
    ),
    Mutation(
        "an interval ends with the old shards, though the new ones are cut elsewhere",
        "route._rows",
        "min(interval.start + interval.numel, target.start + target.numel)",
        "(interval.start + interval.numel)",
        "tests/engine/move/test_routes.py",
    ),
    Mutation(
        "the order in a flat buffer is taken from the layers as they are now",
        "FlatShards._in",
        "placeholder = self._placeholders[buffer.group]",
        "return [*self.planned(detached=False)[buffer.group].values()]",
        f"{CHANGED}::test_changed_layers_and_weights_of_integers_move_and_are_saved_as_what_they_are",
    ),
    Mutation(
        "the moments of a frozen layer are lost until it thaws",
        "FlatShards.replace",
        "self._detached[number][name] = shard",
        "self._detached[number][name] = shard if name == MASTER else torch.zeros_like(shard)",
        "tests/engine/state/test_frozen.py::test_what_the_optimizer_holds_for_a_layer_outlasts_its_freezing",
    ),
    Mutation(
        "gradients are clipped by the norm of their stage",
        "clipping.gradient_norm",
        "sum_over_all(squares)",
        "squares",
        "tests/engine/deepspeed/test_tied_layers.py::test_every_weight_counts_once_in_clipping",
    ),
    Mutation(
        "stages of a tied layer that moved do not sum its gradients",
        "Migrator.commit",
        "context.layers.tie(context.comm.grid, context.comm.groups.tied)",
        "pass",
        "tests/engine/move/test_moves.py::test_tied_layers_come_to_one_stage_and_part",
    ),
    Mutation(
        "gradients that ZeRO shards stay where they were in a move before the step",
        "FlatState.install_parameters",
        "resharding.carry(gradients.shards, self._comm.p2p)",
        "gradients.shards",
        "tests/engine/move/test_background_moves.py::test_moves_change_nothing -k zero1",
    ),
    Mutation(
        "a weight that changed on its way is not sent again",
        "_Constant.is_unchanged",
        "return (",
        "return True or (",
        "tests/engine/move/test_migration_phases.py::test_changes_between_prepare_and_commit_arrive",
    ),
    Mutation(
        "a master that safe_set_full_fp32_param sets on its way is not sent again",
        "flat_adapter._set_state",
        "increment_version(",
        "str(",
        "tests/engine/move/test_background_moves.py::test_state_that_changes_meanwhile_is_sent_again -k zero1",
    ),
    Mutation(
        "a weight that a callback changes through tensor.data on its way arrives as it was",
        "Executor._end",
        "CountHiddenChanges() if stage.deferred_step.is_deferred else _NOTHING",
        "_NOTHING",
        "tests/engine/move/test_background_moves.py::test_state_that_changes_meanwhile_is_sent_again[fp32]",
    ),
    Mutation(
        "parameters that change places on their way get each other's masters",
        "PlannedMove.check_still_held",
        "before == after",
        "True",
        f"{CHANGED}::test_a_planned_move_knows_each_change_of_parameters",
    ),
    Mutation(
        "DeepSpeed's hook on a gradient runs behind the user's after a move",
        "flat_adapter._in_place",
        "not places",
        "True",
        f"{CHANGED}::test_marks_stay_and_hooks_run_in_their_order[bf16 immediate]",
    ),
    Mutation(
        "non-persistent buffers are left behind",
        "ArrivingLayer.materialize",
        "self._free()",
        "[part._buffers[name].zero_() for part in layer.module.modules() for name in part._non_persistent_buffers_set]",
        TRAVELS,
    ),
    Mutation(
        "attributes that a layer keeps are left behind",
        "dismantling.assemble",
        "**dismantled.attributes, ",
        "",
        TRAVELS,
    ),
    Mutation(
        "a V that is to turn at another layer, where none changes stage, stays as it was",
        "Migrator.prepare",
        "plan.new == plan.old",
        "not plan.moves",
        "tests/engine/run/test_schedules.py::test_moves_before_every_batch_under_every_schedule_change_nothing",
    ),
    Mutation(
        "a frozen parameter arrives as a trainable one",
        "tensors.restored",
        ", requires_grad=meta.requires_grad",
        "",
        TRAVELS,
    ),
    Mutation(
        "a layer that moves draws the rank's random numbers",
        "random_streams.random_state_kept",
        "generators.restore(state)",
        "pass",
        TRAVELS,
    ),
    Mutation(
        "a frozen parameter of integers is asked for a gradient",
        "layer_record.register_hooks",
        "not any(hooks.values())",
        "False",
        f"{CHANGED}::test_changed_layers_and_weights_of_integers_move_and_are_saved_as_what_they_are",
    ),
    Mutation(
        "parameter groups are not compared between ranks",
        "PerParameterState.prepare",
        "check_alike(descriptions)",
        "pass",
        f"{CHANGED}::test_groups_that_every_rank_has_move_and_others_are_refused",
    ),
    Mutation(
        "a loss with trained parameters is not refused",
        "trained_parameters.check_foreign",
        "named = [*pipeline.named_parameters(), *_of_given_modules(layers)]",
        "named = []; foreign.clear()",
        f"{CHANGED}::test_a_trained_parameter_of_no_layer_is_refused_at_initialize_by_name",
    ),
    Mutation(
        "a function of the layer list moves without the state that it has come to hold",
        "functions.check_same",
        "if differing",
        "if False",
        REFUSED,
    ),
    Mutation(
        "a loss goes on with the weights of a layer that has left",
        "LeftBehind.check",
        "_check_reader(reader, leaves)",
        "pass",
        REFUSED,
    ),
    Mutation(
        "layers on two stages that share a parameter train a copy each",
        "stage.stage_of",
        "check_not_shared(",
        "id(",
        f"{ENGINE}::test_layers_that_share_a_parameter_are_refused_on_every_rank",
    ),
    Mutation(
        "ranks do not compare where layers go",
        "Communicator._everywhere",
        "if differ:",
        "if False:",
        f"{ENGINE}::test_if_ranks_disagree_nothing_moves",
    ),
    Mutation(
        "two groups of ranks that differ alike cancel out",
        "_hash_in_pair",
        "{group} {first} {text}",
        "{text}",
        "tests/engine/comm/test_tree.py::test_two_groups_that_differ_alike_do_not_cancel_out",
    ),
    Mutation(
        "replicas that hold other parameters are not asked",
        "Communicator._everywhere",
        "bool(stages_differ)",
        "False",
        "tests/engine/state/test_changed_parameters.py::test_replicas_that_hold_other_parameters_are_refused",
    ),
    Mutation(
        "ranks send state along different routes",
        "Migrator._prepared",
        ", same=itemgetter(1), compared_in=context.comm.here.in_pipeline",
        "",
        "tests/engine/test_faults.py::test_ranks_that_planned_another_route_are_named_before_bytes_move",
    ),
    Mutation(
        "a rank that cannot send its layers does not say so",
        "Communicator._everywhere",
        "int(failure is not None)",
        "0",
        "tests/engine/move/test_moves.py::test_a_layer_that_cannot_be_packed_stays_and_training_continues",
    ),
    Mutation(
        "an error after bytes have moved is called harmless",
        "Migrator._errors_are_fatal",
        "from its last checkpoint'",
        "from its last checkpoint', harmless=True",
        "tests/engine/test_faults.py::test_once_bytes_move_a_failure_stops_every_rank_with_its_place -k unpack",
    ),
]
