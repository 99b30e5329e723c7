"""What a batch does: orders of passes, weight gradients that wait, masks between stages."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SPLIT, RUN = "ds_dynmo/engine/split", "ds_dynmo/engine/run"
TRAINS = "tests/engine/split/test_schedules.py::test_training_equals_1f1b -k 'fp32-2 and not zero1'"
SCHEDULE = "tests/schedules/test_schedule.py"

MUTATIONS = [
    Mutation(
        "weight gradients that wait are those of the first micro-batch alone",
        f"{SPLIT}/weight_gradients.py",
        "        return self._waiting.popleft()\n",
        "        return self._waiting[0]\n",
        TRAINS,
    ),
    Mutation(
        "the weight gradient of the last micro-batch is forgotten",
        f"{SPLIT}/scheduled.py",
        "        if deferred:\n",
        "        if deferred and self.gradients._waiting:\n",
        TRAINS,
    ),
    Mutation(
        "weight gradients that wait are added twice",
        f"{SPLIT}/weight_gradients.py",
        "return whole(parameter, common, reduce(torch.add, gradients))",
        "return whole(parameter, common, reduce(torch.add, gradients * 2))",
        TRAINS,
    ),
    Mutation(
        "weight gradients are computed in both parts of a backward pass",
        f"{SPLIT}/weight_gradients.py",
        "            return torch.zeros_like(gradient)\n        return gradient.clone()",
        "            return gradient\n        return gradient.clone()",
        "tests/engine/split/test_split_modules.py tests/engine/split/test_weight_gradients.py",
    ),
    Mutation(
        "two micro-batches in flight share a buffer",
        f"{SPLIT}/steps.py",
        "            taken.add(buffers[key])\n",
        "",
        TRAINS,
    ),
    Mutation(
        "the optimizer steps before stages have summed the gradients of tied layers",
        f"{SPLIT}/steps.py",
        "yield [deepspeeds.ReduceTiedGrads(), deepspeeds.ReduceGrads(), deepspeeds.OptimizerStep()]",
        "yield [deepspeeds.ReduceGrads(), deepspeeds.OptimizerStep(), deepspeeds.ReduceTiedGrads()]",
        "tests/engine/split/test_schedules.py::test_training_equals_1f1b_with_tied_layers_on_one_stage",
    ),
    Mutation(
        "1F1B runs one forward pass more ahead",
        "ds_dynmo/schedules/one_f_one_b.py",
        "return min(num_stages - stage, micro_batches)",
        "return min(num_stages - stage + 1, micro_batches)",
        "tests/schedules/test_orders.py",
    ),
    Mutation(
        "an order may compute a weight gradient before the gradient that it is made of",
        "ds_dynmo/schedules/schedule.py",
        "action.kind == Kind.WEIGHT_GRADIENT and action.micro_batch >= done",
        "action.kind == Kind.WEIGHT_GRADIENT and action.micro_batch > done",
        SCHEDULE,
    ),
    Mutation(
        "stages may wait for each other in a circle",
        "ds_dynmo/schedules/order.py",
        "    if any(asleep):\n",
        "    if False:\n",
        SCHEDULE,
    ),
    Mutation(
        "two orders have the same hash",
        "ds_dynmo/schedules/schedule.py",
        "json.dumps([self.owners, self.micro_batches, self.orders]",
        "json.dumps([self.owners, self.micro_batches]",
        SCHEDULE,
    ),
    Mutation(
        "an order holds more micro-batches than the memory limit allows",
        "ds_dynmo/engine/decide/decision_input.py",
        "            limit_bytes=limit,\n",
        "            limit_bytes=None,\n",
        "tests/engine/decide/test_schedule_decisions.py::test_an_order_stays_within_the_memory_limit",
    ),
    Mutation(
        "a layer that is recomputed in the first part of a backward pass draws other numbers",
        f"{RUN}/random_streams.py",
        "            InputGradientPass: self._backward_pass,\n",
        "",
        "tests/engine/run/test_randomness.py::test_recomputation_in_a_pass_in_two_parts_changes_nothing",
    ),
    Mutation(
        "a mask between stages gets a gradient",
        f"{RUN}/gradient_flags.py",
        "                tensor.requires_grad_(flag)\n",
        "                tensor.requires_grad_(True)\n",
        "tests/engine/comm/test_masks.py::test_each_tensor_crosses_a_boundary_once_and_two_of_eight_go_back",
    ),
    Mutation(
        "of tensors that no layer used nothing goes back",
        f"{RUN}/gradient_flags.py",
        "                    tensor.grad = torch.zeros_like(tensor)\n",
        "                    pass\n",
        "tests/engine/comm/test_masks.py::test_what_travels_beside_hidden_states_trains_as_on_one_stage",
    ),
    Mutation(
        "stages before the last return the loss of their replica",
        "ds_dynmo/engine/deepspeed/losses.py",
        "    return received.element(1)\n",
        "    return received.element(0)\n",
        "tests/engine/run/test_batch_ends.py::test_any_rank_or_none_may_read_the_loss[bf16-2-1.0]",
    ),
    Mutation(
        "an instruction of the user's that sends runs",
        "ds_dynmo/engine/deepspeed/instruction_map.py",
        "        if kind not in AT_THE_END and not is_deepspeeds(instruction):\n",
        "        if kind is schedule.ForwardPass and not is_deepspeeds(instruction):\n",
        "tests/engine/run/test_instructions.py::test_only_instructions_at_the_end_of_a_batch_may_be_the_users",
    ),
]
