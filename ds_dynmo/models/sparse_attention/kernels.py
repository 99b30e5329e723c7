"""Exact attention over a sparse causal pattern, at a cost that falls with the number of pairs in it.

Two patterns (Pagliardini et al., "Faster causal attention over large sequences through sparse flash attention"): tokens
in hash buckets, and kept queries over kept keys. In both, a token without a pair gets zeros.
Tokens stand in the order of their positions; query, key and value are ``[batch, heads, sequence, width]``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ds_dynmo.models.capabilities import can_compute
from ds_dynmo.models.host_numbers import counts_of

__all__ = ["bucket_attention", "bucket_pairs", "kept_attention", "kept_pairs"]

QUERY_TILE = 128  # queries over one range of kept keys; 64 measured no faster
FLEX_TILE = 128  # FlexAttention's blocks, of queries and of keys

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# -- hash-sparse -------------------------------------------------------------------------------------------


def bucket_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, buckets: torch.Tensor, num_buckets: int
) -> torch.Tensor:
    """Let every token attend to the earlier tokens of its bucket.

    Args:
        buckets: int64 ``[batch, heads, sequence]``, each in ``range(num_buckets)``.

    Returns:
        ``[batch, heads, sequence, width]``.
    """
    order = buckets.argsort(dim=-1, stable=True)  # by bucket, then by position
    if _flex_takes(query):
        return _bucket_attention_flex(query, key, value, buckets, order, flex=_compiled_flex())
    return _bucket_attention_batched(query, key, value, buckets, order, num_buckets)


def bucket_pairs(buckets: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Count the (query, key) pairs of :func:`bucket_attention` over all heads and sequences, int64 ``[]``."""
    sizes = _bucket_sizes(buckets, num_buckets)
    return (sizes * (sizes - 1) // 2).sum()


def _bucket_sizes(buckets: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Count the tokens in each bucket of each head of each sequence, one after the other."""
    rows = buckets.flatten(0, 1)
    first = torch.arange(rows.shape[0], device=rows.device) * num_buckets
    return counts_of(rows + first[:, None], rows.shape[0] * num_buckets)


def _bucket_attention_batched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    buckets: torch.Tensor,
    order: torch.Tensor,
    num_buckets: int,
) -> torch.Tensor:
    """Compute one causal attention per bucket, those of about the same size in one batch.

    Its queries are the tokens but the first, its keys those but the last, so that the causal mask lets a token see
    earlier ones alone. A bucket is padded at its end with copies of its last pair. The mask hides them from the others,
    and their outputs are dropped.
    """
    batch, heads, sequence, width = query.shape
    first = torch.arange(batch * heads, device=order.device) * sequence
    tokens = (order.flatten(0, 1) + first[:, None]).flatten()  # as numbers of rows in [batch * heads * sequence]
    sizes = _bucket_sizes(buckets, num_buckets)
    starts, pairs = sizes.cumsum(0) - sizes, (sizes - 1).clamp(min=0)
    rows = [states.reshape(-1, width) for states in (query, key, value)]
    zeros = rows[2][:0].sum(dim=0, keepdim=True)  # of no rows: zeros that have a gradient, as the others have
    found, sources = [zeros], []
    for padded, members in _size_classes(pairs):
        within = torch.arange(padded, device=order.device)
        earlier = starts[members, None] + within.minimum(pairs[members, None] - 1)
        seen, seeing = tokens[torch.stack((earlier, earlier + 1))]
        queries, keys, values = (
            row.index_select(0, taken.flatten()).view(-1, 1, padded, width)
            for row, taken in zip(rows, (seeing, seen, seen), strict=True)
        )
        found.append(F.scaled_dot_product_attention(queries, keys, values, is_causal=True).reshape(-1, width))
        sources.append(torch.where(within < pairs[members, None], seeing, -1).flatten())
    source = torch.cat([tokens.new_empty(0), *sources])
    real = (source >= 0).nonzero().squeeze(1)
    place = torch.zeros_like(tokens)
    place[source[real]] = real + 1
    return torch.cat(found).index_select(0, place).view(batch, heads, sequence, width)


def _size_classes(sizes: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Iterate over (padded size, numbers of the buckets that get it); buckets of size 0 are left out.

    Sizes are rounded up to one of four steps per power of two, 16 at least: that costs at most a quarter of the
    places, and there are few different shapes to run one after the other.
    """
    step = (2 ** (sizes.clamp(min=1).log2().floor() - 2)).long().clamp(min=16)
    padded = (sizes + step - 1) // step * step
    for size in padded.unique().tolist():
        if size:
            yield size, (padded == size).nonzero().squeeze(1)


# -- QK-sparse ---------------------------------------------------------------------------------------------


def kept_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keep_query: torch.Tensor,
    keep_key: torch.Tensor,
) -> torch.Tensor:
    """Let every kept query attend to the kept keys of earlier tokens and to its own, if that is kept.

    Args:
        keep_query, keep_key: bool ``[batch, heads, sequence]``.

    Returns:
        ``[batch, heads, sequence, width]``.
    """
    width = query.shape[-1]
    num_queries, num_keys = (max(1, int(keep.sum(-1).max())) for keep in (keep_query, keep_key))
    on_flex = _flex_takes(query)
    if on_flex:  # few different shapes to compile for
        num_queries, num_keys = (math.ceil(count / FLEX_TILE) * FLEX_TILE for count in (num_queries, num_keys))
    # Kept ones first, in their order. Heads that keep fewer are filled up with dropped ones.
    queries = keep_query.argsort(dim=-1, descending=True, stable=True)[..., :num_queries]
    keys = keep_key.argsort(dim=-1, descending=True, stable=True)[..., :num_keys]
    seen = keep_key.cumsum(-1).masked_fill(~keep_query, 0)  # so many of ``keys``, by each token
    keys_up_to = seen.gather(-1, queries)

    def rows(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return states.gather(2, tokens.unsqueeze(-1).expand(-1, -1, -1, width))

    kept = rows(query, queries), rows(key, keys), rows(value, keys)
    mixed = _kept_flex(*kept, keys_up_to, flex=_compiled_flex()) if on_flex else _kept_tiles(*kept, keys_up_to)
    return mixed.new_zeros(value.shape).scatter(2, queries.unsqueeze(-1).expand(-1, -1, -1, width), mixed)


def kept_pairs(keep_query: torch.Tensor, keep_key: torch.Tensor) -> torch.Tensor:
    """Count the (query, key) pairs of :func:`kept_attention` over all heads and sequences, int64 ``[]``."""
    return keep_key.cumsum(-1).masked_fill(~keep_query, 0).sum()


def _kept_tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys_up_to: torch.Tensor) -> torch.Tensor:
    """Compute tiles of queries, each over the keys that its queries see.

    Args:
        query: ``[batch, heads, queries, width]``, compacted; key and value likewise.
        keys_up_to: int64 ``[batch, heads, queries]``: the query sees so many of the first keys.
    """
    visible = torch.stack([tile.max() for tile in keys_up_to.split(QUERY_TILE, dim=2)]).clamp(min=1).tolist()
    found = []
    for tile, num_keys in enumerate(visible):
        part = slice(tile * QUERY_TILE, (tile + 1) * QUERY_TILE)
        seen = keys_up_to[:, :, part].unsqueeze(-1)
        mask = torch.arange(num_keys, device=key.device) < seen.clamp(min=1)  # a row of nothing would be NaN
        mixed = F.scaled_dot_product_attention(
            query[:, :, part], key[:, :, :num_keys], value[:, :, :num_keys], attn_mask=mask
        )
        found.append(mixed.masked_fill(seen == 0, 0.0))
    return torch.cat(found, dim=2)


# -- FlexAttention -----------------------------------------------------------------------------------------


def _flex_takes(query: torch.Tensor) -> bool:
    """Return whether FlexAttention can train with this; it is tried for heads of a power of two, 16 or more wide."""
    width = query.shape[-1]
    return width >= 16 and width & (width - 1) == 0 and _has_flex(width, query.dtype, query.device)


@cache
def _has_flex(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Try both patterns, forward and backward. On a CPU torch has no backward pass."""
    rows = (2, 2, 2 * FLEX_TILE)

    def attempt() -> None:
        query, key, value = (torch.ones(*rows, width, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flex_attention(query, key, value)  # not compiled, it refuses at once a device that it is not for
        buckets = torch.zeros(rows, dtype=torch.int64, device=device)
        found = [
            _bucket_attention_flex(query, key, value, buckets, buckets.argsort(dim=-1), flex=_compiled_flex()),
            _kept_flex(query, key, value, buckets + FLEX_TILE, flex=_compiled_flex()),
        ]
        torch.autograd.grad(torch.stack(found).sum(), (query, key, value))

    return can_compute(attempt)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _block_mask(first: torch.Tensor, count: torch.Tensor, mask: MaskMod, lengths: tuple[int, int]) -> BlockMask:
    """Let query tile ``t`` compute key tiles ``first[t]`` to ``first[t] + count[t] - 1``, and ``mask`` within them.

    Made from the tiles alone: ``create_block_mask`` would look at every pair.

    Args:
        first, count: int ``[batch, heads, query tiles]``.
        lengths: number of queries and of keys.
    """
    num_tiles = math.ceil(lengths[1] / FLEX_TILE)
    tiles = (first.unsqueeze(-1) + torch.arange(num_tiles, device=first.device)) % num_tiles
    return BlockMask.from_kv_blocks(count.int(), tiles.int(), BLOCK_SIZE=FLEX_TILE, mask_mod=mask, seq_lengths=lengths)


def _bucket_attention_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    buckets: torch.Tensor,
    order: torch.Tensor,
    *,
    flex: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Sort tokens by bucket; a tile of queries computes the key tiles from where its first bucket begins.

    The forward pass has been compared with :func:`_bucket_attention_batched` on a CPU. The
    backward pass has run nowhere yet.
    """
    index = order.unsqueeze(-1).expand_as(query)
    mixed = flex(
        *(states.gather(2, index) for states in (query, key, value)),
        block_mask=_bucket_block_mask(buckets.gather(-1, order)),
    )
    return torch.empty_like(mixed).scatter(2, index, mixed)


def _bucket_block_mask(buckets: torch.Tensor) -> BlockMask:
    """Mask pairs of different buckets; ``buckets``: ``[batch, heads, sequence]``, ascending."""
    sequence = buckets.shape[-1]
    begin = torch.searchsorted(buckets, buckets[..., ::FLEX_TILE].contiguous())  # of each tile's first bucket
    first = begin // FLEX_TILE
    last = torch.arange(first.shape[-1], device=buckets.device)

    def mask(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key < query) & (buckets[batch, head, key] == buckets[batch, head, query])

    return _block_mask(first, last - first + 1, mask, (sequence, sequence))


def _kept_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys_up_to: torch.Tensor,
    *,
    flex: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Compute what :func:`_kept_tiles` does.

    The forward pass has been compared with :func:`_kept_tiles` on a CPU. The backward pass has run nowhere yet.
    """
    return flex(query, key, value, block_mask=_kept_block_mask(keys_up_to, key.shape[2]))


def _kept_block_mask(keys_up_to: torch.Tensor, num_keys: int) -> BlockMask:
    num_queries = keys_up_to.shape[-1]
    tiles = F.pad(keys_up_to, (0, -num_queries % FLEX_TILE)).unflatten(-1, (-1, FLEX_TILE))
    count = (tiles.amax(-1) + FLEX_TILE - 1) // FLEX_TILE

    def mask(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key < keys_up_to[batch, head, query]

    return _block_mask(torch.zeros_like(count), count, mask, (num_queries, num_keys))
