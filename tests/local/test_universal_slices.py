"""Cutting whole parameters into tensor-parallel slices, as DeepSpeed's converter joined them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from ds_dynmo import CheckpointError
from ds_dynmo.engine.deepspeed.universal import WholeParameter
from ds_dynmo.engine.save.importers.universal_slices import cut_slice


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def cut(content: dict[str, Any], shapes: list[list[int]]) -> list[torch.Tensor]:
    whole = WholeParameter.of(content)
    assert whole is not None
    return [cut_slice(whole, shapes, tp_rank, "w/fp32.pt") for tp_rank in range(len(shapes))]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (2, 2, 4)])
def test_slices_join_to_the_whole(dim: int, sizes: tuple[int, ...]) -> None:
    whole = numbers(8, 8)
    shapes = [[size, 8] if dim == 0 else [8, size] for size in sizes]
    assert torch.cat(cut({"param": whole, "cat_dim": dim}, shapes), dim).equal(whole)


def test_what_every_slice_holds_is_not_cut() -> None:
    whole = numbers(6)
    assert all(part.equal(whole) for part in cut({"param": whole}, [[6], [6]]))


def test_a_vocabulary_is_padded_for_the_slices_here() -> None:
    whole = numbers(5, 2)
    first, second = cut({"param": whole, "cat_dim": 0, "vocab_tensor": True}, [[4, 2], [4, 2]])
    assert torch.cat((first, second)).equal(torch.cat((whole, torch.zeros(3, 2))))
    (alone,) = cut({"param": whole, "cat_dim": 0, "vocab_tensor": True}, [[6, 2]])
    assert alone.equal(torch.cat((whole, torch.zeros(1, 2))))


def test_two_parameters_in_one_are_cut_each_by_itself() -> None:
    whole = numbers(8, 1)
    first, second = cut({"param": whole, "cat_dim": 0, "param_n_sub_params": 2}, [[4, 1], [4, 1]])
    assert first.flatten().tolist() == [0, 1, 4, 5] and second.flatten().tolist() == [2, 3, 6, 7]


def test_parts_of_different_sizes_are_cut_each_by_itself() -> None:
    """Queries, keys and values of grouped attention in one parameter."""
    whole, shape = numbers(8, 1), SubparamShape(patterns=["w"], shape=((4, 2, 2), 1), partition_dim=0)
    first, second = cut({"param": whole, "sub_param_shape": shape}, [[4, 1], [4, 1]])
    assert first.flatten().tolist() == [0, 1, 4, 6] and second.flatten().tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize(
    ("content", "shapes"),
    [
        ({"param": numbers(8, 2)}, [[8, 1], [8, 1]]),
        ({"param": numbers(8, 2), "cat_dim": 1}, [[4, 2], [4, 2]]),
        ({"param": numbers(8)}, [[3], [3]]),
        ({"param": numbers(8), "cat_dim": 1}, [[4], [4]]),
        ({"param": numbers(8), "param_n_sub_params": 2}, [[3], [5]]),
        ({"param": numbers(5, 2), "vocab_tensor": True}, [[4, 2]]),
        ({"param": numbers(6), "sub_param_shape": SubparamShape(["w"], ((3, 3),), 0)}, [[3], [3]]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(content: dict[str, Any], shapes: list[list[int]]) -> None:
    with pytest.raises(CheckpointError, match=r"w/fp32.pt: has shape .*cannot be cut along dimension \d into"):
        cut(content, shapes)
