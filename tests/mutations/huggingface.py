"""What is made once for the layers of a Hugging Face model on a stage, and what verification refuses."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

STUBBED = "ds_dynmo/models/huggingface/stubbed_model.py"
ONCE = "tests/models/test_huggingface.py::test_arguments_are_made_once_for_the_layers_of_a_stage"
IN_FLIGHT = "tests/models/test_huggingface.py::test_micro_batches_in_flight_have_their_own_arguments"
FAMILIES = "tests/models/test_huggingface_families.py"

MUTATIONS = [
    Mutation(
        "layers get the arguments of another micro-batch",
        STUBBED,
        "        if latest is None or not latest.has(hidden, inputs):\n",
        "        if latest is None or latest.about != _about(hidden):\n",
        IN_FLIGHT,
    ),
    Mutation(
        "positions that change in place do not count",
        STUBBED,
        " and _version(tensor) == version\n",
        "\n",
        IN_FLIGHT,
    ),
    Mutation(
        "arguments are made for each layer",
        STUBBED,
        "        if latest is None or not latest.has(hidden, inputs):\n",
        "        if True:\n",
        ONCE,
    ),
    Mutation(
        "what was made in inference mode is used in training",
        STUBBED,
        ", autocast, torch.is_inference_mode_enabled()\n",
        ", autocast\n",
        ONCE,
    ),
    Mutation(
        "arguments depend on the hidden states of the layer for which they are made",
        STUBBED,
        "            nothing = hidden.new_full((), math.nan).expand(hidden.shape)\n",
        "            nothing = hidden.detach()\n",
        f"{FAMILIES}::test_arguments_that_depend_on_the_values_of_hidden_states_are_refused",
    ),
    Mutation(
        "layers are verified with the arguments of one stage",
        "ds_dynmo/models/huggingface/verification.py",
        "    layers.separate()\n",
        "",
        f"{FAMILIES}::test_layers_that_hand_values_on_through_an_argument_are_refused",
    ),
    Mutation(
        "every rank verifies a model",
        "ds_dynmo/models/huggingface/verification.py",
        "    store = default_store() if dist.is_initialized() else None\n",
        "    store = None\n",
        "tests/models/test_huggingface_inputs.py::test_one_rank_verifies_a_model_and_all_hear_of_it",
    ),
    Mutation(
        "what a layer makes for its stage counts as its own seconds",
        "ds_dynmo/stage_work.py",
        "    stopwatch.pause()\n    try:\n        yield\n    finally:\n        stopwatch.resume()\n",
        "    yield\n",
        "tests/engine/measure/test_profiler.py::test_work_for_the_whole_stage_is_no_layers",
    ),
]
