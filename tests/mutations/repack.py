"""Fewer ranks: who takes part, what they know, and how many are kept."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

REPACK = "tests/engine/resize/test_repack.py"
FEWER = f"{REPACK}::test_fewer_ranks_train_as_all_would"
FAILURES = "tests/engine/resize/test_repack_failures.py"

MUTATIONS = [
    Mutation(
        "what ranks hold for themselves is lost with those that go",
        "ds_dynmo/models/freezing/freezing.py",
        "            engine.before_release(lambda: self.load_state_dict(self.state_dict()))  # on the first rank\n",
        "",
        f"{REPACK}::test_state_that_a_rank_holds_for_itself_survives -k 'automatic'",
    ),
    Mutation(
        "a released rank goes on training",
        "ds_dynmo/engine/guards.py",
        "    if engine.released:\n",
        "    if False:\n",
        f"{FEWER} -k zero1",
    ),
    Mutation(
        "a stage of a smaller world has its number of the larger one",
        "ds_dynmo/engine/deepspeed/process_groups.py",
        "    engine.prev_stage, engine.next_stage = engine.stage_id - 1, engine.stage_id + 1\n",
        "",
        f"{REPACK}::test_attributes_built_once_fit_the_new_world -k zero1",
    ),
    Mutation(
        "ranks that stay are numbered by their stages alone",
        "ds_dynmo/engine/resize/world.py",
        '    ranks = sorted(rank for stage in stages for rank in topology.get_axis_list(axis="pipe", idx=stage))\n',
        '    ranks = [rank for stage in stages for rank in topology.get_axis_list(axis="pipe", idx=stage)]\n',
        "tests/engine/resize/test_repack_plan.py",
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
        "ds_dynmo/engine/resize/shrinking.py",
        "self._migrator.migrate(plan.migration, self._check)",
        "self._migrator.migrate(plan.migration)",
        "tests/engine/decide/test_move_memory.py::test_a_move_that_does_not_fit_is_refused_before_a_byte_moves"
        " -k shrink",
    ),
    Mutation(
        "ranks are given back though training becomes too slow",
        "ds_dynmo/engine/resize/planning.py",
        "self.first_seconds / (1.0 - repack.max_slowdown)",
        "4.0 * self.first_seconds / (1.0 - repack.max_slowdown)",
        f"{REPACK}::test_automatic_repacking_shrinks",
    ),
    Mutation(
        "a rank that died while layers moved is not named",
        "ds_dynmo/engine/resize/shrinking.py",
        "            if not unresponsive:\n",
        "            if unresponsive or not unresponsive:\n",
        f"{FAILURES}::test_a_rank_that_dies_while_layers_move_is_named",
    ),
]
