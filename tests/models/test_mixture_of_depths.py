import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ds_dynmo.config import parse_section
from ds_dynmo.models import ModelConfig, language_model_loss, model_layers
from ds_dynmo.models.gpt import Block, CausalSelfAttention, apply_rotary
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.mixture_of_depths.block import (
    MixtureOfDepthsBlock,
    tokens_of,
    top_tokens,
)
from ds_dynmo.models.moe.grouped_linear import ALIGNMENT
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.stream import Stream

SIZES = {"layers": 4, "hidden_size": 16, "heads": 2, "sequence_length": 12, "tied_embedding": False}
SEQUENCE, BATCH = 12, 3


def model_config(**mod: Any) -> ModelConfig:
    return parse_section(ModelConfig, {**SIZES, "case": {"kind": "mod", "capacity": 0.25, **mod}}, "model")


def block_of(attention: Any = None, **mod: Any) -> MixtureOfDepthsBlock:
    """Build a block with weights larger than initial ones, so that all its parts matter."""
    config = model_config(**mod)
    block = MixtureOfDepthsBlock(config, 2, *config.case, attention)
    with torch.no_grad():
        for name, parameter in sorted(block.named_parameters()):
            parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator_for(name)))
    return block


def hidden_states(seed: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, SEQUENCE, 16, generator=generator_for("hidden", seed)).requires_grad_()


def run(block: nn.Module, hidden: torch.Tensor) -> Stream:
    packed = Stream(hidden, torch.zeros(1)).pack() if block.depths.layer_outputs == "auxiliary" else hidden
    return Stream.unpack(block(packed))


def slow_top(weights: list[float], count: int) -> set[int]:
    return set(sorted(range(len(weights)), key=lambda position: (-weights[position], position))[:count])


def slow_block(block: MixtureOfDepthsBlock, hidden: torch.Tensor, members: list[set[int]], window: int) -> torch.Tensor:
    """Run the sequence through the block token by token, with the others masked out, then apply equation 1."""
    rows = []
    for sequence, chosen in zip(hidden, members, strict=True):
        attention = block.attention
        query, key, value = (block.attention_norm(sequence) @ attention.query_key_value.weight.T).chunk(3, dim=-1)
        parts = []
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)
            turned_query, turned_key = (apply_rotary(x[:, part], torch.arange(SEQUENCE), 10000.0) for x in (query, key))
            scores = turned_query @ turned_key.T / math.sqrt(8)
            seen = torch.tensor(
                [
                    [(b in chosen and b <= a and a - b < window) or a == b for b in range(SEQUENCE)]
                    for a in range(SEQUENCE)
                ]
            )
            parts.append(scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ value[:, part])
        middle = sequence + torch.cat(parts, dim=-1) @ attention.output.weight.T
        added = middle + block.mlp(block.mlp_norm(middle)) - sequence
        weights = sequence @ block.router.weight[0]
        rows.append(
            torch.stack([sequence[t] + weights[t] * added[t] if t in chosen else sequence[t] for t in range(SEQUENCE)])
        )
    return torch.stack(rows)


class WindowAttention(CausalSelfAttention):
    """Attention that sees fewer than 5 positions back, and so needs correct positions."""

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch, count, width = hidden.shape
        assert positions.shape == (batch, count)
        query, key, value = self.query_key_value(hidden).view(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = (apply_rotary(x, positions.unsqueeze(1), self.rope_base) for x in (query, key))
        distance = positions.unsqueeze(2) - positions.unsqueeze(1)
        mask = ((distance >= 0) & (distance < 5)).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(mixed.transpose(1, 2).reshape(batch, count, width))


# -- choice ------------------------------------------------------------------------------------------------


def test_the_largest_weights_are_chosen_in_order() -> None:
    for weights, count, chosen in (
        ([0.1, 0.9, 0.3, 0.8], 2, [1, 3]),
        ([0.5, 0.9, 0.5, 0.1, 0.5], 2, [0, 1]),  # a tie at the threshold: the first
        ([0.5, 0.9, 0.5, 0.1, 0.5], 3, [0, 1, 2]),
        ([0.0] * 40, 3, [0, 1, 2]),
        ([-3.0, -1.0, -2.0], 1, [1]),
        ([1.0, 2.0], 2, [0, 1]),
    ):
        assert top_tokens(torch.tensor([weights, weights]), count).tolist() == [chosen, chosen], weights


def test_the_choice_equals_a_stable_sort() -> None:
    weights = torch.randint(0, 4, (50, 30), generator=generator_for("ties")).float()
    for count in (1, 7, 30):
        chosen = top_tokens(weights, count)
        assert chosen.shape == (50, count)
        for row, found in zip(weights.tolist(), chosen.tolist(), strict=True):
            assert found == sorted(slow_top(row, count))


def test_capacity_is_a_fraction_of_the_sequence() -> None:
    for capacity, sequence, tokens in ((0.125, 256, 32), (0.125, 3, 1), (1.0, 7, 7), (0.29, 100, 29)):
        assert tokens_of(capacity, sequence) == tokens


def test_one_of_every_so_many_blocks_is_routed() -> None:
    for every, routed in ((1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (4, [4])):
        specs = model_layers(model_config(every=every))
        assert [n for n, spec in enumerate(specs) if spec.typename is MixtureOfDepthsBlock] == routed
        assert [n for n, spec in enumerate(specs) if spec.typename is Block] == sorted({1, 2, 3, 4} - set(routed))


# -- the block ---------------------------------------------------------------------------------------------


def check_as_slow(
    block: MixtureOfDepthsBlock, inputs: list[torch.Tensor], members: list[set[int]], window: int = SEQUENCE
) -> None:
    """Compare outputs and gradients with those of the slow block, of two equal ``inputs``."""
    outputs = [run(block, inputs[0]).hidden, slow_block(block, inputs[1], members, window)]
    gradients = []
    for hidden, output in zip(inputs, outputs, strict=True):
        block.zero_grad()
        (output * torch.randn(output.shape, generator=generator_for("weights"))).sum().backward()
        gradients.append([hidden.grad, *(parameter.grad for parameter in block.parameters())])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    for mine, slow in zip(*gradients, strict=True):
        assert mine is not None and mine.abs().sum() > 0
        torch.testing.assert_close(mine, slow, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("capacity", [0.01, 0.25, 0.6, 1.0])
def test_the_block_computes_equation_1(capacity: float) -> None:
    for attention, window in ((None, SEQUENCE), (WindowAttention, 5)):
        block, hidden = block_of(attention, capacity=capacity, sampling="topk"), hidden_states()
        weights = (hidden @ block.router.weight[0]).tolist()
        members = [slow_top(row, max(1, round(capacity * SEQUENCE))) for row in weights]
        check_as_slow(block, [hidden_states(), hidden_states()], members, window)


def test_tokens_that_are_not_chosen_stay_unchanged() -> None:
    block, hidden = block_of(sampling="topk"), hidden_states()
    changed = (run(block, hidden).hidden != hidden).any(dim=-1)
    assert changed.sum(dim=1).tolist() == [3, 3, 3]
    assert changed.nonzero()[:, 1].view(BATCH, 3).tolist() == top_tokens(hidden @ block.router.weight[0], 3).tolist()


def test_equal_weights_choose_the_first_tokens() -> None:
    block = block_of(sampling="topk")
    with torch.no_grad():
        block.router.weight.zero_()
    hidden = hidden_states()
    output = run(block, hidden).hidden
    assert torch.equal(output, hidden)  # r is 0
    output.sum().backward()
    assert block.router.weight.grad is not None and block.router.weight.grad.abs().sum() > 0
    assert all(p.grad.isfinite().all() for p in block.parameters())  # type: ignore[union-attr]


def test_the_router_distinguishes_tokens_beyond_bf16_precision() -> None:
    """The weights of tokens 7 to 9 are the largest, by less than bf16 can represent; in bf16, and under autocast."""
    for dtype, mixed in ((torch.bfloat16, False), (torch.float32, True)):
        block = block_of(capacity=0.25, sampling="topk").to(dtype)
        with torch.no_grad():
            block.router.weight.zero_()[0, :2] = torch.tensor([1.0, 2.0**-10])
        hidden = torch.zeros(1, SEQUENCE, 16, dtype=dtype)
        hidden[0, :, 0], hidden[0, 7:10, 1] = 1.0, 1.0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            output = run(block, hidden).hidden
        assert output.dtype == dtype
        assert (output != hidden).any(dim=-1).nonzero()[:, 1].tolist() == [7, 8, 9]


def test_tokens_that_are_not_chosen_are_not_computed() -> None:
    for capacity in (0.01, 0.25, 0.6, 1.0):
        block, width = block_of(capacity=capacity, sampling="topk"), 16
        taken = BATCH * max(1, round(capacity * SEQUENCE))
        of_router, of_linears = 2 * BATCH * SEQUENCE * width, 2 * taken * width * width * (3 + 1 + 2 * 4)
        of_attention = 2 * 2 * taken * (taken // BATCH) * width
        with sdpa_kernel(SDPBackend.MATH):  # FLOPs of the CPU's own kernel are not counted
            with FlopCounterMode(display=False) as forward:
                output = run(block, hidden_states()).hidden
            with FlopCounterMode(display=False) as backward:
                output.sum().backward()
        assert forward.get_total_flops() == of_router + of_linears + of_attention, capacity
        assert backward.get_total_flops() == 2 * forward.get_total_flops(), capacity


def test_positions_may_differ_between_sequences() -> None:
    block, hidden = block_of(sampling="topk"), hidden_states()
    positions = torch.arange(SEQUENCE) * torch.tensor([[1], [2], [3]])
    whole, _ = block.transform(hidden, positions)
    for number in range(BATCH):
        alone, _ = block.transform(hidden[number : number + 1], positions[number])
        torch.testing.assert_close(whole[number], alone[0])


@pytest.mark.parametrize("sampling", ["topk", "predictor"])
def test_activation_checkpointing_gives_the_same(sampling: str) -> None:
    found = []
    for recompute in (False, True):
        block, hidden = block_of(sampling=sampling), hidden_states()
        packed = Stream(hidden, torch.zeros(1, requires_grad=True)).pack() if sampling == "predictor" else hidden
        output = checkpoint(block, packed, use_reentrant=False) if recompute else block(packed)
        stream = Stream.unpack(output)
        (stream.hidden.square().sum() + (0 if stream.auxiliary is None else stream.auxiliary.sum())).backward()
        found.append([stream.hidden, hidden.grad, *(parameter.grad for parameter in block.parameters())])
        assert block.load_signal() == 0.25
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


THRESHOLD = {"capacity": 0.125, "threshold": 0.5, "min_capacity": 0.25, "max_capacity": 0.5}


def above(weights: torch.Tensor) -> list[set[int]]:
    """Choose as THRESHOLD does, of sequences of 12."""
    counts = [min(max(sum(weight > 0.5 for weight in row), 3), 6) for row in weights.tolist()]
    return [slow_top(row, count) for row, count in zip(weights.tolist(), counts, strict=True)]


def test_a_threshold_takes_the_tokens_above_it_within_bounds() -> None:
    block, inputs = block_of(sampling="topk", **THRESHOLD), [hidden_states(), hidden_states()]
    with torch.no_grad():
        for each in inputs:
            each[0] -= 2 * block.router.weight[0] / block.router.weight.square().sum()  # fewer than the minimum
            each[1] += 3 * block.router.weight[0] / block.router.weight.square().sum()  # more than the maximum
            each[2] += block.router.weight[0] / block.router.weight.square().sum() / 4
        members = above(inputs[0] @ block.router.weight[0])
    assert [len(chosen) for chosen in members[:2]] == [3, 6] and 3 < len(members[2]) < 6
    check_as_slow(block, inputs, members)
    assert block.load_signal() == sum(map(len, members)) / 36


@pytest.mark.parametrize("recompute", [False, True])
def test_the_load_signal_is_measured_over_the_micro_batches_of_a_batch(recompute: bool) -> None:
    block = block_of(sampling="topk", **THRESHOLD)
    taken = [sum(map(len, above((hidden_states(n) @ block.router.weight[0]).detach()))) for n in range(3)]
    assert len(set(taken)) > 1
    for batch in ([0], [1, 2]):
        block.train()
        for n in batch:
            given = hidden_states(n)
            (checkpoint(block, given, use_reentrant=True) if recompute else block(given)).sum().backward()
        assert block.load_signal() == sum(taken[n] for n in batch) / (36 * len(batch))
        assert block.tokens == 36 * len(batch)
    run(block.eval(), hidden_states())
    assert block.load_signal() == (taken[1] + taken[2]) / 72


def test_evaluation_by_the_threshold_does_not_look_ahead_and_has_no_bounds() -> None:
    block, hidden = block_of(**{**THRESHOLD, "threshold": -0.5, "sampling": "threshold"}).eval(), hidden_states()
    assert block.predictor is None
    changed = (run(block, hidden).hidden != hidden).any(dim=-1)
    assert torch.equal(changed, hidden @ block.router.weight[0] > -0.5) and changed.sum(dim=1).max() > 6
    other = torch.cat((hidden[:, :8], hidden_states(1)[:, 8:]), dim=1)
    torch.testing.assert_close(run(block, other).hidden[:, :8], run(block, hidden).hidden[:, :8])


# -- the predictor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [{}, THRESHOLD], ids=["capacity", "threshold"])
def test_the_predictors_loss_is_the_binary_cross_entropy_of_membership(threshold: dict[str, float]) -> None:
    block, hidden = block_of(**threshold, predictor_coefficient=0.3), hidden_states()
    stream = run(block, hidden)
    expected = 0.0
    with torch.no_grad():
        weights = hidden @ block.router.weight[0]
        members = above(weights) if threshold else [slow_top(row, 3) for row in weights.tolist()]
        for row, chosen in zip(hidden, members, strict=True):
            for position, state in enumerate(row):
                logit = block.predictor.decide(F.gelu(block.predictor.expand(state))) + block.predictor.bias[0]
                share = torch.sigmoid(logit).item()
                expected -= math.log(share if position in chosen else 1 - share)
    assert stream.auxiliary is not None and stream.auxiliary.shape == (1,)
    assert stream.auxiliary.item() == pytest.approx(0.3 * expected / (BATCH * SEQUENCE), rel=1e-5)


def test_only_the_predictor_learns_from_its_loss() -> None:
    block, hidden = block_of(), hidden_states()
    stream = run(block, hidden)
    stream.auxiliary.sum().backward(retain_graph=True)  # type: ignore[union-attr]
    assert hidden.grad is None
    for name, parameter in block.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().sum() > 0) == name.startswith("predictor."), name
    block.zero_grad()
    stream.hidden.sum().backward()
    for name, parameter in block.named_parameters():
        assert (parameter.grad is None) == name.startswith("predictor."), name


def test_evaluation_chooses_by_the_predictor() -> None:
    block, hidden = block_of().eval(), hidden_states()
    members = [set(row.nonzero().flatten().tolist()) for row in block.predictor(hidden) > 0]
    assert len({len(chosen) for chosen in members}) > 1
    stream = run(block, hidden)
    torch.testing.assert_close(stream.hidden, slow_block(block, hidden, members, SEQUENCE), atol=1e-5, rtol=1e-5)
    assert stream.auxiliary is not None and stream.auxiliary.item() == 0


def test_evaluation_by_the_predictor_does_not_look_ahead() -> None:
    block, hidden = block_of().eval(), hidden_states()
    before = run(block, hidden).hidden
    with torch.no_grad():
        changed = hidden.clone()
        changed[:, 8:] = 10 * torch.randn(BATCH, 4, 16, generator=generator_for("later"))
    torch.testing.assert_close(run(block, changed).hidden[:, :8], before[:, :8])
    block.sampling = "topk"
    assert not torch.allclose(run(block, changed).hidden[:, :8], run(block, hidden).hidden[:, :8])


def test_experts_behind_a_predictor_begin_aligned_in_a_flat_buffer() -> None:
    """Else their weights are copied in every pass."""
    sizes = {"layers": 4, "hidden_size": 8, "heads": 2, "sequence_length": SEQUENCE, "vocab_size": 257}
    for predictor_size in (7, 8, 32):
        cases = [{"kind": "moe", "experts": 3}, {"kind": "mod", "predictor_size": predictor_size}]
        begins, size = list[int](), 0
        for spec in model_layers(parse_section(ModelConfig, {**sizes, "case": cases}, "model")):
            for parameter in spec.build().parameters():
                begins += [size] * (parameter.dim() == 3)
                size += parameter.numel() * torch.bfloat16.itemsize
        assert len(begins) == 8 and not any(begin % ALIGNMENT for begin in begins), predictor_size


def test_the_predictor_may_choose_no_token_or_all() -> None:
    for bias, taken in ((-1e4, 0), (1e4, SEQUENCE)):
        block, hidden = block_of().eval(), hidden_states()
        with torch.no_grad():
            block.predictor.bias.fill_(bias)
        output = run(block, hidden).hidden
        assert output.isfinite().all()
        assert (output != hidden).any(dim=-1).sum(dim=1).tolist() == [taken] * BATCH


def test_evaluation_by_top_k_equals_training() -> None:
    for block in (block_of(sampling="topk"), block_of()):
        hidden = hidden_states()
        trained = run(block, hidden).hidden
        block.eval().sampling = "topk"
        evaluated = run(block, hidden)
        assert torch.equal(evaluated.hidden, trained)
        assert evaluated.auxiliary is None or evaluated.auxiliary.item() == 0
        run(block, hidden[:, :5])
        assert block.load_signal() == 3 / 12


def test_only_predictor_sampling_builds_a_predictor() -> None:
    assert block_of(sampling="topk").predictor is None
    assert model_config(sampling="topk").layer_outputs == "hidden" and model_config().layer_outputs == "auxiliary"
    assert GPTConfig().layer_outputs == ModelConfig().layer_outputs == "hidden"


def test_the_predictor_learns_what_the_router_does() -> None:
    config = model_config(predictor_coefficient=1.0)
    block = MixtureOfDepthsBlock(config, 2, *config.case)
    optimizer = torch.optim.AdamW(block.predictor.parameters(), lr=1e-2)
    for step in range(150):
        loss = run(block, hidden_states(step)).auxiliary
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    hidden = hidden_states(1000)
    chosen = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool).scatter(
        1, top_tokens(block.router(hidden).squeeze(-1), 3), True
    )
    assert ((block.predictor(hidden) > 0) == chosen).float().mean() > 0.85  # always predicting no gives 0.75


# -- the load ----------------------------------------------------------------------------------------------


def test_the_load_signal_is_the_share_of_routed_tokens_in_the_last_training_batch() -> None:
    block = block_of(capacity=0.3)
    assert block.load_signal() == 4 / 12
    run(block, hidden_states()[:, :5])
    assert block.load_signal() == 2 / 5
    run(block.eval(), hidden_states())
    assert block.load_signal() == 2 / 5
    block.requires_grad_(False)
    assert block.load_signal() == 0.0  # layer freezing's formula


def test_a_frozen_block_routes_and_has_no_loss() -> None:
    block, hidden = block_of().requires_grad_(False), hidden_states().detach()
    stream = run(block, hidden)
    assert not stream.hidden.requires_grad and stream.auxiliary is not None and stream.auxiliary.item() == 0
    assert torch.equal(stream.hidden, run(block_of(), hidden).hidden)


@pytest.mark.nightly
def test_training_memorises_a_sentence() -> None:
    model = nn.Sequential(*(spec.build() for spec in model_layers(model_config())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(256, (1, SEQUENCE + 1), generator=generator_for("text"))
    for _ in range(80):
        loss = language_model_loss(model(text[:, :-1]), text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
    assert all(parameter.grad is not None for parameter in model.parameters())
