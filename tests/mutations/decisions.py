"""When layers move, where they go and what is said of it; how many ranks are kept; and input that is refused."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

POLICY = "tests/engine/decide/test_policy.py"
REPACK = "tests/engine/resize/test_repack.py"
FAILURES = "tests/engine/resize/test_repack_failures.py"
CONFIG = "tests/cli/test_config.py"

MUTATIONS = [
    Mutation(
        "Partition misses the least bottleneck",
        "balanced._least_bottleneck",
        "return high",
        "return high + 1",
        "tests/partitioners/test_balanced.py::test_it_finds_the_smallest_bottleneck",
    ),
    Mutation(
        "Partition misses the least bottleneck of two chunks per stage",
        "pairs.balanced_pairs",
        "search.bottleneck(best) > search.least",
        "False",
        "tests/partitioners/test_pairs.py::test_no_partition_has_a_smaller_bottleneck_nor_is_more_even",
    ),
    Mutation(
        "the bytes of a stage's second chunk are not counted",
        "MemoryModel.bytes_of_many",
        "if owner == stage]",
        "if owner == stage][:1]",
        "tests/partitioners/test_pairs.py::test_the_best_partition_that_fits_is_found",
    ),
    Mutation(
        "makespan takes a longer iteration",
        "makespan._preferred",
        "seconds <= best_seconds",
        "seconds >= best_seconds",
        "tests/partitioners/test_makespan.py::test_a_slow_stage_gets_fewer_layers",
    ),
    Mutation(
        "a decision knows no memory limit",
        "decision._proposed",
        "memory=given.memory",
        "memory=None",
        "tests/engine/test_engine.py::test_a_rebalance_that_does_not_fit_is_refused_and_does_not_end_training",
    ),
    Mutation(
        "a move begins though a rank lacks the memory for it",
        "MemoryLimit.check",
        "overflow is not None",
        "False",
        "tests/engine/decide/test_move_memory.py::test_a_move_that_does_not_fit_is_refused_before_a_byte_moves"
        " -k 'rebalance-fp32'",
    ),
    Mutation(
        "activations of micro-batches in flight are not counted",
        "decision_input.memory_model",
        "(layer.activation_bytes",
        "(0",
        f"{FAILURES}::test_a_repacking_that_does_not_fit_names_one_that_would",
    ),
    Mutation(
        "layers move for a gain below the threshold",
        "decision._improves",
        "given.config.min_improvement",
        "0",
        f"{POLICY}::test_a_gain_below_min_improvement_is_rejected",
    ),
    Mutation(
        "layers move for a gain that noise explains",
        "MoveTradeoff._exceeds_noise",
        "_STANDARD_ERRORS",
        "0",
        f"{POLICY}::test_a_move_must_save_more_than_the_noise",
    ),
    Mutation(
        "layers move though the move costs more than it saves",
        "MoveTradeoff.objection",
        "<= price",
        "<= 0",
        f"{POLICY}::test_a_move_must_save_more_than_it_costs",
    ),
    Mutation(
        "a model that changed asks for no decision",
        "cycle.after",
        "return after(changed, Asked(Request(Reason.MODEL_CHANGED, reason)))",
        "return changed",
        "tests/engine/state/test_frozen.py::test_a_model_that_changed_is_profiled_and_rebalanced",
    ),
    Mutation(
        "every rank decides",
        "Decider.begin_to_decide",
        "if not self._is_first:",
        "if False:",
        "tests/engine/decide/test_own_balancer.py::test_a_balancer_that_fails_changes_nothing_and_its_cause_is_said",
    ),
    Mutation(
        "what a profile was for is forgotten with it",
        "cycle.after",
        "return replace(cycle, state=Idle(), due=due.joined(taken))",
        "return replace(cycle, state=Idle())",
        "tests/engine/decide/test_cycle.py::test_every_event_in_every_state",
    ),
    Mutation(
        "layers may freeze without a word",
        "TrainableLayers.check",
        "check_unchanged(self._stage.layers, self._layers)",
        "pass",
        "tests/engine/state/test_frozen.py::test_a_fully_frozen_model_still_runs_once_model_changed_was_called",
    ),
    Mutation(
        "a decision is missing in the report",
        "Reporter.rebalanced",
        "self.write(report.as_record())",
        "pass",
        "tests/engine/decide/test_decisions.py::test_a_rebalance_without_a_profile_decides_once",
    ),
    Mutation(
        "where no order of two chunks fits, an iteration is predicted to last for ever",
        "PipelineModel.expected_seconds",
        "seconds < math.inf or self.passes is None",
        "True",
        "tests/engine/decide/test_policy.py::test_where_no_order_fits_the_one_that_runs_is_predicted",
    ),
    Mutation(
        "nothing reaches DeepSpeed's monitors",
        "Reporter._send",
        "self._monitor is not None",
        "False",
        "tests/engine/decide/test_monitors.py::test_csv_files_have_all_series",
    ),
    Mutation(
        "a partition with an empty stage is accepted",
        "Placement.__post_init__",
        " or (stop == start and owner not in may_be_empty)",
        "",
        "tests/engine/test_engine.py::test_if_a_partition_is_invalid_or_ranks_disagree_nothing_moves",
    ),
    Mutation(
        "an unknown key of the section is accepted",
        "Section",
        "extra='forbid'",
        "extra='ignore'",
        f"{CONFIG}::test_an_unknown_key_is_refused_with_the_nearest_known_one",
    ),
    Mutation(
        "a withdrawn key is taken for an unknown one",
        "withdrawn.refusal",
        "if name in WITHDRAWN",
        "if False",
        f"{CONFIG}::test_keys_that_were_withdrawn_are_refused_by_name",
    ),
    Mutation(
        "layers move though the section is switched off",
        "guards.where_layers_may_move",
        "not engine.dynmo.enabled",
        "False",
        "tests/engine/test_switched_off.py::test_calls_that_would_move_layers_are_refused",
    ),
    Mutation(
        "a released rank goes on training",
        "guards.check_at_work",
        "if engine.released",
        "if False",
        f"{REPACK}::test_fewer_ranks_train_as_all_would",
    ),
    Mutation(
        "ranks are given back though training becomes too slow",
        "Planner.best",
        "(1.0 - repack.max_slowdown)",
        "(1.0 - repack.max_slowdown) * 4.0",
        f"{REPACK}::test_automatic_repacking_shrinks",
    ),
    Mutation(
        "a rank that died while layers moved is not named",
        "Communicator.operation",
        "self._watch.explain(error, ends_operation=True)",
        "pass",
        f"{FAILURES}::test_a_rank_that_dies_while_layers_move_is_named",
    ),
    Mutation(
        "a rank waits in the backend for one that was stopped",
        "Lookout._end_process",
        "os._exit(1)",
        "return",
        "tests/engine/comm/test_watch.py::test_ranks_end_that_wait_for_a_stopped_one_in_the_backend",
    ),
    Mutation(
        "a rank waits for the loss of one that was stopped",
        "PostedBroadcast._read",
        "watch is not None and self.tensor.is_cpu",
        "False",
        "tests/engine/comm/test_watch.py::test_ranks_end_that_read_the_loss_of_a_stopped_one",
    ),
    Mutation(
        "a busy process on the same host is lost",
        "Lookout._look",
        "not self._seen[rank].is_at_work",
        "True",
        "tests/engine/comm/test_watch.py::test_a_busy_rank_on_the_same_host_is_not_lost",
    ),
    Mutation(
        "a rank waits for one that has failed, and whose process goes on",
        "Lookout._look",
        "if self.activity.waits_for(beats[rank])",
        "if False",
        "tests/engine/comm/test_watch.py::test_ranks_end_that_wait_for_a_failed_one_whose_process_goes_on",
    ),
    Mutation(
        "nobody watches while a world forms",
        "World.begin",
        "self._comm.watch(self._part('watch').raw, self.rank, len(launch_ranks))",
        "pass",
        f"{FAILURES}::test_a_rank_that_dies_while_a_world_forms_is_named",
    ),
]
