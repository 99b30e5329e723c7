"""Experts of a Hugging Face model that replicas share: the model is transformers', its layers move, and it is exported.

An expert multiplies the tokens of all replicas at once, so that sums are those of transformers' model in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.models import huggingface, language_model_loss, local_layers
from ds_dynmo.models.huggingface.experts import MoEDecoderLayer
from ds_dynmo.models.huggingface.weights import Folder
from tests.support import case_runs
from tests.support.case_runs import CaseRun, check_moves_change_nothing, check_two_chunks_change_nothing, moved
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.huggingface_runs import LENGTH, MICRO_BATCHES, MIXTRAL, SIZES, train_at
from tests.support.training import whole

pytestmark = pytest.mark.ranks

transformers = pytest.importorskip("transformers")
MODELS: dict[str, dict[str, Any]] = {
    "balanced": MIXTRAL,
    "eager": {**MIXTRAL, "output_router_logits": False, "experts_implementation": "eager"},
}


def case(name: str = "balanced", **settings: Any) -> CaseRun:
    block = {"huggingface": MODELS[name], "sequence_length": LENGTH, "expert_parallel": True, "verified": False}
    return CaseRun(block, **{"replicas": 2, **settings})


@cache
def plain_run() -> list[dict[str, Any]]:
    """Run the model without moves, stops or recomputation."""
    return run(4, case_runs.train, case())


def test_moves_change_nothing() -> None:
    check_moves_change_nothing(case(), plain_run())


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
@pytest.mark.parametrize("name", MODELS)
def test_moves_change_nothing_under_any_setting(name: str, precision: str, stages: int) -> None:
    check_moves_change_nothing(case(name, stages=stages, precision=precision))


@pytest.mark.nightly
def test_moves_of_halves_change_nothing() -> None:
    check_moves_change_nothing(replace(case(), model={**case().model, "split_blocks": True}))


@pytest.mark.nightly
def test_recomputation_and_split_passes_change_nothing() -> None:
    """With moves, too."""
    again = (case(checkpoint_interval=1), case(dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}}))
    for found in run_each(4, case_runs.train, *((moved(one),) for one in again)):
        assert plain_run()[0]["losses"] == found[0]["losses"] and whole(plain_run()) == whole(found)
        assert case_runs.signals(plain_run()) == case_runs.signals(found)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["v", "loop"])
def test_two_chunks_per_stage_change_nothing(kind: str) -> None:
    check_two_chunks_change_nothing(case(), kind, plain_run())


@pytest.mark.nightly
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    resumed = run(4, case_runs.train, case(), str(tmp_path), 3)
    assert plain_run()[0]["losses"] == resumed[0]["losses"] and whole(plain_run()) == whole(resumed)


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
        "losses": [engine.train_batch(data).item() for _ in range(3)],
        "signals": [layer.load_signal() for layer in layers],
        "weights": [layer.part.get_parameter("mlp.experts.down_proj").detach().tolist() for layer in layers],
        "replica": engine.grid.get_data_parallel_id(),
    }


@pytest.mark.parametrize("name", ["balanced", pytest.param("eager", marks=pytest.mark.nightly)])
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

PARTITIONS = [[0, 4, 7], [0, 2, 7], [0, 6, 7]]


def fine_tune(folder: str, checkpoint: str, parallel: bool) -> dict[str, Any]:
    """Train the model in ``folder``, one step at each of :data:`PARTITIONS`, and save a checkpoint."""
    read: list[str] = []
    original = Folder.read
    Folder.read = lambda self, names: (read.extend(names), original(self, names))[1]  # type: ignore[method-assign]
    specs = huggingface.layers(folder, expert_parallel=parallel, verified=False)
    module = PipelineModule(layers=specs, num_stages=2, loss_fn=language_model_loss, partition_method="uniform")
    before = [held_bytes(layer) for layer in module.forward_funcs if isinstance(layer, MoEDecoderLayer)]
    module.double().float()
    still = [held_bytes(layer) for layer in module.forward_funcs if isinstance(layer, MoEDecoderLayer)]
    engine = ds_dynmo.initialize(
        model=module, model_parameters=list(module.parameters()), config=config(Case(clip=0.0))
    )[0]
    losses = train_at(engine, case_runs.micro_batches(LENGTH, engine.grid.get_data_parallel_id()), PARTITIONS)
    layers = engine.stage.layers.counted_modules().items()
    seen = {
        n: [layer.choices.tolist(), layer.load_signal()] for n, layer in layers if isinstance(layer, MoEDecoderLayer)
    }
    engine.save_checkpoint(checkpoint)
    return {"losses": losses, "read": read, "held": before, "still": still, "seen": seen}


def held_bytes(layer: MoEDecoderLayer) -> int:
    """Return the bytes of the experts' storage."""
    return sum(weights.untyped_storage().nbytes() for weights in layer.part.get_submodule("mlp.experts").parameters())


def micro_batches(replicas: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield what all replicas train at once."""
    return map(list, zip(*(case_runs.micro_batches(LENGTH, replica) for replica in range(replicas))))


@pytest.mark.parametrize("name", ["balanced", pytest.param("eager", marks=pytest.mark.nightly)])
def test_training_equals_that_of_the_librarys_model(name: str, tmp_path: Path) -> None:
    """Each replica reads its share from a folder; two stages train with moves, save, and all is exported."""
    torch.manual_seed(3)
    settings = {**MODELS[name]}
    implementation = settings.pop("experts_implementation", None)
    library_config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(
        library_config, attn_implementation="sdpa", experts_implementation=implementation
    ).train()
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model.save_pretrained(folder, max_shard_size="20KB")
    ranks = run(4, fine_tune, str(folder), str(checkpoint), True)

    for number, rank in enumerate(ranks):
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in rank["read"] if ".experts." in name}
        assert experts == ({0, 1} if number % 2 == 0 else {2, 3})  # of the layers that it built
        assert rank["still"] == rank["held"] == [8] * len(rank["held"])  # one element for each of two weights
        assert rank["losses"] == ranks[0]["losses"]

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    data = micro_batches(2)
    routed: list[torch.Tensor] = []
    blocks = model.model.layers
    for block in blocks:
        block.mlp.experts.register_forward_pre_hook(lambda module, inputs: routed.append(inputs[1]))
    for expected in ranks[0]["losses"]:
        total = 0.0
        routed.clear()
        for _ in range(MICRO_BATCHES):
            for tokens, labels in next(data):
                outputs = model(tokens)
                loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
                if outputs.aux_loss is not None:
                    loss = loss + library_config.router_aux_loss_coef * outputs.aux_loss
                loss = loss / MICRO_BATCHES / 2
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert total == pytest.approx(expected, rel=1e-5)

    # routed: of the last step, by micro-batch, replica and layer
    chosen = torch.stack([index.flatten().bincount(minlength=4) for index in routed]).view(MICRO_BATCHES, 2, 4, 4)
    seen = {(number, rank % 2): found for rank in range(4) for number, found in ranks[rank]["seen"].items()}
    for block_number in range(4):
        busiest = chosen[:, :, block_number].sum(1).view(MICRO_BATCHES, 2, 2).sum(2).amax(1).sum().item()
        mean = MICRO_BATCHES * 2 * LENGTH * 2  # of a replica: sequences of a micro-batch, tokens, choices
        for replica in range(2):
            counts, signal = seen[block_number + 1, replica]
            assert counts == chosen[:, replica, block_number].sum(0).tolist()
            assert signal == pytest.approx(busiest / mean * 2 / 4)

    huggingface.export(folder, checkpoint, out)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(exported.get_parameter(parameter_name), parameter, rtol=1e-3, atol=1e-4)


# Families whose experts, routers or files are others.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.2},
    "qwen2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.2},
        "shared_expert_intermediate_size": 24,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "router_aux_loss_coef": 0.2},
    "deepseek_v3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4},
        **{"qk_nope_head_dim": 4, "num_key_value_heads": 2, "head_dim": 4},
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_share_experts(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    settings = {**SIZES, "output_router_logits": "router_aux_loss_coef" in FAMILIES[kind], **FAMILIES[kind]}
    library_config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(library_config).train()
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model.save_pretrained(folder)
    ranks = run(4, fine_tune, str(folder), str(checkpoint), True)
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=0.03), micro_batches(2)
    for expected in ranks[0]["losses"]:
        total = 0.0
        for _ in range(MICRO_BATCHES):
            for tokens, labels in next(data):
                outputs = model(tokens)
                loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
                if getattr(outputs, "aux_loss", None) is not None:
                    loss = loss + library_config.router_aux_loss_coef * outputs.aux_loss
                loss = loss / MICRO_BATCHES / 2
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert total == pytest.approx(expected, rel=1e-5)
    signals = {number: signal for rank in ranks for number, (_, signal) in rank["seen"].items()}
    assert sorted(signals) == [1, 2, 3, 4][FAMILIES[kind].get("first_k_dense_replace", 0) :]
    assert all(0.5 <= signal <= 1.0 for signal in signals.values())
    huggingface.export(folder, checkpoint, out)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    for parameter_name, parameter in model.named_parameters():
        off = (exported.get_parameter(parameter_name) - parameter).norm()  # AdamW makes much of rounded small gradients
        assert off <= 1e-3 * parameter.norm() + 1e-4, parameter_name


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_experts_that_replicas_cannot_share_are_refused_on_every_rank() -> None:
    odd = replace(case(), model={**case().model, "huggingface": {**MIXTRAL, "num_local_experts": 3}})
    for (said,) in run(4, case_runs.refusals, [odd]):
        assert "3 experts (num_local_experts) cannot be shared out evenly over 2 data-parallel replicas" in said
