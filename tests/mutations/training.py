"""What a batch does: random numbers, orders of passes, what stages send each other; what models and data add to it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SCHEDULES = "tests/engine/run/test_schedules.py::test_training_equals_1f1b"
CHAT = "tests/data/test_data_chat.py"

MUTATIONS = [
    Mutation(
        "a layer draws by its place in its stage",
        "StageLayers.random_streams",
        "getattr(untied.get(index), 'draws_as_layer', index)",
        "index - self.indices[0]",
        "tests/engine/run/test_randomness.py::test_moves_change_nothing[False]",
    ),
    Mutation(
        "a generator that layers share draws the numbers of its rank",
        "components.build_components",
        "states.add('the program', SharedGenerators(references.shared_generators))",
        "pass",
        "tests/engine/run/test_randomness.py::test_moves_change_nothing",
    ),
    Mutation(
        "all micro-batches of a batch draw the same",
        "LayerStreams.running",
        "LayerPass(micro_batch, recomputes)",
        "LayerPass(0, recomputes)",
        "tests/engine/run/test_random_streams.py::test_recomputation_repeats_the_random_numbers_of_its_micro_batch",
    ),
    Mutation(
        "weight gradients that wait are those of another micro-batch",
        "WeightGradients.second_part",
        "self._waiting.pop(which)",
        "self._waiting.pop(max(self._waiting))",
        f"{SCHEDULES} -k 'fp32-2 and not zero1'",
    ),
    Mutation(
        "a head that is a function of the tied embedding defers nothing",
        "Executor._watched",
        "split_modules.watched(layer, self._stage.layers.modules_that_run()[index])",
        "layer",
        "tests/engine/run/test_schedules.py::test_a_decision_finds_an_order_that_all_ranks_run",
    ),
    Mutation(
        "a slice of the head forgets the logits of those before it",
        "vocabulary.add_logits",
        "torch.logaddexp(scores[0], total)",
        "total",
        "tests/models/test_vocabulary_slices.py::test_loss_and_gradients_equal_those_of_whole_matrices",
    ),
    Mutation(
        "a label that no slice has counts as one of a logit of zero",
        "vocabulary.check_tokens",
        "labels.masked_fill(labels == NO_LABEL, 0)",
        "tokens",
        "tests/models/test_vocabulary_slices.py::test_tokens_that_no_slice_has_are_no_zeros",
    ),
    Mutation(
        "stages do not sum the gradients of tied layers",
        "Executor._end",
        "instructions[deepspeeds.ReduceTiedGrads](engine)",
        "pass",
        f"{SCHEDULES}_with_tied_layers_on_one_stage",
    ),
    Mutation(
        "a backward pass recomputes the chunk that ran forward last",
        "Executor._carry_out",
        "self._stage.chunks.activate(chunk)",
        "kind == Kind.FORWARD and self._stage.chunks.activate(chunk)",
        "tests/engine/run/test_two_chunks.py::test_training_equals_a_chain -k reentrant",
    ),
    Mutation(
        "another batch follows one that an error ended",
        "Executor.check",
        "self._unfinished",
        "False",
        "tests/engine/deepspeed/test_as_deepspeed.py::test_after_data_that_end_no_batch_is_trained",
    ),
    Mutation(
        "a dynamic case sees one of the chunks of its stage",
        "module.layers_of_stage",
        "vars(module).get(_RUNS, (bounds,))",
        "(bounds,)",
        "tests/models/test_cases.py::test_two_chunks_per_stage_change_nothing",
    ),
    Mutation(
        "1F1B runs one forward pass more ahead",
        "one_f_one_b.in_flight",
        "num_stages - stage,",
        "num_stages - stage + 1,",
        "tests/schedules/test_orders.py",
    ),
    Mutation(
        "stages may wait for each other in a circle",
        "order.run",
        "any(asleep)",
        "False",
        "tests/schedules/test_schedule.py",
    ),
    Mutation(
        "the batch that announces sizes begins like any other",
        "first_batch._in_front",
        "action.kind == Kind.FORWARD and action.micro_batch == 0",
        "False",
        "tests/schedules/test_link_order.py",
    ),
    Mutation(
        "a V keeps no memory free for the way back",
        "greedy.greedy",
        "max((activations[other] for other in chunks[owner] if other > chunk), default=0)",
        "0",
        "tests/schedules/test_greedy.py",
    ),
    Mutation(
        "a mask between stages gets a gradient",
        "Executor._send_activations",
        "goes_back and tensor.requires_grad",
        "goes_back and tensor.is_floating_point()",
        "tests/engine/comm/test_masks.py::test_each_tensor_crosses_a_boundary_once_and_two_of_eight_go_back",
    ),
    Mutation(
        "experts of all replicas but the first are left out of the norm",
        "clipping.counts",
        " or is_per_replica(parameter)",
        "",
        "tests/models/test_expert_parallel.py::test_split_experts_train_as_all_experts_on_every_replica",
    ),
    Mutation(
        "the moments of pruned elements are not set to 0",
        "FlatShards.zero_elements",
        "part.masked_fill_(",
        "part.masked_fill(",
        "tests/models/test_pruning_training.py::test_pruned_weights_stay_pruned_in_an_optimizer_with_moments",
    ),
    Mutation(
        "layers of Hugging Face models get the arguments of another micro-batch",
        "StubbedModel.arguments",
        "not latest.has(hidden, inputs)",
        "latest.about != _about(hidden)",
        "tests/models/test_huggingface.py::test_micro_batches_in_flight_have_their_own_arguments",
    ),
    Mutation(
        "arguments of Hugging Face layers that depend on hidden states are those of one layer",
        "StubbedModel.arguments",
        "hidden.new_full((), math.nan).expand(hidden.shape)",
        "hidden.detach()",
        "tests/models/test_huggingface_families.py"
        "::test_arguments_that_depend_on_the_values_of_hidden_states_are_refused",
    ),
    Mutation(
        "a Hugging Face model is pruned that reads its linear weights itself",
        "verification._compare_layers",
        "trial.prunable and",
        "False and",
        "tests/models/test_huggingface_pruning.py::test_a_layer_that_reads_weights_itself_is_refused",
    ),
    Mutation(
        "a decoder layer is cut in halves that compute something else",
        "halves._compute_the_same",
        "torch.equal(hidden, call.output)",
        "True",
        "tests/models/test_huggingface_halves.py::test_attention_beside_the_feed_forward_part_is_refused",
    ),
    Mutation(
        "what the user says is trained",
        "DocumentRows.take",
        "self.tokens.trained is not None",
        "False",
        f"{CHAT}::test_labels_are_the_answers_and_nothing_else",
    ),
    Mutation(
        "roles that do not alternate are rendered",
        "encoding._check_roles",
        "role == before != 'tool'",
        "False",
        f"{CHAT}::test_wrong_conversations_are_named",
    ),
    Mutation(
        "text that changed is not tokenized again",
        "opening._tokens",
        ", file.stat().st_mtime_ns",
        "",
        "tests/data/test_data_rows.py::test_a_text_is_tokenized_once_until_something_changes",
    ),
]
