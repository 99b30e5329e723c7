"""Search the logs of a world of ranks for what NCCL would not have got through, although gloo did.

NCCL runs the operations of a communicator on a stream, in the order posted. An operation begins when those before it on
its communicator, and those that its stream waits for, are over. It is over when its other ranks have begun theirs. So:

- all members of a communicator must post the same collectives in the same order, and as many of them,
- what is sent must be as long as what is received for it,
- beginnings and ends must not wait for each other in a circle.

The search takes time in proportion to the number of operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from tests.emulated.operation_log import Operation, read

Waits = dict[tuple, list[tuple]]  # ("begin" or "end", index of an operation) or a meeting: what it waits for


def check(folder: str, finished: bool = True) -> list[str]:
    """Return what is wrong with the operations that the ranks of a world logged in ``folder``.

    Args:
        finished: whether all ranks came to their end; otherwise it is no fault that an operation has no counterpart.
    """
    operations = list(read(folder))
    waits = _order_of_streams(operations)
    problems = [*_meet(operations, waits, finished), *_exchange(operations, waits, finished)]
    circle = _circle(waits)
    if circle:
        members = [operations[index] for index in circle]
        problems.append(_problem("operations wait for each other in a circle: NCCL would stand still", members))
    return problems


def _order_of_streams(operations: Sequence[Operation]) -> Waits:
    """Return what each operation waits for on its own rank."""
    waits: Waits = {}
    index_of = {(operation.rank, operation.number): index for index, operation in enumerate(operations)}
    last: dict[tuple[int, str], int] = {}
    for index, operation in enumerate(operations):
        before = [index_of[operation.rank, number] for number in operation.after]
        previous = last.get((operation.rank, operation.communicator))
        if previous is not None:
            before.append(previous)
        last[operation.rank, operation.communicator] = index
        waits["begin", index] = [("end", other) for other in before]
        waits["end", index] = [("begin", index)]
    return waits


def _meet(operations: Sequence[Operation], waits: Waits, finished: bool) -> Iterable[str]:
    """Let the members of each communicator meet in its collectives; yield where they differ."""
    posted: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, operation in enumerate(operations):
        if not operation.messages:
            posted[operation.communicator][operation.member].append(index)
    for communicator, by_member in posted.items():
        size = operations[next(iter(by_member.values()))[0]].size
        for number, meeting in enumerate(zip_longest(*(by_member[member] for member in range(size)))):
            present = [index for index in meeting if index is not None]
            whats = {operations[index].what: index for index in present}
            if len(whats) > 1:
                text = f"collective {number} of communicator {communicator} is not the same on all its ranks"
                yield _problem(text, [operations[index] for index in whats.values()])
                break  # the following differ because of this one
            if len(present) < size:
                if finished:
                    text = (
                        f"{size - len(present)} of {size} ranks lack collective {number} of communicator {communicator}"
                    )
                    yield _problem(text, [operations[index] for index in present])
                break
            for index in present:
                waits["end", index].append(("meeting", communicator, number))
            waits["meeting", communicator, number] = [("begin", index) for index in present]


def _exchange(operations: Sequence[Operation], waits: Waits, finished: bool) -> Iterable[str]:
    """Let each send meet its receive; yield where they differ."""
    pairs: dict[tuple[str, int, int], dict[str, list[tuple[int, int]]]] = defaultdict(lambda: {"send": [], "recv": []})
    for index, operation in enumerate(operations):
        for kind, peer, size in operation.messages:
            pair = (operation.member, peer) if kind == "send" else (peer, operation.member)
            pairs[operation.communicator, *pair][kind].append((index, size))
    for (communicator, *_), sides in pairs.items():
        for sent, received in zip_longest(sides["send"], sides["recv"]):
            if sent is None or received is None:
                if finished:
                    index, _ = sent or received
                    text = f"a message on communicator {communicator} is never {'received' if sent else 'sent'}"
                    yield _problem(text, [operations[index]])
                break
            if sent[1] != received[1]:
                text = f"{sent[1]} bytes are sent, {received[1]} received, on communicator {communicator}"
                yield _problem(text, [operations[sent[0]], operations[received[0]]])
            waits["end", sent[0]].append(("begin", received[0]))
            waits["end", received[0]].append(("begin", sent[0]))


def _circle(waits: Waits) -> list[int]:
    """Return the operations of a circle where it passes from rank to rank; [] if there is none."""
    visited, path = set(), {}  # path: from where the search stands back to where it began, in order
    for start in waits:
        if start in visited:
            continue
        stack = [(start, iter(waits[start]))]
        path = {start: None}
        while stack:
            node, rest = stack[-1]
            following = next((other for other in rest if other not in visited), None)
            if following is None:
                visited.add(node)
                del path[node]
                stack.pop()
            elif following in path:
                nodes = list(path)
                return _turns(nodes[nodes.index(following) :])
            else:
                path[following] = None
                stack.append((following, iter(waits[following])))
    return []


def _turns(circle: list[tuple]) -> list[int]:
    """Return those operations of a circle whose end waits for another operation, or for which another's end waits."""
    crossings = []
    for node, following in zip(circle, [*circle[1:], circle[0]]):
        if node[0] == "meeting":
            crossings.append(following[1])
        elif node[0] == "end" and (following[0] == "meeting" or following[1] != node[1]):
            crossings += [node[1]] if following[0] == "meeting" else [node[1], following[1]]
    return list(dict.fromkeys(crossings))


def _problem(text: str, operations: Iterable[Operation]) -> str:
    return "\n".join([text, *(f"  {_told(operation)}" for operation in operations)])


def _told(operation: Operation) -> str:
    messages = ", ".join(
        f"{kind} {size} bytes {'to' if kind == 'send' else 'from'} member {peer}"
        for kind, peer, size in operation.messages
    )
    single = operation.what in ("send", "recv")
    what = messages if single else f"{operation.what} ({messages})" if messages else operation.what
    return (
        f"rank {operation.rank}: {what}, as member {operation.member} of communicator {operation.communicator}, "
        f"posted at {', from '.join(operation.place)}"
    )
