"""Breakages of the code that tests have to catch: one for a promise, by topic.

A breakage is named by the behaviour that it breaks, and its tests look at what a user sees: whoever rewrites the code
breaks the same behaviour at the new place, and keeps the tests.
"""

from __future__ import annotations

from tests.mutations import checkpoints, decisions, device, moves, training
from tests.mutations.mutation import Mutation

TOPICS: dict[str, list[Mutation]] = {
    "moves": moves.MUTATIONS,
    "training": training.MUTATIONS,
    "decisions": decisions.MUTATIONS,
    "checkpoints": checkpoints.MUTATIONS,
    "device": device.MUTATIONS,
}
MUTATIONS = [mutation for topic in TOPICS.values() for mutation in topic]
