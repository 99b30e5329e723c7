"""The state of a plain optimizer: what it counts, what its groups say of their parameters, and its bytes."""

from __future__ import annotations

import torch
from torch import nn

from ds_dynmo.engine.comm.point_to_point import SMALL_BYTES, _messages
from ds_dynmo.engine.state.optimizer_state import PerParameterState, held_alone
from tests.support.configs import UncompiledFusedAdam


def test_fused_adam_counts_the_steps_of_a_group_at_each_of_its_parameters() -> None:
    """DeepSpeed's counts them at one. When parameters have changed it is the count of the whole model that holds."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = UncompiledFusedAdam([{"params": parameters[:2]}, {"params": parameters[2:]}])
    for step, parameter in enumerate(parameters):
        optimizer.state[parameter] = {"step": step + 1}
    state = PerParameterState(optimizer, lambda counted: [counted, [7, 0]])
    state.describe()
    assert [state.state_of(parameter)["step"] for parameter in parameters] == [2, 2, 3]
    state.match_layers()
    assert [state.state_of(parameter)["step"] for parameter in parameters] == [7, 7, 3]


def test_names_of_parameters_that_were_given_to_torch_do_not_name_others_after_a_move() -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    state = PerParameterState(optimizer)
    state.drop([layer.weight])
    state.install_parameters([layer.bias], {})
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["params"] == [0] and "param_names" not in group


def test_tensors_that_travel_in_one_message_are_counted_as_copied_to_it() -> None:
    tensors = [torch.empty(SMALL_BYTES + more, dtype=torch.uint8) for more in (-1, 0, 1)]
    together = [message for _, message in _messages([(1, tensor) for tensor in tensors]) if len(message) > 1]
    held = held_alone(tensors)
    assert held.separate == 3 * SMALL_BYTES
    assert held.staged == sum(tensor.nbytes for message in together for tensor in message) == 2 * SMALL_BYTES - 1
