"""What is written to a checkpoint, when it counts as one, and what a run that resumes has of it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RESUMES = "tests/distributed/test_checkpoint.py::test_a_run_resumes_in_an_engine_that_trained_at_another_partition"
DAMAGE = "tests/distributed/test_checkpoint_damage.py"
CHANGED = "tests/distributed/test_checkpoint_changed_layers.py"
STOCK = "tests/distributed/test_checkpoint_stock.py"
UNIVERSAL = "tests/distributed/test_universal.py"

MUTATIONS = [
    Mutation(
        "what a layer has beside its weights is not written for the last layer of a stage",
        "ds_dynmo/engine/save/writing.py",
        "        _write(extras, folder, layer_file(index, replica, slice_index))\n",
        "        if index != layers.indices[-1]:\n"
        "            _write(extras, folder, layer_file(index, replica, slice_index))\n",
        f"{RESUMES} -k SGD",
    ),
    Mutation(
        "the file `latest` names a checkpoint before it is whole",
        "ds_dynmo/engine/save/folder.py",
        "        sync(os.path.join(self.temporary, FOLDER))\n",
        "        write_latest(self._save_dir, self._tag)\n        sync(os.path.join(self.temporary, FOLDER))\n",
        f"{DAMAGE}::test_a_kill_at_any_step_leaves_a_whole_checkpoint[one-two-blocking-13]",
    ),
    Mutation(
        "a checkpoint is written into the folder of the one before",
        "ds_dynmo/engine/save/folder.py",
        "            os.rename(self.temporary, self._replacing)\n            self._replace()\n",
        "            _remove(self._path)\n            os.rename(self.temporary, self._path)\n",
        f"{DAMAGE}::test_a_kill_at_any_step_leaves_a_whole_checkpoint[one-one-blocking-13]",
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
        "        present = _gather(context, present_shapes)\n",
        "        if target != context.stage.placement:\n"
        "            context.rebalancer.move_to(target, Request(Reason.CHECKPOINT), clears_pending_decision=False)\n"
        "        present = _gather(context, present_shapes)\n",
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
        "tests/distributed/test_checkpoint.py::test_a_resumed_run_keeps_the_times_of_profiles_and_decisions",
    ),
    Mutation(
        "the state of frozen layers is not written",
        "ds_dynmo/engine/state/flat_shards.py",
        '"parked": {number: dict(self.held(Buffer(number, detached=True))) for number in self.numbers},',
        '"parked": {number: {} for number in self.numbers},',
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
        "_checksum(storage) not in checksums",
        "not checksums",
        "tests/distributed/test_checkpoint_damage.py::test_a_flipped_bit_of_a_shard_names_the_file_and_the_tensor",
    ),
    Mutation(
        "parameters on both sides of a new one are taken for one interval",
        "ds_dynmo/engine/move/route.py",
        "            last.destination_offset + last.numel,\n",
        "            row.destination_offset,\n",
        "tests/pure/test_routes.py",
    ),
    Mutation(
        "each replica resumes with the experts of the first",
        "ds_dynmo/engine/save/reading.py",
        "replica = context.here.replica if same_replicas else 0",
        "replica = 0",
        "tests/distributed/test_expert_parallel.py::test_a_resumed_run_equals_an_uninterrupted_one",
    ),
    Mutation(
        "shards of stock DeepSpeed are taken for those of one replica",
        "ds_dynmo/engine/save/importers/flat.py",
        'return shard_size(total, int(saved.read(stage_file(saved.slice.numbers[stage]))["dp_world_size"]))',
        "return shard_size(total, 1)",
        f"{STOCK}::test_wrapped_checkpoints_load_in_stock_and_back -k 'stock-ours and bf16 and zero1'",
    ),
    Mutation(
        "a checkpoint of stock DeepSpeed is read at the partition in force",
        "ds_dynmo/engine/save/importers/stock.py",
        "        return built\n",
        "        return self._context.stage.placement\n",
        f"{STOCK}::test_a_stock_checkpoint_loads_after_layers_have_moved",
    ),
    Mutation(
        "parameters of a stage of stock DeepSpeed are looked for at the beginning of their group",
        "ds_dynmo/engine/save/importers/stock.py",
        "offset=offset",
        "offset=0",
        f"{STOCK}::test_a_stock_checkpoint_loads_at_every_number_of_stages",
    ),
    Mutation(
        "stock DeepSpeed is taken to have saved at the partition that the module was built with",
        "ds_dynmo/engine/save/importers/stock.py",
        "            _are_alike(self._groups(built, stage), groups) for",
        "            True for",
        f"{STOCK}::test_a_stock_checkpoint_of_another_partition_is_loaded",
    ),
    Mutation(
        "options of groups that the first stage of stock DeepSpeed lacked are not loaded",
        "ds_dynmo/engine/save/importers/per_parameter.py",
        "        if saved.manifest.stock and not {",
        "        if not saved.manifest.stock and not {",
        f"{STOCK}::test_a_group_that_one_stage_alone_had_keeps_its_options",
    ),
    Mutation(
        "a slice of a universal checkpoint is cut from the beginning of a parameter",
        "ds_dynmo/engine/save/importers/universal_slices.py",
        "tensor.narrow(dim, start + sum(share[:tp_rank]), share[tp_rank])",
        "tensor.narrow(dim, start, share[tp_rank])",
        f"{UNIVERSAL}::test_from_two_slices_to_one_and_back -k fp32",
    ),
    Mutation(
        "the two moments of a universal checkpoint are exchanged",
        "ds_dynmo/engine/save/importers/universal.py",
        "{what: folder.cut(saved, what, model.shapes[key], tp_rank) for what in MOMENTS}",
        "{what: folder.cut(saved, other, model.shapes[key], tp_rank) for what, other in zip(MOMENTS, MOMENTS[::-1])}",
        f"{UNIVERSAL}::test_another_number_of_replicas_has_the_same_state",
    ),
    Mutation(
        "the loss scale begins anew in a run that resumes from a universal checkpoint",
        "ds_dynmo/engine/save/importers/universal.py",
        "loss_scale=folder.loss_scale(),",
        "loss_scale={},",
        f"{UNIVERSAL}::test_a_loss_scale_goes_on",
    ),
]
