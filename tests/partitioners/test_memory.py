import random
from dataclasses import replace
from typing import Any

import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import MemoryModel, check_fits
from ds_dynmo.placement import Placement
from tests.partitioners.instances import random_memory

MODEL = MemoryModel((10, 20, 30, 40), (1, 2, 3, 4), (5, 6, 7, 8), limits=(50, 50, 100), micro_batches=2)


def test_early_stages_hold_more_micro_batches() -> None:
    assert [MODEL.in_flight(stage) for stage in range(3)] == [2, 2, 1]
    assert MODEL.stage_bytes(0, 0, 2) == 10 + 20 + 2 * (1 + 2)
    assert MODEL.stage_bytes(2, 0, 2) == 10 + 20 + 1 + 2


def test_checkpointing_holds_segment_inputs_and_one_segment() -> None:
    checkpointed = replace(MODEL, checkpoint_interval=2)
    assert checkpointed.stage_bytes(0, 0, 3) == 60 + 2 * (5 + 7) + max(1 + 2, 3)
    assert checkpointed.stage_bytes(0, 1, 4) == 90 + 2 * (6 + 8) + max(2 + 3, 4)  # segments begin with the stage
    assert checkpointed.stage_bytes(2, 3, 4) == 40 + 8 + 4


def test_stages_fit_up_to_the_limit_and_the_worst_is_named() -> None:
    assert replace(MODEL, limits=(36, 50, 100)).fits(0, 0, 2)
    assert not replace(MODEL, limits=(35, 50, 100)).fits(0, 0, 2)
    check_fits(Placement.chain([0, 1, 2, 4]), MODEL)
    with pytest.raises(PartitionError, match=r"stage 1 needs 60 bytes, its limit is 50"):
        check_fits(Placement.chain([0, 1, 3, 4]), MODEL)


def test_a_stage_knows_its_own_layers_only() -> None:
    own = MODEL.of_stage(1, 1, 3)
    assert (own.static_bytes, own.activation_bytes, own.input_bytes, own.limit) == ((20, 30), (2, 3), (6, 7), 50)


def test_furthest_stops_are_the_last_that_fit() -> None:
    rng = random.Random(1)
    for _ in range(80):
        num_layers, num_stages = rng.randint(1, 8), rng.randint(1, 4)
        memory = random_memory(rng, num_layers, num_stages)
        for stage in range(num_stages):
            for start, stop in enumerate(memory.furthest_stops(stage)):
                fitting = [end for end in range(start + 1, num_layers + 1) if memory.fits(stage, start, end)]
                assert stop == max(fitting, default=start)


def test_a_wrong_model_is_refused() -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"static_bytes": (1, 2)}, "2 static, 4 activation and 4 input"),
        ({"activation_bytes": (1, 2, -3, 4)}, r"activation_bytes\[2\] is -3"),
        ({"limits": (-1, 5)}, r"limits\[0\] is -1"),
        ({"micro_batches": 0}, "micro_batches >= 1"),
        ({"checkpoint_interval": -1}, "checkpoint_interval >= 0"),
    ]
    for change, words in refusals:
        with pytest.raises(PartitionError, match=words):
            pytest.fail(f"{words}: {replace(MODEL, **change)}")
