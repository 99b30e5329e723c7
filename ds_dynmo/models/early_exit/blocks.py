"""Blocks that run on the tokens that have not left the model.

A token that left keeps its hidden state to the end. Later blocks run queries, attention rows and the feed-forward
part on the tokens that are still in; keys and values they compute for all tokens, from the states that were kept.
While most tokens are still in, attention rows are computed for all of them: see :data:`DENSE_ABOVE`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ds_dynmo.models.batch_counts import CountsPerBatch, is_recomputing
from ds_dynmo.models.early_exit.config import EarlyExitConfig
from ds_dynmo.models.early_exit.criteria import confident, state_similarity
from ds_dynmo.models.gpt import Block, CausalSelfAttention, apply_rotary
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.stream import Activations, Stream

__all__ = ["ExitBlock", "RemainingAttention", "leave_after"]

# If more than this share of a sequence remains, compute all rows: causal SDPA, which skips the masked half, is faster
# than some rows with a mask. Measured: 192 and 1024 tokens, 128 and 256 wide.
DENSE_ABOVE = 0.7


class ExitBlock(CountsPerBatch, Block):
    """A block that runs on the tokens that are still in the model.

    Args:
        depth: its number, counted from 1: a token that leaves after it has that number in ``Stream.exited``.

    Attributes:
        leaving: whether tokens may leave (see "start").
        tokens_ran: tokens of the last training batch that ran in this block, on this rank.
        tokens: all tokens of that batch.
    """

    attention: RemainingAttention

    def __init__(self, config: GPTConfig, exits: EarlyExitConfig, depth: int) -> None:
        super().__init__(config, depth, attention=RemainingAttention)
        self.exits = exits
        self.depth = depth
        self.leaving = exits.start == 0
        self.decides = exits.confidence == "state" and depth in exits.exit_depths(config.layers)
        self.tokens_ran = self.tokens = 0

    def forward(self, activations: Activations) -> Activations:
        stream = Stream.unpack(activations)
        assert stream.exited is not None
        batch, sequence, width = stream.hidden.shape
        remain = stream.exited == 0
        index = remain.flatten().nonzero().squeeze(1)
        if self.training and not is_recomputing():
            self._count(len(index), batch * sequence)
        if len(index) == batch * sequence:
            hidden, _ = self.transform(stream.hidden, torch.arange(sequence, device=remain.device))
        else:
            hidden = self._transform_remaining(stream.hidden, remain, index)
        exited = stream.exited
        if self.decides and self.leaving and (self.training or self.exits.evaluation):
            before, after = (
                states.detach().reshape(-1, width).index_select(0, index) for states in (stream.hidden, hidden)
            )
            leave = confident(self.exits, state_similarity(before, after), index % sequence, sequence)
            exited = leave_after(exited, index, leave, self.depth)
        return replace(stream, hidden=hidden, exited=exited).pack()

    def _transform_remaining(self, hidden: torch.Tensor, remain: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, 1).index_select(0, index)
        if len(index) == 0:  # no query needs keys and values; gradients are zeros
            kept, remain = hidden[:, :0], remain[:, :0]
        else:
            kept = hidden
        rows = rows + self.attention.remaining(self.attention_norm(kept), remain, index)
        rows = rows + self.mlp(self.mlp_norm(rows))
        return hidden.flatten(0, 1).index_copy(0, index, rows).view_as(hidden)

    def _count(self, ran: int, tokens: int) -> None:
        if self.begins_batch():
            self.tokens_ran = self.tokens = 0
        self.tokens_ran += ran
        self.tokens += tokens

    def load_signal(self) -> float:
        """Return the paper's ``t_i / t``: tokens that ran in this block over all tokens of the last training batch."""
        return super().load_signal() * (self.tokens_ran / self.tokens if self.tokens else 1.0)


class RemainingAttention(CausalSelfAttention):
    """Causal attention, of all tokens or of some of them to all."""

    def remaining(self, hidden: torch.Tensor, remain: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Compute the attention's rows of some tokens.

        Args:
            hidden: normalised states of all tokens, ``[batch, sequence, hidden]``: keys and values are made of them.
            remain: which tokens ask, bool ``[batch, sequence]``.
            index: their numbers in ``[batch * sequence]``, int64 ``[tokens]``.

        Returns:
            ``[tokens, hidden]``.
        """
        sequence = hidden.shape[1]
        every = torch.arange(sequence, device=index.device)
        most = int(remain.sum(dim=1).max()) if sequence else 0
        if most > DENSE_ABOVE * sequence:
            mixed = self.mix(hidden, every).flatten(0, 1).index_select(0, index)
        else:
            mixed = self._mix_remaining(hidden, remain, index, most)
        output: torch.Tensor = self.output(mixed)
        return output

    def _mix_remaining(
        self, hidden: torch.Tensor, remain: torch.Tensor, index: torch.Tensor, most: int
    ) -> torch.Tensor:
        """Compute :meth:`mix` for the tokens ``index``, at most ``most`` of a sequence: ``[tokens, hidden]``."""
        batch, sequence, width = hidden.shape
        query_weight, key_value_weight = self.query_key_value.weight.split([width, 2 * width])
        rows = F.linear(hidden.flatten(0, 1).index_select(0, index), query_weight)
        key_value = F.linear(hidden, key_value_weight).view(batch, sequence, 2, self.heads, width // self.heads)
        key, value = key_value.permute(2, 0, 3, 1, 4)

        # Sequences keep different numbers of tokens: each is padded to the most, with rows that are dropped again.
        slots = remain.cumsum(dim=1) - 1 + most * torch.arange(batch, device=index.device).unsqueeze(1)
        slots = slots.flatten().index_select(0, index)
        query = rows.new_zeros(batch * most, width).index_copy(0, slots, rows)
        positions = index.new_zeros(batch * most).index_copy(0, slots, index % max(sequence, 1)).view(batch, 1, most)
        query = query.view(batch, most, self.heads, width // self.heads).transpose(1, 2)

        every = torch.arange(sequence, device=index.device)
        query, key = apply_rotary(query, positions, self.rope_base), apply_rotary(key, every, self.rope_base)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=positions.unsqueeze(-1) >= every)
        return mixed.transpose(1, 2).reshape(batch * most, width).index_select(0, slots)


def leave_after(exited: torch.Tensor, index: torch.Tensor, leave: torch.Tensor, depth: int) -> torch.Tensor:
    """Let tokens ``index`` leave after ``depth`` blocks where ``leave``, bool ``[tokens]``: the new ``exited``."""
    flat = exited.flatten()
    return flat.index_copy(0, index, flat.index_select(0, index).masked_fill(leave, depth)).view_as(exited)
