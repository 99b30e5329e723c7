"""The emulated device trains to the bit as the CPU: a workload of each kind, which moves on the device alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import case_runs
from tests.support.case_runs import CASES, CaseRun
from tests.support.checkpoints import check_same, load_and_continue, save_and_continue
from tests.support.configs import Case
from tests.support.elastic import losses, merged, train_and_repack
from tests.support.harness import run
from tests.support.huggingface_runs import GPT2
from tests.support.sliced_layers import sliced_layers
from tests.support.training import train, train_layers, whole

CPU, EMULATED = "gloo", None  # backends of the ranks
MOVES = ([0, 2, 8], [0, 7, 8], [0, 4, 8])
ZERO_BUBBLE = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
SLICED = Case(slices=2, blocks=4, tied=True, clip=0.05, precision="bf16", groups="two")
COMPARED = ("losses", "evaluations", "evaluated", "norm")
IN_OTHERS = ("moves, fp32", "zero bubble, fp32")  # whose parts other workloads have

Workload = tuple[int, Any, tuple[Any, ...], tuple[Any, ...]]  # ranks, function, and its arguments: still, moved


def of_case(**settings: Any) -> Workload:
    case = Case(micro_batches=4, dropout=True, **settings)
    return case.ranks, train, (case, (), 4, 1), (case, MOVES, 4, 1)


def of_model(model: dict[str, Any], **settings: Any) -> Workload:
    still = CaseRun(model, **settings)
    return still.ranks, case_runs.train, (still,), (case_runs.moved(still),)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    **{f"moves, {name}": partial(of_case, precision=name) for name in ("bf16 zero1", "fp16 zero1", "fp32")},
    "moves, two replicas": partial(of_case, replicas=2, tied=True, precision="bf16"),
    "zero bubble, fp32": partial(of_case, dynmo=ZERO_BUBBLE),
    "zero bubble, bf16 zero1": partial(of_case, dynmo=ZERO_BUBBLE, precision="bf16 zero1"),
    "recomputed activations": partial(of_case, checkpoint_interval=1),
    "tensor parallel": lambda: (
        *(4, train_layers, (SLICED, sliced_layers, [], 6)),
        (SLICED, sliced_layers, [[0, 2, 6], [0, 5, 6]], 6),
    ),
    "expert parallel": partial(of_model, {"case": {"kind": "moe", "experts": 4, "expert_parallel": True}}, replicas=2),
    "pruning": partial(of_model, CASES["pruning"], precision="bf16 zero1"),
    "automatic freezing": partial(of_model, CASES["automatic freezing"]),
    "mixture of depths": partial(of_model, CASES["mod"]),
    "Hugging Face": partial(of_model, {"huggingface": GPT2, "sequence_length": 12, "verified": False}),
}


def outcome(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: result[name] for name in COMPARED if name in result} for result in results]


def nightly(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.nightly)


@pytest.mark.parametrize("name", [nightly(name) if name in IN_OTHERS else name for name in WORKLOADS])
def test_moved_it_trains_as_the_cpu_still(name: str) -> None:
    ranks, function, still, moved = WORKLOADS[name]()
    on_cpu, emulated = run(ranks, function, *still, backend=CPU), run(ranks, function, *moved, backend=EMULATED)
    assert outcome(emulated) == outcome(on_cpu)
    assert whole(emulated) == whole(on_cpu)
    assert emulated[0]["partition"] != on_cpu[0]["partition"] or emulated[0]["moved"] > 0


@pytest.mark.parametrize("precision", [nightly("fp32"), "bf16 zero1"])
def test_it_re_packs_as_the_cpu(precision: str) -> None:
    case = Case(precision=precision, dynmo={"interval": 0}, dropout=True, clip=0.0)
    on_cpu, emulated = (run(2, train_and_repack, case, {2: 1}, 4, backend=backend) for backend in (CPU, EMULATED))
    assert losses(emulated) == losses(on_cpu) and merged(emulated) == merged(on_cpu)


@pytest.mark.parametrize(("first", "second"), [(CPU, EMULATED), (EMULATED, CPU)])
def test_checkpoints_of_either_load_on_the_other(first: str | None, second: str | None, tmp_path: Path) -> None:
    """On other stages than they were saved on."""
    saved = run(2, save_and_continue, Case(precision="bf16 zero1"), str(tmp_path), [0, 2, 8], backend=first)
    check_same(saved, run(3, load_and_continue, Case(stages=3, precision="bf16 zero1"), str(tmp_path), backend=second))
