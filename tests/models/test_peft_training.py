"""LoRA in a pipeline: adapters train, the base stays, and moves change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.errors import CheckpointError
from ds_dynmo.models import huggingface
from tests.support import case_runs, elastic
from tests.support.case_runs import CaseRun, check_moves_change_nothing, check_two_chunks_change_nothing, moved
from tests.support.harness import RankError, run
from tests.support.huggingface_runs import GPT2, LENGTH, MICRO_BATCHES, SIZES, engine_of, train_at
from tests.support.training import state, whole
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
LORA = {"r": 2, "lora_alpha": 8, "lora_dropout": 0.2, "target_modules": "all-linear"}
# All have seven layers.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"huggingface": {"model_type": "llama", **SIZES}, "peft": LORA},
    "llama dora": {"huggingface": {"model_type": "llama", **SIZES}, "peft": {**LORA, "use_dora": True}},
    "llama tied, two layers": {
        "huggingface": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
        "peft": {**LORA, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1, 2]},
    },
    "llama copies": {"huggingface": {"model_type": "llama", **SIZES}, "peft": {**LORA, "modules_to_save": ["lm_head"]}},
    "mistral": {"huggingface": {"model_type": "mistral", **SIZES, "sliding_window": 6}, "peft": LORA},
    "gpt2 biases": {
        "huggingface": GPT2,
        "peft": {"bias": "lora_only", "use_rslora": True},
    },
    "mixtral": {
        "huggingface": {
            **{"model_type": "mixtral", **SIZES, "num_local_experts": 4},
            **{"output_router_logits": True, "router_aux_loss_coef": 0.2},
        },
        "peft": {**LORA, "target_modules": ["q_proj", "v_proj"]},
    },
}
MODELS["mixtral shared"] = {**MODELS["mixtral"], "expert_parallel": True}


def case(
    name: str, *, stages: int = 2, replicas: int = 1, precision: str = "fp32", interval: int = 0, **more: Any
) -> CaseRun:
    return CaseRun({**MODELS[name], "sequence_length": LENGTH}, stages, replicas, precision, interval, **more)


@pytest.mark.parametrize(
    ("name", "precision", "stages", "replicas"),
    [
        ("mistral", "bf16 zero1", 2, 1),
        pytest.param("llama", "fp32", 3, 2, marks=pytest.mark.nightly),
        pytest.param("mistral", "bf16 zero1", 2, 2, marks=pytest.mark.nightly),
        pytest.param("mixtral shared", "bf16 zero1", 2, 2, marks=pytest.mark.nightly),
        pytest.param("llama", "fp16 zero1", 2, 1, marks=pytest.mark.nightly),
        *(pytest.param(name, "fp32", 2, 1, marks=pytest.mark.nightly) for name in MODELS),
        *(pytest.param(name, "bf16 zero1", 2, 1, marks=pytest.mark.nightly) for name in MODELS),
        *(pytest.param(name, "bf16", 3, 1, marks=pytest.mark.nightly) for name in MODELS),
        *(pytest.param(name, "fp32 zero1", 3, 2, marks=pytest.mark.nightly) for name in MODELS),
    ],
)
def test_moves_change_nothing(name: str, precision: str, stages: int, replicas: int) -> None:
    check_moves_change_nothing(case(name, stages=stages, replicas=replicas, precision=precision))


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("mistral", "v", {"precision": "bf16 zero1"}),
        *(pytest.param(name, "v", {}, marks=pytest.mark.nightly) for name in MODELS if name != "mixtral shared"),
        pytest.param("mixtral shared", "loop", {"replicas": 2}, marks=pytest.mark.nightly),
        pytest.param("llama tied, two layers", "loop", {"interval": 1}, marks=pytest.mark.nightly),
    ],
)
def test_two_chunks_per_stage_change_nothing(name: str, kind: str, settings: dict[str, Any]) -> None:
    check_two_chunks_change_nothing(case(name, **settings), kind)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_split_backward_passes_change_nothing(name: str) -> None:
    check_as_under_1f1b(2, case_runs.train, moved(case(name)))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
@pytest.mark.parametrize("name", ["llama", "llama dora", "gpt2 biases", "mixtral"])
def test_moves_change_nothing_of_compiled_layers(name: str, precision: str) -> None:
    check_moves_change_nothing(case(name, precision=precision, dynmo={"interval": 0, "compile": True}))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mistral", "bf16 zero1"),
        *((name, "fp32") for name in MODELS),
        ("llama tied, two layers", "bf16 zero1"),
    ],
)
def test_repacking_changes_nothing(name: str, precision: str) -> None:
    on_three = case(name, stages=3, precision=precision)
    fewer = run(3, elastic.train_case, on_three, {1: 2, 2: 1})
    stayed = run(3, elastic.train_case, on_three, {})
    assert elastic.losses(fewer) == elastic.losses(stayed)
    assert elastic.merged(fewer) == elastic.merged(stayed)


# -- checkpoints ------------------------------------------------------------------------------------------

STEPS = 3  # batches before a checkpoint, and after it


def save_and_continue(run: CaseRun, folder: str, adapters_alone: bool) -> dict[str, Any]:
    engine, model = case_runs.build(run)
    data = case_runs.batches(engine, model)
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.rebalance([0, 2, 7])
    frozen = [p for p in engine.module.parameters() if not p.requires_grad]
    assert frozen and not any(
        engine.stage.state.state_of(p) or engine.stage.state.state_and_gradient_bytes(p) for p in frozen
    )
    engine.save_checkpoint(folder, exclude_frozen_parameters=adapters_alone)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


def load_and_continue(run: CaseRun, folder: str) -> dict[str, Any]:
    engine, model = case_runs.build(run)
    engine.load_checkpoint(folder)
    data = islice(case_runs.batches(engine, model), STEPS * engine.micro_batches, None)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


@pytest.mark.parametrize(
    ("name", "precision", "adapters_alone"),
    [
        ("mistral", "bf16 zero1", True),
        *(pytest.param("llama", "fp32", alone, marks=pytest.mark.nightly) for alone in (False, True)),
        *(pytest.param(name, "bf16", True, marks=pytest.mark.nightly) for name in MODELS),
        pytest.param("mistral", "bf16 zero1", False, marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_continues_on_other_stages(
    name: str, precision: str, adapters_alone: bool, tmp_path: Path
) -> None:
    saving = case(name, precision=precision)
    saved = run(2, save_and_continue, saving, str(tmp_path), adapters_alone)
    loaded = run(3, load_and_continue, replace(saving, stages=3), str(tmp_path))
    assert loaded[0]["losses"] == saved[0]["losses"] and whole(loaded) == whole(saved)
    tag = tmp_path / f"global_step{STEPS}"
    names = {name for file in tag.glob("layer_*-model_states.pt") for name in torch.load(file)}
    assert any("lora_A" in name for name in names)
    assert any("base_layer.weight" in name for name in names) is not adapters_alone
    another = replace(saving, model={**saving.model, "seed": 1})  # draws another base
    if adapters_alone:
        with pytest.raises(RankError, match="was frozen and left out, and the one that would stay has other values"):
            run(2, load_and_continue, another, str(tmp_path))


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


def fine_tune(folder: str, checkpoint: str, partitions: list[list[int]], lora: dict[str, Any]) -> dict[str, Any]:
    """Train what :func:`adapted` makes, one step at each partition, save the adapters, and return the losses."""
    specs = huggingface.layers(adapted(folder, **lora))
    engine = engine_of(specs)
    losses = train_at(engine, case_runs.micro_batches(LENGTH), partitions)
    engine.save_checkpoint(checkpoint, exclude_frozen_parameters=True)
    held = {id(p) for group in engine.basic_optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in engine.module.parameters() if p.requires_grad}
    evaluated = engine.eval_batch(case_runs.micro_batches(LENGTH, seed=1)).item()
    return {"losses": losses, "evaluated": evaluated}


def loss_of(model: Any, micro_batches: Any, *, backward: bool = False) -> float:
    total = 0.0
    for _ in range(MICRO_BATCHES):
        tokens, labels = next(micro_batches)
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()) / MICRO_BATCHES
        if backward:
            loss.backward()
        total += loss.item()
    return total


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", {"modules_to_save": ["lm_head"]}),
        pytest.param("mistral", {}, marks=pytest.mark.nightly),
        pytest.param("llama", {"use_dora": True, "lora_bias": False}, marks=pytest.mark.nightly),
        pytest.param("qwen2", {"bias": "all"}, marks=pytest.mark.nightly),
    ],
)
def test_training_equals_that_of_pefts_model(kind: str, lora: dict[str, Any], tmp_path: Path) -> None:
    """Two stages with moves train what peft trains; peft reads the adapters, and transformers the merged model."""
    torch.manual_seed(3)
    base, checkpoint, out, whole_model = (str(tmp_path / part) for part in ("base", "checkpoint", "out", "merged"))
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SIZES)).save_pretrained(
        base
    )
    found = run(2, fine_tune, base, checkpoint, [[0, 4, 7], [0, 2, 7], [0, 6, 7]], lora)[0]
    model, micro_batches = adapted(base, **lora), case_runs.micro_batches(LENGTH)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.03)
    for expected in found["losses"]:
        assert loss_of(model, micro_batches, backward=True) == pytest.approx(expected, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()

    huggingface.export(model, checkpoint, out)
    huggingface.export(base, checkpoint, whole_model, peft=model.peft_config["default"], merge=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained
    untrained, *trained = (
        loss_of(one.eval(), case_runs.micro_batches(LENGTH, seed=1))
        for one in (plain(base), peft.PeftModel.from_pretrained(plain(base), out), plain(whole_model))
    )
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
