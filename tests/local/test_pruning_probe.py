"""From what sparsity on CSR is measured to be faster, and what all ranks agree on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_dynmo.models.pruning import probe
from ds_dynmo.models.pruning.probe import SPARSITIES, agree_on_csr, csr_is_faster_from
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget() -> None:
    """Let each test measure anew."""
    csr_is_faster_from.cache_clear()


def stub(monkeypatch: pytest.MonkeyPatch, start: float) -> list[float]:
    """Let CSR be faster from ``start`` on; return the sparsities that are measured."""
    measured: list[float] = []

    def faster(shape: object, sparsity: float, dtype: torch.dtype, device: torch.device) -> bool:
        measured.append(sparsity)
        return sparsity >= start

    monkeypatch.setattr(probe, "_csr_is_faster", faster)
    return measured


@pytest.mark.parametrize("start", [*SPARSITIES, 0.0])
def test_the_lowest_sparsity_is_found_once(start: float, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = stub(monkeypatch, start)
    expected = max(start, SPARSITIES[0])
    assert csr_is_faster_from((8, 4), torch.float32, CPU) == expected
    assert 0 < len(measured) <= 4
    again = stub(monkeypatch, 0.9 if start != 0.9 else 0.7)
    assert csr_is_faster_from((8, 4), torch.float32, CPU) == expected and not again


def test_what_torch_cannot_do_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = stub(monkeypatch, 0.0)
    assert csr_is_faster_from((8, 4), torch.bfloat16, CPU) == 1.0 and not measured


def test_it_measures() -> None:
    assert csr_is_faster_from((96, 64), torch.float32, CPU) in SPARSITIES


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
            measure=lambda shape, dtype, device: found[stage][replica],
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
    def measure(shape: object, dtype: torch.dtype, device: torch.device) -> float:
        raise AssertionError("is measured")

    known = linear(8, 4)
    known.measured_csr_from = 0.9
    agree_on_csr({1: [known], 2: [linear(8, 4, 0.5)]}, num_layers=3, sum_over_world=torch.clone, measure=measure)
    assert known.measured_csr_from == 0.9
