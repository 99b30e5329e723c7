"""The rows of each micro-batch, and what a pipeline is given of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_dynmo.errors import ConfigError

pytest.importorskip("transformers")

from ds_dynmo.trainer.batches import Epochs, Sizes, as_micro_batch, collate_rows, micro_batches_of
from tests.support.trainer_runs import TrainerRun, arguments_of, model_of


def rows_of(count: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [number + 1] * 2} for number in range(count)]


def library_order(count: int, folder: str, **arguments: Any) -> list[list[list[int]]]:
    """Return the numbers of the rows in each batch of three epochs of transformers' trainer."""
    from transformers import Trainer

    run = TrainerRun(arguments={"per_device_train_batch_size": 2, "eval_strategy": "no", **arguments})
    trainer = Trainer(
        model_of(run), arguments_of(run, folder), data_collator=collate_rows, train_dataset=rows_of(count)
    )
    loader, epochs = trainer.get_train_dataloader(), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append([(batch["input_ids"][:, 0] - 1).tolist() for batch in loader])
    return epochs


@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_come_in_the_order_of_the_trainer_of_transformers(drop_last: bool, tmp_path: Any) -> None:
    for count, seed, more in (
        (11, 3, {}),
        (12, 3, {"data_seed": 9}),
        (5, 4, {"train_sampling_strategy": "sequential"}),
    ):
        expected = library_order(count, str(tmp_path), seed=seed, dataloader_drop_last=drop_last, **more)
        sizes = Sizes(rows=count, micro_batch=2, steps=3, replicas=1, drop_last=drop_last)
        order = Epochs(sizes, None if "train_sampling_strategy" in more else more.get("data_seed", seed))
        for epoch, of_epoch in enumerate(expected):
            found = [rows for batch in range(sizes.batches) for rows in order.of(epoch, batch, 0)]
            assert [rows for rows in found if rows] == of_epoch, (count, epoch)
            assert len(found) == sizes.batches * 3 and sizes.micro_batches == len(of_epoch)


def test_replicas_share_the_micro_batches_of_an_epoch_and_have_as_many_rows() -> None:
    sizes = Sizes(rows=11, micro_batch=2, steps=1, replicas=2, drop_last=False)
    order = Epochs(sizes, None)
    found = [order.of(0, batch, replica)[0] for batch in range(sizes.batches) for replica in range(2)]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 0]]
    whole = Sizes(rows=11, micro_batch=2, steps=1, replicas=2, drop_last=True)
    assert whole.micro_batches == 2


def test_labels_come_to_the_token_before_and_padding_has_none() -> None:
    batch = collate_rows([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}])
    tokens, labels = as_micro_batch(batch, (), 2)
    assert tokens.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert labels.tolist() == [[6, 7, -100], [9, -100, -100]]


def test_a_batch_that_an_epoch_does_not_fill_is_filled_with_rows_that_train_nothing() -> None:
    rows = rows_of(3)
    (first, second, third) = micro_batches_of([[0, 1], [2], []], rows, collate_rows, (), 2)
    assert first[1].tolist() == [[1, -100], [2, -100]]
    assert second[0].tolist() == [[3, 3], [3, 3]] and second[1].tolist() == [[3, -100], [-100, -100]]
    assert third[0].shape == (2, 2) and (third[1] == -100).all()


def test_positions_and_masks_follow_the_tokens() -> None:
    row = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "position_ids": [0, 1, 0], "attention_mask": [1, 1, 1]}
    batch = collate_rows([row, {name: values[:2] for name, values in row.items()}])
    (tokens, positions, mask), _ = as_micro_batch(batch, ("position_ids", "attention_mask"), 3)
    assert tokens.shape == positions.shape == mask.shape == (3, 3)
    assert positions.tolist() == [[0, 1, 0], [0, 1, 0], [0, 1, 0]] and mask.tolist()[1] == [1, 1, 0]


def test_what_a_collator_makes_is_refused_by_name() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    left = torch.tensor([[0, 1, 1], [1, 1, 1]])
    for batch, inputs, words in (
        ({"input_ids": ids}, (), "has no labels"),
        ({"input_ids": ids, "labels": ids, "attention_mask": left}, (), "padding is before"),
        ({"input_ids": ids, "labels": ids}, ("position_ids",), "has no position_ids"),
    ):
        with pytest.raises(ConfigError, match=words):
            as_micro_batch(batch, inputs, 2)
    with pytest.raises(ConfigError, match='"labels" should have one for each of a row\'s 3 tokens'):
        collate_rows([{"input_ids": [1, 2, 3], "labels": [1]}])
