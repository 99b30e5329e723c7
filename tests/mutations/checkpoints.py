"""What is written to a checkpoint, when it counts as one, and what a run that resumes has of it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CHECKPOINT = "tests/engine/save/test_checkpoint.py"
SHAPES = f"{CHECKPOINT}::test_a_run_resumes_in_any_shape"
DAMAGE = "tests/engine/save/test_checkpoint_damage.py"
SAFE = "tests/engine/save/test_safe_load.py"
CHANGED = "tests/engine/save/test_checkpoint_changed_layers.py"
LISTING = "tests/engine/save/test_checkpoint_listing.py"
KEPT = f"{LISTING}::test_the_newest_checkpoints_of_a_run_stay_and_all_of_others[blocking]"
CLAIMS = "tests/engine/save/test_claims.py::test_a_second_process_is_refused_until_the_first_has_ended_in_whatever_way"
BACKGROUND = "tests/engine/save/test_background_saves.py"

MUTATIONS = [
    Mutation(
        "a run begins to save into a folder into which another one saves",
        "claims.claim_folder",
        "not _lock(descriptor)",
        "False",
        CLAIMS,
    ),
    Mutation(
        "a process saves into a folder that another has claimed",
        "CheckpointFolder.begin",
        "check_claim(self._save_dir)",
        "pass",
        CLAIMS,
    ),
    Mutation(
        "a run whose folder was taken over saves again when the other has ended",
        "claims.check_claim",
        "_lock(descriptor, unknown=False)",
        "_lock(descriptor) or True",
        "tests/engine/save/test_claims.py::test_the_process_whose_folder_was_taken_over_saves_no_more[flock]",
    ),
    Mutation(
        "the command saves into a folder that has checkpoints of another run",
        "paths.check_new_folder",
        "has_saved(save)",
        "False",
        "tests/cli/test_saving.py::test_a_folder_that_has_checkpoints_of_another_run_is_refused",
    ),
    Mutation(
        "a run that goes on from an older checkpoint has the state of its cases from the damaged one",
        "train.as_loaded",
        "engine.global_steps == run.first_step",
        "True",
        "tests/cli/test_saving.py::test_a_run_keeps_its_newest_checkpoints_and_goes_on_from_the_newest_whole_one",
    ),
    Mutation(
        "old checkpoints of other runs are removed",
        "listing.remove_older",
        "is_of_run(save_dir, tag, run)",
        "True",
        KEPT,
    ),
    Mutation(
        "a resumed run does not remove its checkpoints from before",
        "EngineProgress.restore_counters",
        "saved.get('run', self.run)",
        "self.run",
        KEPT,
    ),
    Mutation(
        "the checkpoint that `latest` names is removed",
        "listing.remove_older",
        "tag != latest",
        "True",
        f"{LISTING}::test_what_latest_names_stays_and_a_failed_removal_is_a_warning",
    ),
    Mutation(
        "a checkpoint with a truncated file is called whole",
        "listing._is_whole",
        "check_file(os.path.join(folder, name), saved)",
        "pass",
        f"{LISTING}::test_the_newest_whole_checkpoint_is_found_if_asked_for",
    ),
    Mutation(
        "a run for whose checkpoints there is no room begins",
        "saving.check_room",
        "free < least * expected",
        "False",
        "tests/cli/test_saving.py -k free_space",
    ),
    Mutation(
        "the file `latest` names a checkpoint before it is whole",
        "CheckpointFolder.commit",
        "sync(os.path.join(self.temporary, FOLDER))",
        "write_latest(self._save_dir, self._tag); sync(os.path.join(self.temporary, FOLDER))",
        "tests/engine/save/test_checkpoint_folder.py::test_nothing_is_left_of_a_save_that_was_killed_at_any_step",
    ),
    Mutation(
        "a flipped bit of a tensor is not noticed",
        "safe_load.find_damaged",
        "_checksum(storage) not in checksums",
        "not checksums",
        f"{DAMAGE}::test_a_damaged_file_is_named_and_changes_nothing",
    ),
    Mutation(
        "a stage's manifest of another save is taken for this one's",
        "manifest_files.read_all",
        "_read(check_file(path, saved))",
        "_read(path)",
        "tests/engine/save/test_checkpoint_layout.py"
        "::test_a_manifest_of_a_stage_that_is_not_of_this_checkpoint_is_refused",
    ),
    Mutation(
        "code in a file is run",
        "safe_load.safe_load",
        "weights_only=True",
        "weights_only=False",
        f"{SAFE}::test_a_file_in_torchs_old_format_runs_no_code",
    ),
    Mutation(
        "a dtype of numpy is loaded with whatever state a file says",
        "_Dtype.__setstate__",
        "order not in ('<', '>', '|') or state != self.plain.newbyteorder(order).__reduce__()[2]",
        "False",
        f"{SAFE}::test_the_state_of_a_dtype_is_numpys_and_calls_are_refused",
    ),
    Mutation(
        "a checkpoint with a class that is not allowed is saved without a word",
        "UnfinishedCheckpoint._write_rest",
        "if not_allowed:",
        "if False:",
        f"{DAMAGE}::test_a_failure_of_one_rank_is_an_error_on_all",
    ),
    Mutation(
        "the layers of a second chunk are saved under the numbers of others",
        "files._files_named",
        "layers[place] - module._local_start",
        "place",
        SHAPES,
    ),
    Mutation(
        "a resumed run does not continue its ranks' random numbers",
        "applying._put_progress",
        "loaded.random is not None",
        "False",
        f"{CHECKPOINT}::test_a_run_comes_back_with_every_kind_of_optimizer_and_of_groups",
    ),
    Mutation(
        "the pieces of a saved parameter are put together with an overlap of one element",
        "flat._elements",
        "(interval.start, tensor",
        "(max(interval.start - 1, 0), tensor",
        f"{CHECKPOINT}::test_a_run_of_replicas_comes_back",
    ),
    Mutation(
        "the state of frozen layers is not written",
        "FlatShards.extra_optimizer_state",
        "dict(self.held(Buffer(number, detached=True)))",
        "{}",
        f"{CHANGED}::test_frozen_layers_get_their_state_back",
    ),
    Mutation(
        "attributes that a layer changed are lost in a checkpoint",
        "layer_content.install",
        "subs[path].__dict__[name] = _marked_as(here, value)",
        "pass",
        f"{CHANGED}::test_changed_layers_load_as_they_were_saved",
    ),
    Mutation(
        "frozen weights that were left out of a checkpoint may have other values",
        "reading._read_tag",
        "context.everywhere(lambda: _check_left_out(context, saved))",
        "pass",
        "tests/engine/save/test_checkpoint_files.py"
        "::test_a_rank_hashes_its_share_of_what_is_left_out_and_what_it_takes",
    ),
    Mutation(
        "fp32 weights of stock DeepSpeed are taken for those of other parameters",
        "stock.check_masters",
        "if not values",
        "if False and not values",
        "tests/engine/save/test_checkpoint_stock.py::test_without_zero_groups_in_another_order_are_refused",
    ),
    Mutation(
        "each replica resumes with the experts of the first",
        "reading._read",
        "context.here.replica if same_replicas else 0",
        "0",
        "tests/models/test_expert_parallel.py::test_moves_a_restart_recomputation_and_two_chunks_change_nothing",
    ),
    Mutation(
        "a save in the background writes what training has changed meanwhile",
        "_Records.write_record",
        "data.clone()",
        "data",
        f"{BACKGROUND}::test_a_save_in_the_background_writes_the_same_files_whatever_changes_later",
    ),
    Mutation(
        "a run that may take any shape stays in its own where a checkpoint of another is loaded",
        "target._may_have_shape",
        "stage.config.schedule.kind != 'auto'",
        "True",
        SHAPES,
    ),
]
