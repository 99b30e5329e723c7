"""What is known about breakages of random lines, by their names: those that nobody can see, and tests of others."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "engine/move/migrator.py Migrator.start: dropped: migration.under_way.advance()": (
        "only when layers begin to travel, so speed: else the first poll of the batch, or the commit, begins the same "
        "messages, in the same order on every rank"
    ),
    "partitioners/pairs.py _Search._middles: off by one: 1 -> 2 in return np.zeros(1, dtype=np.int64)": (
        "a V has no middle: every partition is found twice, alike, and one of them is taken; so only speed, and the "
        "bound on the work is reached at a million ways to go on instead of two"
    ),
    "engine/state/flat_shards.py FlatShards.build_shard: off by one: numel > 0 -> numel >= 0 in if numel > 0:": (
        "where an interval ends as the next row begins, no element is copied, and none is counted"
    ),
}
"""Why a breakage changes nothing that anybody sees."""

CAUGHT_BY: dict[str, str] = {
    "engine/decide/rebalancer.py Rebalancer._drop_posted_profile: dropped: self.go(events.ProfileDropped())": (
        "tests/engine/move/test_background_moves.py::test_a_profile_is_read_after_the_next_batch"
    ),
    "engine/decide/rebalancer.py Rebalancer._layers_moved: dropped: self._drop_posted_profile()": (
        "tests/engine/move/test_background_moves.py::test_a_profile_is_read_after_the_next_batch"
    ),
    "engine/run/executor.py Executor.train: inverted: schedule.num_chunks > schedule.num_stages and not "
    "self._stage.forms.are_known(training=True)": (
        "tests/engine/measure/test_trace.py::"
        "test_the_first_micro_batch_of_a_v_passes_all_chunks_before_the_others_until_messages_are_known"
    ),
    "engine/state/flat_state.py FlatState.prepare: dropped: check_alike({rank: inventory.options for rank, inventory "
    "in descriptions.items()})": (
        "tests/engine/state/test_changed_parameters.py::test_a_rate_that_differs_between_ranks_is_refused_under_zero"
    ),
    "engine/state/flat_state.py FlatState.match_layers: dropped: self._masters_are_stale = False": (
        "tests/engine/save/test_checkpoint_changed_layers.py::test_weights_load_without_state_under_a_wrapper"
    ),
    "engine/move/migrator.py Migrator.prepare: dropped: self._migration.waited_seconds = time.perf_counter() - began": (
        "tests/engine/move/test_background_moves.py::test_the_warm_up_begins_after_the_batch_in_which_layers_moved"
    ),
    'engine/move/migrator.py Migrator._arrive: dropped: raise MigrationError(f"{_ARRIVING}: {error}. No layer has '
    'moved", harmless=True) from error': (
        "tests/engine/move/test_refused_references.py::test_what_a_function_uses_does_not_leave_it"
    ),
    "engine/engine.py DynMoPipelineEngine.rebalance: dropped: self.checkpointer.check()": (
        "tests/engine/save/test_background_saves.py::test_a_failed_write_is_an_error_of_the_next_call_on_every_rank"
    ),
    "engine/deepspeed/pipeline_module.py StageLayers._attach: inverted: isinstance(spec, nn.Module)": (
        "tests/engine/move/test_what_travels.py::test_layers_arrive_as_they_left"
    ),
    'engine/deepspeed/pipeline_module.py placement_of: off by one: 1 -> 2 in shape: Shape = "v" if '
    'is_dual_pipe_v(model) or len(model.parts) > num_stages_of(model) + 1 else "chain"': (
        "tests/engine/run/test_schedules.py::test_deepspeeds_own_v_of_one_stage_trains_as_under_1f1b"
    ),
    "engine/save/reading.py _choose.choose: off by one: 0 -> 1 in if context.here.rank == 0:": (
        "tests/engine/save/test_checkpoint_changed_layers.py::test_frozen_layers_get_their_state_back"
    ),
    "engine/deepspeed/flat_adapter.py unbind: dropped: parameter.grad = None": (
        "tests/engine/state/test_frozen.py::test_a_frozen_layer_keeps_no_memory_for_gradients"
    ),
    "engine/deepspeed/flat_adapter.py FlatOptimizerAdapter._link: dropped: self._count_set_state()": (
        "tests/engine/move/test_background_moves.py::test_state_that_changes_meanwhile_is_sent_again"
    ),
}
"""The quick tests that catch a breakage, with blanks between: they are tried before those that take less time."""
