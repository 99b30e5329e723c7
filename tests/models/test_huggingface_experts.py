"""Experts of a Hugging Face model that replicas share: the model is transformers', its layers move, and it is exported.

An expert multiplies the tokens of all replicas at once, so that sums are those of transformers' model in another order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_dynmo.models import huggingface, local_layers
from ds_dynmo.models.huggingface.experts import MoEDecoderLayer
from ds_dynmo.models.huggingface.weights import Folder
from tests.support import case_runs
from tests.support.case_runs import CaseRun
from tests.support.harness import run, run_each
from tests.support.huggingface_families import nightly
from tests.support.huggingface_runs import (
    LENGTH,
    MICRO_BATCHES,
    MIXTRAL,
    PARTITIONS,
    SIZES,
    case,
    check_exported,
    engine_of,
    library_model,
    micro_batches,
    module_of,
    train_at,
    train_library,
)
from tests.support.huggingface_runs import MODELS as RUNS
from tests.support.training import state, whole

pytestmark = pytest.mark.ranks

transformers = pytest.importorskip("transformers")
OF_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "balanced": MIXTRAL,
    "eager": RUNS["mixtral shared, eager"]["huggingface"],
    # Families whose experts, routers or files are others.
    "qwen3_moe": {"model_type": "qwen3_moe", **SIZES, **OF_QWEN, "output_router_logits": True},
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", **SIZES, **OF_QWEN, "output_router_logits": True},
        "shared_expert_intermediate_size": 24,
    },
    "gpt_oss": {
        **{"model_type": "gpt_oss", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        **{"output_router_logits": True, "router_aux_loss_coef": 0.2},
    },
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", **SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
        **{"topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 8},
        **{"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "head_dim": 4},
        "num_key_value_heads": 2,
    },
}


def train_favourites(run: CaseRun) -> dict[str, Any]:
    """Train with routers that send every token to the first two experts."""
    engine, model = case_runs.build(run)
    layers = [layer for _, layer in local_layers(engine.module) if isinstance(layer, MoEDecoderLayer)]
    for layer in layers:
        layer.part.get_submodule("mlp.gate").register_forward_hook(
            lambda module, inputs, routed: (*routed[:2], torch.arange(2, device=routed[2].device).expand_as(routed[2]))
        )
    data = case_runs.batches(engine, model)
    return {
        "losses": [engine.train_batch(data).item() for _ in range(2)],
        "signals": [layer.load_signal() for layer in layers],
        "weights": [layer.part.get_parameter("mlp.experts.down_proj").detach().tolist() for layer in layers],
        "replica": engine.grid.get_data_parallel_id(),
    }


@pytest.mark.parametrize("name", ["mixtral shared", nightly("mixtral shared, eager")])
def test_a_replica_whose_experts_nobody_chose_trains_as_with_all_experts_in_one_place(name: str) -> None:
    shared = case(name, stages=1, optimizer="SGD")
    everywhere = replace(shared, model={**shared.model, "expert_parallel": False})
    ours, theirs = run_each(2, train_favourites, (shared,), (everywhere,))
    for mine, whole_model in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(whole_model["losses"], rel=1e-6)
        assert mine["signals"] == [1.0] * len(mine["signals"]) and set(whole_model["signals"]) == {0.5}
        share = slice(0, 2) if mine["replica"] == 0 else slice(2, 4)
        for weights, expected in zip(mine["weights"], whole_model["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected[share]), rtol=1e-4, atol=1e-5)


# -- beside transformers' model ---------------------------------------------------------------------------------------


def fine_tune_shared(folder: str, checkpoint: str, partitions: list[list[int]]) -> dict[str, Any]:
    """Train the model in ``folder`` one step at each partition, evaluate it, and save a checkpoint if it has a name."""
    read: list[str] = []
    original = Folder.read
    with patch.object(Folder, "read", lambda self, names: (read.extend(names), original(self, names))[1]):
        module = module_of(huggingface.layers(folder, expert_parallel=True, verified=False))
        before = held_bytes(module)
        module.double().float()
        still = held_bytes(module)
        engine = engine_of(module)
    data = micro_batches(replica=engine.grid.get_data_parallel_id())
    losses = train_at(engine, data, partitions)
    seen = {
        number: [layer.choices.tolist(), layer.load_signal()]
        for number, layer in engine.stage.layers.counted_modules().items()
        if isinstance(layer, MoEDecoderLayer)
    }
    if checkpoint:
        engine.save_checkpoint(checkpoint)
    return {
        **{"losses": losses, "read": read, "held": before, "still": still, "seen": seen, "state": state(engine)},
        **{"replica": engine.grid.get_data_parallel_id(), "evaluated": engine.eval_batch(data).item()},
    }


def held_bytes(module: Any) -> list[int]:
    """Return the bytes of the experts' storage, by layer."""
    experts = (layer.part.mlp.experts for layer in module.forward_funcs if isinstance(layer, MoEDecoderLayer))
    return [sum(weights.untyped_storage().nbytes() for weights in one.parameters()) for one in experts]


@pytest.mark.parametrize("name", [name if name == "balanced" else nightly(name) for name in MODELS])
def test_training_equals_that_of_the_librarys_model(name: str, tmp_path: Path) -> None:
    """Each replica reads its share from a folder; two stages train, with moves as without, save and export."""
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model = library_model(MODELS[name], folder)
    calls = ((str(folder), "", PARTITIONS[:1] * 3), (str(folder), str(checkpoint), PARTITIONS))
    still, ranks = run_each(4, fine_tune_shared, *calls)
    assert whole(ranks) == whole(still) and ranks[0]["evaluated"] == still[0]["evaluated"]
    for number, rank in enumerate(ranks):
        assert rank["losses"] == still[0]["losses"]
        assert rank["still"] == rank["held"] and rank["held"]
        if name in ("balanced", "eager"):
            experts = {int(read.split(".experts.")[1].split(".")[0]) for read in rank["read"] if ".experts." in read}
            assert experts == ({0, 1} if number % 2 == 0 else {2, 3})  # of the layers that it built
            assert rank["held"] == [8] * len(rank["held"])  # one element for each of two weights

    routed: list[torch.Tensor] = []
    for block in model.model.layers:
        if hasattr(block.mlp, "experts"):
            block.mlp.experts.register_forward_pre_hook(lambda module, inputs: routed.append(inputs[1]))
    assert train_library(model, replicas=2) == pytest.approx(ranks[0]["losses"], rel=1e-5)
    huggingface.export(folder, checkpoint, out)
    seen, seen_still = (
        {(number, one["replica"]): found for one in run for number, found in one["seen"].items()}
        for run in (ranks, still)
    )
    assert seen == seen_still
    if name in ("balanced", "eager"):
        check_choices(routed, seen)
        check_exported(model, out)
        return
    assert sorted({number for number, _ in seen}) == [1, 2, 3, 4][MODELS[name].get("first_k_dense_replace", 0) :]
    assert all(0.5 <= signal <= 1.0 for _, signal in seen.values())
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    for parameter_name, parameter in model.named_parameters():
        off = (exported.get_parameter(parameter_name) - parameter).norm()  # AdamW makes much of rounded small gradients
        assert off <= 1e-3 * parameter.norm() + 1e-4, parameter_name


def check_choices(routed: list[torch.Tensor], seen: dict[tuple[int, int], Any]) -> None:
    """Check the choices of each layer and replica in the last step, and its load signal, by those of the library."""
    of_last_step = torch.stack([index.flatten().bincount(minlength=4) for index in routed[-MICRO_BATCHES * 2 * 4 :]])
    chosen = of_last_step.view(MICRO_BATCHES, 2, 4, 4)  # by micro-batch, replica and layer
    for block_number in range(4):
        busiest = chosen[:, :, block_number].sum(1).view(MICRO_BATCHES, 2, 2).sum(2).amax(1).sum().item()
        mean = MICRO_BATCHES * 2 * LENGTH * 2  # of a replica: sequences of a micro-batch, tokens, choices
        for replica in range(2):
            counts, signal = seen[block_number + 1, replica]
            assert counts == chosen[:, replica, block_number].sum(0).tolist()
            assert signal == pytest.approx(busiest / mean * 2 / 4)


def test_experts_that_replicas_cannot_share_are_refused_on_every_rank() -> None:
    odd = case("mixtral shared", stages=1, more={"huggingface": {**MIXTRAL, "num_local_experts": 3}})
    for (said,) in run(2, case_runs.refusals, [odd]):
        assert "3 experts (num_local_experts) cannot be shared out evenly over 2 data-parallel replicas" in said
