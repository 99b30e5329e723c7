"""The peak memory of a schedule's passes."""

from __future__ import annotations

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules.actions import Kind
from ds_dynmo.schedules.costs import PassBytes
from ds_dynmo.schedules.schedule import Schedule

__all__ = ["peak_bytes"]


def peak_bytes(schedule: Schedule, sizes: PassBytes) -> tuple[int, ...]:
    """Return the peak bytes of each stage's passes, without weights and optimizer state.

    Times do not matter: a stage allocates and frees memory in the order of its actions.

    Raises:
        ScheduleError: the number of chunks differs.
    """
    if len(sizes.activation_bytes) != schedule.num_chunks:
        raise ScheduleError(f"{schedule.num_chunks} chunks need bytes each, got {len(sizes.activation_bytes)}")
    activations, held = sizes.activation_bytes, sizes.held_bytes
    recomputed = {Kind.BACKWARD: sizes.recomputed_bytes, Kind.INPUT_GRADIENT: sizes.split_recomputed_bytes}
    peaks = []
    for order in schedule.orders:
        used = peak = sum(sizes.standing_bytes[chunk] for chunk in {action.chunk for action in order})
        for kind, chunk, _ in order:
            if kind == Kind.FORWARD:
                used += activations[chunk]
            elif kind == Kind.WEIGHT_GRADIENT:
                used -= held[chunk]
            else:
                peak = max(peak, used + recomputed[kind][chunk])
                used -= activations[chunk] - (held[chunk] if kind == Kind.INPUT_GRADIENT else 0)
            peak = max(peak, used)
        peaks.append(peak)
    return tuple(peaks)
