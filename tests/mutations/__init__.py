"""Breakages of the code that tests have to catch, by topic.

A breakage is named by the behaviour that it breaks, and its tests look at what a user sees: whoever rewrites the code
breaks the same behaviour at the new place, and keeps the tests.
"""

from __future__ import annotations

from tests.mutations import checkpoints, data, decisions, device, huggingface, moves, repack, schedules, state
from tests.mutations.mutation import Mutation

TOPICS: dict[str, list[Mutation]] = {
    "state": state.MUTATIONS,
    "moves": moves.MUTATIONS,
    "checkpoints": checkpoints.MUTATIONS,
    "repack": repack.MUTATIONS,
    "decisions": decisions.MUTATIONS,
    "schedules": schedules.MUTATIONS,
    "device": device.MUTATIONS,
    "data": data.MUTATIONS,
    "huggingface": huggingface.MUTATIONS,
}
MUTATIONS = [mutation for topic in TOPICS.values() for mutation in topic]
