"""From what sparsity on CSR is measured to be faster: what all ranks agree on, and the file that keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_dynmo.models.pruning import probe
from ds_dynmo.models.pruning.probe import SPARSITIES, agree_on_csr, cache_file, csr_is_faster_from
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "ds_dynmo" / "csr_from.json"
    return cache_file()


def stub(monkeypatch: pytest.MonkeyPatch, start: float) -> list[float]:
    """Let CSR be faster from ``start`` on; return the sparsities that are measured."""
    measured: list[float] = []

    def faster(shape: object, sparsity: float, dtype: torch.dtype, device: torch.device, block_size: int) -> bool:
        measured.append(sparsity)
        return sparsity >= start

    monkeypatch.setattr(probe, "_sparse_is_faster", faster)
    return measured


@pytest.mark.parametrize("start", [*SPARSITIES, 0.0])
def test_the_lowest_sparsity_is_found_and_kept(start: float, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = stub(monkeypatch, start)
    expected = max(start, SPARSITIES[0])
    assert csr_is_faster_from((8, 4), torch.float32, CPU) == expected
    assert 0 < len(measured) <= 4 and list(json.loads(cache.read_text()).values()) == [expected]
    stub(monkeypatch, 0.9 if start != 0.9 else 0.7)
    assert csr_is_faster_from((8, 4), torch.float32, CPU) == expected
    (key,) = json.loads(cache.read_text())
    assert all(part in key for part in (torch.__version__, "threads", "8 x 4", "float32"))
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"nonsense": 1}'])
def test_a_cache_that_cannot_be_used_is_ignored(content: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, 0.95)
    csr_is_faster_from((8, 4), torch.float32, CPU)
    (key,) = json.loads(cache.read_text())
    for text in (content, json.dumps({key: 0.123})):
        cache.write_text(text)
        assert csr_is_faster_from((8, 4), torch.float32, CPU) == 0.95
        assert json.loads(cache.read_text())[key] == 0.95
    cache.unlink()
    cache.parent.rmdir()
    cache.parent.write_text("a file in the folder's place")
    assert csr_is_faster_from((8, 4), torch.float32, CPU) == 0.95


def test_what_torch_cannot_do_is_not_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = stub(monkeypatch, 0.0)
    assert csr_is_faster_from((8, 4), torch.bfloat16, CPU) == 1.0 and not measured and not cache.exists()


def test_it_measures(cache: Path) -> None:
    assert csr_is_faster_from((96, 64), torch.float32, CPU) in SPARSITIES and cache.exists()


def linear(outputs: int, inputs: int, csr_from: float | None = None) -> PrunableLinear:
    return PrunableLinear(nn.Parameter(torch.zeros(outputs, inputs)), csr_from)


def test_ranks_agree_on_the_highest_per_shape() -> None:
    """Two stages of two replicas; layer 2 has a shape of layer 1."""
    stages = [{1: [linear(8, 4), linear(4, 4)]}, {2: [linear(8, 4)], 3: [linear(2, 2, 0.5)]}]
    found = [[0.8, 0.9], [0.95, 0.7]]  # per stage and replica, of every shape
    tables: list[list[torch.Tensor]] = [[], []]

    class Recorded(Exception):
        pass

    def run(stage: int, replica: int, answers: list[torch.Tensor], record: list[torch.Tensor] | None) -> None:
        given = iter(answers)

        def sum_over_world(numbers: torch.Tensor) -> torch.Tensor:
            answer = next(given, None)
            if answer is None:
                assert record is not None
                record.append(numbers)
                raise Recorded
            return answer

        agree_on_csr(
            stages[stage],
            num_layers=5,
            sum_over_world=sum_over_world,
            measure=lambda shape, dtype, device, block_size: found[stage][replica],
        )

    places = [(stage, replica) for stage in range(2) for replica in range(2)]
    answers: list[torch.Tensor] = []
    for call in range(2):
        for place in places:
            with pytest.raises(Recorded):
                run(*place, answers, tables[call])
        answers.append(torch.stack(tables[call]).sum(0))
    for place in places[::2]:
        run(*place, answers, None)
    assert [member.measured_csr_from for member in stages[0][1]] == [0.95, 0.9]
    assert stages[1][2][0].measured_csr_from == 0.95 and stages[1][3][0].measured_csr_from is None


def test_nothing_is_measured_twice_or_against_a_setting() -> None:
    known = linear(8, 4)
    known.measured_csr_from = 0.9
    agree_on_csr({1: [known], 2: [linear(8, 4, 0.5)]}, num_layers=3, sum_over_world=torch.clone, measure=None)
    assert known.measured_csr_from == 0.9


def test_what_ranks_agree_on_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, 0.8)

    def sum_over_world(numbers: torch.Tensor) -> torch.Tensor:
        if numbers.dim() == 2:
            return 2 * numbers
        other = torch.zeros_like(numbers)
        other[1, 0, :3] = torch.tensor([1.0, 8.0, 4.0])
        other[1, 0, 3 + SPARSITIES.index(0.95)] = 1.0
        return numbers + other

    found = linear(8, 4)
    agree_on_csr({1: [found]}, num_layers=3, sum_over_world=sum_over_world)
    assert found.measured_csr_from == 0.95 and list(json.loads(cache.read_text()).values()) == [0.95]
