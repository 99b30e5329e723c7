"""The names of DeepSpeed that it does not document, and that this package relies on: one table.

``probe`` looks for each of them before an engine is built. Other packages of ds_dynmo use those alone that programs
written for DeepSpeed read too, such as ``module.parts``: ``OPEN`` in tests/source/test_private_names.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_dynmo.engine import versions

TESTED = versions.TESTED["deepspeed"]
OLDEST = TESTED[0]
BELOW = "0.20"  # the first that is refused unseen


@dataclass(frozen=True)
class PrivateName:
    """One name that has to be there.

    Attributes:
        owner: ``"package.module"``, or ``"package.module:Class"`` for what its instances have.
        name: a method, a function, a global, or an attribute that code of the owner assigns.
        takes: of a function, the parameters that we name in a call or an override.
    """

    owner: str
    name: str
    takes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


def _of(owner: str, names: str, **functions: str) -> Iterator[PrivateName]:
    """Yield names of ``owner``: attributes in ``names``, and functions with parameters, separated by spaces."""
    yield from (PrivateName(owner, name) for name in names.split())
    yield from (PrivateName(owner, name, tuple(takes.split())) for name, takes in functions.items())


_PIPE, _ZERO = "deepspeed.runtime.pipe", "deepspeed.runtime.zero.stage_1_and_2"

NEEDED: tuple[PrivateName, ...] = (
    # The layers of a stage, and what goes by them.
    *_of(
        f"{_PIPE}.module:PipelineModule",
        "_layer_specs _local_start _local_stop _topo activation_checkpoint_func activation_checkpoint_interval "
        "base_seed forward_funcs fwd_map global_rank is_checkpointable_results_interval micro_offset num_stages parts "
        "seed_fn seed_layers stage_id tied_comms tied_modules tied_weight_attrs world_group world_size",
        _precompute_checkpointable_values="",
        _recursive_getattr="module attr_name",
        _set_bounds="start stop",
        _synchronize_tied_weights="",
        ckpt_layer_path="ckpt_dir local_layer_idx",
    ),
    *_of(f"{_PIPE}.module:LayerSpec", "module_args module_kwargs typename", build=""),
    *_of(f"{_PIPE}.module:TiedLayerSpec", "forward_fn key tied_weight_attr"),
    *_of("deepspeed.runtime.utils", "", set_random_seed="seed", is_model_parallel_parameter="p"),
    # The engine: what is overridden, called, or set anew when layers have moved.
    *_of(
        f"{_PIPE}.engine:PipelineEngine",
        "_INSTRUCTION_MAP _compute_loss _config _global_grad_norm _running_engine_backward agg_additional_losses "
        "agg_train_loss batch_fn checkpoint_mp_rank "
        "basic_optimizer checkpoint_engine client_lr_scheduler data_iterator data_parallel_group dp_group_loss "
        "dynamic_shape engine_timers eval_return_logits fwd_outputs "
        "is_pipe_parallel is_pipe_partitioned loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size "
        "local_rank loss mp_world_size outputs param_names pipe_buffers "
        "save_zero_checkpoint seq_data_parallel_group skipped_steps timers "
        "total_additional_losses total_loss tput_timer training_data training_dataloader using_bf16_optimizer",
        _aggregate_total_loss="",
        _backward_prologue_per_tensor="grad",
        _broadcast_model="",
        _configure_basic_optimizer="model_parameters",
        _configure_distributed_model="model",
        _configure_optimizer="client_optimizer model_parameters",
        _exec_load_micro_batch="buffer_id",
        _exec_schedule="pipe_schedule",
        _get_gradients_for_reduction="",
        _get_zero_param_shapes="",
        _loss_stage_global_rank="",
        _next_batch="",
        _reserve_pipe_buffers="num_buffers",
        _save_checkpoint="save_dir tag client_state exclude_frozen_parameters",
        _save_zero_checkpoint="save_path tag",
        _start_timers="timer_names",
        _stop_timers="timer_names",
        clip_fp32_gradients="",
        curriculum_learning_enabled="",
        get_data_types="",
        random_ltd_enabled="",
        reset_activation_shape="",
        use_node_local_storage="",
    ),
    *_of("deepspeed.runtime.config:DeepSpeedConfig", "float16_config zero_optimization_stage"),
    *_of(
        "deepspeed.utils.debug", "", debug_clear_module_and_param_names="", debug_extract_module_and_param_names="model"
    ),
    # Optimizer wrappers.
    *_of(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
        "_grad_acc_hooks _hp_grad _hp_optimizer_states_linked _param_slice_mappings bf16_groups bf16_groups_flat "
        "bf16_partitioned_groups dp_process_group fp32_groups_actual_gradients_flat "
        "fp32_groups_flat_partition fp32_groups_gradient_dict fp32_groups_gradient_flat_partition "
        "fp32_groups_gradients fp32_groups_gradients_flat fp32_groups_has_gradients grad_acc_dtype group_paddings "
        "immediate_grad_update mpu non_expert_gradients optimizer partition_count real_dp_process_group",
        _create_param_mapping="",
        _lazy_init_hp_params_optimizer_state="",
        _enable_universal_checkpoint="",
        _link_all_hp_params="",
        _split_flat_tensor="flat_tensor num_elem_list",
        create_grad_acc_hooks="",
        get_grads_for_reduction="",
        get_grads_for_norm="for_clipping",
        state_dict="",
    ),
    *_of(
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
        "cur_hysteresis cur_iter cur_scale last_overflow_iter",
    ),
    *_of(
        f"{_ZERO}:DeepSpeedZeroOptimizer",
        "_grad_acc_hooks _hp_optimizer_states_linked _param_slice_mappings all_grad_tensors averaged_gradients "
        "bit16_groups bit16_groups_flat contiguous_gradients device dp_process_group expert_dp_process_group "
        "first_offset groups_padding is_param_in_current_partition loss_scale loss_scaler "
        "model_parallel_group model_parallel_rank model_parallel_world_size mpu optimizer "
        "parallel_partitioned_bit16_groups param_dict "
        "param_id params_already_reduced params_in_partition params_not_in_partition partition_count partition_size "
        "real_dp_process_group round_robin_bit16_groups round_robin_bit16_indices round_robin_bit16_meta "
        "round_robin_bit16_offsets round_robin_bit16_padding "
        "single_partition_of_fp32_groups use_grad_accum_attribute",
        _create_param_mapping="",
        _enable_universal_checkpoint="",
        _lazy_init_hp_params_optimizer_state="",
        _link_all_hp_params="",
        create_gradient_handling_hooks="",
        get_data_parallel_partitions="tensor group_id",
        get_partition_info="tensor_list partition_size partition_id",
        initialize_gradient_partitioning_data_structures="",
        reset_partition_gradient_structures="",
        scaled_global_norm="norm_type",
        state_dict="",
    ),
    *_of("deepspeed.runtime.utils", "", mask_nan_or_inf_with_val_inplace="input device"),
    *_of("deepspeed.utils.bwc", "", bwc_tensor_model_parallel_rank="mpu"),
    # The processes: what DeepSpeed keeps of a world.
    *_of(
        "deepspeed.utils.groups",
        "mpu",
        _get_data_parallel_group="",
        _get_model_parallel_world_size="",
        _get_sequence_data_parallel_group="",
    ),
    *_of(f"{_PIPE}.p2p", "", init_process_groups="grid"),
    *_of(f"{_PIPE}.topology:PipelineParallelGrid", "pipe_groups pp_group"),
    *_of(
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "_CUDA_RNG_STATE_TRACKER mp_group mp_rank mp_size mpu",
        get_cuda_rng_tracker="",
        non_reentrant_checkpoint="function",
    ),
    # Files, and the operator for shared memory.
    *_of("deepspeed.utils.tensor_fragment", "fragment_address", set_full_hp_param="value optim_state_key"),
    *_of("deepspeed.utils.tensor_fragment:tensor_fragment", "", get_hp_fragment="optim_state_key"),
    *_of("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    *_of(
        "deepspeed.checkpoint.constants",
        "PARAM_SHAPES PIPELINE_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO "
        "UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE",
    ),
    *_of("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    *_of("deepspeed.moe.experts", "Experts"),
    *_of("deepspeed.utils.logging", "LoggerFactory warning_once"),
    *_of("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    *_of("deepspeed.comm.comm", "cdb"),
    *_of("deepspeed.comm.torch", "", build_shm_op=""),
    *_of("deepspeed.comm.torch:TorchBackend", "shm_comm_op"),
)
