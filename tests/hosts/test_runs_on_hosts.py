"""Ranks on several hosts, whose own names resolve to 127.0.1.1 as on Debian: a run moves, saves and resumes there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import data_after
from tests.support.configs import Case
from tests.support.elastic import train_alone
from tests.support.harness import run
from tests.support.namespaces import Network
from tests.support.training import build

pytestmark = pytest.mark.ranks

ON_THREE = [[0, 2, 5, 8], [0, 4, 6, 8]]
ON_TWO = [[0, 7, 8], [0, 3, 8]]


def train(case: Case, folder: str, first: int, partitions: list[list[int]]) -> list[float]:
    """Train a batch before each move, resumed from the checkpoint at step ``first`` (0: none); then save."""
    engine = build(case)
    if first:
        engine.load_checkpoint(folder)
    data = data_after(engine, first)
    losses = []
    for partition in partitions:
        losses.append(engine.train_batch(data).item())
        engine.rebalance(partition)
    engine.save_checkpoint(folder)
    return losses


def test_a_run_on_three_hosts_moves_saves_and_resumes_on_two(three_hosts: Network, tmp_path: Path) -> None:
    case, fewer = Case(stages=3, dropout=True), Case(stages=2, dropout=True)
    before = run(3, train, case, str(tmp_path), 0, ON_THREE, hosts=three_hosts)[0]
    after = run(2, train, fewer, str(tmp_path), len(before), ON_TWO, hosts=three_hosts)[0]
    on_one_rank = run(1, train_alone, replace(case, stages=1), len(ON_THREE + ON_TWO))[0]["losses"]
    assert before + after == list(on_one_rank.values())
