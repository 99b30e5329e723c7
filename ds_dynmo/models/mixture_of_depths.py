"""Mixture of Depths: some blocks take only the tokens that their router gives the largest weights (paper, section 2).

Raposo et al., "Mixture-of-Depths: Dynamically allocating compute in transformer-based language models" (2024). Choosing
the top-k of a whole sequence looks at later tokens. That is how it trains; for causal use a small predictor learns
which tokens are among them from each token alone.

With one capacity the load of a layer never changes: that is the static form, and the default. Capacities that differ
between layers, follow a schedule, or come from a threshold of the router's weights make it differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from torch import nn

from ds_dynmo.models.batch_counts import CountsPerBatch
from ds_dynmo.models.case import DynamicCase
from ds_dynmo.models.gpt import Block
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.local_layers import local_layers
from ds_dynmo.models.recomputation import is_recomputing
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.transformer import INIT_STD, init_linear

__all__ = ["MixtureOfDepths", "MixtureOfDepthsBlock", "MixtureOfDepthsConfig", "Predictor", "top_tokens"]

OF_THE_PREDICTOR = ("predictor_size", "predictor_coefficient")
OF_THE_THRESHOLD = ("min_capacity", "max_capacity")
CAPACITY = 0.125  # Raposo et al.


class MixtureOfDepthsConfig(BaseModel):
    """The "mod" block. The defaults are the paper's best: an eighth of the tokens in every second block."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    capacity: float | tuple[float, ...] = Field(
        default=CAPACITY,
        description="tokens that a routed block takes, as a fraction of a sequence, at least 1; a list has one for "
        "each routed block",
    )
    schedule: tuple[tuple[float, float], ...] | None = Field(
        default=None,
        description="[[fraction, capacity], ...]: from that fraction of the steps on, routed blocks have that "
        "capacity, before the first that of the key capacity",
    )
    threshold: float | None = Field(
        default=None,
        description="a routed block takes the tokens with a larger router weight, from min_capacity to max_capacity; "
        "null: as many as capacity says",
    )
    min_capacity: float = Field(default=0.03125, gt=0, le=1, description="with threshold: takes at least so many")
    max_capacity: float = Field(default=0.5, gt=0, le=1, description="with threshold: takes at most so many")
    every: int = Field(default=2, ge=1, description="every so many blocks one is routed, the last of them; 1: all are")
    sampling: Literal["topk", "predictor", "threshold"] = Field(
        default="predictor",
        description="who chooses at evaluation: the router as in training, the predictor, or the threshold without its "
        "bounds; the choice of the last two does not depend on later tokens",
    )
    predictor_size: int = Field(default=32, ge=1, description="width of the predictor's hidden layer")
    predictor_coefficient: float = Field(default=0.01, gt=0, description="of the predictor's loss in the total")

    @field_validator("capacity", mode="before")
    @classmethod
    def _one_or_a_list(cls, capacity: Any) -> float | tuple[float, ...]:
        if not isinstance(capacity, list | tuple):
            return _checked(capacity)
        if not capacity:
            raise ValueError("should be a capacity, or a list with one for each routed block")
        return tuple(_checked(each) for each in capacity)

    @field_validator("schedule", mode="before")
    @classmethod
    def _pairs(cls, schedule: Any, info: ValidationInfo) -> tuple[tuple[float, float], ...] | None:
        if schedule is None:
            return None
        if not isinstance(schedule, list | tuple) or not schedule:
            raise ValueError("should be null or a list of [fraction of the steps, capacity], one or more")
        for entry in schedule:
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                raise ValueError(f"should hold pairs [fraction of the steps, capacity], not {entry}")
            if type(entry[0]) not in (int, float) or not 0 <= entry[0] < 1:
                raise ValueError(f"should have fractions of the steps in [0, 1), not {entry[0]}")
            _checked(entry[1])
        fractions = [fraction for fraction, _ in schedule]
        if any(later <= earlier for earlier, later in zip(fractions, fractions[1:])):
            raise ValueError(f"should have increasing fractions of the steps, not {fractions}")
        if isinstance(info.data.get("capacity"), tuple):
            raise ValueError("cannot be combined with a list of capacities: it gives one to all routed blocks")
        return tuple((float(fraction), float(capacity)) for fraction, capacity in schedule)

    @field_validator("threshold")
    @classmethod
    def _instead_of_capacity(cls, threshold: float | None, info: ValidationInfo) -> float | None:
        if threshold is not None and (info.data.get("capacity") != CAPACITY or info.data.get("schedule") is not None):
            raise ValueError("cannot be combined with capacity or schedule: min_capacity and max_capacity bound it")
        return threshold

    @field_validator(*OF_THE_THRESHOLD)
    @classmethod
    def _of_the_threshold(cls, bound: float, info: ValidationInfo) -> float:
        assert info.field_name is not None
        if info.data.get("threshold") is None and bound != cls.model_fields[info.field_name].default:
            raise ValueError("is used with threshold only, this is null")
        least = info.data.get("min_capacity")
        if info.field_name == "max_capacity" and least is not None and bound < least:
            raise ValueError(f"should be at least min_capacity, {least}")
        return bound

    @field_validator(*OF_THE_PREDICTOR)
    @classmethod
    def _of_this_sampling(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        sampling = info.data.get("sampling", "predictor")
        if sampling != "predictor" and value != cls.model_fields[info.field_name].default:
            raise ValueError(f'is used by sampling "predictor" only, this is "{sampling}"')
        return value

    @field_validator("sampling")
    @classmethod
    def _has_a_threshold(cls, sampling: str, info: ValidationInfo) -> str:
        if sampling == "threshold" and "threshold" in info.data and info.data["threshold"] is None:
            raise ValueError("needs a threshold, this is null")
        return sampling

    def routes(self, block: int) -> bool:
        """Is block number ``block``, counted from 1, a routed one?

        >>> [block for block in range(1, 7) if MixtureOfDepthsConfig(every=2).routes(block)]
        [2, 4, 6]
        """
        return block % self.every == 0

    def capacity_of(self, block: int) -> float:
        """Give the capacity of routed block number ``block`` at first; with a threshold, the most it takes."""
        if self.threshold is not None:
            return self.max_capacity
        return self.capacity[block // self.every - 1] if isinstance(self.capacity, tuple) else self.capacity

    def scheduled_capacity(self, step: int, total_steps: int) -> float:
        """Give the schedule's capacity in step ``step``, counted from 0. All have begun by the last step.

        >>> config = MixtureOfDepthsConfig(capacity=1.0, schedule=[[0.5, 0.25], [0.99, 0.125]])
        >>> [config.scheduled_capacity(step, 4) for step in range(4)]
        [1.0, 1.0, 0.25, 0.125]
        """
        assert self.schedule is not None and isinstance(self.capacity, float)
        last = total_steps - 1
        due = [capacity for fraction, capacity in self.schedule if step >= min(round(fraction * total_steps), last)]
        return due[-1] if due else self.capacity


def tokens_of(capacity: float, sequence: int) -> int:
    """Count the tokens that a block of this capacity takes of a sequence: at least 1, halves rounded to even.

    >>> tokens_of(0.125, 256)
    32
    """
    return max(1, round(capacity * sequence))


def _checked(capacity: Any) -> float:
    if type(capacity) not in (int, float) or not 0 < capacity <= 1:
        raise ValueError(f"should have capacities greater than 0 and less than or equal to 1, not {capacity}")
    return float(capacity)


class MixtureOfDepthsBlock(CountsPerBatch, Block):
    """A block for some of the tokens: ``x + r f(x)`` on those, ``x`` on all others (Raposo et al., equation 1).

    ``f(x)`` is what the block adds to ``x``, so that the residual is there once; the factor ``r``, the router's
    weight, gives the router its gradient. The tokens that are taken attend to each other alone, in their order and at
    their positions.

    Args:
        config, layer, attention, mlp: as in :class:`~ds_dynmo.models.gpt.Block`.
        depths: the "mod" block.

    Attributes:
        sampling: as in :class:`MixtureOfDepthsConfig`.
        capacity: now; with a threshold, the most it takes.
        tokens_taken: tokens of the last training batch that it took, on this rank.
        tokens: all tokens that were counted there.
    """

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        depths: MixtureOfDepthsConfig,
        attention: Callable[[Any, torch.Generator], nn.Module] | None = None,
        mlp: Callable[[Any, torch.Generator], nn.Module] | None = None,
    ) -> None:
        super().__init__(config, layer, attention, mlp)
        generator = generator_for("mixture of depths", config.seed, layer)
        self.depths = depths
        self.sampling = depths.sampling
        self.router = init_linear(config.hidden_size, 1, INIT_STD, generator)
        self.predictor = Predictor(config, depths, generator) if depths.sampling == "predictor" else None
        self.capacity = depths.capacity_of(layer)
        self.sequence_length = config.sequence_length
        self.tokens_taken: torch.Tensor | None = None
        self.tokens = 0

    def load_signal(self) -> float:
        """The paper's ``r_i t_i`` (section 2, mixture of depths) over all tokens: the share that the block takes.

        As it was in the last training batch; before the first, as it will be at the configured length. Times what
        other cases leave of the block. The paper counts attention as linear in its tokens like the rest.
        """
        expected = tokens_of(self.capacity, self.sequence_length) / self.sequence_length
        return super().load_signal() * (expected if self.tokens_taken is None else int(self.tokens_taken) / self.tokens)

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the block to tokens that it chooses; give its auxiliary loss too, with the predictor's, or None.

        Args:
            hidden: ``[batch, sequence, hidden]``, tokens in the order of their positions.
            positions: int64 ``[sequence]`` or ``[batch, sequence]``.
        """
        with torch.autocast(hidden.device.type, enabled=False):  # in bf16 many would be the same
            weights = F.linear(hidden.float(), self.router.weight.float()).squeeze(-1)
        positions = positions.expand(hidden.shape[:2])
        if not self.training and self.sampling != "topk":
            return self._on_members(hidden, weights, positions, self._members_causally(hidden, weights))[0], None
        if self.depths.threshold is None:
            chosen = top_tokens(weights, tokens_of(self.capacity, hidden.shape[1]))
            members = torch.zeros_like(weights, dtype=torch.bool).scatter(1, chosen, True)
            changed, auxiliary = self._on_tokens(hidden, weights, positions, chosen)
        else:
            members = self._members_by_threshold(weights, self.depths.threshold)
            changed, auxiliary = self._on_members(hidden, weights, positions, members)
        if not self.training:
            return changed, auxiliary
        if not is_recomputing():
            self._count(members)
        if self.predictor is not None and self.router.weight.requires_grad:  # a frozen block has nothing to learn
            loss = self.depths.predictor_coefficient * self.predictor.loss(hidden, members)
            auxiliary = loss if auxiliary is None else auxiliary + loss
        return changed, auxiliary

    def _members_by_threshold(self, weights: torch.Tensor, threshold: float) -> torch.Tensor:
        """Choose the tokens with the largest weights: as many as are above the threshold, within the bounds."""
        sequence = weights.shape[1]
        least, most = (tokens_of(bound, sequence) for bound in (self.depths.min_capacity, self.depths.max_capacity))
        counts = (weights > threshold).sum(dim=1, keepdim=True).clamp(least, most)
        order = top_order(weights)
        ranks = torch.empty_like(order).scatter(1, order, torch.arange(sequence, device=order.device).expand_as(order))
        return ranks < counts

    def _members_causally(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Choose each token without those after it."""
        if self.sampling == "threshold":
            assert self.depths.threshold is not None, "its sampling needs it"
            return weights > self.depths.threshold
        assert self.predictor is not None, "its sampling needs it"
        taken: torch.Tensor = self.predictor(hidden) > 0
        return taken

    def _count(self, members: torch.Tensor) -> None:
        taken = members.sum()  # stays on the accelerator until somebody asks
        if self.begins_batch() or self.tokens_taken is None:
            self.tokens_taken, self.tokens = torch.zeros_like(taken), 0
        self.tokens_taken = self.tokens_taken + taken
        self.tokens += members.numel()

    def _on_tokens(
        self, hidden: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the block at ``chosen``, int64 ``[batch, k]``, increasing in every sequence."""
        batch, sequence, width = hidden.shape
        flat = (chosen + sequence * torch.arange(batch, device=chosen.device).unsqueeze(1)).flatten()
        taken = hidden.reshape(-1, width).index_select(0, flat).view(batch, -1, width)
        made, auxiliary = super().transform(taken, positions.gather(1, chosen))
        change = (weights.gather(1, chosen).unsqueeze(-1) * (made - taken)).to(hidden.dtype)
        # No token comes twice, so that the order of additions does not matter.
        return hidden.reshape(-1, width).index_add(0, flat, change.view(-1, width)).view_as(hidden), auxiliary

    def _on_members(
        self, hidden: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the block at ``members``, bool ``[batch, sequence]``, one sequence at a time.

        The auxiliary loss is the mean of the sequences', None if no sequence has any.
        """
        parts, losses = [], []
        for number, taken in enumerate(members):
            one = slice(number, number + 1)
            chosen = taken.nonzero().view(1, -1)
            part = hidden[one]
            if chosen.numel():
                part, loss = self._on_tokens(part, weights[one], positions[one], chosen)
                losses += [] if loss is None else [loss]
            parts.append(part)
        return torch.cat(parts), torch.stack(losses).sum(dim=0) / len(parts) if losses else None


class Predictor(nn.Module):
    """Predicts from a token alone whether its block's router will have it among the largest of the sequence.

    Raposo et al., section 3.5, the second of the two ways. Nothing before it gets a gradient.
    """

    def __init__(self, config: GPTConfig, depths: MixtureOfDepthsConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.expand = init_linear(config.hidden_size, depths.predictor_size, INIT_STD, generator)
        self.decide = init_linear(depths.predictor_size, 1, INIT_STD, generator)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence, hidden]`` to logits, fp32 ``[batch, sequence]``: above 0, the token is taken."""
        return (self.decide(F.gelu(self.expand(hidden.detach()))) + self.bias).squeeze(-1).float()

    def loss(self, hidden: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        """Compute the mean binary cross entropy, fp32 ``[1]``, of being in ``members``, bool ``[batch, sequence]``."""
        return F.binary_cross_entropy_with_logits(self(hidden), members.float()).view(1)


def top_tokens(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Find where the ``count`` largest weights of each sequence are, in increasing order; of equal ones the first.

    Args:
        weights: ``[batch, sequence]``.

    Returns:
        int64 ``[batch, count]``.

    >>> top_tokens(torch.tensor([[0.5, 0.9, 0.5, 0.1, 0.5]]), 3)
    tensor([[0, 1, 2]])
    """
    return top_order(weights)[:, :count].sort(dim=1).values


def top_order(weights: torch.Tensor) -> torch.Tensor:
    """Order each sequence by weight, the largest first; of equal ones the first."""
    return weights.detach().sort(dim=1, descending=True, stable=True).indices  # topk takes any of equal ones


class MixtureOfDepths(DynamicCase):
    """Gives routed blocks the schedule's capacity, and tells the engine when that changes. It has no state."""

    name = "mod"

    def __init__(self, config: MixtureOfDepthsConfig, engine: Any, *, total_steps: int) -> None:
        super().__init__(engine)
        self._config = config
        self._total_steps = total_steps

    def before_batch(self, step: int) -> None:
        """Set the capacity of this stage's routed blocks."""
        capacity = self._config.scheduled_capacity(step, self._total_steps)
        for _, layer in local_layers(self.engine.module):
            if isinstance(layer, MixtureOfDepthsBlock):
                layer.capacity = capacity
        if capacity != self._config.scheduled_capacity(step - 1, self._total_steps):
            self.engine.model_changed(f"mixture of depths: capacity {capacity:g}")
