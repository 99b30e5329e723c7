"""Where every parameter lies in the flat buffers of a stage, and what has to travel when that changes. Pure.

DeepSpeed's BF16_Optimizer and DeepSpeedZeroOptimizer keep, per parameter group, one flat buffer of the stage's
parameters in fp32, padded and cut into one equal shard per data-parallel rank. Parameters that are frozen lie in
a *parked* buffer of their group, cut the same way: the optimizer does not see it, and what it holds comes back
when they are unfrozen.

Parameters that are each replica's own (:mod:`ds_dynmo.engine.comm.replicas`) are in parameter groups of their own,
whose buffers are not cut: every replica has others, whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

MASTER = "master"  # the kind of state that the fp32 weights are

ParamOwner = str  # a layer's number, or the key of a tied layer
ParamKey = tuple[ParamOwner, int]  # a parameter: its owner, its position among the owner's parameters
BufferKey = tuple[int, bool]  # a flat buffer: parameter group, parked or not
ShardOwner = tuple[int, int]  # a rank of a tensor-parallel slice: stage, data-parallel index


@dataclass(frozen=True)
class Member:
    """A parameter that an optimizer group holds.

    Attributes:
        position: among the parameters of its layer, as it is to be.
        numel: elements.
        group: number of its parameter group.
        parked: it lies in the group's parked buffer now; None: in none, it is new.
        park: it is to lie there from now on; None: in none, it goes.
    """

    position: int
    numel: int
    group: int
    parked: bool | None
    park: bool | None


@dataclass(frozen=True)
class Buffer:
    """One flat buffer of one stage: ``offsets`` of its parameters, and ``shard`` elements per data-parallel rank.

    Attributes:
        own: every data-parallel rank has another such buffer, whole, rather than a shard of one.
    """

    offsets: Mapping[ParamKey, int]
    numel: Mapping[ParamKey, int]
    shard: int
    own: bool = False

    def position_of(self, replica: int) -> int:
        """Return the number of the shard that a data-parallel rank holds."""
        return 0 if self.own else replica


@dataclass(frozen=True)
class Transfer:
    """``numel`` elements that lie in a row in an old shard and in a new one.

    Attributes:
        old, new: the buffers.
        start_old, start_new: first element within the two shards.
    """

    source: ShardOwner
    destination: ShardOwner
    old: BufferKey
    new: BufferKey
    start_old: int
    start_new: int
    numel: int


def stage_buffers(
    owners: Sequence[ParamOwner],
    members: Mapping[ParamOwner, Sequence[Member]],
    num_groups: int,
    shards: int,
    *,
    after: bool,
    own_groups: Container[int] = (),
) -> dict[BufferKey, Buffer]:
    """Lay out the buffers of a stage that holds the parameters of ``owners``, in this order.

    Args:
        members: the parameters of each owner, in their present order.
        shards: data-parallel size.
        after: as it is to be (``park``) rather than as it is (``parked``).
        own_groups: the groups whose parameters are each replica's own.
    """
    buffers = {}
    for group in range(num_groups):
        for parked in (False, True):
            offsets, numel, total = {}, {}, 0
            for owner in owners:
                own = members.get(owner, ())
                for member in sorted(own, key=lambda member: member.position) if after else own:
                    if member.group == group and (member.park if after else member.parked) == parked:
                        key = (owner, member.position)
                        offsets[key], numel[key] = total, member.numel
                        total += member.numel
            own_group = group in own_groups
            shard = shard_size(total, 1 if own_group else shards, parked=parked)
            buffers[group, parked] = Buffer(offsets, numel, shard, own_group)
    return buffers


def shard_size(total: int, shards: int, *, parked: bool = False) -> int:
    """Count elements per rank: padded to 2 x ``shards`` as DeepSpeed 0.19.8 does. A live buffer is never empty.

    >>> shard_size(7, 2), shard_size(0, 2), shard_size(0, 2, parked=True)
    (4, 2, 0)
    """
    total = total if parked else max(total, 1)
    return -(-total // (2 * shards)) * 2


def plan_transfers(
    old: Mapping[int, Mapping[BufferKey, Buffer]],
    new: Mapping[int, Mapping[BufferKey, Buffer]],
    source_of: Mapping[tuple[int, ParamOwner], int],
    shards: tuple[int, int],
    replica: int = 0,
) -> Iterator[Transfer]:
    """List everything that has to be copied or sent, in one order on every rank.

    Of what each replica has of its own, only what ``replica`` copies and sends.

    Args:
        old, new: per stage, its buffers before and after.
        source_of: the stage from which a stage gets an owner's parameters: itself where they stay.
        shards: of each buffer, before and after.
    """
    for stage in sorted(new):
        for key in sorted(new[stage]):
            for source, old_key, start_old, start_new, numel in _rows(stage, key, old, new, source_of):
                buffer = new[stage][key]
                for transfer in _cut(
                    (source, stage, old_key, key),
                    (start_old, start_new, numel),
                    (old[source][old_key].shard, buffer.shard),
                    (1, 1) if buffer.own else shards,
                ):
                    if buffer.own:
                        transfer = replace(transfer, source=(source, replica), destination=(stage, replica))
                    yield transfer


def _rows(
    stage: int,
    buffer_key: BufferKey,
    old: Mapping[int, Mapping[BufferKey, Buffer]],
    new: Mapping[int, Mapping[BufferKey, Buffer]],
    source_of: Mapping[tuple[int, ParamOwner], int],
) -> Iterator[tuple[int, BufferKey, int, int, int]]:
    """List the rows of a new buffer that an old one has: parameters that lie side by side in both are one row."""
    buffer, group = new[stage][buffer_key], buffer_key[0]
    found, gaps = [], 0
    for key, start_new in buffer.offsets.items():
        source = source_of[stage, key[0]]
        held = next((c for c in ((group, False), (group, True)) if key in old[source][c].offsets), None)
        if held is None:
            gaps += 1  # what lies on either side of a new one is no row, however much went from between them
            continue
        found.append((source, held, old[source][held].offsets[key], start_new, buffer.numel[key], gaps))
    for _, group_of_row in groupby(found, key=lambda each: (each[0], each[1], each[2] - each[3], each[5])):
        row = list(group_of_row)
        source, held, start_old, start_new, *_ = row[0]
        yield source, held, start_old, start_new, sum(each[4] for each in row)


def _cut(
    where: tuple[int, int, BufferKey, BufferKey],
    row: tuple[int, int, int],
    sizes: tuple[int, int],
    shards: tuple[int, int],
) -> Iterator[Transfer]:
    """Cut a row at the boundaries of the old and of the new shards."""
    source, stage, old, new = where
    start_old, start_new, numel = row
    done = 0
    while done < numel:
        at_old, at_new = start_old + done, start_new + done
        shard_old, shard_new = at_old // sizes[0], at_new // sizes[1]
        assert shard_old < shards[0] and shard_new < shards[1]
        length = min(numel - done, (shard_old + 1) * sizes[0] - at_old, (shard_new + 1) * sizes[1] - at_new)
        yield Transfer(
            source=(source, shard_old),
            destination=(stage, shard_new),
            old=old,
            new=new,
            start_old=at_old - shard_old * sizes[0],
            start_new=at_new - shard_new * sizes[1],
            numel=length,
        )
        done += length
