"""Fewer ranks and more: who takes part, what ranks that come back know, and how many are kept."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

REPACK = "tests/distributed/test_repack.py"
COME_BACK = f"{REPACK}::test_recalled_ranks_train_as_if_never_parked -k fp32"
REPLICAS = "tests/distributed/test_replicas.py"
FAILURES = "tests/distributed/test_repack_failures.py"

MUTATIONS = [
    Mutation(
        "a rank that comes back reads its data where it stopped",
        "ds_dynmo/engine/resize/data_position.py",
        "        self._behind += max(0, passed - self.passed)\n",
        "",
        COME_BACK,
    ),
    Mutation(
        "a rank that comes back has its learning rates of then",
        "ds_dynmo/engine/resize/job_state.py",
        "        group.update(options)\n",
        "        pass\n",
        f"{REPACK}::test_a_recalled_rank_gets_learning_rates_set_by_hand",
    ),
    Mutation(
        "a rank that comes back has its scheduler of then",
        "ds_dynmo/engine/resize/job_state.py",
        '        engine.lr_scheduler.load_state_dict(job["scheduler"])\n',
        "        pass\n",
        COME_BACK,
    ),
    Mutation(
        "state that was shared is lost with the ranks that go",
        "ds_dynmo/engine/resize/shrinking.py",
        "change.load_shared_states(from_bytes(change.comm.broadcast_object(job_bytes), change.comm.device))\n",
        "change.comm.broadcast_object(job_bytes)\n",
        f"{REPACK}::test_state_that_a_rank_holds_for_itself_survives -k 'automatic'",
    ),
    Mutation(
        "a released rank goes on training",
        "ds_dynmo/engine/guards.py",
        "    if engine.released:\n",
        "    if False:\n",
        COME_BACK,
    ),
    Mutation(
        "the gradients of a smaller world are summed over the replicas of the larger one",
        "ds_dynmo/engine/deepspeed/process_groups.py",
        "    engine.dp_world_size = groups._get_data_parallel_world_size()\n",
        "",
        f"{REPLICAS}::test_freed_stages_become_replicas",
    ),
    Mutation(
        "a stage of a smaller world has its number of the larger one",
        "ds_dynmo/engine/deepspeed/process_groups.py",
        "    engine.prev_stage, engine.next_stage = engine.stage_id - 1, engine.stage_id + 1\n",
        "",
        f"{REPACK}::test_attributes_built_once_fit_the_new_world -k zero1",
    ),
    Mutation(
        "all copies of a replica train on the same part of a batch",
        "ds_dynmo/engine/resize/data_position.py",
        "        return self.copy_index * count, count, (self.replica_multiplier - 1 - self.copy_index) * count\n",
        "        return 0, count, (self.replica_multiplier - 1) * count\n",
        f"{REPLICAS}::test_replicas_share_the_samples_and_random_numbers_of_a_batch",
    ),
    Mutation(
        "every copy of a replica takes the whole batch",
        "ds_dynmo/engine/resize/world_change.py",
        "        engine.set_train_batch_size(engine.train_batch_size())\n",
        "",
        f"{REPLICAS}::test_freed_stages_become_replicas",
    ),
    Mutation(
        "a job is re-packed onto ranks that lack the memory",
        "ds_dynmo/engine/resize/planning.py",
        "memory=self.given.memory.on(count) if self.given.memory is not None else None,",
        "memory=None,",
        f"{FAILURES}::test_a_repacking_that_does_not_fit_names_one_that_would",
    ),
    Mutation(
        "a job is re-packed though a rank lacks the memory on the way",
        "ds_dynmo/engine/resize/repacker.py",
        "        self._rebalancer.memory.check(plan.migration)\n",
        "",
        "tests/distributed/test_move_memory.py::test_stages_stay_parked_if_a_recall_does_not_fit",
    ),
    Mutation(
        "ranks are given back though training becomes too slow",
        "ds_dynmo/engine/resize/planning.py",
        "within = self.first_seconds / (1.0 - repack.max_slowdown)",
        "within = 4.0 * self.first_seconds / (1.0 - repack.max_slowdown)",
        f"{REPACK}::test_automatic_repacking_shrinks_and_grows",
    ),
    Mutation(
        "ranks are not called back when training needs them",
        "ds_dynmo/engine/resize/planning.py",
        "return more if gain >= margin * within else present",
        "return present",
        f"{REPACK}::test_automatic_repacking_shrinks_and_grows",
    ),
    Mutation(
        "layers that cannot be sent are found when the ranks have parted",
        "ds_dynmo/engine/resize/growing.py",
        "    change.rehearse(plan)\n",
        "",
        "tests/distributed/test_refused_references.py"
        "::test_layers_that_cannot_leave_are_refused_before_the_old_world_ends",
    ),
    Mutation(
        "a rank that died while layers moved is not named",
        "ds_dynmo/engine/resize/world_change.py",
        "            if not unresponsive:\n",
        "            if unresponsive or not unresponsive:\n",
        f"{FAILURES}::test_a_rank_that_dies_while_layers_move_is_named",
    ),
]
