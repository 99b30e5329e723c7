import errno
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynmo.data.batches import STRETCH
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.text import Batches, ByteText, FileBytes, load_text


def counting(length: int) -> ByteText:
    """Make a text whose byte at position i is i % 251."""
    return ByteText((torch.arange(length) % 251).to(torch.uint8), "counting")


def content(text: ByteText) -> bytes:
    assert isinstance(text.tokens, FileBytes)
    found = b"".join(text.tokens.pieces())
    assert len(found) == len(text.tokens) and found[:99] == bytes(text.read(0, len(found[:99])))
    return found


def train_batches(text: ByteText, **changes: Any) -> Batches:
    return text.batches("train", **{"micro_batch_size": 2, "sequence_length": 8, "seed": 1, **changes})


def test_labels_are_the_inputs_shifted_by_one_byte() -> None:
    inputs, labels = train_batches(counting(2000)).micro_batch(0)
    assert inputs.shape == labels.shape == (2, 8)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, (inputs + 1) % 251)
    assert inputs.is_contiguous() and labels.is_contiguous()


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "text"
    for byte in b"xy":
        (tmp_path / "new").write_bytes(bytes([byte] * 9))
        (tmp_path / "new").rename(file)
        assert FileBytes([file]).read(0, 1).tolist() == [byte]


def test_a_micro_batch_is_reached_by_its_number() -> None:
    batches = train_batches(counting(5000))
    walked = list(islice(batches.iterate(micro_batches=1), 6))
    for number in (5, 0, 3):
        assert all(torch.equal(a, b) for a, b in zip(batches.micro_batch(number), walked[number], strict=True))
    resumed = next(batches.iterate(4, micro_batches=1))
    assert torch.equal(resumed[0], walked[4][0])


def test_a_micro_batch_depends_on_seed_number_and_replica() -> None:
    text = counting(100_000)
    first = train_batches(text).micro_batch(0)[0]
    torch.rand(3)
    assert torch.equal(first, train_batches(text).micro_batch(0)[0])
    assert not torch.equal(first, train_batches(text).micro_batch(1)[0])
    assert not torch.equal(first, train_batches(text, seed=2).micro_batch(0)[0])
    assert not torch.equal(first, train_batches(text, replica=1).micro_batch(0)[0])


def test_batches_do_not_use_the_global_generator() -> None:
    before = torch.get_rng_state()
    train_batches(counting(2000)).micro_batch(0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("length", [180, 1000, 3 * STRETCH + 17])
def test_training_never_shows_a_byte_of_validation(length: int) -> None:
    text = counting(length)
    text.tokens = torch.arange(len(text.tokens))  # every byte is its position
    seen = {
        split: text.batches(split, micro_batch_size=2000, sequence_length=8, seed=0)
        for split in ("train", "validation")
    }
    places = {}
    for split, batches in seen.items():
        inputs, labels = batches.micro_batch(0)
        places[split] = set(inputs.flatten().tolist()) | set(labels.flatten().tolist())
        assert torch.equal(inputs + 1, labels)
    assert not places["train"] & places["validation"]
    if length <= 1000:
        assert places["train"] | places["validation"] == set(range(length))


def test_a_long_text_is_validated_in_every_part() -> None:
    text = counting(3 * STRETCH)
    text.tokens = torch.arange(len(text.tokens))
    inputs, _ = text.batches("validation", micro_batch_size=100, sequence_length=8, seed=0).micro_batch(0)
    assert set((inputs // STRETCH).flatten().tolist()) == {0, 1, 2}


def test_a_folder_is_read_whole_whatever_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.LOG").write_bytes(b"two\xff")
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "c.bin").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"zero")
    assert content(load_text(tmp_path)) == b"zeroonetwo\xff"


@pytest.mark.parametrize("sampling", ["random", "epochs"])
def test_micro_batches_of_files_are_those_of_their_bytes_in_memory(sampling: Any, tmp_path: Path) -> None:
    """Also where a sequence begins in one file and ends in another, and where more files are read than stay mapped."""
    written = (torch.arange(5000) ** 2 % 251).to(torch.uint8)
    for number, piece in enumerate(written.split(40)):
        (tmp_path / f"{number:03}").write_bytes(bytes(piece.tolist()))
    in_memory, of_files = ByteText(written, "memory"), load_text(tmp_path)
    for number in range(20):
        expected, found = (train_batches(text, sampling=sampling).micro_batch(number) for text in (in_memory, of_files))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_text_is_not_held_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "text").open("wb") as file:
        file.truncate(2**40)  # sparse
    inputs, _ = train_batches(load_text(tmp_path / "text")).micro_batch(0)
    assert not inputs.any()


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    text = load_text(path)
    assert content(text) == bytes(range(256))


def test_the_default_text_is_pythons_sources_without_tests() -> None:
    text = load_text()
    found = content(text)
    assert 2**20 < len(found) <= 16 * 2**20
    assert b"import os" in found
    assert found == content(load_text())


def test_bad_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    with pytest.raises(ConfigError, match="nowhere: no such file or folder"):
        load_text(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="empty: there is not one byte"):
        load_text(tmp_path / "empty")
    with pytest.raises(ConfigError, match="folder: there is no file in it"):
        load_text(tmp_path / "folder")
    with pytest.raises(ConfigError, match="null: is neither a regular file nor a folder"):
        load_text("/dev/null")


def test_what_a_folder_would_leave_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes(b"two")
    (folder / "linked.txt").symlink_to(tmp_path / "b.txt")
    assert content(load_text(folder)) == b"onetwo"
    for target in (tmp_path / "nowhere", tmp_path, folder / "link"):
        (folder / "link").symlink_to(target)
        with pytest.raises(ConfigError, match="texts/link: is a link to a folder or to nothing"):
            load_text(folder)
        (folder / "link").unlink()
    listing = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("inner"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match="texts/inner: cannot be read: Permission denied"):
        load_text(folder)


def test_too_short_a_text_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 179)
    with pytest.raises(ConfigError, match=r"short: 179 bytes are too few.* 8 bytes .* needs 180"):
        load_text(path).batches("train", micro_batch_size=1, sequence_length=8, seed=0)
    path.write_bytes(b"x" * 180)
    load_text(path).batches("validation", micro_batch_size=1, sequence_length=8, seed=0).micro_batch(0)


@pytest.mark.parametrize("length", [1000, 3 * STRETCH // 64 * 64 + 17])
def test_an_epoch_shows_every_sequence_once_and_the_next_one_again_in_another_order(length: int) -> None:
    text = counting(length)
    text.tokens = torch.arange(len(text.tokens))  # every byte is its position
    sequence = 8 if length == 1000 else 1024
    batches = train_batches(text, sampling="epochs", sequence_length=sequence)
    count, epochs = len(batches.epoch), []
    for epoch in range(2):
        seen = [batches.micro_batch(number) for number in range(epoch * count, (epoch + 1) * count)]
        assert all(torch.equal(inputs + 1, labels) for inputs, labels in seen)
        epochs.append([tuple(inputs[:, 0].tolist()) for inputs, _ in seen])
    first, second = epochs
    assert first != second and sorted(first) == sorted(second)  # whole micro-batches are repeated
    places = [place for starts in first for place in starts]
    assert len(set(places)) == len(places) and len(text.tokens) * 0.95 / sequence - len(places) < 2 + 3
    stretch = batches.rows.stretch
    in_stretch = [place % stretch for place in places]
    assert all(place % sequence == 0 and place + sequence < stretch * 0.95 + 1 for place in in_stretch)


def test_an_epoch_needs_a_micro_batch() -> None:
    text = counting(180)  # 171 for training: 21 sequences
    assert train_batches(text, sampling="epochs", micro_batch_size=21).micro_batch(0)
    with pytest.raises(ConfigError, match=r"21 sequences of 8 bytes are too few for a micro-batch of 22 \(train\)"):
        train_batches(text, sampling="epochs", micro_batch_size=22)


def starts(text: ByteText, sampling: Any, replicas: int, numbers: range) -> list[int]:
    """Give where the sequences of the micro-batches ``numbers`` of the whole run begin, as ``replicas`` read them."""
    first = numbers.start // replicas
    return sorted(
        start
        for replica in range(replicas)
        for number in range(first, first + len(numbers) // replicas)
        for start in replace(
            train_batches(text, sampling=sampling, replica=replica, replicas=replicas), begun=numbers.start % replicas
        )
        .starts(number)
        .tolist()
    )


@pytest.mark.parametrize("sampling", ["random", "epochs"])
def test_a_batch_is_the_same_whatever_the_replicas(sampling: str) -> None:
    text = counting(3000)
    for batch in (range(0, 12), range(12, 24), range(600, 612)):
        assert len({str(starts(text, sampling, replicas, batch)) for replicas in (1, 2, 3, 4)}) == 1


def test_an_epoch_that_other_replicas_end_shows_every_sequence_once() -> None:
    text = counting(2000)
    count = len(train_batches(text, sampling="epochs").epoch)
    assert count == 118
    begun = starts(text, "epochs", 2, range(54))  # no multiple of 4: the next round of four begins within one
    for replicas in (1, 2, 4):
        seen = begun + starts(text, "epochs", replicas, range(54, count))
        assert len(seen) == len(set(seen)) == 2 * count
