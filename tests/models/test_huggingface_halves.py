"""Hugging Face models with their decoder layers in halves: they compute what the library does, or are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.config import parse_section
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import ModelConfig, dynamic_cases, huggingface, language_model_loss, model_layers
from ds_dynmo.models.huggingface import verification
from ds_dynmo.models.huggingface.adapter import source_of
from ds_dynmo.models.huggingface.configs import families
from ds_dynmo.models.huggingface.experts import MoEDecoderLayer
from ds_dynmo.models.huggingface.halves import Half
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model, trial_batches
from ds_dynmo.models.layer_numbers import block_numbers
from tests.support import case_runs
from tests.support.allocations import Allocations
from tests.support.case_runs import CaseRun
from tests.support.harness import run_each
from tests.support.huggingface_families import tiny_values, write_checkpoint
from tests.support.huggingface_runs import LENGTH, MODELS
from tests.support.training import drop_decision, state, whole

transformers = pytest.importorskip("transformers")

MASK = ("attention_mask", "position_ids")
# By why they are here; nightly but for the first ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "norms after both parts": ("gemma2", {}),
    "a factor on both parts": ("granite", {"residual_multiplier": 0.22}),
    "router loss": ("mixtral", {}),
    "dropout, attention returns two values": ("gpt2", {}),
    "norms after both parts, none before": ("olmo2", {}),
    "norms of other names": ("glm4", {}),
    "norms after, positions in some layers": ("exaone4", {}),
    "scaled embedding, two rotaries": ("gemma3_text", {}),
    "dropout of a part's result": ("gpt_neox", {"use_parallel_residual": False, "hidden_dropout": 0.2}),
    "norms without weights": ("olmo", {}),
    "experts that return two values": ("gpt_oss", {}),
    "layers with and without experts": ("deepseek_v3", {}),
    "shared experts": ("qwen2_moe", {}),
    "plain": ("qwen3", {}),
}
OFTEN = 4


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if at < OFTEN else pytest.mark.nightly) for at, name in enumerate(FAMILIES)],
)
def test_a_family_equals_the_librarys(name: str) -> None:
    """Verification compares losses and gradients, with padding too."""
    kind, changes = FAMILIES[name]
    values = tiny_values(kind, **changes)
    specs = huggingface.layers(values, split_blocks=True, inputs=MASK if kind != "gpt2" else ())
    numbers = [spec.module_args[2] for spec in specs if getattr(spec.typename, "is_block", False)]
    assert numbers == [block for block in range(max(numbers) + 1) for _ in range(2)]


@pytest.mark.parametrize("kind", ["cohere", "phi", "gpt_neox"])
def test_attention_beside_the_feed_forward_part_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        huggingface.layers(tiny_values(kind), split_blocks=True)
    assert f"model_type {kind}: split_blocks: " in str(error.value)
    assert "no cut between its modules, input_layernorm, " in str(error.value)
    assert str(error.value).endswith("makes two layers that compute the same: should be false")


@pytest.mark.nightly
def test_what_the_page_says_of_families_holds() -> None:
    """Takes minutes. Later versions of transformers have more families."""
    refused = set()
    for kind in families():
        try:
            huggingface.layers(tiny_values(kind), split_blocks=True)
        except ConfigError as error:
            if "split_blocks" in str(error):
                refused.add(kind)
    parallel = {"cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "phi", "gptj", "codegen", "gpt_neox"}
    assert refused == parallel | {"minimax", "beam", "doge", "longcat_flash"}


def test_dropout_of_the_residual_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half would drop out."""
    kind = type(random_model(tiny_values("llama"), "eager").model.layers[0])
    compute = kind.forward

    def dropping(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.dropout(compute(self, *args, **kwargs), 0.2, self.training)

    monkeypatch.setattr(kind, "forward", dropping)
    with pytest.raises(ConfigError, match="LlamaDecoderLayer is no attention and then feed-forward"):
        huggingface.layers(tiny_values("llama", attention_bias=True), split_blocks=True)


def test_a_weight_of_the_layer_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(random_model(tiny_values("llama"), "eager").model.layers[0])
    build = kind.__init__

    def with_scale(self: Any, *args: Any) -> None:
        build(self, *args)
        self.scale = nn.Parameter(torch.ones(()))

    monkeypatch.setattr(kind, "__init__", with_scale)
    with pytest.raises(ConfigError, match="LlamaDecoderLayer has a tensor of its own, scale, beside"):
        huggingface.layers(tiny_values("llama", mlp_bias=True), split_blocks=True)


def test_halves_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification finds it, whatever a cut says."""
    wrong = (("input_layernorm", 0), ("self_attn", 2), ("post_attention_layernorm", 0)), (("mlp", 0),)
    halves = tuple(Half(absent) for absent in reversed(wrong))
    monkeypatch.setattr(verification, "_cut_once", lambda tiny, implementation: (halves,) * 3)
    with pytest.raises(ConfigError, match=r"cannot have split_blocks: the logits of a tiny model differ by \d"):
        huggingface.layers(tiny_values("llama"), split_blocks=True)


def trained(layers: BuiltLayers, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return loss and gradients by their names in the model."""
    tokens, _ = next(trial_batches(32, ()))
    loss = language_model_loss(layers.to(dtype)(tokens), F.pad(tokens[:, 1:], (0, 1), value=-100))
    loss.backward()
    gradients = {name: weights[0].grad for name, weights in layers.parts().items()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"loss": loss, **gradients}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
def test_fresh_halves_equal_whole_layers_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    values = tiny_values(kind)
    both = [huggingface.layers(values, split_blocks=split, verified=False, seed=3) for split in (False, True)]
    expected, found = (trained(BuiltLayers(specs), dtype) for specs in both)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_experts_and_their_load_signal_are_in_the_second_half() -> None:
    specs = huggingface.layers(tiny_values("mixtral"), split_blocks=True, verified=False)
    attention, experts = specs[1].build(), specs[2].build()
    assert not hasattr(attention, "load_signal") and not hasattr(attention.part.mlp, "experts")
    assert isinstance(experts, MoEDecoderLayer) and experts.load_signal() == 2 / 8
    assert not [*experts.part.self_attn.parameters()]


def test_halves_of_a_model_in_memory_keep_what_trains() -> None:
    model = random_model(tiny_values("llama"), "sdpa")
    model.model.layers[0].mlp.requires_grad_(False)
    attention, feed_forward = (
        spec.build() for spec in huggingface.layers(model, split_blocks=True, verified=False)[1:3]
    )
    assert all(one.requires_grad for one in attention.parameters())
    assert {name for name, one in feed_forward.named_parameters() if one.requires_grad} == {
        "part.post_attention_layernorm.weight"
    }


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_half_takes_the_memory_of_its_own_modules(in_memory: bool, tmp_path: Path) -> None:
    model = random_model(tiny_values("llama"), "sdpa")
    model.save_pretrained(tmp_path)
    specs = huggingface.layers(model if in_memory else tmp_path, split_blocks=True, verified=False)
    layer, found = model.model.layers[0], []
    for spec in specs[1:3]:
        with Allocations() as allocations:
            half = spec.build()
        assert allocations.total == sum(own.nbytes for own in half.parameters()) > 0
        found.append(allocations.total)
        assert all(torch.equal(own, layer.get_parameter(name)) for name, own in half.part.named_parameters())
    assert sum(found) == sum(weight.nbytes for weight in layer.parameters())


@pytest.mark.parametrize("settings", [{"init_lora_weights": "gaussian"}, {"use_dora": True}, {"bias": "all"}])
def test_fresh_adapters_of_halves_are_those_of_whole_layers(settings: dict[str, Any], tmp_path: Path) -> None:
    """They are drawn for both halves, whose base is read once."""
    pytest.importorskip("peft")
    random_model(tiny_values("qwen2"), "sdpa").save_pretrained(tmp_path)
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj", "up_proj"], **settings}
    expected, found = (
        BuiltLayers(huggingface.layers(tmp_path, peft=lora, split_blocks=split, verified=False)).parts()
        for split in (False, True)
    )
    assert found.keys() == expected.keys() and any("lora_B" in name for name in found)
    for name, (weight,) in expected.items():
        assert torch.equal(found[name][0], weight), name


def test_an_export_has_whole_layers(tmp_path: Path) -> None:
    model = random_model(tiny_values("mixtral"), "sdpa")
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model.save_pretrained(folder)
    settings = {"split_blocks": True, "vocabulary_slices": 3}
    write_checkpoint(BuiltLayers(huggingface.layers(folder, verified=False, **settings)), checkpoint)
    huggingface.export(folder, checkpoint, out, **settings)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, weight in model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], weight), name
    with pytest.raises(CheckpointError, match=r"is not layer 1 of the model, model\.layers\.0: mlp.* has no tensor"):
        huggingface.export(folder, checkpoint, tmp_path / "whole", vocabulary_slices=3)
    write_checkpoint(BuiltLayers(huggingface.layers(folder, verified=False)), tmp_path / "of whole")
    with pytest.raises(CheckpointError, match="no such file: was the model trained with split_blocks"):
        huggingface.export(folder, tmp_path / "of whole", tmp_path / "halves", split_blocks=True)


def test_adapters_in_halves_are_exported_and_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = random_model(tiny_values("llama"), "sdpa")
    tokens, _ = next(trial_batches(32, ()))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    built = BuiltLayers(huggingface.layers(adapted, split_blocks=True, verified=False))
    expected = adapted(tokens).logits
    torch.testing.assert_close(built(tokens), expected, rtol=0.0, atol=0.0)
    write_checkpoint(built, tmp_path / "checkpoint")
    huggingface.export(adapted, tmp_path / "checkpoint", tmp_path / "adapter", split_blocks=True)
    huggingface.export(adapted, tmp_path / "checkpoint", tmp_path / "merged", merge=True, split_blocks=True)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    read = peft.PeftModel.from_pretrained(random_model(tiny_values("llama"), "sdpa"), tmp_path / "adapter")
    torch.testing.assert_close(read(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_halves_of_other_layers_are_refused() -> None:
    source = source_of(tiny_values("llama"), 0)
    halves = verification.find_halves(source, "it").halves[0]
    verification.check_has_all(halves, source.blocks[0])
    with pytest.raises(ValueError, match="ModuleDict has another module than that of a tiny model, block"):
        verification.check_has_all(halves, nn.ModuleDict({"block": nn.Linear(2, 2)}))


def test_freezing_counts_whole_layers() -> None:
    def layers_of(blocks: int) -> list[Any]:
        case = {"kind": "freezing", "schedule": [[0.5, blocks]]}
        model = {"huggingface": tiny_values("llama", vocab_size=256), "sequence_length": 8, "verified": False}
        return model_layers(parse_section(ModelConfig, {**model, "split_blocks": True, "case": case}, "model"))

    assert block_numbers(layers_of(3)) == range(1, 7)
    with pytest.raises(ConfigError, match=r"schedule freezes 4 blocks, model\.huggingface has 3"):
        layers_of(4)


FREEZING = {"untie": True, "case": {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]}}


def go_on(run: CaseRun, folder: str, step: int) -> dict[str, Any]:
    """Resume after ``step`` steps on any stages; return why not, and whether the engine is as it was."""
    engine, model = case_runs.build(run)
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    before = state(engine)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        return {"refused": str(error), "unchanged": state(engine) == before and engine.global_steps == 0}
    data = islice(case_runs.batches(engine, model), step * engine.micro_batches, None)
    losses = []
    for number in range(step, run.steps):
        for case in cases:
            case.before_batch(number)
        drop_decision(engine)
        losses.append(engine.train_batch(data).item())
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "precision", "settings", "stages"),
    [
        ("mixtral tied", "bf16 zero1", FREEZING, 1),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (
                ("mixtral tied", "fp32", {"vocabulary_slices": 4}, 3),
                ("gpt2", "fp32", {}, 3),
                ("granite", "bf16", {"vocabulary_slices": 2}, 1),
            )
        ),
    ],
)
def test_moves_of_halves_change_nothing(
    name: str, precision: str, settings: dict[str, Any], stages: int, tmp_path: Path
) -> None:
    """From a checkpoint at another partition in the order of zero bubble, and in a V. They train as whole layers do.

    The checkpoint resumes at other stages too, but not in other pieces.
    """
    model = {"huggingface": MODELS[name], "sequence_length": LENGTH, "verified": False, **settings}
    of_whole = CaseRun(model, precision=precision, clip=0.0)
    still = replace(of_whole, model={**model, "split_blocks": True})
    last = case_runs.num_layers(still)
    chain = {1: [0, 2, last], 2: [0, last - 2, last], 4: [0, last - 1, last]}
    folded = {1: [0, 1, 2, 4, last], 2: [0, 2, last], 3: [0, 3, 6, last - 1, last]}
    zero_bubble, v = (
        replace(still, moves=moves, dynmo={"interval": 0, "schedule": {"kind": kind}})
        for kind, moves in (("zero_bubble", chain), ("v", folded))
    )
    expected, resumed, in_v, unsplit = run_each(
        2, case_runs.train, (still,), (zero_bubble, str(tmp_path / "saved"), 3), (v,), (of_whole,)
    )
    for found in (resumed, in_v):
        assert found[0]["losses"] == expected[0]["losses"] and found[0]["evaluated"] == expected[0]["evaluated"]
        assert whole(found) == whole(expected)
    if name != "gpt2":  # whose dropout draws other numbers
        assert unsplit[0]["losses"] == expected[0]["losses"] and unsplit[0]["evaluated"] == expected[0]["evaluated"]
    elsewhere = replace(still, stages=stages)
    as_many = settings.get("vocabulary_slices", 1) + 2  # layers, in four whole decoder layers
    others = [
        replace(elsewhere, model={**elsewhere.model, **pieces})
        for pieces in (
            {"split_blocks": False},
            {"vocabulary_slices": 5},
            {"split_blocks": False, "vocabulary_slices": as_many},
        )
    ]
    calls = [(one, str(tmp_path / "saved"), 3) for one in (elsewhere, *others)]
    found, *refused = run_each(stages, go_on, *calls)
    assert found[0]["losses"] == expected[0]["losses"][3:] and whole(found) == whole(expected)
    for ranks in refused:
        assert all(one["unchanged"] for one in ranks)
        assert "; with other vocabulary_slices or split_blocks a model begins from its" in ranks[0]["refused"]
