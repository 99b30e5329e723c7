"""Events: subscribers are called in order, and phases reach whoever records them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ds_dynmo.engine.events import EngineEvent, Timeline


def test_subscribers_are_called_in_the_order_of_subscription() -> None:
    event: EngineEvent[int] = EngineEvent()
    heard: list[tuple[str, int]] = []
    event.publish(0)
    for name in ("profiler", "executor"):
        event.subscribe(f"{name} keeps numbers", lambda number, name=name: heard.append((name, number)))
    event.publish(1)
    assert heard == [("profiler", 1), ("executor", 1)]
    assert event.reasons == ["profiler keeps numbers", "executor keeps numbers"]


def test_phases_are_recorded_only_while_somebody_records() -> None:
    timeline, phases = Timeline(), []

    @contextmanager
    def record(category: str, name: str) -> Iterator[None]:
        phases.append((category, name))
        yield

    with timeline.phase("decide", "nobody hears of it"):
        timeline.record = record
    with timeline.phase("migrate", "migrate"):
        pass
    assert phases == [("migrate", "migrate")]
