"""Orders, packing and micro-batches of token ids."""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch

from ds_dynmo.data import Column, TokenData, Tokens
from ds_dynmo.data.batches import STRETCH, TokenBatches
from ds_dynmo.data.order import Shuffle, draw
from ds_dynmo.data.rows import DocumentRows, pack
from ds_dynmo.errors import ConfigError


def tokens(ids: Any, name: str, starts: Any = None) -> Tokens:
    """Make tokens of one document, or of those that begin where ``starts`` says."""
    return Tokens(name, Column([pyarrow.array(ids)]), np.array([0, len(ids)] if starts is None else starts))


def counting(length: int) -> TokenData:
    """Make a text whose ids are their positions."""
    return TokenData(tokens(np.arange(length, dtype=np.uint32), "counting"))


def documents(lengths: list[int], **settings: Any) -> TokenData:
    """Make a text of documents, in which ids are their positions."""
    ends = np.cumsum(lengths)
    return TokenData(tokens(np.arange(ends[-1]), "documents", [0, *ends]), **settings)


def train(data: TokenData, **changes: Any) -> TokenBatches:
    return data.batches("train", **{"micro_batch_size": 2, "sequence_length": 8, "seed": 1, **changes})


# -- orders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_a_shuffle_is_a_permutation_of_its_own_for_each_key(count: int) -> None:
    positions = np.arange(count)
    first, second = (Shuffle(count, "key", key).at(positions) for key in (0, 1))
    assert sorted(first) == sorted(second) == positions.tolist()
    assert first.tolist() == Shuffle(count, "key", 0).at(positions).tolist()
    assert np.array_equal(Shuffle(count, "key", 0).at(positions[::-1]), first[::-1])
    assert count < 16 or (first.tolist() != second.tolist() and first.tolist() != positions.tolist())


def test_shuffles_and_draws_favour_no_number() -> None:
    placed = np.array([Shuffle(6, key).at(np.arange(6)) for key in range(1200)])
    for counts in [
        *(np.bincount(column, minlength=6) for column in placed.T),
        np.bincount(draw(6, np.arange(1200), 3)),
    ]:
        assert (abs(counts - 200) < 65).all()  # five standard deviations
    follows = (np.diff(placed, axis=1) == 1).mean()
    assert abs(follows - 5 / 30) < 0.02  # 5 of the 30 ordered pairs


def test_orders_are_the_same_in_every_version() -> None:
    """A resumed run depends on these numbers."""
    assert Shuffle(10, "train", 0, 0).at(np.arange(10)).tolist() == [2, 4, 6, 3, 1, 7, 0, 5, 9, 8]
    assert draw(1000, np.arange(5), "train", 0).tolist() == [988, 720, 395, 179, 740]


# -- windows ------------------------------------------------------------------------------------------------


def test_labels_are_the_inputs_one_token_on() -> None:
    for sampling in ("random", "epochs"):
        inputs, labels = train(counting(2000), sampling=sampling).micro_batch(3)
        assert inputs.shape == labels.shape == (2, 8) and inputs.dtype == labels.dtype == torch.int64
        assert torch.equal(labels, inputs + 1) and torch.equal(inputs - inputs[:, :1], torch.arange(8).expand(2, 8))
        assert inputs.is_contiguous() and labels.is_contiguous()


@pytest.mark.parametrize("length", [180, 1000, 3 * STRETCH + 17])
def test_training_never_shows_a_token_of_validation(length: int) -> None:
    data, places = counting(length), {}
    for split in ("train", "validation"):
        batches = data.batches(split, micro_batch_size=20_000, sequence_length=8, seed=0)
        inputs, labels = batches.micro_batch(0)
        places[split] = {*inputs.flatten().tolist(), *labels.flatten().tolist()}
    assert not places["train"] & places["validation"]
    if length <= 1000:
        assert places["train"] | places["validation"] == set(range(length))
    else:
        assert {place // (length // 3) for place in places["validation"]} == {0, 1, 2}


def test_a_text_for_validation_leaves_the_other_whole() -> None:
    texts = [tokens(np.arange(start, start + 40), "x") for start in (0, 100)]
    data = TokenData(texts[0], validation=texts[1])
    seen = set(
        data.batches("train", micro_batch_size=500, sequence_length=8, seed=0).micro_batch(0)[1].flatten().tolist()
    )
    assert seen == set(range(1, 40))
    inputs, _ = data.batches("validation", micro_batch_size=500, sequence_length=8, seed=0).micro_batch(0)
    assert set(inputs.flatten().tolist()) == set(range(100, 139))


# -- what comes in which order ------------------------------------------------------------------------------

DATA = {
    "joined": counting(1000),
    "packed": documents([5, 3, 9, 4, 7, 2] * 40, documents="packed"),
    "padded": documents([5, 3, 9, 4, 7, 2] * 40, documents="padded"),
}


def places(batches: TokenBatches, first: int, count: int) -> list[list[int]]:
    """Give the ids of micro-batches."""
    found = []
    for inputs, _ in islice(batches.iterate(first, micro_batches=1), count):
        found.append((inputs if isinstance(inputs, torch.Tensor) else inputs[0]).flatten().tolist())
    return found


@pytest.mark.parametrize("sampling", ["random", "epochs"])
@pytest.mark.parametrize("kind", DATA)
def test_a_batch_is_the_same_whatever_the_replicas(kind: str, sampling: str) -> None:
    alone = places(train(DATA[kind], sampling=sampling), 0, 96)
    for replicas in (2, 3, 4):
        shards = [
            places(train(DATA[kind], sampling=sampling, replica=replica, replicas=replicas), 0, 96 // replicas)
            for replica in range(replicas)
        ]
        for step in range(96 // 12):  # batches of 12 micro-batches
            each = 12 // replicas
            batch = [one for shard in shards for one in shard[step * each : (step + 1) * each]]
            assert sorted(batch) == sorted(alone[step * 12 : (step + 1) * 12])
    assert alone != places(train(DATA[kind], sampling=sampling, seed=2), 0, 96)


@pytest.mark.parametrize("sampling", ["random", "epochs"])
@pytest.mark.parametrize("kind", DATA)
def test_a_run_goes_on_from_any_position(kind: str, sampling: str) -> None:
    whole = places(train(DATA[kind], sampling=sampling), 0, 30)
    assert places(train(DATA[kind], sampling=sampling), 17, 13) == whole[17:]


@pytest.mark.parametrize("kind", ["joined", "packed", "padded"])
def test_epochs_show_every_sequence_once_in_the_same_micro_batches(kind: str) -> None:
    batches = train(DATA[kind], sampling="epochs")
    count = len(batches.epoch)
    assert count == len(batches.rows) // 2
    first, second = places(batches, 0, count), places(batches, count, count)
    assert first != second and sorted(first) == sorted(second)
    numbers = np.concatenate([batches.sequence_indices(number) for number in range(count)])
    assert len(set(numbers.tolist())) == 2 * count and len(batches.rows) - 2 * count < 2


def test_documents_come_all_before_one_comes_again() -> None:
    for kind in ("packed", "padded"):
        batches = train(DATA[kind])
        count = len(batches.rows)
        numbers = np.concatenate([batches.sequence_indices(number) for number in range(count)]).tolist()
        assert (
            sorted(numbers[:count]) == sorted(numbers[count:]) == list(range(count))
            and numbers[:count] != numbers[count:]
        )


# -- trained tokens -----------------------------------------------------------------------------------------


def partly_trained(**settings: Any) -> TokenData:
    """Make documents of which some tokens are trained, in columns of several arrays, one of them empty."""
    lengths = np.random.default_rng(3).integers(2, 20, 200)
    trained = np.random.default_rng(4).random(lengths.sum()) < 0.3
    starts = np.concatenate(([0], np.cumsum(lengths)))
    trained[starts[1:] - 1] = True
    columns = (
        Column([pyarrow.array(part) for part in np.split(values, [700, 700, 1500])])
        for values in (np.arange(len(trained)), trained)
    )
    ids, of_ids = columns
    return TokenData(Tokens("chats", ids, starts, of_ids, int(trained.sum())), **settings)


def test_true_values_are_counted_over_several_arrays() -> None:
    values = np.random.default_rng(0).random(50) < 0.5
    column = Column([pyarrow.array(part) for part in np.split(values, [0, 7, 7, 30, 49])])
    starts, stops = (ends.ravel() for ends in np.meshgrid(np.arange(51), np.arange(51)))
    expected = [values[start:stop].sum() for start, stop in zip(starts, np.maximum(starts, stops))]
    assert column.count(starts, np.maximum(starts, stops)).tolist() == expected


@pytest.mark.parametrize("sampling", ["random", "epochs"])
@pytest.mark.parametrize("documents", ["packed", "padded"])
def test_every_replica_counts_the_trained_tokens_of_all(documents: Any, sampling: str) -> None:
    for made in (partly_trained(documents=documents), DATA[documents]):
        for replicas, micro_batches in ((1, 6), (2, 3), (3, 2)):
            shards = [train(made, sampling=sampling, replica=one, replicas=replicas) for one in range(replicas)]
            iterators = [shard.iterate(5, micro_batches=micro_batches) for shard in shards]
            for _ in range(40):  # some batches lie in two epochs
                batch = [labels for one in iterators for _, labels in islice(one, micro_batches)]
                counts = [int((labels != -100).sum()) for labels, _ in batch]
                expected = torch.tensor(sum(counts) / len(counts))
                assert all(torch.equal(tokens, expected) for _, tokens in batch)


def test_labels_come_alone_where_all_are_trained_or_micro_batches_weigh_the_same() -> None:
    for data in (DATA["joined"], partly_trained(documents="packed", loss="micro_batch_mean")):
        _, labels = next(train(data).iterate(micro_batches=4))
        assert isinstance(labels, torch.Tensor)


# -- documents ----------------------------------------------------------------------------------------------


def pieces_of(data: TokenData, length: int = 8) -> tuple[list[list[int]], DocumentRows]:
    """Give the ids of every piece with the id after them, and check the rows that they are in."""
    batches = train(data, sequence_length=length, micro_batch_size=1, sampling="epochs")
    found = []
    for number in batches.epoch:
        inputs, labels = batches.micro_batch(number)
        ids, positions = (one[0] for one in inputs) if isinstance(inputs, tuple) else (inputs[0], torch.arange(length))
        labels = labels[0]
        starts = [place for place in range(length) if positions[place] == 0]
        for start, stop in zip(starts, [*starts[1:], length]):
            assert positions[start:stop].tolist() == list(range(stop - start))
            real = int((labels[start:stop] != -100).sum())
            assert (labels[start + real : stop] == -100).all() and (ids[start + real : stop] == 0).all()
            if real:
                assert torch.equal(labels[start : start + real - 1], ids[start + 1 : start + real])
                found.append([*ids[start : start + real].tolist(), int(labels[start + real - 1])])
    rows = batches.rows
    assert isinstance(rows, DocumentRows)
    return sorted(found), rows


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_every_token_of_a_document_is_predicted_once_and_from_its_own_document(kind: Any) -> None:
    lengths = [5, 3, 9, 4, 1, 7, 2, 20, 18, 0, 8] * 4
    data = documents(lengths, documents=kind)
    found, rows = pieces_of(data)
    expected = []
    for number, (start, stop) in enumerate(zip(data.tokens.starts, data.tokens.starts[1:])):
        if number % 20 != 19:  # for validation
            expected += [list(range(a, min(a + 9, stop))) for a in range(start, stop - 1, 8)]
    assert found == sorted(expected)
    inputs = sum(len(piece) - 1 for piece in expected)
    assert rows.fill == pytest.approx(inputs / (8 * len(rows)))
    assert len(rows) == len(expected) if kind == "padded" else rows.fill > 0.97


def test_padded_documents_have_no_position_ids_and_packed_ones_do() -> None:
    assert isinstance(train(DATA["padded"]).micro_batch(0)[0], torch.Tensor)
    ids, positions = train(DATA["packed"]).micro_batch(0)[0]
    assert ids.shape == positions.shape == (2, 8) and positions.dtype == torch.int64


def test_packing_is_best_fit_decreasing() -> None:
    assert pack([], 8).tolist() == []
    assert pack([8, 8], 8).tolist() == [0, 1]
    assert pack([2, 3, 6, 5, 4, 4], 8).tolist() == [0, 1, 0, 1, 2, 2]
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 41, 2000).tolist()
    rows = pack(lengths, 64)
    used = np.bincount(rows, weights=lengths)
    assert used.max() <= 64 and used.sum() == sum(lengths)
    assert len(used) <= 1.01 * -(-sum(lengths) // 64)


def one_by_one(lengths: list[int], space: int) -> list[int]:
    """Pack as :func:`pack` does, one after the other: of rows with equal space the one that got it last comes first."""
    rows, order, count = [0] * len(lengths), sorted(range(len(lengths)), key=lambda number: -lengths[number]), 0
    with_space: dict[int, list[int]] = {}
    for number in order:
        fitting = [left for left, held in with_space.items() if held and left >= lengths[number]]
        left = min(fitting, default=space)
        if not fitting:
            with_space.setdefault(space, []).append(count)
            count += 1
        rows[number] = with_space[left].pop()
        with_space.setdefault(left - lengths[number], []).append(rows[number])
    return rows


def test_packing_equals_packing_one_after_the_other() -> None:
    generator = np.random.default_rng(1)
    for _ in range(300):
        space = int(generator.integers(1, 40))
        most = int(generator.integers(1, space + 1))
        lengths = generator.integers(1, most + 1, generator.integers(1, 120)).tolist()
        assert pack(lengths, space).tolist() == one_by_one(lengths, space)


@pytest.mark.parametrize(
    ("length", "digest"), [(8, "8a9a569f06eed874"), (64, "77eb1836527d3cf4"), (1000, "6f2b102682486523")]
)
def test_packed_micro_batches_are_the_same_in_every_version(length: int, digest: str) -> None:
    """A resumed run depends on them."""
    lengths = [1 + 13 * number % 97 for number in range(500)]
    batches = train(documents(lengths, documents="packed"), sampling="epochs", sequence_length=length)
    found = hashlib.sha256()
    for number in batches.epoch:
        (ids, positions), labels = batches.micro_batch(number)
        found.update(torch.stack([ids, positions, labels]).numpy().tobytes())
    assert found.hexdigest()[:16] == digest


def test_every_twentieth_document_is_for_validation() -> None:
    data = documents([4] * 40, documents="padded")
    inputs = data.batches("validation", micro_batch_size=2, sequence_length=4, seed=0, sampling="epochs").micro_batch(
        0
    )[0]
    assert sorted(inputs[:, 0].tolist()) == [19 * 4, 39 * 4]  # type: ignore[call-overload]


# -- refused ------------------------------------------------------------------------------------------------


def test_too_little_text_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"counting: 179 tokens are too few: one sequence of 8 tokens in the 5% .* 180"
    ):
        counting(179).check_length(8)
    counting(180).check_length(8)
    alone = tokens(np.arange(8), "x")
    with pytest.raises(ConfigError, match="x: 8 tokens are too few: one sequence of 8 tokens needs 9"):
        TokenData(tokens(np.arange(50), "y"), validation=alone).check_length(8)
    with pytest.raises(ConfigError, match=r"19 documents are too few: .* validation, which gets every 20th one"):
        documents([4] * 19, documents="packed").check_length(8)
    with pytest.raises(ConfigError, match=r"20 documents are too few: one of more than a token"):
        documents([1] * 20, documents="packed").check_length(8)
    with pytest.raises(ConfigError, match=r"21 sequences of 8 tokens are too few for a micro-batch of 22 \(train\)"):
        train(counting(180), micro_batch_size=22, sampling="epochs")


def test_a_text_is_described() -> None:
    assert counting(1000).describe(8) == "counting: 1,000 tokens"
    assert documents([5] * 20, documents="packed").describe(8) == (
        "documents: 100 tokens in 20 documents, packed: 95% of each sequence of 8 is text"
    )
