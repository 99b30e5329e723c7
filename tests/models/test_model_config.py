"""The "model" section: what is read, dumped and refused."""

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

CONFIGS = {path.stem: path for path in sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))}


def read(**section: Any) -> ModelConfig:
    return read_model_config({"train_batch_size": 8, "model": section})


def of(kind: str, **keys: Any) -> dict[str, Any]:
    """Return the section of a case."""
    return {"kind": kind, **keys}


SCHEDULE, AUTOMATIC = of("freezing", schedule=[[0.5, 1]]), of("freezing", automatic={})
EGERIA = of("freezing", egeria={})

CALM, HASH = of("early_exit", method="calm"), of("sparse_attention", pattern="hash")
PARALLEL = of("moe", expert_parallel=True)
UNTIED = {"tied_embedding": False}


def test_a_dumped_section_reads_as_it_was() -> None:
    schedule = of("freezing", schedule=[[0, 1], [0.5, 3]])
    hugging_face = {"sequence_length": 32, "case": of("freezing", schedule=[[0.5, 40]]), "tokens": "bytes"}
    sections: list[dict[str, Any]] = [
        {},
        *(
            {"layers": 3, **UNTIED, "case": case}
            for case in (schedule, of("freezing", automatic={"interval": 0.5}), EGERIA)
        ),
        *({"huggingface": one, **hugging_face} for one in ("folder", {"model_type": "llama", "bos_token_id": None})),
        {"case": of("moe", routing="bias", bias_rate=0.01)},
        {"case": HASH},
        {"case": of("sparse_attention", pattern="qk")},
        {"case": of("pruning", csr_from=0.5, final_sparsity=0.8)},
        {"case": of("early_exit", method="calm", confidence="state")},
        {"case": of("early_exit", method="adpc", depths=[3, 6], start=0.1)},
        {**UNTIED, "case": [of("moe", experts=4), schedule]},
    ]
    for section in sections:
        config = read(**section)
        assert read(**config.model_dump(mode="json")) == config, section
        assert read(**json.loads(config.model_dump_json())) == config, section
        assert config.layer_outputs == "exits" or "early_exit" not in str(section)


def test_what_is_left_out_has_its_default() -> None:
    config = read()
    assert config == ModelConfig() and len(gpt_layers(config)) == config.layers + 3
    assert read(split_blocks=False, case=of("mod")) == read(case=of("mod"))
    hashed, kept = (
        read(case=of("sparse_attention", pattern=pattern)).find_case(SparseAttentionConfig)
        for pattern in ("hash", "qk")
    )
    assert hashed is not None and kept is not None
    assert (hashed.buckets, hashed.keep_queries, hashed.keep_keys) == (16, None, None)
    assert (kept.buckets, kept.keep_queries, kept.keep_keys) == (None, 0.5, 0.5)
    pruning = read(case=of("pruning")).find_case(PruningConfig)
    assert pruning is not None  # as the paper's
    assert (pruning.start, pruning.end, pruning.times, pruning.final_sparsity) == (0.3, 0.7, 4, 0.9)


def test_it_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": {"layers": 2}}))
    assert read_model_config(path).layers == 2
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read"):
        read_model_config(tmp_path / "nowhere.json")


def test_cases_combine_in_any_order() -> None:
    one, other = of("moe", experts=4), SCHEDULE

    assert read(**UNTIED, case=[one, other]) == read(**UNTIED, case=[other, one])
    assert read(case=[one]) == read(case=one) and read(case=[]) == read(case=None) == read()


def test_a_schedule_is_pairs_of_fraction_and_blocks() -> None:
    freezing = read(**UNTIED, case=of("freezing", schedule=[[0.2, 2], [0.4, 0]])).find_case(FreezingConfig)
    assert freezing is not None and freezing.schedule == ((0.2, 2), (0.4, 0))


def test_the_configs_in_the_tree_are_those_of_the_papers_cases() -> None:
    """No file decides after every batch, or has a case in which no balancer can gain."""
    kinds = {}
    for name, path in CONFIGS.items():
        dynmo, model = read_dynmo_config(path), read_model_config(path)
        kinds[name] = [case.kind for case in model.case]
        assert dynmo is not None and (dynmo.interval == 0 or dynmo.interval >= 25), name
        experts, depths = model.find_case(MoEConfig), model.find_case(MixtureOfDepthsConfig)
        assert experts is None or experts.expert_parallel, name
        assert depths is None or depths.threshold is not None, name
        assert "freezing" not in kinds[name] or not model.tied_embedding, name  # a tied head would freeze, too
    assert {name: cases for name, cases in kinds.items() if cases} == {
        kind: [kind] for kind in ("early_exit", "freezing", "mod", "moe", "pruning", "sparse_attention")
    }


# -- refusals: keys, the beginning of the message, and what it says ---------------------------------------------

FOR_PREDICTOR = 'sampling "predictor" only, this is "topk"'
FOR_AUXILIARY_LOSS = 'routing "aux_loss" only, this is "bias"'
FOR_TOPK = 'mod: only sampling "topk" without threshold can be combined with expert_parallel'
OF_MODEL: list[tuple[dict[str, Any], str, str]] = [
    ({"layer": 2}, "model.layer = 2", 'did you mean "layers"'),
    ({"sampling": "shuffled"}, 'model.sampling = "shuffled"', "'random' or 'epochs'"),
    ({"layers": 0}, "model.layers = 0", "greater than or equal to 1"),
    ({"layers": "2"}, 'model.layers = "2"', "valid integer"),
    ({"heads": 3}, "model.heads = 3", "should divide hidden_size, 128"),
    ({"vocab_size": 255}, "model.vocab_size = 255", "greater than or equal to 256"),
    ({"tied_embedding": 1}, "model.tied_embedding = 1", "valid boolean"),
    ({"case": 3}, "model.case = 3", "an object"),
    ({"case": {}}, "model.case.kind", "is required; should be one of moe, pruning, freezing"),
    ({"case": of("mo")}, 'model.case.kind = "mo"', 'did you mean "moe"'),
    ({"case": [3]}, "model.case[0] = 3", "an object"),
    ({"case": [of("mod"), of("x")]}, 'model.case[1].kind = "x"', "should be one of moe, pruning"),
    ({"case": [of("mod"), of("moe", expert=4)]}, "model.case[1].expert = 4", '"experts"'),
    ({"case": [of("mod"), of("mod")]}, "model.case = [", "mod: is given 2 times"),
    ({"case": True}, "model.case = true", "an object"),
    ({"split_blocks": 1}, "model.split_blocks = 1", "valid boolean"),
    ({"huggingface": 3}, "model.huggingface = 3", "valid string"),
    ({"untie": True}, "model = ", "untie: is for a Hugging Face model (huggingface); without one, tied_embedding"),
    ({"huggingface": "folder", "layers": 2, "heads": 4}, "model = ", "heads, layers: cannot be given beside"),
    ({"huggingface": "folder", "tokens": "words"}, 'model.tokens = "words"', "'bytes'"),
]
OF_CASES: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "moe": [
        ({"unknown": 1}, ".unknown", "one of kind, experts, top_k"),
        ({"expert": 4}, ".expert = 4", 'did you mean "experts"'),
        ({"top_k": 9}, ".top_k = 9", "at most the number of experts, 8"),
        ({"experts": 4, "top_k": 0}, ".top_k = 0", "greater than or equal to 1"),
        ({"routing": "hash"}, '.routing = "hash"', "'aux_loss', 'sbase' or 'bias'"),
        ({"capacity_factor": 0}, ".capacity_factor = 0", "greater than 0"),
        ({"bias_rate": 0.01}, ".bias_rate = 0.01", 'routing "bias" only, this is "aux_loss"'),
        ({"routing": "bias", "auxiliary_coefficient": 1}, ".auxiliary_coefficient = 1", FOR_AUXILIARY_LOSS),
        ({"expert_parallel": 1}, ".expert_parallel = 1", "valid boolean"),
    ],
    "freezing": [
        ({"automatic": {}}, "", "needs tied_embedding = false"),
        ({}, "", 'exactly one of "schedule", "automatic" and "egeria"'),
        ({"schedule": [[0.1, 1]], "automatic": {}}, "", "exactly one"),
        ({"egeria": {}, "automatic": {}}, ".egeria", "exactly one"),
        ({"egeria": {"window": 1}}, ".egeria.window = 1", "greater than or equal to 2"),
        ({"egeria": {"interval": 0.1, "delay": 0.2}}, ".egeria.delay = 0.2", "interval, 0.1"),
        ({"schedules": [], "automatic": {}}, ".schedules", 'did you mean "schedule"'),
        ({"schedule": []}, ".schedule", "one or more"),
        ({"schedule": 0.5}, ".schedule", "should be null or a list"),
        ({"schedule": [[0.5, 1], [0.5, 2]]}, ".schedule", "increasing fractions"),
        ({"schedule": [[1.0, 1]]}, ".schedule", "in [0, 1), not 1.0"),
        ({"schedule": [["0.1", 1]]}, ".schedule", "in [0, 1), not 0.1"),
        ({"schedule": [[0.1, -1]]}, ".schedule", "0 or more, not -1"),
        ({"schedule": [[0.1, 1.5]]}, ".schedule", "0 or more, not 1.5"),
        ({"schedule": [[0.1]]}, ".schedule", "should hold pairs"),
        ({"automatic": {"interval": 0}}, ".automatic.interval = 0", "greater than 0"),
    ],
    "pruning": [
        ({"sparsity": 0.9}, ".sparsity", "final_sparsity"),
        ({"final_sparsity": 1.0}, ".final_sparsity = 1.0", "less than 1"),
        ({"initial_sparsity": -0.1}, ".initial_sparsity = -0.1", "or equal to 0"),
        ({"initial_sparsity": 0.5, "final_sparsity": 0.4}, ".final_sparsity = 0.4", "at least initial_sparsity, 0.5"),
        ({"start": 0.5, "end": 0.5}, ".end = 0.5", "greater than start, 0.5"),
        ({"end": 1.0}, ".end = 1.0", "less than 1"),
        ({"times": 0}, ".times = 0", "greater than or equal to 1"),
        ({"times": 2.5}, ".times = 2.5", "valid integer"),
        ({"csr_from": 1.5}, ".csr_from = 1.5", "less than or equal to 1"),
    ],
    "early_exit": [
        ({}, ".method", "required"),
        ({"method": "adp"}, '.method = "adp"', "'calm' or 'adpc'"),
        ({"method": "adpc"}, "", "adpc needs depths"),
        ({"method": "calm", "depths": []}, ".depths", "null or a list"),
        ({"method": "calm", "depths": [0, 1]}, ".depths", "each 1 or more"),
        ({"method": "calm", "depths": [2, 2]}, ".depths", "should increase"),
        ({"method": "adpc", "depths": [1], "confidence": "state"}, '.confidence = "state"', "adpc has one of its own"),
        ({"method": "calm", "threshold": 1.1}, ".threshold = 1.1", "less than or equal"),
        ({"method": "calm", "start": 1}, ".start = 1", "less than 1"),
        ({"method": "calm", "startt": 0}, ".startt", 'did you mean "start"'),
        ({"method": "calm", "confidence": "classifier"}, '.confidence = "classifier"', "'softmax' or 'state'"),
    ],
    "sparse_attention": [
        ({}, ".pattern", "is required"),
        ({"pattern": "lsh"}, '.pattern = "lsh"', "'hash' or 'qk'"),
        ({"pattern": "hash", "bucket": 8}, ".bucket = 8", '"buckets"'),
        ({"pattern": "hash", "buckets": 7}, ".buckets = 7", "should be even"),
        ({"pattern": "hash", "buckets": 0}, ".buckets = 0", "equal to 2"),
        ({"pattern": "qk", "buckets": 8}, ".buckets = 8", 'is for pattern "hash"'),
        ({"pattern": "hash", "keep_keys": 0.5}, ".keep_keys = 0.5", 'is for pattern "qk", this is "hash"'),
        ({"pattern": "qk", "keep_queries": 0.0}, ".keep_queries = 0.0", "greater than 0"),
        ({"pattern": "qk", "keep_keys": 1.5}, ".keep_keys = 1.5", "less than or equal to 1"),
    ],
    "mod": [
        ({"capacity": 0}, ".capacity = 0", "greater than 0"),
        ({"capacity": 1.5}, ".capacity = 1.5", "less than or equal to 1"),
        ({"every": 0}, ".every = 0", "greater than or equal to 1"),
        ({"sampling": "router"}, '.sampling = "router"', "'topk', 'predictor' or 'threshold'"),
        ({"capacity": [0.5]}, ".capacity = [0.5]", "should be a valid number"),
        ({"schedule": [[0.5, 1]]}, ".schedule: withdrawn", "threshold"),
        ({"capacity": 0.5, "threshold": 0}, ".threshold = 0", "cannot be combined with capacity"),
        ({"min_capacity": 0.1}, ".min_capacity = 0.1", "with threshold only"),
        (
            {"threshold": 0, "min_capacity": 0.5, "max_capacity": 0.1},
            ".max_capacity = 0.1",
            "at least min_capacity, 0.5",
        ),
        ({"sampling": "threshold"}, '.sampling = "threshold"', "needs a threshold"),
        ({"predictor_coefficient": 0}, ".predictor_coefficient = 0", "greater than 0"),
        ({"sampling": "topk", "predictor_size": 8}, ".predictor_size = 8", FOR_PREDICTOR),
        ({"predictor_coefficient": 1, "sampling": "topk"}, ".predictor_coefficient = 1", FOR_PREDICTOR),
        ({"capacities": 1}, ".capacities", 'did you mean "capacity"'),
    ],
}
BESIDE_HUGGINGFACE = (
    "cannot be given beside huggingface: it replaces parts of the model by our own, whose weights a pretrained model "
    "does not have; leave out huggingface, or the case"
)
# Cases, other keys, and what is said of model.case.
COMBINATIONS: list[tuple[Any, dict[str, Any], str]] = [
    (SCHEDULE, {"tied_embedding": True}, "would freeze the head with the embedding: needs tied_embedding = false"),
    (of("freezing", schedule=[[0.1, 5]]), {"layers": 4, **UNTIED}, "freezes 5 blocks, the model has 4"),
    (of("moe"), {"hidden_size": 12, "heads": 2}, "a multiple of 8, this is 12"),
    (of("moe", dense_blocks=4), {"layers": 4}, "no block with experts: dense_blocks 4, every 1"),
    (of("moe", dense_blocks=3, every=2), {"layers": 4}, "the model has 4 (layers)"),
    ({**CALM, "depths": [1, 4]}, {"layers": 4}, "has an exit after block 4, exits lie before the last of 4 (layers)"),
    (CALM, {"layers": 1}, "before the last of 1 (layers)"),
    (HASH, {"sequence_length": 8}, "hashes into 16 buckets, a sequence has 8 tokens"),
    (of("mod", every=3), {"layers": 2}, "every 3 blocks one is routed (every), the model has 2"),
    ([AUTOMATIC, CALM], UNTIED, "cannot be combined with freezing"),
    ([of("moe"), CALM], {}, "cannot be combined with moe"),
    ([PARALLEL, AUTOMATIC], UNTIED, "freezing: only schedule can be combined with expert_parallel"),
    ([PARALLEL, EGERIA], UNTIED, "freezing: only schedule can be combined with expert_parallel"),
    ([PARALLEL, of("mod")], {}, FOR_TOPK),
    ([PARALLEL, of("mod", threshold=0, sampling="threshold")], {}, FOR_TOPK),
    ([of("moe"), of("pruning")], {}, "cannot be combined with moe: experts are not pruned"),
    ([of("pruning"), of("mod")], {}, "cannot be combined with pruning"),
    (of("mod"), {"split_blocks": True}, "cannot be combined with split_blocks"),
    (CALM, {"split_blocks": True}, "cannot be combined with split_blocks"),
    (EGERIA, {"split_blocks": True, **UNTIED}, "egeria cannot be combined with split_blocks"),
    (EGERIA, {"split_blocks": True, "huggingface": "folder"}, "egeria cannot be combined with split_blocks"),
    ([EGERIA, HASH], UNTIED, "freezing: egeria cannot be combined with sparse_attention"),
    *(
        (case, {"huggingface": {}}, f"{case['kind']}: {BESIDE_HUGGINGFACE}")
        for case in (of("moe"), HASH, CALM, of("mod"))
    ),
]


def check_refused(section: dict[str, Any], begin: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**section)
    said = str(caught.value)
    assert said.startswith(begin) and words in said and "\n" not in said, (section, said)


@pytest.mark.parametrize("kind", OF_CASES)
def test_a_wrong_value_of_a_case_is_refused_with_key_and_what_is_allowed(kind: str) -> None:
    for keys, begin, words in OF_CASES[kind]:
        check_refused({"case": of(kind, **keys)}, f"model.case{begin}", words)


def test_a_wrong_value_is_refused_with_key_and_what_is_allowed() -> None:
    for section, begin, words in OF_MODEL:
        check_refused(section, begin, words)


def test_cases_that_do_not_go_with_one_another_or_with_the_model_are_refused() -> None:
    for cases, others, words in COMBINATIONS:
        check_refused({**others, "case": cases}, "model.case", words)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"model\.huggingface: .*pip install transformers"):
        model_layers(read(huggingface={"model_type": "llama"}))


def test_a_missing_section_is_named() -> None:
    with pytest.raises(ConfigError, match=r'model: the configuration has no "model" section'):
        read_model_config({"dynmo": {}})
    with pytest.raises(ConfigError, match=r'is "modle" meant to be it\?'):
        read_model_config({"modle": {}})
