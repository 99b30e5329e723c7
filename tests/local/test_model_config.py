import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig, gpt_layers, model_layers, read_model_config

CONFIGS = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))


def read(**block: Any) -> ModelConfig:
    return read_model_config({"train_batch_size": 8, "model": block})


def test_an_empty_block_is_all_defaults() -> None:
    config = read()
    assert config == ModelConfig()
    assert len(gpt_layers(config)) == config.layers + 3


def test_every_default_may_be_written_in_the_block() -> None:
    assert read(**json.loads(ModelConfig().model_dump_json())) == ModelConfig()


def test_a_dumped_block_reads_as_it_was() -> None:
    for freezing in ({"schedule": [[0, 1], [0.5, 3]]}, {"automatic": {"interval": 0.5}}, {"egeria": {}}):
        config = read(layers=3, tied_embedding=False, freezing=freezing)
        assert read(**config.model_dump(mode="json")) == config
    for model in ("folder", {"model_type": "llama", "bos_token_id": None}):
        config = read(huggingface=model, sequence_length=32, freezing={"schedule": [[0.5, 40]]}, tokens="bytes")
        assert read(**config.model_dump(mode="json")) == config
    config = read(moe={"routing": "bias", "bias_rate": 0.01})
    assert read(**config.model_dump(mode="json")) == config
    for kind in ("hash", "qk"):
        config = read(sparse_attention={"kind": kind})
        assert read(**config.model_dump(mode="json")) == config


def test_each_kind_of_sparse_attention_has_its_own_defaults() -> None:
    hashed, kept = (read(sparse_attention={"kind": kind}).sparse_attention for kind in ("hash", "qk"))
    assert hashed is not None and kept is not None
    assert (hashed.buckets, hashed.keep_queries, hashed.keep_keys) == (16, None, None)
    assert (kept.buckets, kept.keep_queries, kept.keep_keys) == (None, 0.5, 0.5)


def test_it_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": {"layers": 2}}))
    assert read_model_config(path).layers == 2
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read"):
        read_model_config(tmp_path / "nowhere.json")


def test_pruning_defaults_are_the_papers() -> None:
    pruning = read(pruning={}).pruning
    assert pruning is not None
    assert (pruning.start, pruning.end, pruning.times, pruning.final_sparsity) == (0.3, 0.7, 4, 0.9)
    dumped = read(pruning={"csr_from": 0.5, "final_sparsity": 0.8})
    assert read(**dumped.model_dump(mode="json")) == dumped


def test_whole_blocks_may_be_requested_explicitly() -> None:
    assert read(split_blocks=False, mod={}) == read(mod={})


def test_dumped_exits_read_as_they_were() -> None:
    for exits in ({"method": "calm", "confidence": "state"}, {"method": "adpc", "depths": [3, 6], "start": 0.1}):
        config = read(early_exit=exits)
        assert read(**config.model_dump(mode="json")) == config
        assert config.carries == "exits"


def test_a_schedule_is_pairs_of_fraction_and_blocks() -> None:
    freezing = read(tied_embedding=False, freezing={"schedule": [[0.2, 2], [0.4, 0]]}).freezing
    assert freezing is not None
    assert freezing.schedule == ((0.2, 2), (0.4, 0))


@pytest.mark.parametrize(
    ("block", "key", "allowed"),
    [
        ({"layer": 2}, "model.layer = 2", 'did you mean "layers"'),
        ({"sampling": "shuffled"}, 'model.sampling = "shuffled"', "'random' or 'epochs'"),
        ({"layers": 0}, "model.layers = 0", "greater than or equal to 1"),
        ({"layers": "2"}, 'model.layers = "2"', "valid integer"),
        ({"heads": 3}, "model.heads = 3", "should divide hidden_size, 128"),
        ({"vocab_size": 255}, "model.vocab_size = 255", "greater than or equal to 256"),
        ({"tied_embedding": 1}, "model.tied_embedding = 1", "valid boolean"),
        ({"freezing": 3}, "model.freezing = 3", "an object"),
        (
            {"freezing": {"schedule": [[0.5, 1]]}, "tied_embedding": True},
            "model.freezing",
            "would freeze the head with the embedding: needs tied_embedding = false",
        ),
        ({"freezing": {"automatic": {}}}, "model.freezing", "needs tied_embedding = false"),
        ({"freezing": {}}, "model.freezing", 'exactly one of "schedule", "automatic" and "egeria"'),
        ({"freezing": {"schedule": [[0.1, 1]], "automatic": {}}}, "model.freezing", "exactly one"),
        ({"freezing": {"egeria": {}, "automatic": {}}}, "model.freezing.egeria", "exactly one"),
        ({"freezing": {"egeria": {"window": 1}}}, "model.freezing.egeria.window = 1", "greater than or equal to 2"),
        (
            {"freezing": {"egeria": {"interval": 0.1, "delay": 0.2}}},
            "model.freezing.egeria.delay = 0.2",
            "interval, 0.1",
        ),
        (
            {"freezing": {"automatic": {}, "cache_bytes": 9}},
            "model.freezing.cache_bytes = 9: is withdrawn",
            "remove it",
        ),
        ({"pruning": {"block_size": 4}}, "model.pruning.block_size = 4: is withdrawn", "remove it"),
        ({"early_exit": {"loss_tokens": "all"}}, 'model.early_exit.loss_tokens = "all": is withdrawn', "remove it"),
        ({"freezing": {"schedules": [], "automatic": {}}}, "model.freezing.schedules", 'did you mean "schedule"'),
        ({"freezing": {"schedule": []}}, "model.freezing.schedule", "one or more"),
        ({"freezing": {"schedule": 0.5}}, "model.freezing.schedule", "should be null or a list"),
        ({"freezing": {"schedule": [[0.5, 1], [0.5, 2]]}}, "model.freezing.schedule", "increasing fractions"),
        ({"freezing": {"schedule": [[1.0, 1]]}}, "model.freezing.schedule", "in [0, 1), not 1.0"),
        ({"freezing": {"schedule": [["0.1", 1]]}}, "model.freezing.schedule", "in [0, 1), not 0.1"),
        ({"freezing": {"schedule": [[0.1, -1]]}}, "model.freezing.schedule", "0 or more, not -1"),
        ({"freezing": {"schedule": [[0.1, 1.5]]}}, "model.freezing.schedule", "0 or more, not 1.5"),
        ({"freezing": {"schedule": [[0.1]]}}, "model.freezing.schedule", "should hold pairs"),
        (
            {"layers": 4, "tied_embedding": False, "freezing": {"schedule": [[0.1, 5]]}},
            "model.freezing",
            "freezes 5 blocks, the model has 4",
        ),
        ({"moe": {"expert": 4}}, "model.moe.expert = 4", 'did you mean "experts"'),
        ({"moe": {"top_k": 9}}, "model.moe.top_k = 9", "at most the number of experts, 8"),
        ({"moe": {"experts": 4, "top_k": 0}}, "model.moe.top_k = 0", "greater than or equal to 1"),
        ({"moe": {"routing": "hash"}}, 'model.moe.routing = "hash"', "'aux_loss', 'sbase' or 'bias'"),
        ({"moe": {"capacity_factor": 0}}, "model.moe.capacity_factor = 0", "greater than 0"),
        ({"moe": {"bias_rate": 0.01}}, "model.moe.bias_rate = 0.01", 'routing "bias" only, this is "aux_loss"'),
        (
            {"moe": {"routing": "bias", "auxiliary_coefficient": 0.01}},
            "model.moe.auxiliary_coefficient = 0.01",
            'routing "aux_loss" only, this is "bias"',
        ),
        ({"layers": 4, "moe": {"dense_blocks": 4}}, "model.moe", "no block with experts: dense_blocks 4, every 1"),
        ({"layers": 4, "moe": {"dense_blocks": 3, "every": 2}}, "model.moe", "the model has 4 (layers)"),
        ({"pruning": True}, "model.pruning = true", "an object"),
        ({"pruning": {"sparsity": 0.9}}, "model.pruning.sparsity", "final_sparsity"),
        ({"pruning": {"final_sparsity": 1.0}}, "model.pruning.final_sparsity = 1.0", "less than 1"),
        ({"pruning": {"initial_sparsity": -0.1}}, "model.pruning.initial_sparsity = -0.1", "or equal to 0"),
        (
            {"pruning": {"initial_sparsity": 0.5, "final_sparsity": 0.4}},
            "model.pruning.final_sparsity = 0.4",
            "at least initial_sparsity, 0.5",
        ),
        ({"pruning": {"start": 0.5, "end": 0.5}}, "model.pruning.end = 0.5", "greater than start, 0.5"),
        ({"pruning": {"end": 1.0}}, "model.pruning.end = 1.0", "less than 1"),
        ({"pruning": {"times": 0}}, "model.pruning.times = 0", "greater than or equal to 1"),
        ({"pruning": {"times": 2.5}}, "model.pruning.times = 2.5", "valid integer"),
        ({"pruning": {"csr_from": 1.5}}, "model.pruning.csr_from = 1.5", "less than or equal to 1"),
        ({"early_exit": {}}, "model.early_exit.method", "required"),
        ({"early_exit": {"method": "adp"}}, 'model.early_exit.method = "adp"', "'calm' or 'adpc'"),
        ({"early_exit": {"method": "adpc"}}, "model.early_exit", "adpc needs depths"),
        ({"early_exit": {"method": "calm", "depths": []}}, "model.early_exit.depths", "null or a list"),
        ({"early_exit": {"method": "calm", "depths": [0, 1]}}, "model.early_exit.depths", "each 1 or more"),
        ({"early_exit": {"method": "calm", "depths": [2, 2]}}, "model.early_exit.depths", "should increase"),
        (
            {"early_exit": {"method": "adpc", "depths": [1], "confidence": "state"}},
            'model.early_exit.confidence = "state"',
            "adpc has one of its own",
        ),
        (
            {"early_exit": {"method": "calm", "threshold": 1.1}},
            "model.early_exit.threshold = 1.1",
            "less than or equal",
        ),
        ({"early_exit": {"method": "calm", "start": 1}}, "model.early_exit.start = 1", "less than 1"),
        ({"early_exit": {"method": "calm", "startt": 0}}, "model.early_exit.startt", 'did you mean "start"'),
        (
            {"layers": 4, "early_exit": {"method": "calm", "depths": [1, 4]}},
            "model.early_exit",
            "has an exit after block 4, exits lie before the last of 4 (layers)",
        ),
        ({"layers": 1, "early_exit": {"method": "calm"}}, "model.early_exit", "before the last of 1 (layers)"),
        (
            {"tied_embedding": False, "freezing": {"automatic": {}}, "early_exit": {"method": "calm"}},
            "model.early_exit",
            "cannot be combined with freezing",
        ),
        ({"moe": {}, "early_exit": {"method": "calm"}}, "model.early_exit", "cannot be combined with moe"),
        ({"moe": {"expert_parallel": 1}}, "model.moe.expert_parallel = 1", "valid boolean"),
        (
            {"tied_embedding": False, "moe": {"expert_parallel": True}, "freezing": {"automatic": {}}},
            "model.moe",
            "expert_parallel can be combined with freezing.schedule only",
        ),
        (
            {"tied_embedding": False, "moe": {"expert_parallel": True}, "freezing": {"egeria": {}}},
            "model.moe",
            "expert_parallel can be combined with freezing.schedule only",
        ),
        (
            {"moe": {"expert_parallel": True}, "mod": {}},
            "model.mod",
            'sampling "predictor" cannot be combined with moe.expert_parallel',
        ),
        ({"moe": {}, "pruning": {}}, "model.pruning", "cannot be combined with moe: experts are not pruned"),
        ({"pruning": {}, "mod": {}}, "model.mod", "cannot be combined with pruning"),
        ({"split_blocks": 1}, "model.split_blocks = 1", "valid boolean"),
        ({"split_blocks": True, "mod": {}}, "model.mod", "cannot be combined with split_blocks"),
        (
            {"split_blocks": True, "early_exit": {"method": "calm"}},
            "model.early_exit",
            "cannot be combined with split_blocks",
        ),
        (
            {"split_blocks": True, "tied_embedding": False, "freezing": {"egeria": {}}},
            "model.freezing",
            "egeria cannot be combined with split_blocks",
        ),
        ({"huggingface": "folder", "split_blocks": True}, "model = ", "split_blocks: cannot be given beside"),
        (
            {"tied_embedding": False, "freezing": {"egeria": {}}, "sparse_attention": {"kind": "hash"}},
            "model.sparse_attention",
            "cannot be combined with freezing.egeria",
        ),
        ({"huggingface": 3}, "model.huggingface = 3", "valid string"),
        ({"huggingface": "folder", "layers": 2, "heads": 4}, "model = ", "heads, layers: cannot be given beside"),
        ({"huggingface": "folder", "tokens": "words"}, 'model.tokens = "words"', "'bytes'"),
        ({"huggingface": {}, "pruning": None}, "model = ", "pruning: cannot be given beside huggingface"),
        ({"freezing": {"automatic": {"interval": 0}}}, "model.freezing.automatic.interval = 0", "greater than 0"),
        ({"sparse_attention": True}, "model.sparse_attention = true", "an object"),
        ({"sparse_attention": {}}, "model.sparse_attention.kind", "is required"),
        ({"sparse_attention": {"kind": "lsh"}}, 'model.sparse_attention.kind = "lsh"', "'hash' or 'qk'"),
        ({"sparse_attention": {"kind": "hash", "bucket": 8}}, "model.sparse_attention.bucket = 8", '"buckets"'),
        ({"sparse_attention": {"kind": "hash", "buckets": 7}}, "model.sparse_attention.buckets = 7", "should be even"),
        ({"sparse_attention": {"kind": "hash", "buckets": 0}}, "model.sparse_attention.buckets = 0", "equal to 2"),
        (
            {"sparse_attention": {"kind": "qk", "buckets": 8}},
            "model.sparse_attention.buckets = 8",
            'is for kind "hash"',
        ),
        (
            {"sparse_attention": {"kind": "hash", "keep_keys": 0.5}},
            "model.sparse_attention.keep_keys = 0.5",
            'is for kind "qk", this is "hash"',
        ),
        (
            {"sparse_attention": {"kind": "qk", "keep_queries": 0.0}},
            "model.sparse_attention.keep_queries = 0.0",
            "greater than 0",
        ),
        (
            {"sparse_attention": {"kind": "qk", "keep_keys": 1.5}},
            "model.sparse_attention.keep_keys = 1.5",
            "less than or equal to 1",
        ),
        (
            {"sequence_length": 8, "sparse_attention": {"kind": "hash"}},
            "model.sparse_attention",
            "hashes into 16 buckets, a sequence has 8 tokens",
        ),
        ({"mod": {"capacity": 0}}, "model.mod.capacity = 0", "greater than 0"),
        ({"mod": {"capacity": 1.5}}, "model.mod.capacity = 1.5", "less than or equal to 1"),
        ({"mod": {"every": 0}}, "model.mod.every = 0", "greater than or equal to 1"),
        ({"mod": {"sampling": "router"}}, 'model.mod.sampling = "router"', "'topk', 'predictor' or 'threshold'"),
        ({"mod": {"capacity": []}}, "model.mod.capacity", "one for each routed block"),
        ({"mod": {"capacity": [0.5, 2]}}, "model.mod.capacity", "less than or equal to 1, not 2"),
        (
            {"layers": 4, "mod": {"capacity": [0.5, 0.25, 0.1]}},
            "model.mod",
            "capacity lists 3 capacities, the model has 2 routed blocks (layers 4, every 2)",
        ),
        ({"mod": {"schedule": [0.5]}}, "model.mod.schedule", "pairs [fraction of the steps, capacity], not 0.5"),
        ({"mod": {"schedule": [[1, 0.5]]}}, "model.mod.schedule", "in [0, 1), not 1"),
        ({"mod": {"schedule": [[0, 0]]}}, "model.mod.schedule", "greater than 0"),
        ({"mod": {"schedule": [[0.5, 1], [0.5, 0.5]]}}, "model.mod.schedule", "increasing fractions"),
        (
            {"layers": 2, "mod": {"capacity": [0.5], "schedule": [[0, 1]]}},
            "model.mod.schedule",
            "cannot be combined with a list of capacities",
        ),
        ({"mod": {"capacity": 0.5, "threshold": 0}}, "model.mod.threshold = 0", "cannot be combined with capacity"),
        ({"mod": {"threshold": 0, "schedule": [[0, 1]]}}, "model.mod.threshold = 0", "or schedule"),
        ({"mod": {"min_capacity": 0.1}}, "model.mod.min_capacity = 0.1", "with threshold only"),
        (
            {"mod": {"threshold": 0, "min_capacity": 0.5, "max_capacity": 0.25}},
            "model.mod.max_capacity = 0.25",
            "at least min_capacity, 0.5",
        ),
        ({"mod": {"sampling": "threshold"}}, 'model.mod.sampling = "threshold"', "needs a threshold"),
        (
            {"moe": {"expert_parallel": True}, "mod": {"threshold": 0, "sampling": "threshold"}},
            "model.mod",
            "threshold cannot be combined with moe.expert_parallel",
        ),
        (
            {"early_exit": {"method": "calm", "confidence": "classifier"}},
            'model.early_exit.confidence = "classifier"',
            "'softmax' or 'state'",
        ),
        ({"mod": {"predictor_coefficient": 0}}, "model.mod.predictor_coefficient = 0", "greater than 0"),
        (
            {"mod": {"sampling": "topk", "predictor_size": 8}},
            "model.mod.predictor_size = 8",
            'sampling "predictor" only, this is "topk"',
        ),
        (
            {"mod": {"predictor_coefficient": 0.1, "sampling": "topk"}},
            "model.mod.predictor_coefficient = 0.1",
            'sampling "predictor" only, this is "topk"',
        ),
        ({"mod": {"capacities": 1}}, "model.mod.capacities", 'did you mean "capacity"'),
        ({"layers": 2, "mod": {"every": 3}}, "model.mod", "every 3 blocks one is routed (every), the model has 2"),
    ],
)
def test_a_wrong_value_is_refused_with_key_and_what_is_allowed(block: dict[str, Any], key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**block)
    assert str(caught.value).startswith(key)
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"model\.huggingface: .*pip install ds_dynmo\[huggingface\]"):
        model_layers(read(huggingface={"model_type": "llama"}))


def test_a_missing_block_is_named() -> None:
    with pytest.raises(ConfigError, match=r'model: the configuration has no "model" block'):
        read_model_config({"dynmo": {}})
    with pytest.raises(ConfigError, match=r'is "modle" meant to be it\?'):
        read_model_config({"modle": {}})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_in_the_tree_are_valid(path: Path) -> None:
    config = read_model_config(path)
    if config.freezing is not None:
        assert not config.tied_embedding  # a tied head would freeze with the embedding
