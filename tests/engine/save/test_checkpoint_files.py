"""The files of a checkpoint, and which ranks read and write them."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.save import layer_content, writing
from ds_dynmo.engine.save.manifest import MANIFEST
from ds_dynmo.engine.save.manifest_files import read_all
from ds_dynmo.engine.save.safe_load import describe
from ds_dynmo.files.claims import CLAIM
from tests.support.checkpoints import (
    attempt,
    files_read,
    train_on,
)
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.models import WIDTH, Embedding, Head
from tests.support.training import build, drop_decision, freeze, gather, layers_of, state

pytestmark = pytest.mark.ranks


def files_hold_no_placeholder(case: Case, folder: str) -> list[str]:
    """Train where stages lack groups, and search DeepSpeed's files for placeholders."""
    engine = build(case)
    train_on(engine, 0, 1)
    engine.save_checkpoint(folder, tag="now")
    if engine.global_rank:
        return []
    found = []
    for path in sorted(Path(folder, "now").glob("*.pt")):
        content = torch.load(path, weights_only=False)
        groups = content.get("optimizer_state_dict", {}).get("single_partition_of_fp32_groups", [])
        sizes = [group.numel() for group in groups]
        if "placeholder" in str(content) or 1 in sizes or 2 in sizes:
            found.append(path.name)
    return found


@pytest.mark.parametrize("precision", ["bf16 zero1", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_placeholders_are_in_no_file(tmp_path: Path, precision: str) -> None:
    case = Case(
        stages=4, precision=precision, groups="two", micro_batches=1, start=(0, 1, 6, 7, 8)
    )  # embedding, blocks, function, head
    assert run(4, files_hold_no_placeholder, case, str(tmp_path))[0] == []


# -- reading and writing ------------------------------------------------------------------------------


def save_after_a_batch(case: Case, folder: str) -> None:
    engine = build(case)
    train_on(engine, 0, 1)
    engine.save_checkpoint(folder)


def test_each_rank_reads_only_what_it_needs(tmp_path: Path) -> None:
    run(4, save_after_a_batch, Case(stages=4, micro_batches=1), str(tmp_path))
    read = run(2, files_read, Case(), str(tmp_path))
    stages = [[name for name in names if "mp_rank" in name] for names in read]
    assert stages == [
        ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"],
        ["mp_rank_00_model_states.pt", "mp_rank_02_model_states.pt", "mp_rank_03_model_states.pt"],
    ]
    layers = [{int(name.partition("layer_")[2][:2]) for name in names if "layer_" in name} for names in read]
    assert layers == [{0, 1, 2, 3}, {4, 5, 7}]


class Wide(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 300), nn.Linear(300, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).relu())


def wide_layers(case: Case) -> list[Any]:
    return [LayerSpec(Embedding, 1), *[LayerSpec(Wide, index) for index in range(case.blocks)], LayerSpec(Head, 2)]


class HashedBytes:
    """Counts the bytes of tensors that this rank hashes: in digests, and to compare them with a file's checksums."""

    def __init__(self) -> None:
        self.in_digests = self.compared = 0
        digest, crc32 = layer_content.digest, zlib.crc32

        def count_in_digests(value: Any) -> str:
            self.in_digests += value.nbytes if isinstance(value, torch.Tensor) else 0
            return digest(value)

        def count_compared(values: Any, *start: int) -> int:
            self.compared += 0 if isinstance(values, bytes) else len(values)  # those of a manifest are no tensor's
            return crc32(values, *start)

        layer_content.digest, zlib.crc32 = count_in_digests, count_compared

    def take(self) -> tuple[int, int]:
        """Return the bytes in digests and those compared since the last call."""
        found, self.in_digests, self.compared = (self.in_digests, self.compared), 0, 0
        return found


def collectives_of_a_save(engine: Any, folder: str, **options: Any) -> Counter[str]:
    """Count how often this rank takes part in an agreement, or in something that grows with the ranks."""
    calls, comm = Counter[str](), engine.stage.comm
    for name in ("everywhere", "gather_objects", "gather_on_first", "broadcast_object"):
        original = getattr(comm, name)

        def count(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        setattr(comm, name, count)
    engine.save_checkpoint(folder, tag="counted", **options)
    for name in ("everywhere", "gather_objects", "gather_on_first", "broadcast_object"):
        delattr(comm, name)
    return calls


# The optimizer's parameters, the folder, the state, every rank's files, every stage's manifest, the name.
AGREEMENTS = 6


def hash_on_the_way(case: Case, folder: str) -> dict[str, Any]:
    """Save without the frozen weights, and load into another engine; count what is hashed."""
    engine, other = build(case, wide_layers), build(case, wide_layers)
    freeze(engine, 3)
    engine.model_changed("frozen")
    drop_decision(engine)
    train_on(engine, 0, 1)
    hashed = HashedBytes()
    collectives = collectives_of_a_save(engine, folder, exclude_frozen_parameters=True)
    saving = hashed.take()
    other.load_checkpoint(folder)
    found, expected = state(other), state(engine)
    found.pop("shards"), expected.pop("shards")  # it has moments of 0 for frozen layers
    assert found == expected
    layers = layers_of(engine).values()
    frozen, trained = (
        sum(p.numel() for layer in layers for p in layer.parameters() if p.requires_grad == trains)
        for trains in (False, True)
    )
    found = {"saving": saving, "loading": hashed.take(), "frozen": frozen, "trained": trained}
    if engine.global_rank == 0:  # another base on the first replica alone
        layers_of(other)[1].up.weight.data[0, 0] += 1
    return {**found, "collectives": collectives, "refused": attempt(other, folder)}


def test_a_rank_hashes_its_share_of_what_is_left_out_and_what_it_takes(tmp_path: Path) -> None:
    """Weights have 2 bytes an element, fp32 weights and moments 12, which two replicas share out."""
    case = Case(stages=2, replicas=2, precision="bf16 zero1", blocks=4, micro_batches=1)
    (first, second), others = (run(4, hash_on_the_way, case, str(tmp_path))[at : at + 2] for at in (0, 2))
    assert first["frozen"] > 10_000 and others[0]["trained"] > 10_000 and not others[0]["frozen"]
    assert first["saving"][0] + second["saving"][0] == 2 * first["frozen"] > 2 * second["saving"][0] > 0
    for rank in (first, second, *others):
        in_digests, compared = rank["loading"]
        message, unchanged = rank["refused"]
        assert unchanged and message.startswith(f"rank 0: {tmp_path}/counted/layer_01-model_states.pt: lacks up.weig")
        assert in_digests == 2 * rank["frozen"]
        assert rank["collectives"] == {"everywhere": AGREEMENTS + 1}  # that all have hashed
        assert compared <= 2 * rank["trained"] + 12 * (rank["trained"] + rank["frozen"]) // 2 + 30_000
    assert not any(rank["saving"][0] for rank in others) and not any(rank["saving"][1] for rank in (first, *others))


def parts_of(engine: Any) -> dict[str, Any]:
    found = state(engine)
    return {
        "weights": {name: value for name, value in found.items() if "/" not in name},
        "moments": {name: value for name, value in found.items() if "/exp" in name},
        "steps": engine.global_steps,
        "scheduler": engine.lr_scheduler.last_batch_iteration,
    }


def load_parts(case: Case, folder: str, ways: list[dict[str, bool]]) -> list[set[str]]:
    """Load a checkpoint over another; return, per choice of flags, which parts are then of the first."""
    engine, saved, found = build(case), [], []
    for tag in ("first", "other"):
        train_on(engine, 50, 1)
        engine.save_checkpoint(folder, tag=tag)
        saved.append(parts_of(engine))
    for flags in ways:
        engine.load_checkpoint(folder, tag="other")
        engine.load_checkpoint(folder, tag="first", **flags)
        now = parts_of(engine)
        found.append({part for part, value in now.items() if value == saved[0][part]})
        assert all(value in (saved[0][part], saved[1][part]) for part, value in now.items()), flags
    return found


def test_flags_choose_what_is_loaded(tmp_path: Path) -> None:
    every = {"weights", "moments", "steps", "scheduler"}
    ways: list[tuple[dict[str, bool], set[str]]] = [
        ({}, set()),
        ({"load_optimizer_states": False}, {"moments"}),
        ({"load_lr_scheduler_states": False}, {"scheduler"}),
        ({"load_module_only": True}, {"moments", "steps", "scheduler"}),
    ]
    for found in run(2, load_parts, Case(scheduler=True, micro_batches=1), str(tmp_path), [flags for flags, _ in ways]):
        assert found == [every - stays for _, stays in ways]


def misuse(case: Case, folder: str, claimed: str) -> list[str]:
    engine = build(case)
    found = []
    for call in (
        lambda: engine.save_checkpoint(folder, tag="a/b"),
        lambda: engine.save_checkpoint(folder, tag=f"rank{engine.global_rank}"),
        lambda: engine.load_checkpoint(folder, tag="nowhere"),
        lambda: engine.load_checkpoint(folder, tag=f"rank{engine.global_rank}"),
        lambda: engine.load_checkpoint(folder, custom_load_fn=print),
        lambda: engine.save_checkpoint(claimed),
        lambda: engine.load_checkpoint(folder) == (None, None),
    ):
        try:
            found.append(str(call()))
        except (ds_dynmo.ConfigError, ds_dynmo.CheckpointError) as error:
            found.append(str(error))
    return found


def test_wrong_tags_and_folders_are_refused(tmp_path: Path) -> None:
    claimed, free = tmp_path / "claimed", tmp_path / "free"
    free.mkdir()
    says = [
        "'a/b': has to be the name of one folder",
        r"ranks differ: .*/rank0 on ranks \[0\], .*/rank1 on ranks \[1\]",
        "nowhere: there is no such folder",
        r"ranks differ: .*'rank0' on ranks \[0\], .*'rank1' on ranks \[1\]",
        "custom_load_fn",
        f"{claimed}: process {os.getpid()} on ",
        "^True$",
    ]
    with ds_dynmo.claim_folder(str(claimed)):
        for found in run(2, misuse, Case(), str(free), str(claimed)):
            for message, expected in zip(found, says, strict=True):
                assert re.search(expected, message)
        assert os.listdir(claimed) == [CLAIM] and not os.listdir(free)


def lists_nothing(folder: str, empty: str) -> None:
    """Let this rank list a folder as a network file system may, before it looks again: as the one that is ``empty``."""
    for name in ("listdir", "scandir"):
        original = getattr(os, name)
        listed = lambda path=".", original=original: original(empty if folder in str(path) else path)  # noqa: E731
        setattr(os, name, listed)


def save_with_trouble(case: Case, folder: str) -> list[str]:
    """Save, and count collectives; save with a stale listing; with a file that only its writer finds; and bypassed.

    Then load, with a stale listing, what has no list of its files.
    """
    engine = build(case)
    if engine.global_rank == 0:
        os.makedirs(f"{folder}/empty")
    gather(None)
    assert collectives_of_a_save(engine, f"{folder}/counted") == {"everywhere": AGREEMENTS}
    lists_nothing(".writing", f"{folder}/empty")
    assert engine.save_checkpoint(folder, tag="stale")
    if engine.global_rank == 0:
        shutil.copytree(f"{folder}/stale", f"{folder}/stock", ignore=lambda *_: ["dynmo"])

    def described(path: str) -> Any:
        found = describe(path)
        if path.endswith("mp_rank_01_model_states.pt"):
            os.unlink(path)  # as on a disk of rank 1 alone
        return found

    messages = []
    for tag in ("elsewhere", "bypassed"):
        if tag == "elsewhere":
            writing.describe = described
        else:
            writing.describe = describe
            engine.module.save_state_dict = lambda *_, **__: None
        with pytest.raises(ds_dynmo.CheckpointError) as caught:
            engine.save_checkpoint(folder, tag=tag)
        messages.append(str(caught.value))
    if engine.global_rank == 1:
        lists_nothing("stock", f"{folder}/empty")
    return [*messages, attempt(engine, folder, tag="stock")[0]]


def test_a_checkpoint_has_what_every_rank_wrote_whatever_a_listing_says(tmp_path: Path) -> None:
    case = Case(stages=2)
    for messages in run(2, save_with_trouble, case, str(tmp_path)):
        elsewhere, bypassed = (
            f"rank {rank}: {tmp_path}/.{tag}.writing" for rank, tag in ((1, "elsewhere"), (0, "bypassed"))
        )
        assert messages[0].startswith(f"{elsewhere}/mp_rank_01_model_states.pt: a rank wrote ")
        says = "the first rank of its stage finds no such file: save_dir has to be a folder that all ranks share"
        assert messages[0].endswith(f" bytes, and {says}")
        assert messages[1].startswith(
            f"{bypassed}/layer_00-model_states.pt: no rank wrote it: a save_state_dict of your"
        )
        assert f"ranks differ: {tmp_path}/stock holds ['layer_00-" in messages[2]
    assert sorted(os.listdir(tmp_path)) == ["counted", "empty", "latest", "stale", "stock"]
    files = [path for path in (tmp_path / "stale").rglob("*.pt") if path.is_file()]
    listed = read_all(str(tmp_path / "stale"), (tmp_path / "stale" / MANIFEST).read_text()).files
    assert {str(path.relative_to(tmp_path / "stale")) for path in files} == listed.keys()
    assert all(path.stat().st_size == listed[str(path.relative_to(tmp_path / "stale"))].num_bytes for path in files)
