import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from torch.utils.checkpoint import checkpoint

from ds_dynmo.config import parse_section
from ds_dynmo.models import MixtureOfExperts, ModelConfig, RouterBiasUpdate, RunSizes, language_model_loss, model_layers
from ds_dynmo.models.gpt import Block, FeedForward
from ds_dynmo.models.moe.config import MoEConfig
from ds_dynmo.models.moe.routing import Router, load_balancing_loss, sinkhorn
from ds_dynmo.models.seeding import generator_for

ROUTINGS = ["aux_loss", "sbase", "bias"]
SIZES = {"layers": 2, "hidden_size": 8, "heads": 2, "sequence_length": 10, "mlp_ratio": 2, "tied_embedding": False}
BATCH = 2


def model_of(**moe: Any) -> ModelConfig:
    return parse_section(ModelConfig, {**SIZES, "case": {"kind": "moe", **moe}}, "model")


def experts_of(**moe: Any) -> MixtureOfExperts:
    """Build a layer whose router tells tokens apart clearly."""
    config, section = model_of(**moe), MoEConfig(**moe)
    layer = MixtureOfExperts(config, generator_for("layer"), moe=section)
    with torch.no_grad():
        layer.router.affinity.weight.mul_(50)
        layer.expand.mul_(20)
        layer.contract.mul_(20)
    if section.routing == "bias":
        layer.router.bias_steps.copy_(torch.randint(-300, 300, (section.experts,), generator=generator_for("bias")))
    return layer


def hidden_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, 10, 8, generator=generator_for("hidden", seed)).requires_grad_()


def output_of(layer: MixtureOfExperts, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = layer(hidden)
    return made if isinstance(made, tuple) else (made, torch.zeros(1))


# -- against a reference, one token and one expert at a time -----------------------------------------------


def best(numbers: list[float], count: int) -> list[int]:
    return sorted(range(len(numbers)), key=lambda index: -numbers[index])[:count]


def scaled(logits: torch.Tensor) -> torch.Tensor:
    """Compute Sinkhorn's result by its definition, with 5000 scalings."""
    plan = logits.detach().double().exp()
    for _ in range(5000):
        plan = plan / plan.sum(dim=1, keepdim=True)
        plan = plan / plan.sum(dim=0, keepdim=True) * len(plan) / plan.shape[1]
    return plan


def reference(layer: MixtureOfExperts, moe: MoEConfig, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = hidden.reshape(-1, hidden.shape[-1])
    logits = tokens @ layer.router.affinity.weight.t()
    choices: list[list[int]] = []
    gates: list[list[torch.Tensor]] = []
    plan = scaled(logits) if moe.routing == "sbase" else None
    for token, affinities in enumerate(logits):
        if moe.routing == "aux_loss":
            scores = affinities.exp() / affinities.exp().sum()
            chosen = best(scores.tolist(), moe.top_k)
        elif plan is not None:
            scores = 1 / (1 + (-affinities).exp()) if moe.top_k == 1 else affinities.exp() / affinities.exp().sum()
            chosen = best(plan[token].tolist(), moe.top_k)
        else:
            scores = 1 / (1 + (-affinities).exp())
            steps = layer.router.bias_steps.tolist()
            chosen = best([s + moe.bias_rate * n for s, n in zip(scores.tolist(), steps)], moe.top_k)
        total = 1.0 if moe.routing == "sbase" or moe.top_k == 1 else sum(scores[expert] for expert in chosen)
        choices.append(chosen)
        gates.append([scores[expert] / total for expert in chosen])
    limit = len(tokens)
    if moe.capacity_factor is not None:
        limit = math.ceil(moe.capacity_factor * moe.top_k * len(tokens) / moe.experts)
    taken = [0] * moe.experts
    outputs = [torch.zeros(hidden.shape[-1]) for _ in tokens]
    for choice in range(moe.top_k):
        for token, x in enumerate(tokens):
            expert = choices[token][choice]
            if taken[expert] < limit:
                taken[expert] += 1
                made = layer.contract[expert] @ F.gelu(layer.expand[expert] @ x)
                outputs[token] = outputs[token] + gates[token][choice] * made
    auxiliary = torch.zeros(1)
    if moe.routing == "aux_loss":
        for expert in range(moe.experts):
            fraction = sum(expert in chosen for chosen in choices) / len(tokens)
            auxiliary = auxiliary + 0.02 * moe.experts * fraction * logits.softmax(dim=-1)[:, expert].mean()
    return torch.stack(outputs).view_as(hidden), auxiliary


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_outputs_and_gradients_equal_the_reference(routing: str, top_k: int) -> None:
    for capacity_factor in (None, 0.7):
        settings = {"routing": routing, "top_k": top_k, "experts": 5, "capacity_factor": capacity_factor}
        if routing == "sbase":
            settings |= {"sinkhorn_tolerance": 1e-9, "sinkhorn_iterations": 5000}
        layer, hidden, moe = experts_of(**settings), hidden_of(), MoEConfig(**settings)
        wanted = [hidden, *layer.parameters()]
        weights = torch.randn(hidden.shape, generator=generator_for("weights"))
        found = []
        for output, auxiliary in (output_of(layer, hidden), reference(layer, moe, hidden)):
            gradients = torch.autograd.grad((output * weights).sum() + 10 * auxiliary.sum(), wanted)
            found.append([output, auxiliary, *gradients])
        for mine, theirs in zip(*found):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert found[0][0].abs().mean() > 0.1 and all(gradient.abs().max() > 1e-2 for gradient in found[0][2:])


def test_a_block_with_equal_experts_computes_as_a_dense_one() -> None:
    """Gates that sum to 1 over equal experts make a feed-forward layer."""
    config = model_of()
    layer, dense = experts_of(), FeedForward(config, generator_for("dense"))
    with torch.no_grad():
        layer.expand.copy_(dense.expand.weight.expand_as(layer.expand))
        layer.contract.copy_(dense.contract.weight.expand_as(layer.contract))
    torch.testing.assert_close(output_of(layer, hidden_of())[0], dense(hidden_of()), rtol=1e-5, atol=1e-6)


# -- balancing the experts ---------------------------------------------------------------------------------


def test_the_auxiliary_loss_is_least_for_equal_experts() -> None:
    """Equal shares and equal probabilities give top_k; everything to one expert gives the number of experts."""
    even = load_balancing_loss(torch.full((6, 3), 1 / 3), torch.tensor([[0, 1], [1, 2], [2, 0]] * 2))
    torch.testing.assert_close(even, torch.tensor([2.0]))
    lopsided = load_balancing_loss(torch.tensor([[1.0, 0.0, 0.0]] * 4), torch.zeros(4, 1, dtype=torch.int64))
    torch.testing.assert_close(lopsided, torch.tensor([3.0]))


def test_sinkhorn_gives_every_expert_its_share() -> None:
    logits = torch.randn(24, 4, generator=generator_for("logits"))
    plan = sinkhorn(logits, tolerance=1e-4, iterations=1000)
    torch.testing.assert_close(plan.sum(dim=0), torch.full((4,), 6.0, dtype=torch.float64))
    assert (plan.sum(dim=1) - 1).abs().max() <= 1e-4
    torch.testing.assert_close(plan, scaled(logits), rtol=1e-3, atol=1e-4)
    shifted = sinkhorn(logits + torch.randn(24, 1), tolerance=1e-4, iterations=1000)
    torch.testing.assert_close(shifted, plan, rtol=1e-5, atol=1e-6)  # adding a constant per token changes nothing


def test_sinkhorn_stops_with_finite_numbers() -> None:
    for scale in (0.0, 1e3, 1e30):
        logits = scale * torch.randn(24, 4, generator=generator_for("logits"))
        logits[:, 0] += 10 * scale  # all tokens prefer expert 0; the others become 0
        assert sinkhorn(logits, tolerance=1e-4, iterations=20).isfinite().all(), scale


def test_sbase_spreads_tokens_that_prefer_one_expert() -> None:
    layer = experts_of(routing="sbase", experts=5, top_k=1)
    with torch.no_grad():
        layer.router.affinity.weight[0] += 3.0
    hidden = hidden_of().detach().abs()
    layer(hidden)
    assert max(layer.tokens_per_expert) <= 5  # an even share is 4
    layer.eval()
    assert torch.bincount(layer.router(hidden.flatten(0, 1)).experts.flatten(), minlength=5)[0] == BATCH * 10


@pytest.mark.parametrize("routing", ROUTINGS)
def test_evaluation_does_not_look_at_later_tokens(routing: str) -> None:
    """It has no auxiliary loss, and is not counted."""
    for capacity_factor in (None, 0.5):
        layer, hidden = experts_of(routing=routing, capacity_factor=capacity_factor), hidden_of()
        assert isinstance(layer(hidden_of(1)), tuple) == (routing == "aux_loss")
        counts = list(layer.tokens_per_expert)
        layer.eval()
        torch.testing.assert_close(layer(hidden)[:, :4], layer(hidden[:, :4]))
        assert layer.tokens_per_expert == counts and sum(counts)


def test_capacity_is_counted_exactly() -> None:
    """In floating point 1.1 * 200 / 4 is more than 55."""
    layer = experts_of(top_k=1, experts=4, capacity_factor=1.1)
    layer.router.affinity.weight.data.zero_()  # all tokens choose one expert
    layer(hidden_of().repeat(1, 10, 1))
    assert max(layer.tokens_per_expert) == 55


def test_under_autocast_the_router_stays_in_fp32() -> None:
    layer, hidden = experts_of(routing="bias").eval(), hidden_of()
    expected = layer.router(hidden.flatten(0, 1)).gates
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.router(hidden.flatten(0, 1)).gates, expected)
        mixed = layer(hidden)
    torch.testing.assert_close(mixed, layer(hidden), atol=0.02, rtol=0.02)


def test_the_bias_is_for_selection_only() -> None:
    layer = experts_of(routing="bias", experts=4)
    layer.router.bias_steps.copy_(torch.tensor([0, 0, 10_000, 5_000]))
    routing = layer.router(hidden_of().flatten(0, 1))
    assert routing.experts.tolist() == [[2, 3]] * 20
    scores = (hidden_of().flatten(0, 1) @ layer.router.affinity.weight.t()).sigmoid()[:, 2:]
    torch.testing.assert_close(routing.gates, scores / scores.sum(dim=1, keepdim=True))


def test_the_bias_counteracts_the_load() -> None:
    router = Router(MoEConfig(routing="bias", experts=4, bias_rate=0.25), 8, generator_for("router"))
    for counts, bias in (([10, 0, 5, 5], [-0.25, 0.25, 0.0, 0.0]), ([1, 0, 0, 0], [-0.5, 0.5, 0.25, 0.25])):
        router.balance(counts)
        assert router.bias.tolist() == bias


def test_the_bias_evens_out_the_experts() -> None:
    layer = experts_of(routing="bias", experts=5, bias_rate=0.02)
    layer.router.bias_steps.zero_()
    largest = []
    for _ in range(150):
        layer.train()
        layer(hidden_of())
        largest.append(max(layer.choices_per_expert))
        layer.router.balance(layer.choices_per_expert)
    assert largest[0] >= 12 and max(largest[-5:]) <= 10  # an even share is 8


def test_softmax_scores() -> None:
    layer = experts_of(routing="bias", scores="softmax", experts=4)
    layer.router.bias_steps.zero_()
    routing = layer.router(hidden_of().flatten(0, 1))
    expected = experts_of(routing="aux_loss", experts=4).router(hidden_of().flatten(0, 1))
    assert torch.equal(routing.experts, expected.experts)
    torch.testing.assert_close(routing.gates, expected.gates)


# -- numerical edge cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_expert_for_all_no_preference_and_scores_of_zero_give_finite_numbers(routing: str) -> None:
    for factor, liked in ((0.0, 2), (1e4, 2), (1e4, 0)):
        layer = experts_of(routing=routing, capacity_factor=0.5)
        hidden = hidden_of().detach().abs().requires_grad_()
        with torch.no_grad():
            layer.router.affinity.weight.fill_(-factor)
            layer.router.affinity.weight[:liked] = factor  # the other experts get a sigmoid of 0
        output, auxiliary = output_of(layer, hidden)
        (output.square().sum() + auxiliary.sum()).backward()
        assert output.isfinite().all() and auxiliary.isfinite().all()
        assert hidden.grad is not None and hidden.grad.isfinite().all()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_an_expert_without_tokens_is_not_touched() -> None:
    layer = experts_of(routing="bias", experts=4)
    layer.router.bias_steps.copy_(torch.tensor([0, 0, 10_000, 10_000]))
    with torch.no_grad():
        layer.expand[0], layer.contract[1] = math.nan, math.nan
    hidden = hidden_of()
    layer(hidden).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    for weight in (layer.expand, layer.contract):
        assert weight.grad is not None
        assert [bool(each.any()) for each in weight.grad] == [False, False, True, True]


def test_dropped_tokens_pass_through_the_residual() -> None:
    layer = experts_of(top_k=1, experts=4, capacity_factor=0.5)
    with torch.no_grad():
        layer.router.affinity.weight.zero_()
        layer.router.affinity.weight[1] = 1.0
    hidden = hidden_of().detach().abs()
    output = output_of(layer, hidden)[0].flatten(0, 1)
    assert layer.choices_per_expert == [0, 20, 0, 0] and layer.tokens_per_expert == [0, 3, 0, 0]  # ceil(0.5 * 20 / 4)
    assert output[:3].any(dim=1).all() and not output[3:].any()


# -- counts and the load signal ----------------------------------------------------------------------------


def test_the_load_signal_is_the_papers_load() -> None:
    moe = {"experts": 5, "top_k": 2, "capacity_factor": 0.7}
    block = model_layers(model_of(**moe))[1].build()
    layer = block.mlp
    assert block.load_signal() == layer.load_signal() == 2 / 5
    kept = 0
    for seed in range(3):
        chosen = layer.router(block.mlp_norm(hidden_of(seed)).flatten(0, 1)).experts.flatten().tolist()
        kept += sum(min(chosen.count(expert), math.ceil(0.7 * 2 * 20 / 5)) for expert in range(5))
        layer(block.mlp_norm(hidden_of(seed)))
    assert sum(layer.choices_per_expert) == 3 * 2 * 20 and sum(layer.tokens_per_expert) == kept < 3 * 2 * 20
    assert layer.load_signal() == pytest.approx(kept / (5 * 3 * 20))
    block.requires_grad_(False)
    assert block.load_signal() == 0.0


def test_without_capacity_the_load_is_top_k() -> None:
    layer = experts_of(experts=8, top_k=2)
    layer(hidden_of())
    assert layer.tokens_per_expert == layer.choices_per_expert and sum(layer.tokens_per_expert) == 40
    assert layer.load_signal() == 2 / 8


CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "deepspeed non-reentrant": deepspeed_checkpointing.non_reentrant_checkpoint,
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_recomputing_gives_the_same_numbers_and_counts_once(routing: str) -> None:
    found = []
    for kind in (None, *CHECKPOINTS):
        layer, hidden = experts_of(routing=routing), hidden_of()
        made = CHECKPOINTS[kind](layer, hidden) if kind else layer(hidden)
        output, auxiliary = made if isinstance(made, tuple) else (made, torch.zeros(1))
        (output.square().sum() + auxiliary.sum()).backward()
        assert hidden.grad is not None
        found.append(([output, hidden.grad, *[p.grad for p in layer.parameters()]], layer.choices_per_expert))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0][0], found[-1][0])), kind
        assert found[0][1] == found[-1][1] and sum(found[0][1]) == 40, kind


# -- the model ---------------------------------------------------------------------------------------------


def test_blocks_with_experts() -> None:
    for keys, blocks in (({}, [0, 1, 2, 3, 4, 5]), ({"every": 2}, [1, 3, 5]), ({"dense_blocks": 2}, [2, 3, 4, 5])):
        section = {"layers": 6, "case": {"kind": "moe", **keys}}
        layers = [spec.build() for spec in model_layers(parse_section(ModelConfig, section, "model"))[1:-2]]
        assert [number for number, layer in enumerate(layers) if isinstance(layer.mlp, MixtureOfExperts)] == blocks
        assert all(isinstance(layer, Block) for layer in layers)


def loss_of(model: list[torch.nn.Module], text: torch.Tensor) -> torch.Tensor:
    activations = text[:, :-1]
    for layer in model:
        activations = layer(activations)
    return language_model_loss(activations, text[:, 1:])


def test_the_training_loss_adds_the_auxiliary_losses_of_all_layers() -> None:
    text = torch.randint(0, 256, (2, 11), generator=generator_for("text"))
    losses = {}
    for coefficient in (0.0, 0.02, 0.04):
        model = [spec.build() for spec in model_layers(model_of(auxiliary_coefficient=coefficient))]
        evaluated = loss_of([layer.eval() for layer in model], text)
        losses[coefficient] = loss_of([layer.train() for layer in model], text)
        torch.testing.assert_close(losses[0.0], evaluated)
    added = losses[0.02] - losses[0.0]
    assert 2 * 0.02 * 1.9 < added < 2 * 0.02 * 3  # two layers; top_k is the value for equal experts
    torch.testing.assert_close(losses[0.04] - losses[0.0], 2 * added, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("routing", ["aux_loss", pytest.param("sbase", marks=pytest.mark.nightly), "bias"])
def test_training_reduces_the_loss(routing: str) -> None:
    model = [spec.build() for spec in model_layers(model_of(routing=routing))]
    optimizer = torch.optim.AdamW([p for layer in model for p in layer.parameters()], lr=1e-2)
    text = torch.randint(0, 256, (2, 11), generator=generator_for("text"))
    losses = []
    for _ in range(30):
        loss = loss_of(model, text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_frozen_layer_keeps_its_bias() -> None:
    config = model_of(routing="bias")
    specs = model_layers(config)
    module = torch.nn.Module()
    module._layer_specs, module._local_start, module._local_stop = specs, 1, 3  # type: ignore[assignment]
    blocks = [specs[number].build() for number in (1, 2)]
    for number, block in enumerate(blocks, start=1):
        module.add_module(str(number), block)
    blocks[0].requires_grad_(False)
    engine = SimpleNamespace(module=module, sum_over_replicas=lambda counts: counts)
    case = RouterBiasUpdate(config.case[0], engine, RunSizes(total_steps=1, num_layers=len(specs), blocks=range(1, 3)))
    for block in blocks:
        block(hidden_of())
    case.after_batch(1)
    assert [bool(block.mlp.router.bias_steps.any()) for block in blocks] == [False, True]
    counted = [sum(block.mlp.choices_per_expert) for block in blocks]
    module.train()  # a batch begins
    for block in blocks:
        block(hidden_of())
    assert counted == [sum(block.mlp.choices_per_expert) for block in blocks]
