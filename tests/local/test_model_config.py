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


def test_every_default_is_a_value_that_the_block_takes() -> None:
    assert read(**json.loads(ModelConfig().model_dump_json())) == ModelConfig()


def test_a_dumped_block_reads_as_it_was() -> None:
    for freezing in ({"schedule": [[0, 1], [0.5, 3]]}, {"automatic": {"interval": 0.5}}):
        config = read(layers=3, freezing=freezing)
        assert read(**config.model_dump(mode="json")) == config
    for model in ("folder", {"model_type": "llama", "bos_token_id": None}):
        config = read(huggingface=model, sequence_length=32)
        assert read(**config.model_dump(mode="json")) == config


def test_it_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": {"layers": 2}}))
    assert read_model_config(path).layers == 2
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read"):
        read_model_config(tmp_path / "nowhere.json")


def test_a_schedule_is_pairs_of_fraction_and_blocks() -> None:
    freezing = read(freezing={"schedule": [[0.2, 2], [0.4, 0]]}).freezing
    assert freezing is not None
    assert freezing.schedule == ((0.2, 2), (0.4, 0))


@pytest.mark.parametrize(
    ("block", "key", "allowed"),
    [
        ({"layer": 2}, "model.layer = 2", 'did you mean "layers"'),
        ({"layers": 0}, "model.layers = 0", "greater than or equal to 1"),
        ({"layers": "2"}, 'model.layers = "2"', "valid integer"),
        ({"heads": 3}, "model.heads = 3", "should divide hidden_size, 128"),
        ({"vocab_size": 255}, "model.vocab_size = 255", "greater than or equal to 256"),
        ({"tied_embedding": 1}, "model.tied_embedding = 1", "valid boolean"),
        ({"freezing": 3}, "model.freezing = 3", "an object"),
        ({"freezing": {}}, "model.freezing", 'exactly one of "schedule" and "automatic"'),
        ({"freezing": {"schedule": [[0.1, 1]], "automatic": {}}}, "model.freezing.automatic", "exactly one"),
        ({"freezing": {"schedules": [], "automatic": {}}}, "model.freezing.schedules", 'did you mean "schedule"'),
        ({"freezing": {"schedule": []}}, "model.freezing.schedule", "one or more"),
        ({"freezing": {"schedule": 0.5}}, "model.freezing.schedule", "should be null or a list"),
        ({"freezing": {"schedule": [[0.5, 1], [0.5, 2]]}}, "model.freezing.schedule", "increasing fractions"),
        ({"freezing": {"schedule": [[1.0, 1]]}}, "model.freezing.schedule", "in [0, 1), not 1.0"),
        ({"freezing": {"schedule": [["0.1", 1]]}}, "model.freezing.schedule", "in [0, 1), not 0.1"),
        ({"freezing": {"schedule": [[0.1, -1]]}}, "model.freezing.schedule", "0 or more, not -1"),
        ({"freezing": {"schedule": [[0.1, 1.5]]}}, "model.freezing.schedule", "0 or more, not 1.5"),
        ({"freezing": {"schedule": [[0.1]]}}, "model.freezing.schedule", "should hold pairs"),
        ({"layers": 4, "freezing": {"schedule": [[0.1, 5]]}}, "model.freezing", "freezes 5 blocks, the model has 4"),
        ({"huggingface": 3}, "model.huggingface = 3", "valid string"),
        ({"huggingface": "folder", "layers": 2, "heads": 4}, "model = ", "heads, layers: cannot be given beside"),
        ({"huggingface": {}, "freezing": None}, "model = ", "freezing: cannot be given beside huggingface"),
        ({"freezing": {"automatic": {"interval": 0}}}, "model.freezing.automatic.interval = 0", "greater than 0"),
    ],
)
def test_what_is_wrong_is_named(block: dict[str, Any], key: str, allowed: str) -> None:
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
def test_the_configs_that_come_along_are_right(path: Path) -> None:
    config = read_model_config(path)
    if config.freezing is not None:
        assert not config.tied_embedding  # or the head would be frozen too
