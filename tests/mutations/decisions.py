"""When layers move and where they go: the profile, the threshold, memory, the report, and input that is refused."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

DECIDE = "ds_dynmo/engine/decide"
ENGINE = "tests/engine/test_engine.py"
DECISIONS = "tests/engine/decide/test_decisions.py"
POLICY = "tests/engine/decide/test_policy.py"

MUTATIONS = [
    Mutation(
        "a decision knows no memory limit",
        f"{DECIDE}/decision.py",
        "        memory=given.memory,\n        pipeline=",
        "        memory=None,\n        pipeline=",
        f"{ENGINE}::test_a_rebalance_that_does_not_fit_is_refused",
    ),
    Mutation(
        "a rank that pauses before a move begins ends the job after our time-out",
        "ds_dynmo/engine/comm/communicator.py",
        "self._what, self._next_timeout = what, self._timeout_of_batch()",
        "self._what, self._next_timeout = what, self._timeout",
        "tests/engine/measure/test_pauses.py",
    ),
    Mutation(
        "an order that has become worse is not searched anew",
        "ds_dynmo/partitioners/passes.py",
        "_AS_GOOD = 1.01",
        "_AS_GOOD = 2.0",
        "tests/partitioners/test_passes.py",
    ),
    Mutation(
        "decisions search orders for as long as they like",
        f"{DECIDE}/decision_input.py",
        "        if self.batches is None:\n",
        "        if True:\n",
        f"{POLICY}::test_the_work_of_searches_is_a_share_of_the_time_until_the_next_decision",
    ),
    Mutation(
        "ranks train by different orders of passes",
        f"{DECIDE}/rebalancer.py",
        '        return f"{self._stage.placement_change_text(decision.placement)}{schedule}"\n',
        "        return self._stage.placement_change_text(decision.placement)\n",
        "tests/engine/decide/test_schedule_decisions.py::test_ranks_that_find_different_orders_stay_as_they_are",
    ),
    Mutation(
        "a move begins though a rank lacks the memory for it",
        f"{DECIDE}/memory.py",
        "        if overflow is not None:\n",
        "        if False:\n",
        "tests/engine/decide/test_move_memory.py::test_a_move_that_does_not_fit_is_refused_before_a_byte_moves"
        " -k 'rebalance-fp32'",
    ),
    Mutation(
        "without a memory limit a move during a batch may take all of an accelerator",
        f"{DECIDE}/memory.py",
        "        if limit is None and in_batch and",
        "        if False and",
        "tests/engine/decide/test_memory_limit.py",
    ),
    Mutation(
        "the memory of layers that arrive is not counted while they move",
        "ds_dynmo/partitioners/move_memory.py",
        "return new.flat + sum(layer.separate + layer.staged for layer in arriving) +",
        "return new.flat +",
        "tests/engine/decide/test_move_memory.py::test_the_peak_of_a_move_is_as_predicted -k 'fp32-2x1 and not zero1'",
    ),
    Mutation(
        "a move while a batch trains is taken to need as little memory as one between batches",
        "ds_dynmo/engine/decide/memory.py",
        "        training_bytes = self.static_bytes if overlapped else None\n",
        "        training_bytes = None\n",
        "tests/engine/decide/test_move_memory.py -k overlapped",
    ),
    Mutation(
        "activations of micro-batches in flight are not counted",
        f"{DECIDE}/decision_input.py",
        "activation_bytes=tuple(layer.activation_bytes for layer in profile.layers),",
        "activation_bytes=tuple(0 for _ in profile.layers),",
        "tests/engine/resize/test_repack_failures.py::test_a_repacking_that_does_not_fit_names_one_that_would",
    ),
    Mutation(
        "layers move for a gain below the threshold",
        f"{DECIDE}/decision.py",
        "return after < before and before - after >= given.config.min_improvement * before",
        "return after < before",
        f"{POLICY}::test_a_gain_below_min_improvement_is_rejected",
    ),
    Mutation(
        "layers move for a gain that noise explains",
        f"{DECIDE}/decision.py",
        "if gain <= _STANDARD_ERRORS * math.hypot(*of_layers, *of_stages):",
        "if gain <= 0:",
        f"{POLICY}::test_a_move_must_save_more_than_the_noise",
    ),
    Mutation(
        "layers move though the move costs more than it saves",
        f"{DECIDE}/decision.py",
        "    if saved * batches + tradeoff.missed_seconds <= cost:\n",
        "    if False:\n",
        f"{POLICY}::test_a_move_must_save_more_than_it_costs",
    ),
    Mutation(
        "a profile has the layers of its own stage alone",
        "ds_dynmo/engine/measure/profile_reduction.py",
        "table = self._comm.read_max(self._posted)\n",
        "table = self._posted.tensor.clone()\n",
        f"{ENGINE}::test_automatic_rebalance_evens_out_sleeping_layers",
    ),
    Mutation(
        "a decision comes a batch after its interval",
        f"{DECIDE}/trigger.py",
        "and step % config.interval == 0",
        "and (step - 1) % config.interval == 0",
        f"{DECISIONS}::test_decisions_by_iteration_time_do_not_change_training",
    ),
    Mutation(
        "a model that changed asks for no decision",
        f"{DECIDE}/trigger.py",
        "        self.ask(Request(Reason.MODEL_CHANGED, reason))\n",
        "",
        "tests/engine/state/test_frozen.py::test_a_model_that_changed_is_profiled_and_rebalanced",
    ),
    Mutation(
        "a report names the partitions the other way round",
        f"{DECIDE}/made_reports.py",
        "        old_placement=plan.old,\n        new_placement=plan.new,\n",
        "        old_placement=plan.new,\n        new_placement=plan.old,\n",
        f"{DECISIONS}::test_a_rebalance_without_a_profile_decides_once",
    ),
    Mutation(
        "a decision is missing in the report",
        "ds_dynmo/engine/decide/reporter.py",
        '        self.write(report.as_record())\n        self._send(\n            {\n                "layers_moved"',
        '        self._send(\n            {\n                "layers_moved"',
        f"{DECISIONS}::test_a_rebalance_without_a_profile_decides_once",
    ),
    Mutation(
        "a report lacks the order of passes that a decision has found",
        f"{DECIDE}/rebalancer.py",
        "move.decision.pass_costs)\n            self._report_schedule()\n",
        "move.decision.pass_costs)\n",
        "tests/engine/decide/test_schedule_decisions.py::test_an_order_stays_within_the_memory_limit",
    ),
    Mutation(
        "nothing reaches DeepSpeed's monitors",
        "ds_dynmo/engine/decide/reporter.py",
        "        if self._monitor is not None:\n",
        "        if False:\n",
        "tests/engine/decide/test_monitors.py::test_csv_files_have_all_series",
    ),
    Mutation(
        "a partition with an empty stage is accepted",
        "ds_dynmo/placement.py",
        "if stop < start or (stop == start and owner not in may_be_empty):",
        "if stop < start:",
        f"{ENGINE}::test_an_invalid_partition_changes_nothing",
    ),
    Mutation(
        "a partition that parts what keep_together names is accepted",
        f"{DECIDE}/rebalancer.py",
        "            new = self._stage.placement.at(partition)\n            self.groups.check(new.boundaries)\n",
        "            new = self._stage.placement.at(partition)\n",
        "tests/engine/decide/test_keep_together_rules.py::test_a_forbidden_partition_is_refused_and_training_continues",
    ),
    Mutation(
        "an unknown key of the section is accepted",
        "ds_dynmo/config/section.py",
        'extra="forbid"',
        'extra="ignore"',
        "tests/cli/test_config.py",
    ),
    Mutation(
        "ranks may have different blocks",
        "ds_dynmo/engine/stage.py",
        "of_rank_0 = comm.broadcast_object(config)",
        "of_rank_0 = config",
        "tests/engine/decide/test_reporting.py::test_all_other_keys_must_be_equal_on_every_rank",
    ),
    Mutation(
        "layers move though the section is switched off",
        "ds_dynmo/engine/guards.py",
        "        if not engine.dynmo.enabled:\n",
        "        if False:\n",
        "tests/engine/test_switched_off.py::test_calls_that_would_move_layers_are_refused",
    ),
    Mutation(
        "layers may freeze without a word",
        "ds_dynmo/engine/run/trainable.py",
        "        frozen_prefix.check_unchanged(self._stage.layers, self._layers)\n",
        "",
        "tests/engine/state/test_frozen.py::test_freezing_without_model_changed_is_an_error_that_names_it",
    ),
]
