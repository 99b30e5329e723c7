import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.config import read_dynmo_config
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import (
    FreezingConfig,
    MixtureOfDepthsConfig,
    ModelConfig,
    MoEConfig,
    PruningConfig,
    SparseAttentionConfig,
    gpt_layers,
    model_layers,
    read_model_config,
)

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
        config = read(layers=3, tied_embedding=False, case={"kind": "freezing", **freezing})
        assert read(**config.model_dump(mode="json")) == config
    for model in ("folder", {"model_type": "llama", "bos_token_id": None}):
        config = read(
            huggingface=model, sequence_length=32, case={"kind": "freezing", "schedule": [[0.5, 40]]}, tokens="bytes"
        )
        assert read(**config.model_dump(mode="json")) == config
    config = read(case={"kind": "moe", "routing": "bias", "bias_rate": 0.01})
    assert read(**config.model_dump(mode="json")) == config
    for kind in ("hash", "qk"):
        config = read(case={"kind": "sparse_attention", "pattern": kind})
        assert read(**config.model_dump(mode="json")) == config


def test_each_kind_of_sparse_attention_has_its_own_defaults() -> None:
    hashed, kept = (
        read(case={"kind": "sparse_attention", "pattern": pattern}).find_case(SparseAttentionConfig)
        for pattern in ("hash", "qk")
    )
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
    pruning = read(case={"kind": "pruning"}).find_case(PruningConfig)
    assert pruning is not None
    assert (pruning.start, pruning.end, pruning.times, pruning.final_sparsity) == (0.3, 0.7, 4, 0.9)
    dumped = read(case={"kind": "pruning", "csr_from": 0.5, "final_sparsity": 0.8})
    assert read(**dumped.model_dump(mode="json")) == dumped


def test_whole_blocks_may_be_requested_explicitly() -> None:
    assert read(split_blocks=False, case={"kind": "mod"}) == read(case={"kind": "mod"})


def test_dumped_exits_read_as_they_were() -> None:
    for exits in ({"method": "calm", "confidence": "state"}, {"method": "adpc", "depths": [3, 6], "start": 0.1}):
        config = read(case={"kind": "early_exit", **exits})
        assert read(**config.model_dump(mode="json")) == config
        assert config.layer_outputs == "exits"


def test_cases_combine_in_any_order() -> None:
    one, other = {"kind": "moe", "experts": 4}, {"kind": "freezing", "schedule": [[0.5, 1]]}
    config = read(tied_embedding=False, case=[one, other])
    assert config == read(tied_embedding=False, case=[other, one])
    assert read(**config.model_dump(mode="json")) == config
    assert read(case=[one]) == read(case=one) and read(case=[]) == read(case=None) == read()


def test_the_kinds_of_the_paper_s_cases_are_those_of_the_files() -> None:
    kinds = {path.stem: [case.kind for case in read_model_config(path).case] for path in CONFIGS}
    assert {name: cases for name, cases in kinds.items() if cases} == {
        kind: [kind] for kind in ("early_exit", "freezing", "mod", "moe", "pruning", "sparse_attention")
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_file_decides_after_every_batch_or_has_a_case_in_which_no_balancer_can_gain(path: Path) -> None:
    dynmo, model = read_dynmo_config(path), read_model_config(path)
    assert dynmo is not None and (dynmo.interval == 0 or dynmo.interval >= 25)
    experts, depths = model.find_case(MoEConfig), model.find_case(MixtureOfDepthsConfig)
    assert experts is None or experts.expert_parallel
    assert depths is None or depths.threshold is not None


def test_a_schedule_is_pairs_of_fraction_and_blocks() -> None:
    case = {"kind": "freezing", "schedule": [[0.2, 2], [0.4, 0]]}
    freezing = read(tied_embedding=False, case=case).find_case(FreezingConfig)
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
        ({"case": 3}, "model.case = 3", "an object"),
        ({"case": [3]}, "model.case[0] = 3", "an object"),
        ({"case": {}}, "model.case.kind", "is required; should be one of moe, pruning, freezing"),
        ({"case": {"kind": "mo"}}, 'model.case.kind = "mo"', 'did you mean "moe"'),
        ({"case": [{"kind": "mod"}, {"kind": "x"}]}, 'model.case[1].kind = "x"', "should be one of moe, pruning"),
        ({"case": [{"kind": "mod"}, {"kind": "moe", "expert": 4}]}, "model.case[1].expert = 4", '"experts"'),
        ({"case": [{"kind": "mod"}, {"kind": "mod"}]}, "model.case = [", "mod: is given 2 times"),
        ({"case": {"kind": "moe", "unknown": 1}}, "model.case.unknown", "one of kind, experts, top_k"),
        (
            {"case": {"kind": "freezing", "schedule": [[0.5, 1]]}, "tied_embedding": True},
            "model.case",
            "would freeze the head with the embedding: needs tied_embedding = false",
        ),
        ({"case": {"kind": "freezing", "automatic": {}}}, "model.case", "needs tied_embedding = false"),
        ({"case": {"kind": "freezing"}}, "model.case", 'exactly one of "schedule", "automatic" and "egeria"'),
        ({"case": {"kind": "freezing", "schedule": [[0.1, 1]], "automatic": {}}}, "model.case", "exactly one"),
        ({"case": {"kind": "freezing", "egeria": {}, "automatic": {}}}, "model.case.egeria", "exactly one"),
        (
            {"case": {"kind": "freezing", "egeria": {"window": 1}}},
            "model.case.egeria.window = 1",
            "greater than or equal to 2",
        ),
        (
            {"case": {"kind": "freezing", "egeria": {"interval": 0.1, "delay": 0.2}}},
            "model.case.egeria.delay = 0.2",
            "interval, 0.1",
        ),
        (
            {"case": {"kind": "freezing", "schedules": [], "automatic": {}}},
            "model.case.schedules",
            'did you mean "schedule"',
        ),
        ({"case": {"kind": "freezing", "schedule": []}}, "model.case.schedule", "one or more"),
        ({"case": {"kind": "freezing", "schedule": 0.5}}, "model.case.schedule", "should be null or a list"),
        (
            {"case": {"kind": "freezing", "schedule": [[0.5, 1], [0.5, 2]]}},
            "model.case.schedule",
            "increasing fractions",
        ),
        ({"case": {"kind": "freezing", "schedule": [[1.0, 1]]}}, "model.case.schedule", "in [0, 1), not 1.0"),
        ({"case": {"kind": "freezing", "schedule": [["0.1", 1]]}}, "model.case.schedule", "in [0, 1), not 0.1"),
        ({"case": {"kind": "freezing", "schedule": [[0.1, -1]]}}, "model.case.schedule", "0 or more, not -1"),
        ({"case": {"kind": "freezing", "schedule": [[0.1, 1.5]]}}, "model.case.schedule", "0 or more, not 1.5"),
        ({"case": {"kind": "freezing", "schedule": [[0.1]]}}, "model.case.schedule", "should hold pairs"),
        (
            {"layers": 4, "tied_embedding": False, "case": {"kind": "freezing", "schedule": [[0.1, 5]]}},
            "model.case",
            "freezes 5 blocks, the model has 4",
        ),
        ({"case": {"kind": "moe", "expert": 4}}, "model.case.expert = 4", 'did you mean "experts"'),
        ({"case": {"kind": "moe", "top_k": 9}}, "model.case.top_k = 9", "at most the number of experts, 8"),
        ({"case": {"kind": "moe", "experts": 4, "top_k": 0}}, "model.case.top_k = 0", "greater than or equal to 1"),
        ({"case": {"kind": "moe", "routing": "hash"}}, 'model.case.routing = "hash"', "'aux_loss', 'sbase' or 'bias'"),
        ({"case": {"kind": "moe", "capacity_factor": 0}}, "model.case.capacity_factor = 0", "greater than 0"),
        ({"hidden_size": 12, "heads": 2, "case": {"kind": "moe"}}, "model.case", "a multiple of 8, this is 12"),
        (
            {"case": {"kind": "moe", "bias_rate": 0.01}},
            "model.case.bias_rate = 0.01",
            'routing "bias" only, this is "aux_loss"',
        ),
        (
            {"case": {"kind": "moe", "routing": "bias", "auxiliary_coefficient": 0.01}},
            "model.case.auxiliary_coefficient = 0.01",
            'routing "aux_loss" only, this is "bias"',
        ),
        (
            {"layers": 4, "case": {"kind": "moe", "dense_blocks": 4}},
            "model.case",
            "no block with experts: dense_blocks 4, every 1",
        ),
        (
            {"layers": 4, "case": {"kind": "moe", "dense_blocks": 3, "every": 2}},
            "model.case",
            "the model has 4 (layers)",
        ),
        ({"case": True}, "model.case = true", "an object"),
        ({"case": {"kind": "pruning", "sparsity": 0.9}}, "model.case.sparsity", "final_sparsity"),
        ({"case": {"kind": "pruning", "final_sparsity": 1.0}}, "model.case.final_sparsity = 1.0", "less than 1"),
        (
            {"case": {"kind": "pruning", "initial_sparsity": -0.1}},
            "model.case.initial_sparsity = -0.1",
            "or equal to 0",
        ),
        (
            {"case": {"kind": "pruning", "initial_sparsity": 0.5, "final_sparsity": 0.4}},
            "model.case.final_sparsity = 0.4",
            "at least initial_sparsity, 0.5",
        ),
        ({"case": {"kind": "pruning", "start": 0.5, "end": 0.5}}, "model.case.end = 0.5", "greater than start, 0.5"),
        ({"case": {"kind": "pruning", "end": 1.0}}, "model.case.end = 1.0", "less than 1"),
        ({"case": {"kind": "pruning", "times": 0}}, "model.case.times = 0", "greater than or equal to 1"),
        ({"case": {"kind": "pruning", "times": 2.5}}, "model.case.times = 2.5", "valid integer"),
        ({"case": {"kind": "pruning", "csr_from": 1.5}}, "model.case.csr_from = 1.5", "less than or equal to 1"),
        ({"case": {"kind": "early_exit"}}, "model.case.method", "required"),
        ({"case": {"kind": "early_exit", "method": "adp"}}, 'model.case.method = "adp"', "'calm' or 'adpc'"),
        ({"case": {"kind": "early_exit", "method": "adpc"}}, "model.case", "adpc needs depths"),
        ({"case": {"kind": "early_exit", "method": "calm", "depths": []}}, "model.case.depths", "null or a list"),
        (
            {"case": {"kind": "early_exit", "method": "calm", "depths": [0, 1]}},
            "model.case.depths",
            "each 1 or more",
        ),
        (
            {"case": {"kind": "early_exit", "method": "calm", "depths": [2, 2]}},
            "model.case.depths",
            "should increase",
        ),
        (
            {"case": {"kind": "early_exit", "method": "adpc", "depths": [1], "confidence": "state"}},
            'model.case.confidence = "state"',
            "adpc has one of its own",
        ),
        (
            {"case": {"kind": "early_exit", "method": "calm", "threshold": 1.1}},
            "model.case.threshold = 1.1",
            "less than or equal",
        ),
        ({"case": {"kind": "early_exit", "method": "calm", "start": 1}}, "model.case.start = 1", "less than 1"),
        (
            {"case": {"kind": "early_exit", "method": "calm", "startt": 0}},
            "model.case.startt",
            'did you mean "start"',
        ),
        (
            {"layers": 4, "case": {"kind": "early_exit", "method": "calm", "depths": [1, 4]}},
            "model.case",
            "has an exit after block 4, exits lie before the last of 4 (layers)",
        ),
        (
            {"layers": 1, "case": {"kind": "early_exit", "method": "calm"}},
            "model.case",
            "before the last of 1 (layers)",
        ),
        (
            {
                "tied_embedding": False,
                "case": [{"kind": "freezing", "automatic": {}}, {"kind": "early_exit", "method": "calm"}],
            },
            "model.case",
            "cannot be combined with freezing",
        ),
        (
            {"case": [{"kind": "moe"}, {"kind": "early_exit", "method": "calm"}]},
            "model.case",
            "cannot be combined with moe",
        ),
        ({"case": {"kind": "moe", "expert_parallel": 1}}, "model.case.expert_parallel = 1", "valid boolean"),
        (
            {
                "tied_embedding": False,
                "case": [{"kind": "moe", "expert_parallel": True}, {"kind": "freezing", "automatic": {}}],
            },
            "model.case",
            "freezing: only schedule can be combined with expert_parallel",
        ),
        (
            {
                "tied_embedding": False,
                "case": [{"kind": "moe", "expert_parallel": True}, {"kind": "freezing", "egeria": {}}],
            },
            "model.case",
            "freezing: only schedule can be combined with expert_parallel",
        ),
        (
            {"case": [{"kind": "moe", "expert_parallel": True}, {"kind": "mod"}]},
            "model.case",
            'mod: only sampling "topk" without threshold can be combined with expert_parallel',
        ),
        (
            {"case": [{"kind": "moe"}, {"kind": "pruning"}]},
            "model.case",
            "cannot be combined with moe: experts are not pruned",
        ),
        ({"case": [{"kind": "pruning"}, {"kind": "mod"}]}, "model.case", "cannot be combined with pruning"),
        ({"split_blocks": 1}, "model.split_blocks = 1", "valid boolean"),
        ({"split_blocks": True, "case": {"kind": "mod"}}, "model.case", "cannot be combined with split_blocks"),
        (
            {"split_blocks": True, "case": {"kind": "early_exit", "method": "calm"}},
            "model.case",
            "cannot be combined with split_blocks",
        ),
        (
            {"split_blocks": True, "tied_embedding": False, "case": {"kind": "freezing", "egeria": {}}},
            "model.case",
            "egeria cannot be combined with split_blocks",
        ),
        (
            {"huggingface": "folder", "split_blocks": True, "case": {"kind": "freezing", "egeria": {}}},
            "model.case",
            "egeria cannot be combined with split_blocks",
        ),
        (
            {
                "tied_embedding": False,
                "case": [{"kind": "freezing", "egeria": {}}, {"kind": "sparse_attention", "pattern": "hash"}],
            },
            "model.case",
            "freezing: egeria cannot be combined with sparse_attention",
        ),
        ({"huggingface": 3}, "model.huggingface = 3", "valid string"),
        ({"untie": True}, "model = ", "untie: is for a Hugging Face model (huggingface); without one, tied_embedding"),
        ({"huggingface": "folder", "layers": 2, "heads": 4}, "model = ", "heads, layers: cannot be given beside"),
        ({"huggingface": "folder", "tokens": "words"}, 'model.tokens = "words"', "'bytes'"),
        *(
            (
                {"huggingface": {}, "case": {"kind": kind, **keys}},
                "model.case = ",
                f"{kind}: cannot be given beside huggingface: it replaces parts of the model by our own, whose weights "
                "a pretrained model does not have; leave out huggingface, or the case",
            )
            for kind, keys in (
                ("moe", {}),
                ("sparse_attention", {"pattern": "hash"}),
                ("early_exit", {"method": "calm"}),
                ("mod", {}),
            )
        ),
        (
            {"case": {"kind": "freezing", "automatic": {"interval": 0}}},
            "model.case.automatic.interval = 0",
            "greater than 0",
        ),
        ({"case": True}, "model.case = true", "an object"),
        ({"case": {"kind": "sparse_attention"}}, "model.case.pattern", "is required"),
        (
            {"case": {"kind": "sparse_attention", "pattern": "lsh"}},
            'model.case.pattern = "lsh"',
            "'hash' or 'qk'",
        ),
        (
            {"case": {"kind": "sparse_attention", "pattern": "hash", "bucket": 8}},
            "model.case.bucket = 8",
            '"buckets"',
        ),
        (
            {"case": {"kind": "sparse_attention", "pattern": "hash", "buckets": 7}},
            "model.case.buckets = 7",
            "should be even",
        ),
        (
            {"case": {"kind": "sparse_attention", "pattern": "hash", "buckets": 0}},
            "model.case.buckets = 0",
            "equal to 2",
        ),
        (
            {"case": {"kind": "sparse_attention", "pattern": "qk", "buckets": 8}},
            "model.case.buckets = 8",
            'is for pattern "hash"',
        ),
        (
            {"case": {"kind": "sparse_attention", "pattern": "hash", "keep_keys": 0.5}},
            "model.case.keep_keys = 0.5",
            'is for pattern "qk", this is "hash"',
        ),
        (
            {"case": {"kind": "sparse_attention", "pattern": "qk", "keep_queries": 0.0}},
            "model.case.keep_queries = 0.0",
            "greater than 0",
        ),
        (
            {"case": {"kind": "sparse_attention", "pattern": "qk", "keep_keys": 1.5}},
            "model.case.keep_keys = 1.5",
            "less than or equal to 1",
        ),
        (
            {"sequence_length": 8, "case": {"kind": "sparse_attention", "pattern": "hash"}},
            "model.case",
            "hashes into 16 buckets, a sequence has 8 tokens",
        ),
        ({"case": {"kind": "mod", "capacity": 0}}, "model.case.capacity = 0", "greater than 0"),
        ({"case": {"kind": "mod", "capacity": 1.5}}, "model.case.capacity = 1.5", "less than or equal to 1"),
        ({"case": {"kind": "mod", "every": 0}}, "model.case.every = 0", "greater than or equal to 1"),
        (
            {"case": {"kind": "mod", "sampling": "router"}},
            'model.case.sampling = "router"',
            "'topk', 'predictor' or 'threshold'",
        ),
        ({"case": {"kind": "mod", "capacity": [0.5]}}, "model.case.capacity = [0.5]", "should be a valid number"),
        ({"case": {"kind": "mod", "schedule": [[0.5, 1]]}}, "model.case.schedule: withdrawn", "threshold"),
        (
            {"case": {"kind": "mod", "capacity": 0.5, "threshold": 0}},
            "model.case.threshold = 0",
            "cannot be combined with capacity",
        ),
        ({"case": {"kind": "mod", "min_capacity": 0.1}}, "model.case.min_capacity = 0.1", "with threshold only"),
        (
            {"case": {"kind": "mod", "threshold": 0, "min_capacity": 0.5, "max_capacity": 0.25}},
            "model.case.max_capacity = 0.25",
            "at least min_capacity, 0.5",
        ),
        ({"case": {"kind": "mod", "sampling": "threshold"}}, 'model.case.sampling = "threshold"', "needs a threshold"),
        (
            {
                "case": [
                    {"kind": "moe", "expert_parallel": True},
                    {"kind": "mod", "threshold": 0, "sampling": "threshold"},
                ]
            },
            "model.case",
            'mod: only sampling "topk" without threshold can be combined with expert_parallel',
        ),
        (
            {"case": {"kind": "early_exit", "method": "calm", "confidence": "classifier"}},
            'model.case.confidence = "classifier"',
            "'softmax' or 'state'",
        ),
        (
            {"case": {"kind": "mod", "predictor_coefficient": 0}},
            "model.case.predictor_coefficient = 0",
            "greater than 0",
        ),
        (
            {"case": {"kind": "mod", "sampling": "topk", "predictor_size": 8}},
            "model.case.predictor_size = 8",
            'sampling "predictor" only, this is "topk"',
        ),
        (
            {"case": {"kind": "mod", "predictor_coefficient": 0.1, "sampling": "topk"}},
            "model.case.predictor_coefficient = 0.1",
            'sampling "predictor" only, this is "topk"',
        ),
        ({"case": {"kind": "mod", "capacities": 1}}, "model.case.capacities", 'did you mean "capacity"'),
        (
            {"layers": 2, "case": {"kind": "mod", "every": 3}},
            "model.case",
            "every 3 blocks one is routed (every), the model has 2",
        ),
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
    with pytest.raises(ConfigError, match=r"model\.huggingface: .*pip install transformers"):
        model_layers(read(huggingface={"model_type": "llama"}))


def test_a_missing_block_is_named() -> None:
    with pytest.raises(ConfigError, match=r'model: the configuration has no "model" section'):
        read_model_config({"dynmo": {}})
    with pytest.raises(ConfigError, match=r'is "modle" meant to be it\?'):
        read_model_config({"modle": {}})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_in_the_tree_are_valid(path: Path) -> None:
    config = read_model_config(path)
    if any(case.kind == "freezing" for case in config.case):
        assert not config.tied_embedding  # a tied head would freeze with the embedding
