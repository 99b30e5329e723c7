"""A batch makes the host wait for the device no more often than stock DeepSpeed does, and ds_dynmo hardly ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_dynmo.config import parse_section
from ds_dynmo.models import ModelConfig, model_layers
from ds_dynmo.models.sparse_attention.kernels import bucket_pairs
from tests.emulated.synchronisations import BATCHES, Waits, by_ds_dynmo, counted, waits_for_magnitudes, waits_under
from tests.support.case_runs import SIZES
from tests.support.configs import Case
from tests.support.harness import run


def block_of(**case: Any) -> Any:
    """Build the first block of a small model."""
    return model_layers(parse_section(ModelConfig, {**SIZES, "case": case}, "model"))[1].build()


def hidden_of(seed: int) -> torch.Tensor:
    return torch.randn(2, SIZES["sequence_length"], SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("precision", "dropout"),
    [
        *(("fp32", True), ("bf16 zero1", False), ("fp16 zero1", False)),
        *(pytest.param(precision, False, marks=pytest.mark.nightly) for precision in ("fp32", "bf16")),
    ],
)
def test_a_batch_waits_no_more_often_than_deepspeeds(precision: str, dropout: bool) -> None:
    case = Case(precision=precision, micro_batches=4, dropout=dropout)
    blocks = [{"interval": 1000, "schedule": {"kind": kind}} for kind in ("1f1b", "zero_bubble")]
    for stock, *ours in run(2, waits_under, case, blocks):
        for waits in ours:
            assert not by_ds_dynmo(waits)
            assert BATCHES <= waits.total() <= stock.total()


def test_gradients_are_measured_with_one_wait_per_step() -> None:
    for waits in run(2, waits_for_magnitudes, Case()):
        assert by_ds_dynmo(waits) == ["gradients.py"] * BATCHES


@pytest.mark.parametrize("routing", ["aux_loss", "bias"])  # "sbase" waits to know whether its scaling has ended
def test_a_layer_of_experts_waits_for_their_counts_alone(routing: str) -> None:
    """By which the host divides the rows. In its backward pass it does not wait."""
    layer, waits = block_of(kind="moe", routing=routing).mlp.to("emulated"), Waits()
    for micro_batch in range(3):
        hidden = hidden_of(micro_batch).to("emulated").requires_grad_()
        with counted(waits):
            made = layer(hidden)
            sum(part.sum() for part in (made if isinstance(made, tuple) else [made])).backward()
    assert by_ds_dynmo(waits) == ["layer.py"] * 3 and waits.total() == 3


def test_pairs_of_sparse_attention_are_counted_without_a_wait() -> None:
    buckets, waits = torch.randint(4, (2, 3, 16)), Waits()
    on_device = buckets.to("emulated")
    with counted(waits):
        found = bucket_pairs(on_device, 4)
    assert not waits and found.item() == bucket_pairs(buckets, 4).item()


def test_mixture_of_depths_counts_tokens_without_a_wait() -> None:
    here, there = (block_of(kind="mod", capacity=0.25, every=1).to(device) for device in ("cpu", "emulated"))
    positions, waits, asked = torch.arange(SIZES["sequence_length"]), Waits(), Waits()
    for micro_batch in range(3):
        hidden = hidden_of(micro_batch)
        here.transform(hidden, positions)
        on_device = hidden.to("emulated"), positions.to("emulated")
        with counted(waits):
            there.transform(*on_device)
    assert not waits
    with counted(asked):
        assert there.load_signal() == here.load_signal()
    assert asked.total() == 1
