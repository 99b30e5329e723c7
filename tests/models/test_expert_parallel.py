"""Experts that are split over the data-parallel replicas of a stage: the model is the same, and its layers move."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.models import dynamic_cases
from ds_dynmo.models.moe.expert_parallel import Replicas, experts_of, through_replicas
from ds_dynmo.models.moe.grouped_linear import grouped_linear
from tests.support import case_runs, configs
from tests.support.case_runs import (
    EVERY,
    SIZES,
    CaseRun,
    cases_of,
    check_all_ways,
    check_moves_change_nothing,
    experts,
    in_chunks,
    moved,
    train_and_decide,
    ways,
)
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import layers
from tests.support.training import build, move_in_phases, state, whole
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks


def moe(**keys: Any) -> dict[str, Any]:
    return {"kind": "moe", "expert_parallel": True, **keys}


MODELS: dict[str, dict[str, Any]] = {
    "auxiliary loss": {"case": moe(experts=4)},
    "sbase with capacity": {"case": moe(experts=4, routing="sbase", capacity_factor=0.8, every=2)},
    "bias and freezing": {
        "case": [
            {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 3]]},
            moe(experts=6, routing="bias", bias_rate=0.02, dense_blocks=1),
        ]
    },
    "mod": {"case": [{"kind": "mod", "capacity": 0.4, "sampling": "topk"}, moe(experts=2, top_k=1)]},
}
BLOCKS = {"auxiliary loss": 4, "sbase with capacity": 2, "bias and freezing": 3, "mod": 4}  # with experts
FIRST = "bias and freezing"  # always tested; the other models, and precisions, in the nightly form
PRECISIONS = {
    "bf16 zero1": "sbase with capacity",
    "bf16": "bias and freezing",
    "fp32 zero1": "auxiliary loss",
    "bf16 zero1 fp32sums": "bias and freezing",
    "bf16 immediate": "mod",
    "fp16 zero1": "auxiliary loss",
}
WIDTH = 8
TABLES = [
    [[2, 1, 3, 0, 1, 4], [1, 1, 1, 1, 1, 1], [0, 5, 0, 2, 0, 0]],
    [[3, 2, 0, 0, 1, 0], [1, 4, 0, 0, 0, 0], [2, 2, 0, 0, 3, 5]],  # nothing for the second replica's experts
    [[0, 0, 0, 0, 0, 0], [1, 0, 2, 0, 3, 0], [0, 0, 0, 0, 0, 2]],  # nothing from the first replica
]


def case_in(precision: str, **changes: Any) -> CaseRun:
    return replace(CaseRun(MODELS[PRECISIONS[precision]], replicas=2, precision=precision, clip=0.05), **changes)


def unsharded(run: CaseRun) -> CaseRun:
    """Return the same model with all experts on every replica."""
    cases = [{**case, "expert_parallel": False} if case["kind"] == "moe" else case for case in cases_of(run)]
    return replace(run, model={**run.model, "case": cases})


def through(table: Sequence[Sequence[int]]) -> bool:
    """Send every rank's rows through linear experts of all ranks. Tell whether results equal those of local experts."""
    replica, replicas, total = dist.get_rank(), len(table), len(table[0])
    generator = torch.Generator().manual_seed(0)
    device = get_accelerator().current_device_name()
    weight = torch.randn(total, WIDTH, WIDTH, generator=generator).to(device)
    every = [torch.randn(sum(row), WIDTH, generator=generator).to(device) for row in table]
    towards = [torch.randn(rows.shape, generator=generator).to(device) for rows in every]
    expected_rows, expected_weight = [rows.clone().requires_grad_() for rows in every], weight.clone().requires_grad_()
    expected = [grouped_linear(rows, expected_weight, row) for rows, row in zip(expected_rows, table)]
    torch.stack([(made * to).sum() for made, to in zip(expected, towards)]).sum().backward()

    mine = experts_of(replica, replicas, total)
    rows, share = every[replica].clone().requires_grad_(), weight[mine].clone().requires_grad_()
    peers = Replicas(dist.new_group())
    gathered = peers.gather(table[replica], rows.device)
    made = through_replicas(rows, gathered, peers, lambda arrived, counts: grouped_linear(arrived, share, counts))
    (made * towards[replica]).sum().backward()
    assert gathered == [list(row) for row in table]
    assert expected_weight.grad is not None and rows.grad is not None and share.grad is not None
    torch.testing.assert_close(made, expected[replica])
    torch.testing.assert_close(rows.grad, expected_rows[replica].grad)
    torch.testing.assert_close(share.grad, expected_weight.grad[mine])
    return True


def test_rows_go_to_their_experts_and_back() -> None:
    assert run_each(3, through, *((table,) for table in TABLES)) == [[True] * 3] * len(TABLES)


# -- they train as experts that are not split -----------------------------------------------------------------


def train(run: CaseRun) -> dict[str, Any]:
    """Return losses, gradient norms and this rank's weights; those of experts with the number of the first expert."""
    engine, model = case_runs.build(run)
    data, losses, norms = case_runs.batches(engine, model), [], []
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    replica = engine.grid.get_data_parallel_id()
    for step in range(run.steps):
        for case in cases:
            case.before_batch(step)
        losses.append(engine.train_batch(data).item())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        for case in cases:
            case.after_batch(step + 1)
    first = {index: replica * len(part.expand) for index, part in experts(engine).items()}
    return {
        "losses": losses,
        "norms": norms,
        "weights": {
            f"{index}.{name}": (
                first[index] if getattr(p, "replica_own", False) else 0,
                p.detach().cpu().numpy().copy(),
            )
            for index, module in engine.stage.layers.counted_modules().items()
            for name, p in module.named_parameters()
        },
    }


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        (FIRST, 0.05),
        *(pytest.param(name, 0.05, marks=pytest.mark.nightly) for name in MODELS if name != FIRST),
        pytest.param("auxiliary loss", 0.0, marks=pytest.mark.nightly),
    ],
)
def test_split_experts_train_as_all_experts_on_every_replica(name: str, clip: float) -> None:
    shared = CaseRun(MODELS[name], replicas=2, optimizer="SGD", clip=clip, steps=2)
    ours, theirs = run_each(4, train, (shared,), (unsharded(shared),))
    np.testing.assert_allclose(ours[0]["losses"], theirs[0]["losses"], rtol=1e-6)
    if clip:
        np.testing.assert_allclose(ours[0]["norms"], theirs[0]["norms"], rtol=1e-5)
        assert min(theirs[0]["norms"]) > clip
    assert all(rank["losses"] == ours[0]["losses"] and rank["norms"] == ours[0]["norms"] for rank in ours)
    expected = {key: weight for rank in theirs for key, (_, weight) in rank["weights"].items()}
    shares = 0
    for rank in ours:
        for key, (first, weight) in rank["weights"].items():
            whole_weight = expected[key]
            np.testing.assert_allclose(weight, whole_weight[first : first + len(weight)], rtol=1e-5, atol=1e-6)
            shares += 2 * len(weight) == len(whole_weight)
    assert shares == BLOCKS[name] * 2 * 2  # two replicas, two weights each


def gradients(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the optimizer's mean gradients by parameter; of experts those of all replicas, in order."""
    found: dict[str, list[np.ndarray]] = {}
    for key, value in sorted(whole(results).items()):
        if key.endswith("/momentum_buffer"):
            found.setdefault(key.rpartition(": ")[2], []).append(np.frombuffer(value, dtype=np.float32))
    return {key: np.concatenate(parts) for key, parts in found.items()}


@pytest.mark.parametrize(
    ("precision", "stages"),
    [("bf16 zero1", 1), *(pytest.param(name, 2, marks=pytest.mark.nightly) for name in PRECISIONS)],
)
def test_gradients_are_those_of_all_experts_on_every_replica(precision: str, stages: int) -> None:
    """Each replica holds all optimizer state of its own experts."""
    case = case_in(precision, stages=stages, optimizer="SGD", steps=2)
    ours, theirs = run_each(case.ranks, case_runs.train, (case,), (unsharded(case),))
    tolerance = 1e-5 if "fp32 " in precision else 0.03
    np.testing.assert_allclose(ours[0]["losses"], theirs[0]["losses"], rtol=tolerance)
    expected, found = gradients(theirs), gradients(ours)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        largest = np.abs(expected[key]).max()
        np.testing.assert_allclose(gradient, expected[key], rtol=tolerance, atol=tolerance * largest, err_msg=key)


# -- nothing changes them -------------------------------------------------------------------------------------


def test_moves_a_restart_recomputation_and_two_chunks_change_nothing(tmp_path: Path) -> None:
    """Of a run that is switched off."""
    case = CaseRun(MODELS[FIRST], replicas=2, steps=4)  # in fp32 experts lie in layers' files
    others = ways(case, str(tmp_path))
    calls = others["switched off"], others["moved in a V, recomputed, resumed"]
    check_moves_change_nothing(case, *run_each(4, case_runs.train, *calls))


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_no_way_to_run_a_model_changes_anything(name: str, tmp_path: Path) -> None:
    check_all_ways(CaseRun(MODELS[name], replicas=2), str(tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_changes_a_run_in_any_precision(precision: str, tmp_path: Path) -> None:
    """Neither moves and a restart under zero bubble, nor two chunks per stage."""
    case = case_in(precision, steps=5)
    elsewhere = moved(replace(case, dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}}))
    calls = (case,), (elsewhere, str(tmp_path), 3), (in_chunks(case, "v"),)
    still, *found = run_each(4, case_runs.train, *calls)
    for results in found:
        check_moves_change_nothing(case, still, results)


@pytest.mark.nightly
def test_moves_over_three_stages_change_nothing() -> None:
    check_moves_change_nothing(CaseRun(MODELS["bias and freezing"], stages=3, replicas=2, clip=0.05))


@pytest.mark.nightly
def test_they_train_under_our_schedules() -> None:
    check_as_under_1f1b(4, case_runs.train_moved, CaseRun(MODELS["auxiliary loss"], replicas=2))


def test_decisions_with_moves_during_batches_change_nothing() -> None:
    case = CaseRun(MODELS["auxiliary loss"], replicas=2, steps=3)
    during = replace(case, dynmo={**EVERY, "migration": "background"})
    never, often = run_each(4, train_and_decide, (case,), (during,))
    assert often[0]["moved"] > 0 == never[0]["moved"]
    assert often[0]["losses"] == never[0]["losses"]
    assert all(rank["signals"] == often[0]["signals"] for rank in often)


def train_on_fewer(run: CaseRun, changes: bool) -> dict[str, Any]:
    """Train five batches on two stages; with ``changes``, move while no batch trains, and go on with one."""
    engine, model = case_runs.build(run)
    data, losses, rank = case_runs.batches(engine, model), {}, dist.get_rank()
    while engine.global_steps < 5:
        losses[engine.global_steps] = engine.train_batch(data).item()
        if changes and engine.global_steps == 1:
            move_in_phases(engine, [0, 2, case_runs.num_layers(run)], overlapped=True)
        if changes and engine.global_steps == 2:
            engine.repack(1)
        if engine.released:
            return {"losses": losses, "state": {"shards": {}}, "replica": rank % 2, "held": (0, 0)}
    return {"losses": losses, "state": state(engine), "replica": rank % 2, "held": held_and_counted(engine)}


def held_and_counted(engine: Any) -> tuple[int, int]:
    """Return the bytes of optimizer state that this rank holds, and those that the profile counts, in its layers."""
    shards = engine.stage.state.shards
    held = [shards.held(buffer) for buffer in shards.buffers]
    counted = [shards.bytes_between_batches(parameter).shards for parameter in engine.module.parameters()]
    return sum(tensor.nbytes for of_buffer in held for tensor in of_buffer.values()), sum(counted)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16 zero1", "bf16"])
def test_fewer_stages_change_nothing(precision: str) -> None:
    """Before that layers move ahead of the other state, as while a batch trains. The profile counts what is held."""
    case = CaseRun(MODELS["auxiliary loss"], replicas=2, precision=precision, clip=0.0)
    stayed, fewer = (run(4, train_on_fewer, case, changes) for changes in (False, True))
    assert fewer[0]["losses"] == stayed[0]["losses"] == fewer[2]["losses"] | stayed[0]["losses"]
    assert whole(fewer) == whole(stayed)
    padding = 4 * 4 * 4 * 2  # elements of two groups' shards at most, their bytes, and kinds of state
    for rank in (*stayed, *fewer):
        held, counted = rank["held"]
        assert 0 <= held - counted <= padding


# -- the load signal ------------------------------------------------------------------------------------------


def watch(run: CaseRun, favourites: bool) -> list[dict[str, Any]]:
    """Run a batch. Return, per layer, what each micro-batch sent to each expert, and the load signal.

    Args:
        favourites: whether all tokens go to the first two experts.
    """
    engine, model = case_runs.build(run)
    seen: dict[int, list[list[int]]] = {}
    parts = experts(engine)
    for index, part in parts.items():
        if favourites:
            part.router.bias_steps[:2] += 10**6
        seen[index] = []
        part.register_forward_hook(lambda part, _, __, index=index: seen[index].append(list(part.tokens_per_expert)))
    loss = engine.train_batch(case_runs.batches(engine, model)).item()
    return [
        {
            "sums": seen[index],  # up to each micro-batch
            "signal": part.load_signal(),
            "loss": loss,
            "finite": all(bool(p.isfinite().all()) for p in part.parameters()),
            "shapes": [list(part.expand.shape), list(part.contract.shape)],
        }
        for index, part in parts.items()
    ]


def test_the_load_signal_is_that_of_the_busiest_replica() -> None:
    """It is a share of the work of every token going to every expert. All micro-batches and replicas count."""
    case = CaseRun({"case": moe(experts=4, routing="bias")}, stages=1, replicas=2)
    even, uneven, everywhere = run_each(2, watch, (case, False), (case, True), (unsharded(case), True))
    tokens = 2 * SIZES["sequence_length"]  # of a micro-batch
    for favourites, (ours, theirs) in ((False, even), (True, uneven)):
        assert len(ours) == 4
        for one, other in zip(ours, theirs, strict=True):
            counts = [np.diff(np.array(replica["sums"]), axis=0, prepend=0) for replica in (one, other)]
            table = counts[0] + counts[1]  # [micro-batches, experts]
            busiest = np.maximum(table[:, :2].sum(axis=1), table[:, 2:].sum(axis=1)).sum()
            assert one["signal"] == other["signal"] == pytest.approx(busiest / (4 * 3 * tokens))
            # 2 of 4 experts, if shared evenly
            assert one["signal"] == 1.0 if favourites else 0.5 <= one["signal"] < 1.0
            assert one["finite"] and other["finite"]
            assert one["shapes"] == other["shapes"] == [[2, 32, 16], [2, 16, 32]]
    assert uneven[0][0]["loss"] == pytest.approx(everywhere[0][0]["loss"], rel=1e-6)


# -- checkpoints ----------------------------------------------------------------------------------------------


def refused(engine: Any, model: Any, folder: str) -> str:
    """Return what an engine says that refuses a checkpoint; it is unchanged, and trains on."""
    before = [parameter.clone() for parameter in engine.module.parameters()]
    with pytest.raises(ds_dynmo.CheckpointError) as said:
        engine.load_checkpoint(folder)
    assert all(torch.equal(*pair) for pair in zip(before, engine.module.parameters()))
    engine.train_batch(case_runs.batches(engine, model))
    return str(said.value)


def of_other_replicas(run: CaseRun, folder: str) -> list[str]:
    """Save split experts, and the same on every replica. Return what each engine says of what it cannot load."""
    split, model = case_runs.build(run)
    whole, _ = case_runs.build(unsharded(run))
    for name, engine in (("split", split), ("whole", whole)):
        engine.train_batch(case_runs.batches(engine, model))
        engine.save_checkpoint(f"{folder}/{name}")
    said = [refused(whole, model, f"{folder}/split"), refused(split, model, f"{folder}/whole")]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(f"{folder}/split", f"{folder}/stock", ignore=shutil.ignore_patterns("dynmo"))
    dist.barrier()
    return [*said, refused(split, model, f"{folder}/stock")]


def on_fewer(run: CaseRun, folder: str) -> str:
    return refused(*case_runs.build(run), folder)


def test_a_checkpoint_without_every_replicas_own_is_refused(tmp_path: Path) -> None:
    """Of split experts where all are on every replica, the reverse, DeepSpeed's own, and of more replicas."""
    case = CaseRun(MODELS["auxiliary loss"], stages=1, replicas=2, precision="bf16 zero1")
    for of_split, of_whole, without in run(2, of_other_replicas, case, str(tmp_path)):
        assert "written by a model of which every data-parallel replica has parameters of its own" in of_split
        assert "expected one of which every replica has parameters of its own (moe.expert_parallel)" in of_whole
        assert "has no folder dynmo/" in without and "parameters that each replica has of its own" in without
    (said,) = run(1, on_fewer, replace(case, replicas=1), f"{tmp_path}/split")
    assert "written with 2 data-parallel replicas, expected 1" in said


def save(run: CaseRun, folder: str) -> None:
    engine, model = case_runs.build(run)
    engine.train_batch(case_runs.batches(engine, model))
    engine.save_checkpoint(folder)


@pytest.mark.nightly
def test_a_checkpoint_of_fewer_replicas_is_refused(tmp_path: Path) -> None:
    case = CaseRun(MODELS["auxiliary loss"])
    run(2, save, case, str(tmp_path))
    for said in run(4, on_fewer, replace(case, replicas=2), str(tmp_path)):
        assert "written with 1 data-parallel replicas, expected 2" in said


def state_through(run: CaseRun, folder: str, loads: bool) -> dict[str, Any]:
    """Train two batches and save, or load. Return the state."""
    engine, model = case_runs.build(run)
    data = case_runs.batches(engine, model)
    if loads:
        engine.load_checkpoint(folder)
    else:
        engine.train_batch(data), engine.train_batch(data)
        engine.save_checkpoint(folder)
    return {"state": state(engine), "replica": engine.grid.get_data_parallel_id()}


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_loads_at_another_number_of_stages(precision: str, tmp_path: Path) -> None:
    case = case_in(precision)
    saved = whole(run(4, state_through, case, str(tmp_path), False))
    for stages in (1, 3):
        loaded = run(2 * stages, state_through, replace(case, stages=stages), str(tmp_path), True)
        assert whole(loaded) == saved, stages


# -- refused configurations -----------------------------------------------------------------------------------


class Uneven(nn.Linear):
    """A layer of which every replica has other rows, and as many more as its number."""

    def use_replicas(self, group: Any) -> None:
        self.weight.data = self.weight.data[dist.get_rank(group) :].clone()
        self.weight.replica_own = True  # type: ignore[attr-defined]


def refusals() -> list[str]:
    """Return the errors of replicas with other shapes, and of ZeRO that would sum experts with others."""
    uneven = Case(stages=1, replicas=2, precision="bf16")
    with pytest.raises(ds_dynmo.ConfigError) as of_shapes:
        build(uneven, lambda case: [*layers(case)[:-1], LayerSpec(Uneven, 3, 2, bias=False)])
    said = [str(of_shapes.value)]
    for key in ("reduce_scatter", "contiguous_gradients"):
        configs.PRECISIONS[key] = {"zero_optimization": {"stage": 1, key: False}}
        said += case_runs.refusals([CaseRun(MODELS["mod"], stages=1, replicas=2, precision=key)])
    return said


def test_what_replicas_cannot_share_is_refused_on_every_rank() -> None:
    """Also on the first of two stages, which has no layer of experts that cannot be shared out."""
    odd = CaseRun({"case": moe(experts=3, dense_blocks=3)}, replicas=2)
    for (said,) in run(4, case_runs.refusals, [odd]):
        assert "3 experts (model.case.experts) cannot be shared out evenly over 2 data-parallel replicas" in said
    for shapes, *of_zero in run(2, refusals):
        assert "[[2, 3]] on ranks [0], [[1, 3]] on ranks [1]" in shapes and "bf16 or ZeRO" in shapes
        for key, said in zip(("reduce_scatter", "contiguous_gradients"), of_zero, strict=True):
            assert f"zero_optimization.{key} = false" in said and "allowed is true" in said
