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
    """No batch uses torch's global generator."""
    before = torch.get_rng_state()
    inputs, labels = train_batches(counting(2000)).micro_batch(0)
    assert torch.equal(before, torch.get_rng_state())
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


def by_position(length: int) -> ByteText:
    """Make a text of which every byte is its position."""
    text = counting(length)
    text.tokens = torch.arange(len(text.tokens))
    return text


def test_training_never_shows_a_byte_of_validation() -> None:
    """Which is of every part of a long text."""
    for length in (180, 1000, 3 * STRETCH + 17):
        text, places = by_position(length), {}
        for split in ("train", "validation"):
            batches = text.batches(split, micro_batch_size=2000, sequence_length=8, seed=0)
            inputs, labels = batches.micro_batch(0)
            places[split] = set(inputs.flatten().tolist()) | set(labels.flatten().tolist())
            assert torch.equal(inputs + 1, labels)
        assert not places["train"] & places["validation"], length
        if length <= 1000:
            assert places["train"] | places["validation"] == set(range(length))
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


def test_a_file_is_read_and_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    assert content(load_text(path)) == bytes(range(256))
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    inputs, _ = train_batches(load_text(path)).micro_batch(0)
    assert not inputs.any()


def test_the_default_text_is_pythons_sources_without_tests() -> None:
    text = load_text()
    found = content(text)
    assert 2**20 < len(found) <= 16 * 2**20
    assert b"import os" in found
    assert found == content(load_text())


def test_bad_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    for path, message in (
        (tmp_path / "nowhere", "nowhere: no such file or folder"),
        (tmp_path / "empty", "empty: there is not one byte"),
        (tmp_path / "folder", "folder: there is no file in it"),
        ("/dev/null", "null: is neither a regular file nor a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_text(path)


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
    text = counting(180)  # 171 for training: 21 sequences
    assert train_batches(text, sampling="epochs", micro_batch_size=21).micro_batch(0)
    with pytest.raises(ConfigError, match=r"21 sequences of 8 bytes are too few for a micro-batch of 22 \(train\)"):
        train_batches(text, sampling="epochs", micro_batch_size=22)


@pytest.mark.parametrize(("length", "sequence", "size"), [(1000, 8, 2), (3 * STRETCH // 64 * 64 + 17, 1024, 16)])
def test_an_epoch_shows_every_sequence_once_and_the_next_one_again_in_another_order(
    length: int, sequence: int, size: int
) -> None:
    text = by_position(length)
    batches = train_batches(text, sampling="epochs", sequence_length=sequence, micro_batch_size=size)
    count, epochs = len(batches.epoch), []
    for epoch in range(2):
        seen = [batches.micro_batch(number) for number in range(epoch * count, (epoch + 1) * count)]
        assert all(torch.equal(inputs + 1, labels) for inputs, labels in seen)
        epochs.append([tuple(inputs[:, 0].tolist()) for inputs, _ in seen])
    first, second = epochs
    assert first != second and sorted(first) == sorted(second)  # whole micro-batches are repeated
    places = [place for starts in first for place in starts]
    assert len(set(places)) == len(places) and len(text.tokens) * 0.95 / sequence - len(places) < size + 3
    stretch = batches.rows.stretch
    in_stretch = [place % stretch for place in places]
    assert all(place % sequence == 0 and place + sequence < stretch * 0.95 + 1 for place in in_stretch)


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
