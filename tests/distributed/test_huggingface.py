"""Hugging Face models in a pipeline: moves change nothing, and they learn what they learn outside of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.models import huggingface
from tests.distributed import case_workloads
from tests.distributed import huggingface_workloads as work
from tests.distributed.case_workloads import CaseRun
from tests.distributed.harness import run, run_each
from tests.distributed.test_bitwise import whole
from tests.distributed.test_cases import check_moves_change_nothing, moved

transformers = pytest.importorskip("transformers")


def case(name: str, *, stages: int = 2, replicas: int = 1, precision: str = "fp32", interval: int = 0) -> CaseRun:
    return CaseRun({"huggingface": work.MODELS[name], "sequence_length": 12}, stages, replicas, precision, interval)


@pytest.mark.parametrize("name", work.MODELS)
def test_moves_change_nothing(name: str) -> None:
    check_moves_change_nothing(case(name))


@pytest.mark.parametrize("name", work.FREEZING)
def test_moves_change_nothing_while_it_freezes(name: str) -> None:
    frozen = CaseRun({**work.FREEZING[name], "sequence_length": 12})
    still = run(2, case_workloads.train, frozen)
    check_moves_change_nothing(frozen, still)
    state = whole(still).items()
    steps = {int(key.split(".")[0]): np.frombuffer(raw, "f4").item() for key, raw in state if key.endswith("/step")}
    assert 0 < steps[0] == steps[1] < steps[5] == 6  # gpt2: embedding and positions; else embedding and a block


def test_random_moves_change_nothing() -> None:
    still = case("mixtral", stages=3)
    rng = np.random.default_rng(7)
    moves = {step: [0, *sorted(rng.choice(range(1, 7), 2, replace=False).tolist()), 7] for step in range(1, 6)}
    a, b = run_each(3, case_workloads.train, (still,), (replace(still, moves=moves),))
    assert a[0]["losses"] == b[0]["losses"] and whole(a) == whole(b)
    assert b[0]["partition"] == moves[5] != a[0]["partition"]


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_with_activation_checkpointing(name: str) -> None:
    plain, recomputed = (run(2, case_workloads.train, moved(case(name, interval=n))) for n in (0, 1))
    assert plain[0]["losses"] == recomputed[0]["losses"] and whole(plain) == whole(recomputed)


@pytest.mark.parametrize("name", ["mixtral", "mixtral tied"])
def test_it_learns_what_it_learns_outside(name: str, tmp_path: Path) -> None:
    """From a folder, over two stages with moves in between, to a checkpoint and back to a folder."""
    torch.manual_seed(3)
    settings = {**work.MODELS[name]}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model.save_pretrained(folder, max_shard_size="20KB")
    losses = run(2, work.fine_tune, str(folder), str(checkpoint), [[0, 4, 7], [0, 2, 7], [0, 6, 7]])[0]

    micro_batches = case_workloads.batches(_Engine(), work.Length())  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for expected in losses:
        total = 0.0
        for _ in range(_Engine.micro_batches):
            tokens, labels = next(micro_batches)
            outputs = model(tokens)
            loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
            loss = (loss + config.router_aux_loss_coef * outputs.aux_loss) / _Engine.micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert total == pytest.approx(expected, rel=1e-5)

    huggingface.export(folder, checkpoint, out)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(exported.get_parameter(parameter_name), parameter, rtol=1e-3, atol=1e-4)


class _Engine:
    """What ``batches`` asks an engine for: the only replica."""

    micro_batches = 3
    grid = type("Grid", (), {"get_data_parallel_id": staticmethod(lambda: 0)})


@pytest.mark.fuzz
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("checkpoint_interval", [0, 1])
@pytest.mark.parametrize("name", work.MODELS)
def test_everywhere(name: str, precision: str, stages: int, replicas: int, checkpoint_interval: int) -> None:
    check_moves_change_nothing(
        case(name, stages=stages, replicas=replicas, precision=precision, interval=checkpoint_interval)
    )
