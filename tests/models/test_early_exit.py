import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import TiedLayerSpec
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ds_dynmo.config import parse_section
from ds_dynmo.models import ModelConfig, RunSizes, language_model_loss, model_layers
from ds_dynmo.models.early_exit import blocks as blocks_module
from ds_dynmo.models.early_exit.blocks import ExitBlock
from ds_dynmo.models.early_exit.criteria import (
    EarlyExitConfig,
    calm_threshold,
    confident,
    largest_probability,
    softmax_margin,
    state_similarity,
)
from ds_dynmo.models.early_exit.exits import EarlyExit, ExitHead
from ds_dynmo.models.gpt import apply_rotary, language_model_losses
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.stream import Stream

SIZES = {"layers": 4, "hidden_size": 16, "heads": 2, "sequence_length": 9, "mlp_ratio": 2, "tied_embedding": False}


def config(tied: bool = False, **exits: Any) -> ModelConfig:
    section = {**SIZES, "tied_embedding": tied, "case": {"kind": "early_exit", **exits}}
    return parse_section(ModelConfig, section, "model")


class Model(nn.Module):
    """The layers in one process, with one module per tied layer. The untrained head is made 40 times as confident."""

    def __init__(self, model: ModelConfig, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self._layer_specs = model_layers(model)
        self._local_start, self._local_stop = 0, len(self._layer_specs)
        self.tied_modules = nn.ModuleDict()
        self.functions: list[Any] = []
        for number, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                layer = self.tied_modules[spec.key]
                self.functions.append(partial(spec.forward_fn, layer) if spec.forward_fn else layer)
            else:
                self.add_module(str(number), spec.build())
                self.functions.append(self._modules[str(number)])
        self.head.weight.data.mul_(40)

    @property
    def head(self) -> ExitHead:
        return next(iter(self.tied_modules.values()))  # type: ignore[return-value]

    @property
    def blocks(self) -> list[ExitBlock]:
        return [layer for layer in self.functions if isinstance(layer, ExitBlock)]

    def streams(self, tokens: torch.Tensor) -> Iterator[Any]:
        states: Any = tokens
        for layer in self.functions:
            states = checkpoint(layer, states, use_reentrant=False) if self.recompute else layer(states)
            yield states

    def forward(self, tokens: torch.Tensor) -> Any:
        return list(self.streams(tokens))[-1]


def text(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(256, (batch, length + 1), generator=generator_for("text", batch, length))


def loss_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    return language_model_loss(model(tokens[:, :-1]), tokens[:, 1:])


# -- a slow reference: token by token ----------------------------------------------------------------------


def slow_block(block: ExitBlock, hidden: torch.Tensor, remain: torch.Tensor) -> torch.Tensor:
    """Compute ``[sequence, hidden]`` of one text. Each token that remains attends in a loop over the earlier ones."""
    heads = block.attention.heads
    width = hidden.shape[1] // heads
    projected = block.attention_norm(hidden) @ block.attention.query_key_value.weight.T
    every = torch.arange(len(hidden))
    parts = [part.view(len(hidden), heads, width) for part in projected.chunk(3, dim=-1)]
    query, key = (apply_rotary(part, every.unsqueeze(-1), 10000.0) for part in parts[:2])
    rows = []
    for t in range(len(hidden)):
        if not remain[t]:
            rows.append(hidden[t])
            continue
        mixed = []
        for head in range(heads):
            scores = torch.stack([query[t, head] @ key[u, head] / math.sqrt(width) for u in range(t + 1)])
            mixed.append(sum(p * parts[2][u, head] for u, p in enumerate(scores.softmax(dim=0))))
        row = hidden[t] + torch.cat(mixed) @ block.attention.output.weight.T
        rows.append(row + block.mlp(block.mlp_norm(row)))
    return torch.stack(rows)


def slow_loss(model: Model, exits: EarlyExitConfig, tokens: torch.Tensor) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the training loss of texts ``[batch, sequence + 1]``, and after how many blocks each token left."""
    head, depths, layers = model.head, exits.exit_depths(SIZES["layers"]), SIZES["layers"]
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    weight = model.functions[0].weight if isinstance(model.functions[0], nn.Module) else head.weight
    ranks = {d: d if exits.method == "calm" else 1 for d in (*depths, layers)}
    shares = {d: rank / sum(ranks.values()) for d, rank in ranks.items()}  # CALM's omega
    final, auxiliary, left = [], [], []
    for line in tokens:
        hidden, exited = weight[line[:-1]], [0] * length
        for block in model.blocks:
            before = hidden
            came = [t for t in range(length) if not exited[t]]
            hidden = slow_block(block, hidden, torch.tensor([not e for e in exited]))
            if block.depth not in depths:
                continue
            for t in range(length):
                normed = F.layer_norm(hidden[t], (16,), head.norm.weight.detach(), head.norm.bias.detach(), 1e-5)
                logits = normed @ head.weight.detach().T
                best = logits.softmax(dim=0).sort(descending=True).values
                threshold = min(max(0.9 * (exits.threshold or 0) + 0.1 * math.exp(-4 * t / length), 0), 1)
                if exits.method == "adpc":
                    leave = bool(best[0] > (exits.threshold or 0))
                elif exits.confidence == "state":
                    leave = bool(before[t] @ hidden[t] / (before[t].norm() * hidden[t].norm()) >= threshold)
                else:
                    leave = bool(best[0] - best[1] >= threshold)
                if t + 1 < length:
                    auxiliary.append(-shares[block.depth] * logits.log_softmax(dim=0)[line[t + 1]])
                if leave and t in came:
                    exited[t] = block.depth
        left.append(exited)
        logits = head.norm(hidden) @ head.weight.T
        final += [-row.log_softmax(dim=0)[label] for row, label in zip(logits, line[1:])]
    total = shares[layers] * sum(final) / (batch * length) + sum(auxiliary) / (batch * (length - 1))
    return torch.as_tensor(total), left


CONFIDENCES = {
    "softmax": {"method": "calm", "threshold": 0.03},
    "softmax, one exit": {"method": "calm", "threshold": 0.03, "depths": [2]},
    "state": {"method": "calm", "confidence": "state", "threshold": 0.99},
    "adpc": {"method": "adpc", "depths": [1, 2], "threshold": 0.2},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONFIDENCES)
def test_losses_gradients_and_exits_equal_the_slow_reference(name: str, tied: bool) -> None:
    exits = parse_section(EarlyExitConfig, CONFIDENCES[name], "early_exit")
    fast, slow = (Model(config(tied, **CONFIDENCES[name])).double() for _ in range(2))
    for model in (fast, slow):  # make states differ more than those of an untrained model
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(
                    0.1 * torch.randn(parameter.shape, generator=generator_for("shift", *parameter.shape))
                )
    expected, left = slow_loss(slow, exits, text())
    streams = list(fast.streams(text()[:, :-1]))
    actual = language_model_loss(streams[-1], text()[:, 1:])
    assert Stream.unpack(streams[-2]).exited.tolist() == left
    if (name, tied) != ("state", True):  # here states hardly change direction, so all tokens leave at once
        assert len({depth for row in left for depth in row}) > 1  # tokens leave at different depths
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-6, atol=1e-6)  # cross entropies are fp32
    actual.backward()
    expected.backward()
    for (key, ours), theirs in zip(fast.named_parameters(), slow.parameters(), strict=True):
        wanted = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, wanted, rtol=1e-5, atol=1e-6, msg=lambda m: f"{key}: {m}")  # noqa: B023
    for block in fast.blocks:
        ran = sum(not e or e >= block.depth for row in left for e in row)
        assert block.load_signal() == ran / 18  # the paper's t_i / t


# -- confidence --------------------------------------------------------------------------------------------


def test_confidences_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [1.0, 1e-9, 1e-9], [0.4, 0.4, 0.2]]).log()
    torch.testing.assert_close(softmax_margin(logits), torch.tensor([0.2, 1.0, 0.0]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(largest_probability(logits), torch.tensor([0.5, 1.0, 0.4]))
    before, after = (
        torch.tensor([[1.0, 0.0], [1.0, 0.0], [3.0, 4.0]]),
        torch.tensor([[2.0, 0.0], [0.0, 5.0], [4.0, 3.0]]),
    )
    torch.testing.assert_close(state_similarity(before, after), torch.tensor([1.0, 0.0, 0.96]))


def test_calms_threshold_decays_with_the_position() -> None:
    by_hand = [0.45 + 0.1 * math.exp(-4 * t / 8) for t in range(8)]
    torch.testing.assert_close(calm_threshold(0.5, torch.arange(8), 8), torch.tensor(by_hand))
    assert calm_threshold(1.5, torch.tensor([0]), 8).item() == 1.0
    assert calm_threshold(-0.5, torch.tensor([10**6]), 8).item() == 0.0


def test_adpc_is_over_0_998() -> None:
    adpc = EarlyExitConfig(method="adpc", depths=[1])
    confidence = torch.tensor([0.99, 0.998, 0.9981], dtype=torch.float64)
    assert confident(adpc, confidence, torch.arange(3), 3).tolist() == [False, False, True]


def test_calm_weighs_losses_by_depth_and_all_are_one_loss() -> None:
    calm, adpc = EarlyExitConfig(method="calm"), EarlyExitConfig(method="adpc", depths=[1, 2])
    assert calm.loss_weights(4) == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}  # i / sum
    assert EarlyExitConfig(method="calm", depths=[3, 5]).loss_weights(12) == {3: 0.15, 5: 0.25, 12: 0.6}
    assert adpc.loss_weights(4) == {1: 1 / 3, 2: 1 / 3, 4: 1 / 3}


def test_the_training_loss_is_an_average_over_exits() -> None:
    """Every prediction costs ln 256. At threshold 0 all tokens leave at the first of two exits."""
    for threshold in (1.0, 0.0):
        model = Model(config(method="adpc", depths=[1, 2], threshold=threshold))
        model.head.weight.data.zero_()
        outputs, labels = model(text()[:, :-1]), text()[:, 1:]
        reported, added = language_model_losses(outputs, labels)
        assert reported.item() == pytest.approx(math.log(256))
        assert added is not None and added.item() == pytest.approx(0.0, abs=1e-5)
        assert language_model_loss(outputs, labels).item() == pytest.approx(math.log(256))


# -- tokens that left --------------------------------------------------------------------------------------


def stream_with(exited: torch.Tensor) -> Stream:
    hidden = torch.randn(*exited.shape, 16, generator=generator_for("hidden")).requires_grad_()
    return Stream(hidden, torch.zeros(1, requires_grad=True), text(*exited.shape)[:, :-1], exited)


def test_a_token_that_left_keeps_its_state_and_is_still_attended_to() -> None:
    block = Model(config(method="calm")).blocks[1]
    exited = torch.zeros(1, 9, dtype=torch.long)
    exited[0, 3] = 1
    stream = stream_with(exited)
    out = Stream.unpack(block(stream.pack()))
    assert torch.equal(out.hidden[0, 3], stream.hidden[0, 3])
    (gradient,) = torch.autograd.grad(out.hidden[0, 5].square().sum(), stream.hidden)
    assert gradient[0, 3].abs().sum() > 0 and gradient[0, 6:].abs().sum() == 0


def exited_between(first: int, second: int) -> torch.Tensor:
    """Return ``exited`` of two texts of 9 tokens: so many of each remain, with tokens that left in between."""
    places = torch.tensor([0, 5, 7, 2, 8, 1, 4, 6, 3])
    return torch.stack([torch.ones(9, dtype=torch.long).index_fill(0, places[:n], 0) for n in (first, second)])


@pytest.mark.parametrize("dense_above", [0.0, 1.0])
def test_outputs_and_gradients_equal_the_slow_block(dense_above: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "DENSE_ABOVE", dense_above)
    for remain in ((9, 8), (9, 4), (7, 7), (6, 6), (3, 5), (1, 0)):
        exited, found = exited_between(*remain), []
        for slow in (False, True):
            block = Model(config(method="calm")).double().blocks[1]
            stream = stream_with(exited)
            hidden = stream.hidden.double()
            if slow:
                out = torch.stack([slow_block(block, *pair) for pair in zip(hidden, exited == 0)])
            else:
                out = Stream.unpack(block(replace(stream, hidden=hidden).pack())).hidden
            assert torch.equal(out[exited == 1], hidden[exited == 1]), remain
            out.square().sum().backward()
            found.append([out, stream.hidden.grad, *(parameter.grad for parameter in block.parameters())])
        for ours, theirs in zip(*found, strict=True):
            assert torch.isfinite(ours).all() and torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10), remain


def test_tokens_that_left_are_not_computed() -> None:
    model, width = Model(config(method="calm")), 16
    block, exit_after = model.blocks[1], model.functions[4]
    for remain in ((9, 8), (7, 6), (7, 0), (6, 6), (2, 6), (3, 1), (0, 0)):
        stream, rows = stream_with(exited_between(*remain)), sum(remain)
        dense = max(remain) > 0.7 * 9
        query_rows, key_rows = (18 if dense else rows), (18 if rows else 0)
        queries = 9 if dense else max(remain)  # rows of scores per text and head
        linears = 2 * width * width * (query_rows + 2 * key_rows + rows + 2 * SIZES["mlp_ratio"] * rows)
        scores_and_values = 2 * 2 * 2 * queries * 9 * width
        with sdpa_kernel(SDPBackend.MATH):  # the CPU's own is not counted
            with FlopCounterMode(display=False) as forward:
                out = block(stream.pack())
            with FlopCounterMode(display=False) as backward:
                out[0].sum().backward()
        assert forward.get_total_flops() == linears + scores_and_values, remain
        assert backward.get_total_flops() == 2 * (linears + scores_and_values), remain
        with FlopCounterMode(display=False) as at_exit:
            exit_after(stream.pack())
        assert at_exit.get_total_flops() == 2 * rows * width * 256, remain


@pytest.mark.parametrize("training", [True, False])
def test_a_block_without_tokens_has_zero_gradients(training: bool) -> None:
    for name, exits in CONFIDENCES.items():
        model = Model(config(**{**exits, "threshold": 0.0})).train(training)
        stream = stream_with(torch.full((2, 9), 1))
        states: Any = stream.pack()
        for layer in model.functions[model.functions.index(model.blocks[1]) : -1]:
            states = layer(states)
        out = Stream.unpack(states)
        assert torch.equal(out.hidden, stream.hidden) and out.auxiliary.item() == 0, name
        (out.hidden.sum() + out.auxiliary.sum()).backward()
        assert torch.equal(stream.hidden.grad, torch.ones_like(stream.hidden)), name
        for block in model.blocks[1:]:
            assert all(parameter.grad is not None and not parameter.grad.any() for parameter in block.parameters())
        assert [block.load_signal() for block in model.blocks[1:]] == [0.0 if training else 1.0] * 3, name


def test_a_single_token_has_no_label_and_no_exit_loss() -> None:
    model = Model(config(method="calm"))
    logits, auxiliary, _ = model(text(2, 1)[:, :1])
    assert logits.isfinite().all() and auxiliary.item() == 0


# -- training and evaluation -------------------------------------------------------------------------------


def test_every_use_of_the_head_reaches_all_its_parameters() -> None:
    model = Model(config(tied=True, method="calm"))
    tokens = text()[:, :-1]
    uses = [layer for layer in model.functions if not isinstance(layer, ExitBlock)]
    for use in uses:
        model.zero_grad()
        given: Any = tokens if use is uses[0] else stream_with(torch.zeros(2, 9, dtype=torch.long)).pack()
        made = use(given)
        made[0].sum().backward()
        assert all(parameter.grad is not None for parameter in model.head.parameters())


def test_exit_losses_train_neither_norm_nor_head() -> None:
    model = Model(config(method="calm"))
    _, auxiliary, _ = model(text()[:, :-1])
    auxiliary.sum().backward()
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in model.head.parameters())
    assert all(parameter.grad.any() for parameter in model.blocks[0].parameters())


@pytest.mark.parametrize("evaluation", [True, False])
def test_evaluation_has_no_exit_losses_and_exits_only_on_request(evaluation: bool) -> None:
    for name, exits in CONFIDENCES.items():
        model = Model(config(**{**exits, "evaluation": evaluation}))
        trained = list(model.streams(text()[:, :-1]))
        model.eval()
        evaluated = list(model.streams(text()[:, :-1]))
        assert trained[-1][1].item() > 0 and evaluated[-1][1].item() == 0, name
        exited = Stream.unpack(evaluated[-2]).exited
        if evaluation:
            assert torch.equal(exited, Stream.unpack(trained[-2]).exited) and exited.any(), name
            assert torch.equal(evaluated[-1][0], trained[-1][0]), name
        else:
            assert not exited.any(), name


def test_recomputing_gives_the_same_numbers() -> None:
    for name, exits in CONFIDENCES.items():
        plain, recomputed = (Model(config(**exits), recompute) for recompute in (False, True))
        losses = []
        for model in (plain, recomputed):
            loss = loss_of(model, text())
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1], name
        for ours, theirs in zip(plain.parameters(), recomputed.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad), name
        for ours, theirs in zip(plain.blocks, recomputed.blocks, strict=True):
            assert (ours.tokens_ran, ours.tokens) == (theirs.tokens_ran, theirs.tokens), name
        assert [block.tokens for block in plain.blocks] == [18] * 4, name


def test_weights_equal_the_model_without_exits() -> None:
    with_exits = model_layers(config(method="calm"))
    without = model_layers(parse_section(ModelConfig, SIZES, "model"))
    assert torch.equal(with_exits[1].build().mlp.expand.weight, without[1].build().mlp.expand.weight)
    assert torch.equal(with_exits[-1].build().weight, without[-1].build().weight)
    tied = model_layers(config(tied=True, method="calm"))
    assert torch.equal(tied[0].build().weight, without[0].build().weight)


def case_of(model: Model, said: list[str], start: float, total_steps: int) -> EarlyExit:
    exits = EarlyExitConfig(method="calm", start=start)
    engine = SimpleNamespace(module=model, model_changed=said.append)
    return EarlyExit(exits, engine, RunSizes(total_steps=total_steps, num_layers=7, blocks=range(1, 5)))


def signal_in(case: EarlyExit, model: Model, step: int) -> float:
    """Return the last block's load signal after a batch of two micro-batches."""
    case.before_batch(step)
    model.train()
    for _ in range(2):
        loss_of(model, text())
    return model.blocks[3].load_signal()


@pytest.mark.parametrize(("start", "steps", "first"), [(0.5, 4, 2), (0.99, 4, 3), (0.99, 1, 0), (0.0, 4, 0)])
def test_tokens_leave_from_start_on(start: float, steps: int, first: int) -> None:
    for name in ("softmax", "state", "adpc"):
        model, said = Model(config(**CONFIDENCES[name], start=start)), []
        case = case_of(model, said, start, steps)
        signals = [signal_in(case, model, step) for step in range(steps)]
        assert signals[:first] == [1.0] * first and all(signal < 1.0 for signal in signals[first:]), name
        assert len(said) == (start > 0), name


def test_exits_stay_on_in_a_resumed_run_with_more_steps() -> None:
    model, said = Model(config(method="calm", threshold=0.03, start=0.5)), []
    case = case_of(model, said, 0.5, 4)
    assert signal_in(case, model, 1) == 1.0
    not_yet = json.loads(json.dumps(case.state_dict()))
    assert signal_in(case, model, 2) < 1.0
    longer = case_of(model, said, 0.5, 100)
    longer.load_state_dict(json.loads(json.dumps(case.state_dict())))
    assert signal_in(longer, model, 3) < 1.0 and len(said) == 1
    shorter = case_of(model, said, 0.5, 100)
    shorter.load_state_dict(not_yet)
    assert signal_in(shorter, model, 2) == 1.0 and signal_in(shorter, model, 50) < 1.0 and len(said) == 2


def test_before_start_no_token_leaves_and_evaluation_computes_no_exit() -> None:
    for name, exits in CONFIDENCES.items():
        for training in (True, False):
            model = Model(config(**exits, start=0.5)).train(training)
            assert not Stream.unpack(list(model.streams(text()[:, :-1]))[-2]).exited.any(), name
    model = Model(config(method="calm", start=0.5)).eval()
    with FlopCounterMode(display=False) as counter:
        model.functions[2](stream_with(torch.zeros(2, 9, dtype=torch.long)).pack())
    assert counter.get_total_flops() == 0
