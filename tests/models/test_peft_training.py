"""LoRA in a pipeline: adapters train, the base stays, and moves change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynmo.errors import CheckpointError
from ds_dynmo.models import huggingface
from tests.support import case_runs, elastic
from tests.support.case_runs import CaseRun
from tests.support.harness import run, run_each
from tests.support.huggingface_families import library_loss, nightly
from tests.support.huggingface_runs import (
    LENGTH,
    LORA,
    MICRO_BATCHES,
    MODELS,
    PARTITIONS,
    SIZES,
    case,
    engine_of,
    library_model,
    micro_batches,
    module_of,
    train_at,
    train_library,
)
from tests.support.training import state, whole

pytestmark = pytest.mark.ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mistral, LoRA", "bf16 zero1"),
        ("llama tied, LoRA in two layers", "bf16 zero1"),
        *((name, "fp32") for name in MODELS if "peft" in MODELS[name]),
    ],
)
def test_repacking_changes_nothing(name: str, precision: str) -> None:
    on_three = case(name, stages=3, replicas=1, precision=precision)
    fewer, stayed = (run(on_three.ranks, elastic.train_case, on_three, sizes) for sizes in ({1: 2, 2: 1}, {}))
    assert elastic.losses(fewer) == elastic.losses(stayed)
    assert elastic.merged(fewer) == elastic.merged(stayed)


# -- checkpoints ------------------------------------------------------------------------------------------

STEPS = 2  # batches before a checkpoint, and after it
MOVES = {1: [0, 2, 7], 2: [0, 1, 3, 5, 7], 3: [0, 2, 7]}  # at the second there are two chunks per stage


def train_and_save(run: CaseRun, folder: str, adapters_alone: bool) -> dict[str, Any]:
    """Train, and save after :data:`STEPS` if ``folder`` has a name."""
    engine, model = case_runs.build(run)
    data, losses = case_runs.batches(engine, model), []
    for step in range(2 * STEPS):
        if step in run.moves:
            engine.rebalance(run.moves[step])
            assert engine.partition == run.moves[step]
        if step == STEPS and folder:
            frozen = [p for p in engine.module.parameters() if not p.requires_grad]
            assert frozen and not any(
                engine.stage.state.state_of(p) or engine.stage.state.state_and_gradient_bytes(p) for p in frozen
            )
            engine.save_checkpoint(folder, exclude_frozen_parameters=adapters_alone)
        losses.append(engine.train_batch(data).item())
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


def load_and_continue(run: CaseRun, folder: str) -> dict[str, Any]:
    engine, model = case_runs.build(run)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        return {"refused": str(error)}
    data = islice(case_runs.batches(engine, model), STEPS * engine.micro_batches, None)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


@pytest.mark.parametrize(
    ("name", "precision", "adapters_alone", "stages"),
    [
        ("mistral, LoRA", "bf16 zero1", True, 1),
        *(nightly("llama, LoRA", "fp32", alone, 3) for alone in (False, True)),
        *(nightly(name, "bf16", True, 3) for name in MODELS if "peft" in MODELS[name]),
        nightly("mistral, LoRA", "bf16 zero1", False, 3),
    ],
)
def test_moves_and_checkpoints_change_nothing(
    name: str, precision: str, adapters_alone: bool, stages: int, tmp_path: Path
) -> None:
    """In a chain and in a V. The checkpoint continues on other stages."""
    still = case(name, precision=precision)
    ours = replace(still, moves=MOVES, dynmo={"interval": 0, "schedule": {"kind": "v"}})
    folder = str(tmp_path)
    expected, saved = run_each(still.ranks, train_and_save, (still, "", False), (ours, folder, adapters_alone))
    elsewhere = replace(still, stages=stages)
    another = replace(elsewhere, model={**still.model, "seed": 1})  # draws another base
    others = [another] if adapters_alone else []
    loaded, *refused = run_each(elsewhere.ranks, load_and_continue, *((one, folder) for one in (elsewhere, *others)))
    assert saved[0]["losses"] == expected[0]["losses"] and whole(saved) == whole(expected)
    assert loaded[0]["losses"] == expected[0]["losses"][STEPS:] and whole(loaded) == whole(expected)
    tag = tmp_path / f"global_step{STEPS}"
    names = {name for file in tag.glob("layer_*-model_states.pt") for name in torch.load(file)}
    assert any("lora_A" in name for name in names)
    assert any("base_layer.weight" in name for name in names) is not adapters_alone
    for ranks in refused:
        assert "was frozen and left out, and the one that would stay has other values" in ranks[0]["refused"]


# -- a folder, peft's own model ---------------------------------------------------------------------------


def adapted(folder: str, **lora: Any) -> Any:
    """Give the model in ``folder`` adapters in this process, as a user does."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    torch.manual_seed(5)
    found = peft.get_peft_model(model, peft.LoraConfig(**{**LORA, "lora_dropout": 0.0, **lora}, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return found.train()


def fine_tune(folder: str, checkpoint: str, lora: dict[str, Any]) -> dict[str, Any]:
    """Train what :func:`adapted` makes, one step at each partition, save the adapters, and return the losses."""
    engine = engine_of(module_of(huggingface.layers(adapted(folder, **lora))))
    losses = train_at(engine, micro_batches(), PARTITIONS)
    engine.save_checkpoint(checkpoint, exclude_frozen_parameters=True)
    held = {id(p) for group in engine.basic_optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in engine.module.parameters() if p.requires_grad}
    evaluated = engine.eval_batch(case_runs.micro_batches(LENGTH, seed=1)).item()
    return {"losses": losses, "evaluated": evaluated}


@torch.no_grad()
def evaluate(model: Any) -> float:
    data = islice(case_runs.micro_batches(LENGTH, seed=1), MICRO_BATCHES)
    losses = [library_loss(model, model(input_ids=tokens), labels).item() for tokens, labels in data]
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", {"modules_to_save": ["lm_head"]}),
        nightly("mistral", {}),
        nightly("llama", {"use_dora": True, "lora_bias": False}),
        nightly("qwen2", {"bias": "all"}),
    ],
)
def test_training_equals_that_of_pefts_model(kind: str, lora: dict[str, Any], tmp_path: Path) -> None:
    """Two stages with moves train what peft trains; peft reads the adapters, and transformers the merged model."""
    base, checkpoint, out, whole_model = (str(tmp_path / part) for part in ("base", "checkpoint", "out", "merged"))
    library_model({"model_type": kind, **SIZES}, tmp_path / "base")
    found = run(2, fine_tune, base, checkpoint, lora)[0]
    model = adapted(base, **lora)
    assert train_library(model) == pytest.approx(found["losses"], rel=1e-5)

    huggingface.export(model, checkpoint, out)
    huggingface.export(base, checkpoint, whole_model, peft=model.peft_config["default"], merge=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained
    adapted_again = peft.PeftModel.from_pretrained(plain(base), out)
    untrained, *trained = (evaluate(one.eval()) for one in (plain(base), adapted_again, plain(whole_model)))
    assert trained == pytest.approx([found["evaluated"]] * 2, rel=1e-5) and abs(untrained - trained[0]) > 1e-3

    doubled = {**LORA, **lora, "lora_alpha": 2 * model.peft_config["default"].lora_alpha}
    for number, merge in enumerate((False, True)):
        with pytest.raises(CheckpointError, match=r"q_proj: its adapter was trained with scaling [0-9.]+, by"):
            huggingface.export(base, checkpoint, f"{out} {number}", peft=doubled, merge=merge)
    other = plain(base)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    other.save_pretrained(base)
    with pytest.raises(CheckpointError, match="merge with the base that the adapters were trained on"):
        huggingface.export(base, checkpoint, f"{out} 2", peft=model.peft_config["default"], merge=True)
