"""What is written to a checkpoint, when it counts as one, and what a run that resumes has of it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RESUMES = "tests/engine/save/test_checkpoint.py::test_a_run_resumes_in_an_engine_that_trained_at_another_partition"
DAMAGE = "tests/engine/save/test_checkpoint_damage.py"
CHANGED = "tests/engine/save/test_checkpoint_changed_layers.py"
STOCK = "tests/engine/save/test_checkpoint_stock.py"
BACKGROUND = "tests/engine/save/test_background_saves.py"
FOLDER = "tests/engine/save/test_checkpoint_folder.py"
HASHES = (
    "tests/engine/save/test_checkpoint_files.py::test_a_rank_hashes_its_share_of_what_is_left_out_and_what_it_takes"
)

MUTATIONS = [
    Mutation(
        "a rank that pauses while a save ends in the background ends the job after our time-out",
        "ds_dynmo/engine/comm/communicator.py",
        "return PostedMaximum(numbers, self._control, self._timeout_of_batch())",
        "return PostedMaximum(numbers, self._control, self._timeout)",
        "tests/engine/measure/test_pauses.py",
    ),
    Mutation(
        "what a layer has beside its weights is not written for the last layer of a stage",
        "ds_dynmo/engine/save/writing.py",
        "        take(extras, layer_file(index, replica, slice_index))\n",
        "        if index != layers.indices[-1]:\n            take(extras, layer_file(index, replica, slice_index))\n",
        f"{RESUMES} -k SGD",
    ),
    Mutation(
        "the file `latest` names a checkpoint before it is whole",
        "ds_dynmo/engine/save/folder.py",
        "        sync(os.path.join(self.temporary, FOLDER))\n",
        "        write_latest(self._save_dir, self._tag)\n        sync(os.path.join(self.temporary, FOLDER))\n",
        f"{DAMAGE}::test_a_kill_at_any_step_leaves_a_whole_checkpoint[one-two-one-blocking-13]",
    ),
    Mutation(
        "a checkpoint is written into the folder of the one before",
        "ds_dynmo/engine/save/folder.py",
        "            os.rename(self._path, self._removed)\n",
        "            _remove(self._path)\n",
        f"{FOLDER}::test_nothing_is_left_of_a_save_that_was_killed_at_any_step[one-load]",
    ),
    Mutation(
        "what a killed save left stays until its tag is saved again",
        "ds_dynmo/engine/save/folder.py",
        "                return True\n        finally:\n",
        "                return False\n        finally:\n",
        f"{FOLDER}::test_nothing_is_left_of_a_save_that_was_killed_at_any_step[two-save]",
    ),
    Mutation(
        "a load takes away what a save of another machine is writing",
        "ds_dynmo/engine/save/folder.py",
        "            if os.read(descriptor, 1000) == _machine():\n",
        "            if os.read(descriptor, 1000) != _machine():\n",
        f"{FOLDER}::test_a_save_whose_lock_is_not_seen_is_in_use_for_an_hour",
    ),
    Mutation(
        "ranks find out by listing the folder what others wrote",
        "ds_dynmo/engine/save/writing.py",
        "        for path in self.destination.paths:\n",
        "        folder = self.folder.temporary\n"
        "        for path in (os.path.join(at, name) for at, _, names in os.walk(folder) for name in names):\n",
        "tests/engine/save/test_checkpoint_files.py"
        "::test_a_checkpoint_has_what_every_rank_wrote_whatever_a_listing_says",
    ),
    Mutation(
        "every replica hashes the frozen weights that are left out of a checkpoint",
        "ds_dynmo/engine/save/context.py",
        "list(counted.items())[here.replica :: here.replicas]",
        "list(counted.items())",
        HASHES,
    ),
    Mutation(
        "every replica compares the shards of all replicas with their checksums",
        "ds_dynmo/engine/save/importers/flat.py",
        "compares = replica % wanted.replicas == wanted.replica",
        "compares = True",
        HASHES,
    ),
    Mutation(
        "frozen weights that were left out of a checkpoint may have other values",
        "ds_dynmo/engine/save/reading.py",
        "            context.everywhere(lambda: _check_left_out(context, saved))\n",
        "            pass\n",
        HASHES,
    ),
    Mutation(
        "a load takes the classes that the user allowed off torch's list",
        "ds_dynmo/engine/save/safe_load.py",
        '_ALLOWED = (*((kind, f"{kind.__module__}.{kind.__qualname__}") for kind in _CLASSES),',
        "_ALLOWED = (*_CLASSES,",
        "tests/engine/save/test_safe_load.py::test_classes_that_the_user_allowed_stay_allowed",
    ),
    Mutation(
        "a file of another run of the same length is not noticed",
        "ds_dynmo/engine/save/safe_load.py",
        "    if found != saved:\n",
        "    if found.num_bytes != saved.num_bytes:\n",
        f"{DAMAGE}::test_a_damaged_file_is_named_and_changes_nothing",
    ),
    Mutation(
        "code in a file is run",
        "ds_dynmo/engine/save/safe_load.py",
        "weights_only=True",
        "weights_only=False",
        f"{DAMAGE}::test_a_malicious_pickle_and_an_empty_file_are_refused",
    ),
    Mutation(
        "a damaged file is found after layers have moved",
        "ds_dynmo/engine/save/reading.py",
        "    present = context.gather_layers(lambda _, module: present_shapes(module))\n",
        "    if target != context.stage.placement:\n"
        "        context.rebalancer.move_to(target, Request(Reason.CHECKPOINT), clears_pending_decision=False)\n"
        "    present = context.gather_layers(lambda _, module: present_shapes(module))\n",
        f"{DAMAGE}::test_a_damaged_file_is_named_and_changes_nothing",
    ),
    Mutation(
        "a resumed layer gets the optimizer's state of the parameter before",
        "ds_dynmo/engine/state/optimizer_state.py",
        "number, index, offset, parameter.numel()))",
        "number, max(index - 1, 0), offset, parameter.numel()))",
        f"{RESUMES} -k SGD",
    ),
    Mutation(
        "a resumed run has the step counts of new moments",
        "ds_dynmo/engine/save/importers/flat.py",
        "pieces.scalars.setdefault(number, scalars)",
        'pieces.scalars.setdefault(number, {**scalars, "step": torch.zeros_like(scalars["step"])})',
        f"{RESUMES} -k 'bf16'",
    ),
    Mutation(
        "the pieces of a saved parameter are put together with an overlap of one element",
        "ds_dynmo/engine/save/importers/flat.py",
        "append((interval.start, tensor",
        "append((max(interval.start - 1, 0), tensor",
        f"{RESUMES} -k 'zero1'",
    ),
    Mutation(
        "a resumed run begins its learning rates anew",
        "ds_dynmo/engine/save/applying.py",
        "            engine.lr_scheduler.load_state_dict(copy.deepcopy(_scheduler_state(context, loaded)))\n",
        "            pass\n",
        f"{RESUMES} -k 'sparse'",
    ),
    Mutation(
        "a resumed run does not continue its ranks' random numbers",
        "ds_dynmo/engine/save/applying.py",
        "    if loaded.random is not None:\n",
        "    if loaded.random is None:\n",
        f"{RESUMES} -k SGD",
    ),
    Mutation(
        "a resumed run decides as if it had just begun",
        "ds_dynmo/engine/save/progress.py",
        '            rebalancer.trigger.load_state_dict(saved["controller"])\n',
        "",
        "tests/engine/save/test_checkpoint.py::test_a_resumed_run_keeps_the_times_of_profiles_and_decisions",
    ),
    Mutation(
        "a move that was decided and has not begun is lost in a checkpoint",
        "ds_dynmo/engine/decide/trigger.py",
        "        pending = self._pending or due.request or decided\n",
        "        pending = self._pending or due.request\n",
        "tests/engine/move/test_background_moves.py::test_a_run_that_is_resumed_before_a_decided_move_decides_again",
    ),
    Mutation(
        "a placement that was decided and has not begun counts as done in a checkpoint",
        "ds_dynmo/engine/decide/trigger.py",
        '            "_placed": self._placed and decided is None,\n',
        '            "_placed": self._placed,\n',
        "tests/engine/test_switched_off.py::test_a_resumed_run_without_such_a_partition_profiles_once",
    ),
    Mutation(
        "without the section DeepSpeed names a checkpoint while other ranks write",
        "ds_dynmo/cli/train.py",
        "        save_latest=engine.dynmo is not None,\n",
        "",
        "tests/cli/test_resumed_training.py"
        "::test_without_the_section_a_checkpoint_is_the_latest_once_all_ranks_have_written_it",
    ),
    Mutation(
        "a run resumes from a checkpoint that is not whole",
        "ds_dynmo/cli/training/resuming.py",
        "if name == latest or (checkpoint_folder(folder, name) / MANIFEST).is_file()}",
        "}",
        "tests/cli/test_train_script.py::test_a_run_that_has_saved_nothing_yet_begins_where_it_would_resume",
    ),
    Mutation(
        "ds-dynmo-train waits for each save in the background",
        "ds_dynmo/cli/train.py",
        "            if last or history.stopped:\n                engine.wait_for_save()\n",
        "            engine.wait_for_save()\n",
        "tests/cli/test_resumed_training.py::test_a_run_stopped_by_signals_equals_an_uninterrupted_one",
    ),
    Mutation(
        "ds-dynmo-train ends without a wait for its last save",
        "ds_dynmo/cli/train.py",
        "            if last or history.stopped:\n                engine.wait_for_save()\n",
        "",
        "tests/cli/test_resumed_training.py::test_a_checkpoint_that_cannot_be_the_latest_is_an_error_on_every_rank",
    ),
    Mutation(
        "the state of frozen layers is not written",
        "ds_dynmo/engine/state/flat_shards.py",
        '"detached": {number: dict(self.held(Buffer(number, detached=True))) for number in self.numbers},',
        '"detached": {number: {} for number in self.numbers},',
        f"{CHANGED}::test_frozen_layers_get_their_state_back -k bf16",
    ),
    Mutation(
        "layers that were frozen resume as trainable ones",
        "ds_dynmo/engine/save/layer_content.py",
        '        parameter.requires_grad_(about["requires_grad"])\n        if not',
        "        if not",
        f"{CHANGED}::test_frozen_layers_get_their_state_back -k bf16",
    ),
    Mutation(
        "attributes that a layer changed are lost in a checkpoint",
        "ds_dynmo/engine/save/layer_content.py",
        "                subs[path].__dict__[name] = value\n",
        "                pass\n",
        f"{CHANGED}::test_changed_layers_load_as_they_were_saved[2-2]",
    ),
    Mutation(
        "non-persistent buffers are lost in a checkpoint",
        "ds_dynmo/engine/save/layer_content.py",
        "    for name, buffer in buffers_of(module).items():\n        if buffer is not None:\n",
        "    for name, buffer in buffers_of(module).items():\n"
        "        if buffer is not None and name not in non_persistent_of(module):\n",
        f"{CHANGED}::test_changed_layers_load_as_they_were_saved[2-2]",
    ),
    Mutation(
        "each replica loads the buffers of the first",
        "ds_dynmo/engine/save/writing.py",
        "all_buffers=replica > 0 or shared_writing",
        "all_buffers=False",
        f"{CHANGED}::test_replicas_keep_their_own_attributes",
    ),
    Mutation(
        "weights that are loaded without the optimizer's state do not reach the master weights",
        "ds_dynmo/engine/state/flat_state.py",
        "            self.shards.follow_weights()\n",
        "            pass\n",
        f"{CHANGED}::test_weights_load_without_state_under_a_wrapper",
    ),
    Mutation(
        "a flipped bit of a tensor is not noticed",
        "ds_dynmo/engine/save/safe_load.py",
        "new.items() if _checksum(storage) not in checksums}",
        "new.items() if not checksums}",
        "tests/engine/save/test_checkpoint_damage.py::test_a_flipped_bit_of_a_shard_names_the_file_and_the_tensor",
    ),
    Mutation(
        "parameters on both sides of a new one are taken for one interval",
        "ds_dynmo/engine/move/route.py",
        "            last.destination_offset + last.numel,\n",
        "            row.destination_offset,\n",
        "tests/engine/move/test_routes.py",
    ),
    Mutation(
        "each replica resumes with the experts of the first",
        "ds_dynmo/engine/save/reading.py",
        "replica = context.here.replica if same_replicas else 0",
        "replica = 0",
        "tests/models/test_expert_parallel.py::test_a_resumed_run_equals_an_uninterrupted_one",
    ),
    Mutation(
        "shards of stock DeepSpeed load with another number of replicas",
        "ds_dynmo/engine/save/importers/stock.py",
        '    if content.get("dp_world_size") != context.here.replicas:\n',
        "    if False:\n",
        f"{STOCK}::test_of_a_stock_checkpoint_of_other_stages_or_replicas_only_weights_load",
    ),
    Mutation(
        "a checkpoint of stock DeepSpeed is read at the partition in force",
        "ds_dynmo/engine/save/importers/stock.py",
        "        placement, slices = context.origin.placement, tuple(",
        "        placement, slices = context.stage.placement, tuple(",
        f"{STOCK}::test_a_stock_checkpoint_loads_after_layers_have_moved",
    ),
    Mutation(
        "stock DeepSpeed is taken to have saved at the partition that the module was built with",
        "ds_dynmo/engine/save/importers/stock.py",
        "    if counts is not None and counts != [len(group) for group in groups]:\n",
        "    if False:\n",
        f"{STOCK}::test_of_a_stock_checkpoint_of_another_partition_only_weights_load -k zero1",
    ),
    Mutation(
        "fp32 weights of stock DeepSpeed are taken for those of other parameters",
        "ds_dynmo/engine/save/importers/stock.py",
        "            if not values.to(weight.dtype).equal(",
        "            if False and not values.to(weight.dtype).equal(",
        f"{STOCK}::test_without_zero_groups_in_another_order_are_refused",
    ),
    Mutation(
        "options of groups that the own stage of stock DeepSpeed lacked are not loaded",
        "ds_dynmo/engine/save/importers/per_parameter.py",
        "wanted.stages_of(saved) if saved.manifest.stock else [wanted.stage]",
        "[wanted.stage]",
        f"{STOCK}::test_a_group_that_one_stage_alone_had_keeps_its_options",
    ),
    Mutation(
        "a save in the background writes what training has changed meanwhile",
        "ds_dynmo/torch_private.py",
        "            data = data.clone()  # of a tensor on the CPU; that of another device was copied for this call\n",
        "            pass\n",
        f"{BACKGROUND}::test_nothing_that_changes_later_is_written[fp32]",
    ),
    Mutation(
        "the next save does not wait for the one before",
        "ds_dynmo/engine/save/checkpointer.py",
        "        began = time.perf_counter()\n        self.wait()\n",
        "        began = time.perf_counter()\n        self._under_way = None\n",
        f"{BACKGROUND}::test_what_needs_the_checkpoint_waits_for_it[save]",
    ),
    Mutation(
        "a load does not wait for the save before it",
        "ds_dynmo/engine/save/checkpointer.py",
        '        self.wait()\n        self._stage.optimizer.match_layers("load_checkpoint")',
        '        self._stage.optimizer.match_layers("load_checkpoint")',
        f"{BACKGROUND}::test_what_needs_the_checkpoint_waits_for_it[load]",
    ),
    Mutation(
        "a re-packing does not wait for a save",
        "ds_dynmo/engine/resize/repacker.py",
        "            self._wait_for_save()  # its ranks finish it together\n",
        "            pass\n",
        f"{BACKGROUND}::test_what_needs_the_checkpoint_waits_for_it[repack]",
    ),
    Mutation(
        "training does not notice that a save has failed",
        "ds_dynmo/engine/engine.py",
        "        self.checkpointer.before_batch()\n",
        "",
        f"{BACKGROUND}::test_a_failed_write_is_an_error_of_the_next_call_on_every_rank",
    ),
    Mutation(
        "a rank alone knows that its part of a save has failed",
        "ds_dynmo/engine/comm/store_agreement.py",
        '        verdict = problems[0] if problems else ""\n',
        '        verdict = ""\n',
        f"{BACKGROUND}::test_a_failed_write_is_an_error_of_the_next_call_on_every_rank",
    ),
    Mutation(
        "a script that ends does not wait for its save",
        "ds_dynmo/engine/save/background.py",
        'name="ds_dynmo save")',
        'name="ds_dynmo save", daemon=True)',
        f"{BACKGROUND}::test_a_script_that_ends_leaves_a_whole_checkpoint",
    ),
    Mutation(
        "rank 0, and the store with it, ends before others have read that a checkpoint is whole",
        "ds_dynmo/engine/comm/store_agreement.py",
        "            self._collect()\n            self._delete(self._round - 1)\n",
        "            self._delete(self._round - 1)\n",
        f"{BACKGROUND}::test_ranks_agree_through_the_store",
    ),
    Mutation(
        "the copy of a save does not count with the memory limit",
        "ds_dynmo/engine/save/checkpointer.py",
        "        if present + copied <= held.limit:\n",
        "        if present <= held.limit:\n",
        f"{BACKGROUND}::test_on_a_cpu_the_copy_counts_with_the_memory_limit",
    ),
    Mutation(
        "a checkpoint in the background has its name before every rank has written its files",
        "ds_dynmo/engine/save/writing.py",
        "            agreement.gather(self.destination.write_rest)\n",
        "            self.destination.write_rest()\n",
        f"{BACKGROUND}::test_a_failed_write_is_an_error_of_the_next_call_on_every_rank",
    ),
]
