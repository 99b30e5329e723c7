"""What the engine sends to DeepSpeed's monitors, read from the files that they write."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import ds_dynmo
from ds_dynmo import partitioners
from ds_dynmo.plan import MeasuredReport, Profile, RebalanceReport
from tests.support.configs import Case, config
from tests.support.harness import run_each
from tests.support.models import module_of
from tests.support.training import batches

pytestmark = pytest.mark.ranks

Series = dict[str, list[tuple[int, float]]]


def expected(records: list[tuple[int, Any]]) -> Series:
    """Return, by series, what docs/observability.md promises, with the number of samples as x."""
    series: Series = {}
    for samples, record in records:
        if isinstance(record, RebalanceReport):
            numbers = {
                "layers_moved": record.layers_moved,
                "bytes_moved": record.bytes_moved,
                "predicted_bottleneck_seconds": record.bottleneck_seconds_after,
                "predicted_imbalance": record.imbalance_after,
                "predicted_iteration_seconds": record.iteration_seconds_after,
                "profile_seconds": record.profile_seconds,
                "decide_seconds": record.decide_seconds,
                "migrate_seconds": record.migrate_seconds,
                "boundary_1": record.new_partition[1],
            }
        elif isinstance(record, Profile):
            loads = partitioners.loads(record.costs("time"), record.partition)
            numbers = {f"stage_{stage}_load_seconds": load for stage, load in enumerate(loads)}
        else:
            assert isinstance(record, MeasuredReport)
            names = ("bottleneck_seconds", "imbalance", "batch_seconds", "bubble_ratio")
            numbers = {name: getattr(record, name) for name in names}
        for name, value in numbers.items():
            if value is not None:
                series.setdefault(name, []).append((samples, value))
    return series


def check_run(series: Series) -> None:
    """Check a run of two moves, of which only the second had a profile, and two outcomes; six samples per batch."""
    assert series["boundary_1"] == [(0, 3), (12, 2)]
    for stage in range(2):
        assert [samples for samples, _ in series[f"stage_{stage}_load_seconds"]] == [12, 24]
    assert [samples for samples, _ in series["layers_moved"]] == [0, 12]
    assert [value for _, value in series["layers_moved"]] == [1, 1]
    assert [samples for samples, _ in series["predicted_imbalance"]] == [12]
    assert [samples for samples, _ in series["bubble_ratio"]] == [12, 24]


def monitored(monitors: dict[str, Any], block: dict[str, Any]) -> list[tuple[int, Any]]:
    """Return the engine's records in order, each with its number of samples."""
    case = Case(dynmo={"interval": 0, "migration": "blocking", **block})
    module = module_of(case)
    engine = ds_dynmo.initialize(
        model=module, model_parameters=list(module.parameters()), config={**config(case), **monitors}
    )[0]
    data, samples, profiles = batches(engine), [0], {}
    engine.rebalance([0, 3, 8])
    for step in range(4):
        engine.train_batch(data)
        samples.append(engine.global_samples)
        if step == 1:
            engine.rebalance([0, 2, 8])
        if engine.profile is not None:
            profiles[engine.profile.step] = engine.profile
    records = [*engine.reports, *engine.measurements, *profiles.values()]
    return [(samples[record.step], record) for record in records]


def test_monitors_get_all_series_unless_the_section_disables_them(tmp_path: Path) -> None:
    """In the files of CSV and of TensorBoard."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    names, jobs = ("csv_monitor", "tensorboard"), [tmp_path / "job", tmp_path / "other"]
    (records, _), _ = run_each(
        2,
        monitored,
        *(
            ({name: {"enabled": True, "output_path": str(tmp_path), "job_name": job.name} for name in names}, block)
            for job, block in zip(jobs, ({}, {"monitor": False}))
        ),
    )
    promised = expected(records)
    check_run(promised)
    of_csv: Series = {}
    for path in jobs[0].glob("DynMo_*.csv"):
        name = path.stem.removeprefix("DynMo_")
        header, *rows = csv.reader(path.read_text().splitlines())
        assert header == ["step", name]
        of_csv[name] = [(int(samples), float(value)) for samples, value in rows]
    assert of_csv == promised
    written = accumulator.EventAccumulator(str(jobs[0]))
    written.Reload()
    tags = [tag for tag in written.Tags()["scalars"] if tag.startswith("DynMo/")]
    assert {tag.removeprefix("DynMo/") for tag in tags} == promised.keys()
    for tag in tags:
        points = promised[tag.removeprefix("DynMo/")]
        assert [point.step for point in written.Scalars(tag)] == [samples for samples, _ in points]
        values = [value for _, value in points]
        assert [point.value for point in written.Scalars(tag)] == pytest.approx(values, rel=1e-6)
    assert list(jobs[1].glob("Train_*.csv")) and not list(jobs[1].glob("DynMo_*.csv"))
