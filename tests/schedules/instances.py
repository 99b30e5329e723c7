"""Random pipelines, and schedules and timelines as text."""

import random

from ds_dynmo.placement import Shape, owners_of
from ds_dynmo.schedules import Action, Kind, PassBytes, PassCosts, Schedule, ScheduleTimeline, one_f_one_b_limit

LETTERS = {kind.letter: kind for kind in Kind}
KINDS = ("spread", "layers", "frozen", "no weights", "heavy")


def random_instance(rng: random.Random, most_stages: int = 8) -> tuple[PassCosts, int, PassBytes, tuple[int, ...]]:
    """Return costs of a chain, micro-batches, bytes, and 1F1B's peak as every stage's limit."""
    stages = rng.choice([size for size in (2, 4, 6, 8) if size <= most_stages])
    micro_batches = rng.choice([stages, 3 * stages // 2, 2 * stages, 3 * stages, 4 * stages])
    kind = rng.choice(KINDS)
    if kind == "layers":
        work = [sum(rng.uniform(0.3, 1.7) for _ in range(rng.choice([3, 4, 5]))) for _ in range(stages)]
    elif kind == "heavy":
        work = [sum(3.0 if rng.random() < 0.15 else 1.0 for _ in range(4)) for _ in range(stages)]
    else:
        work = [4 * rng.uniform(0.7, 1.3) for _ in range(stages)]
    forward = [one * rng.uniform(0.9, 1.1) for one in work]
    backward = [2 * one * rng.uniform(0.9, 1.1) for one in work]
    share, price = rng.choice([0.4, 0.5]), rng.choice([1.0, 1.05, 1.1])
    frozen = stages // 4 if kind == "frozen" else 0
    without_weights = rng.sample(range(stages), stages // 3) if kind == "no weights" else []
    inputs, weights = [], []
    for stage in range(stages):
        if stage < frozen:
            backward[stage] = 0.0
        split = price if stage not in without_weights else 1.0
        part = share if stage not in without_weights else 0.0
        inputs.append(backward[stage] * (1 - part) * split)
        weights.append(backward[stage] * part * split)
    link = rng.choice([0.0, 0.05, 0.3])
    costs = PassCosts.chain(forward, inputs, weights, backward, link, frozen_chunks=frozen)
    recomputes = rng.random() < 0.2
    activations = tuple(0 if stage < frozen else round(1000 * one) for stage, one in enumerate(work))
    held = tuple(round(size * (1.0 if recomputes else rng.uniform(0.5, 1.03))) for size in activations)
    inner = tuple(size if recomputes else 0 for size in activations)
    sizes = PassBytes(tuple(size // 10 for size in activations) if recomputes else activations, held, inner)
    return costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches)


def drawn(timeline: ScheduleTimeline) -> str:
    """Format a timeline with a row per stage and a column per second; a pass of two seconds appears twice."""
    steps = round(timeline.iteration_seconds)
    rows = [["step    ", *map(str, range(steps))]]
    for stage, order in enumerate(timeline.schedule.orders):
        cells = ["."] * steps
        for action, start, end in zip(order, timeline.start_seconds[stage], timeline.end_seconds[stage], strict=True):
            for step in range(round(start), round(end)):
                cells[step] = f"{action.kind.letter}{action.micro_batch}"
        rows.append([f"stage {stage} ", *cells])
    return "\n".join(row[0] + " ".join(f"{cell:2}" for cell in row[1:]).rstrip() for row in rows)


def order(text: str, chunk: int) -> tuple[Action, ...]:
    """Parse an order. ``"F0 I0@2"`` is a forward pass of ``chunk`` and an input gradient of chunk 2."""
    words = [word.partition("@") for word in text.split()]
    return tuple(Action(LETTERS[name[0]], int(other or chunk), int(name[1:])) for name, _, other in words)


def chain(*texts: str, micro_batches: int = 2) -> Schedule:
    return Schedule(tuple(range(len(texts))), micro_batches, tuple(order(text, at) for at, text in enumerate(texts)))


def two_chunk_instance(
    rng: random.Random, shape: Shape, memory: float = 1.0
) -> tuple[PassCosts, int, PassBytes, tuple[int, ...]]:
    """Return costs of a V or a loop, micro-batches, bytes, and ``memory`` times 1F1B's peak as every stage's limit."""
    owners = owners_of(shape, rng.randint(2, 5))
    stages, chunks = max(owners) + 1, range(len(owners))
    micro_batches = rng.choice([stages, stages + 1, 2 * stages, 3 * stages - 1])
    frozen = rng.choice([0, 0, 0, stages // 2])
    backward = [0.0 if chunk < frozen else rng.uniform(1.0, 3.0) for chunk in chunks]
    share, price = rng.choice([0.4, 0.5]), rng.choice([1.0, 1.05, 1.2])
    shares = [rng.choice([share, share, 0.0]) for _ in chunks]
    costs = PassCosts(
        owners,
        tuple(rng.uniform(0.5, 1.5) for _ in chunks),
        tuple(price * (1 - own) * seconds if own else seconds for own, seconds in zip(shares, backward)),
        tuple(price * own * seconds for own, seconds in zip(shares, backward)),
        tuple(backward),
        (rng.choice([0.0, 0.1, 0.4]),) * (len(owners) - 1),
        frozen,
    )
    activations = tuple(0 if chunk < frozen else rng.randint(50, 150) for chunk in chunks)
    held = tuple(round(rng.uniform(0.5, 1.03) * size) for size in activations)
    recomputed = tuple(rng.choice([0, size]) for size in activations)
    sizes = PassBytes(activations, held, recomputed, standing_bytes=(5,) * len(owners))
    return costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches, memory, owners=owners)
