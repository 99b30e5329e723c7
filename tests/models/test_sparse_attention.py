from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from ds_dynmo.models import ModelConfig, model_layers
from ds_dynmo.models.gpt import apply_rotary
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.sparse_attention import kernels
from ds_dynmo.models.sparse_attention.attention import (
    HashSparseAttention,
    SparseAttention,
    hash_buckets,
    unit_keys,
)
from ds_dynmo.models.sparse_attention.kernels import bucket_attention, bucket_pairs, kept_attention, kept_pairs
from tests.support.attention_patterns import (
    BUCKETS,
    MOST_BUCKETS,
    bucket_assignments,
    bucket_pattern,
    dense,
    keeps,
    kept_pattern,
    states,
)

HASH = {"pattern": "hash", "buckets": 8}
QK = {"pattern": "qk", "keep_queries": 0.6, "keep_keys": 0.3}
either = pytest.mark.parametrize("sparse", [HASH, QK], ids=["hash", "qk"])


def check_outputs_and_gradients(
    made: torch.Tensor, expected: torch.Tensor, given: list[torch.Tensor], name: str = ""
) -> None:
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5, msg=lambda said: f"{name}: {said}")
    weights = torch.randn(made.shape, generator=generator_for("weights"))
    found, wanted = (
        torch.autograd.grad((each * weights).sum(), given, materialize_grads=True) for each in (made, expected)
    )
    for mine, reference in zip(found, wanted, strict=True):
        assert torch.isfinite(mine).all(), name
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5, msg=lambda said: f"{name}: {said}")


# -- patterns ----------------------------------------------------------------------------------------------


def test_bucket_attention_equals_dense_attention_with_a_mask() -> None:
    for name, buckets in bucket_assignments().items():
        given, attends = states(), bucket_pattern(buckets)
        made = bucket_attention(*given, buckets, MOST_BUCKETS)
        check_outputs_and_gradients(made, dense(*given, attends), given, name)
        assert bucket_pairs(buckets, MOST_BUCKETS) == attends.sum(), name


def test_kept_attention_equals_dense_attention_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "QUERY_TILE", 32)
    for name, kept in keeps().items():
        given, attends = states(), kept_pattern(*kept)
        check_outputs_and_gradients(kept_attention(*given, *kept), dense(*given, attends), given, name)
        assert kept_pairs(*kept) == attends.sum(), name


def test_a_token_without_a_pair_outputs_zeros() -> None:
    """Of a bucket its first token; a dropped query, and a kept one before the first kept key."""
    buckets = torch.tensor([0, 0, 1, 0, 1, 2]).expand(2, 3, 6)
    keep_query = torch.tensor([True, True, False, True, True, False]).expand(2, 3, 6)
    keep_key = torch.tensor([False, True, True, False, False, True]).expand(2, 3, 6)
    query, key, value = (each[:, :, :6] for each in states())
    hashed = bucket_attention(query, key, value, buckets, 3)
    kept = kept_attention(query, key, value, keep_query, keep_key)
    assert [(made != 0).any(-1)[1, 2].tolist() for made in (hashed, kept)] == [
        [False, True, False, True, True, False],
        [False, True, False, True, True, False],
    ]


def test_large_scores_give_finite_outputs() -> None:
    query, key, value = (1e4 * each.detach() for each in states())
    for made in (
        bucket_attention(query, key, value, bucket_assignments()["random"], BUCKETS),
        kept_attention(query, key, value, *keeps()["random"]),
    ):
        assert torch.isfinite(made).all()


def test_sizes_are_padded_by_at_most_a_quarter_and_each_bucket_appears_once() -> None:
    sizes = torch.tensor([0, 1, 16, 17, 32, 33, 64, 65, 100, 128, 129, 500, 512, 513, 2048])
    found = {int(member): padded for padded, members in kernels._size_classes(sizes) for member in members}
    assert sorted(found) == list(range(1, len(sizes)))
    for member, padded in found.items():
        size = int(sizes[member])
        assert size <= padded < max(1.25 * size, size + 16)


# -- hashing -----------------------------------------------------------------------------------------------


def test_a_bucket_is_the_direction_nearest_to_a_vector() -> None:
    directions = 3 * torch.tensor([[1.0, 0.0], [0.0, 5.0]])  # lengths do not count
    vectors = torch.tensor([[2.0, 1.0], [1.0, 2.0], [-2.0, 1.0], [-1.0, -2.0], [3.0, 2.9]])
    assert hash_buckets(vectors, directions).tolist() == [0, 1, 2, 3, 0]


def test_opposite_vectors_never_share_a_bucket_and_length_does_not_count() -> None:
    generator = generator_for("hash")
    vectors, directions = torch.randn(100, 8, generator=generator), torch.randn(8, 4, generator=generator)
    buckets = hash_buckets(vectors, directions)
    assert set(buckets.tolist()) == set(range(8))
    assert torch.equal(hash_buckets(-vectors, directions), (buckets + 4) % 8)
    assert torch.equal(hash_buckets(100 * vectors, directions), buckets)


def test_keys_have_length_1() -> None:
    """And a query of zeros has a finite gradient."""
    queries = torch.randn(50, 8, generator=generator_for("queries"))
    torch.testing.assert_close(unit_keys(queries), queries / queries.norm(dim=-1, keepdim=True))
    assert unit_keys(queries.bfloat16()).dtype == torch.bfloat16
    query = torch.zeros(3, 8, requires_grad=True)
    unit_keys(query).sum().backward()
    assert query.grad is not None and torch.isfinite(query.grad).all()
    assert torch.equal(unit_keys(query), torch.zeros(3, 8))


# -- modules -----------------------------------------------------------------------------------------------


def block(sparse: dict[str, Any], **sizes: int) -> torch.nn.Module:
    config = ModelConfig(
        **{"layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 80, "tied_embedding": False, **sizes},
        case={"kind": "sparse_attention", **sparse},
    )
    return model_layers(config)[1].build()


def attention(sparse: dict[str, Any]) -> SparseAttention:
    made = block(sparse).attention
    for parameter in made.parameters():
        parameter.data.mul_(10)  # so that weights differ between tokens
    return made


def reference(module: SparseAttention, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Compute the module's output and its share of the causal pairs, head by head with a dense matrix."""
    batch, sequence, width = hidden.shape
    query_weight, value_weight = module.input.weight.view(2, 4, width // 4, width)
    hashed = isinstance(module, HashSparseAttention)
    drawn = torch.randn(4, width // 4, HASH["buckets"] // 2) if hashed else torch.rand(2, batch, 4, sequence)
    mixed, pairs = torch.empty(batch, sequence, width), 0
    for row in range(batch):
        for head in range(4):
            where = positions if positions.dim() == 1 else positions[row]
            query = apply_rotary(hidden[row] @ query_weight[head].T, where, module.rope_base)
            key = query / query.norm(dim=-1, keepdim=True)
            if hashed:
                products = query @ (drawn[head] / drawn[head].norm(dim=0))
                attends = bucket_pattern(torch.cat((products, -products), dim=-1).argmax(dim=-1))
            else:
                keep_query, keep_key = drawn[0, row, head] < QK["keep_queries"], drawn[1, row, head] < QK["keep_keys"]
                attends = kept_pattern(keep_query[None, None], keep_key[None, None])[0, 0]
            pairs += int(attends.sum())
            part = slice(head * width // 4, (head + 1) * width // 4)
            mixed[row, :, part] = dense(query, key, hidden[row] @ value_weight[head].T, attends)
    return mixed @ module.output.weight.T, pairs / (batch * 4 * sequence * (sequence + 1) / 2)


@either
def test_a_module_computes_its_formula(sparse: dict[str, Any]) -> None:
    """Also where each sequence has its own positions, ascending with gaps."""
    module = attention(sparse)
    steps = torch.randint(1, 5, (2, 80), generator=generator_for("positions"))
    for positions in (torch.arange(80), steps.cumsum(-1)):
        hidden = torch.randn(2, 80, 32, generator=generator_for("hidden")).requires_grad_()
        module.train()  # a batch begins
        torch.manual_seed(3)
        made = module(hidden, positions)
        torch.manual_seed(3)
        expected, share = reference(module, hidden, positions)
        check_outputs_and_gradients(made, expected, [hidden, *module.parameters()])
        assert module.load_signal() == share


@either
def test_a_token_does_not_see_later_ones(sparse: dict[str, Any]) -> None:
    module = attention(sparse)
    before = torch.randn(1, 80, 32, generator=generator_for("hidden"))
    after = before.clone()
    after[0, 50] += 1
    made = []
    for hidden in (before, after):
        torch.manual_seed(0)
        made.append(module(hidden, torch.arange(80)))
    torch.testing.assert_close(made[0][0, :50], made[1][0, :50])
    assert (made[0][0, 50] != made[1][0, 50]).any()


@either
def test_the_load_signal_is_measured_in_the_last_training_batch(sparse: dict[str, Any]) -> None:
    layer = block(sparse)
    module = layer.attention
    assert layer.load_signal() == 1.0

    def share_of(seed: int) -> float:
        torch.manual_seed(seed)
        layer(torch.randn(1, 80, 32))
        return module.load_signal()

    layer.train()
    alone = share_of(1)
    layer.train()
    other = share_of(2)
    assert 0 < alone < 1 and alone != other
    layer.train()
    assert module.load_signal() == other  # until the batch's first pass
    share_of(1)
    assert share_of(2) == pytest.approx((alone + other) / 2)
    layer.eval()
    share_of(3)
    assert layer.load_signal() == pytest.approx((alone + other) / 2)
    assert layer.requires_grad_(False).load_signal() == 0.0


def test_the_load_falls_with_what_is_kept() -> None:
    signals = []
    for sparse in [{"pattern": "hash", "buckets": n} for n in (2, 8, 32)] + [
        {"pattern": "qk", "keep_queries": p, "keep_keys": p} for p in (1.0, 0.9, 0.5, 0.1)
    ]:
        layer = block(sparse)
        torch.manual_seed(0)
        layer(torch.randn(4, 80, 32))
        signals.append(layer.load_signal())
    assert signals[0] > signals[1] > signals[2] and 1.0 == signals[3] > signals[4] > signals[5] > signals[6]
    assert signals[5] == pytest.approx(0.25, abs=0.05)


@either
def test_recomputation_gives_the_same_activations(sparse: dict[str, Any]) -> None:
    layer, found = block(sparse), []
    for reentrant in (None, True, False):
        hidden = torch.randn(2, 80, 32, generator=generator_for("hidden")).requires_grad_()
        layer.zero_grad()
        layer.train()
        torch.manual_seed(5)
        made = layer(hidden) if reentrant is None else checkpoint(layer, hidden, use_reentrant=reentrant)
        made.square().sum().backward()
        assert hidden.grad is not None
        found.append([made, hidden.grad, *(parameter.grad for parameter in layer.parameters()), layer.load_signal()])
    plain, *recomputed = found
    signal = plain.pop()
    for again in recomputed:
        assert again.pop() == signal and all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


@either
def test_every_pass_uses_new_random_numbers(sparse: dict[str, Any]) -> None:
    layer, hidden = block(sparse), torch.randn(1, 80, 32, generator=generator_for("hidden"))
    torch.manual_seed(0)
    assert not torch.equal(layer(hidden), layer(hidden))
    torch.manual_seed(0)
    first = layer(hidden)
    torch.manual_seed(0)
    assert torch.equal(layer(hidden), first)


@pytest.mark.parametrize("sparse", [HASH, QK, {**QK, "keep_queries": 1e-9}], ids=["hash", "qk", "no query"])
def test_hidden_states_of_zeros_short_sequences_and_bf16(sparse: dict[str, Any]) -> None:
    """Equal queries are all in one bucket."""
    module = attention(sparse)
    for tokens in (1, 2, 80):
        hidden = torch.zeros(1, tokens, 32, requires_grad=True)
        module.zero_grad()
        module(hidden, torch.arange(tokens)).sum().backward()
        assert hidden.grad is not None and torch.isfinite(hidden.grad).all(), tokens
        assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters()), tokens
    layer = block(sparse).bfloat16()
    hidden = torch.randn(2, 80, 32, generator=generator_for("hidden")).bfloat16().requires_grad_()
    made = layer(hidden)
    made.sum().backward()
    assert made.dtype == torch.bfloat16
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()


# -- FlexAttention: block masks, and the forward pass, which runs on a CPU -----------------------------------


def in_tiles(pattern: torch.Tensor) -> torch.Tensor:
    """Tell which tiles have a pair in them."""
    tile = kernels.FLEX_TILE
    query, key = (-size % tile for size in pattern.shape[-2:])
    padded = torch.nn.functional.pad(pattern, (0, key, 0, query))
    return padded.unflatten(-1, (-1, tile)).unflatten(-3, (-1, tile)).any(-1).any(-2)


def computed_tiles(mask: BlockMask) -> torch.Tensor:
    return mask.to_dense().bool()


def test_flex_computes_the_tiles_that_can_have_a_pair() -> None:
    buckets = torch.randint(0, 20, (2, 3, 700), generator=generator_for("flex")).sort(dim=-1).values
    mask = kernels._bucket_block_mask(buckets)
    assert torch.equal(computed_tiles(mask), in_tiles(bucket_pattern(buckets)))
    seen = torch.randint(0, 600, (2, 3, 300), generator=generator_for("flex")).sort(dim=-1).values
    mask = kernels._kept_block_mask(seen, 650)
    assert torch.equal(computed_tiles(mask), in_tiles(torch.arange(650) < seen[..., None]))


def use_flex(monkeypatch: pytest.MonkeyPatch, flex: Any) -> None:
    """Pretend that the device can train with FlexAttention, which is ``flex``."""
    monkeypatch.setattr(kernels, "_has_flex", lambda width, dtype, device: True)
    monkeypatch.setattr(kernels, "_compiled_flex", lambda: flex)


def test_flex_equals_bucket_and_kept_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [each.detach() for each in states()]
    calls = [(name, bucket_attention, (buckets, MOST_BUCKETS)) for name, buckets in bucket_assignments().items()]
    calls += [(name, kept_attention, kept) for name, kept in keeps().items()]
    expected = [function(*given, *args) for _, function, args in calls]
    use_flex(monkeypatch, flex_attention)
    for wanted, (name, function, args) in zip(expected, calls):
        made = function(*given, *args)
        torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-5, msg=lambda said: f"{name}: {said}")  # noqa: B023


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: BlockMask
) -> torch.Tensor:
    """Compute what FlexAttention is defined to, densely, so that it has a backward pass on a CPU."""
    sizes = (*query.shape[:3], key.shape[2])
    return dense(query, key, value, block_mask.mask_mod(*torch.meshgrid(*map(torch.arange, sizes), indexing="ij")))


def test_flex_is_given_whole_tiles_and_its_gradients_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, (keep_query, keep_key), buckets = [], keeps()["random"], bucket_assignments()["random"]

    def recorded(*given: Any, **named: Any) -> Any:
        lengths.append((given[0].shape[2], given[1].shape[2], named["block_mask"].seq_lengths))
        return by_definition(*given, **named)

    for function, args in ((bucket_attention, (buckets, BUCKETS)), (kept_attention, (keep_query, keep_key))):
        with monkeypatch.context() as context:
            given = states()
            expected = function(*given, *args)
            use_flex(context, recorded)
            check_outputs_and_gradients(function(*given, *args), expected, given)
    assert lengths == [(150, 150, (150, 150)), (128, 128, (128, 128))]


def test_a_probe_needs_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU FlexAttention has none, and nothing is compiled to find that out."""
    compiled: list[None] = []
    probe = kernels._has_flex.__wrapped__
    monkeypatch.setattr(kernels, "_compiled_flex", lambda: (compiled.append(None), by_definition)[1])
    assert not probe(16, torch.float32, torch.device("cpu")) and not compiled
    monkeypatch.setattr(kernels, "flex_attention", lambda *states: None)
    assert probe(16, torch.float32, torch.device("cpu")) and compiled
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: 1 / 0)
    assert not probe(16, torch.float32, torch.device("cpu"))
