import base64
import json
import re
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from ds_dynmo.config import (
    DynMoConfig,
    ProfileConfig,
    RandomnessConfig,
    TraceConfig,
    load_json,
    load_settings,
    parse_section,
    parse_type_partition,
    read_dynmo_config,
)
from ds_dynmo.config.withdrawn import WITHDRAWN, WITHDRAWN_FLAGS, check_withdrawn
from ds_dynmo.errors import ConfigError


def read(**section: Any) -> DynMoConfig:
    config = read_dynmo_config({"train_batch_size": 8, "dynmo": section})
    assert config is not None
    return config


def test_an_empty_block_is_all_defaults() -> None:
    assert read() == DynMoConfig()
    assert read().profile == ProfileConfig(batches=1, warmup_batches=1)
    assert read().randomness == RandomnessConfig(per_layer=True, seed=None)


def test_every_default_may_be_written_in_the_block() -> None:
    defaults = json.loads(DynMoConfig().model_dump_json())
    assert read(**defaults) == DynMoConfig()


def test_a_full_block() -> None:
    config = read(
        enabled=False,
        interval=10,
        start_step=5,
        stop_step=50,
        balancer="diffusion",
        balance_by="parameters",
        profile={"batches": 3, "warmup_batches": 0},
        min_improvement=0,
        memory_limit=0.9,
        initial_partition=[0, 3, 8],
        randomness={"per_layer": False, "seed": 7},
        timeout_seconds=10,
        report="out.jsonl",
        log=False,
        monitor=False,
        trace={"path": "trace.json", "steps": [3, 3]},
    )
    assert config.initial_partition == (0, 3, 8)
    assert config.profile.batches == 3
    assert config.trace == TraceConfig(path="trace.json", steps=(3, 3))
    assert (config.randomness.per_layer, config.randomness.seed) == (False, 7)
    assert (config.min_improvement, config.memory_limit, config.timeout_seconds) == (0, 0.9, 10)


def test_a_block_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().interval = 3


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("enabled", 1, "valid boolean"),
        ("enabled", "true", "valid boolean"),
        ("interval", "3", "valid integer"),
        ("interval", True, "valid integer"),
        ("interval", 3.0, "valid integer"),
        ("interval", -1, "greater than or equal to 0"),
        ("interval", None, "valid integer"),
        ("start_step", -1, "greater than or equal to 0"),
        ("stop_step", -1, "greater than or equal to 0"),
        ("balancer", 3, "valid string"),
        ("balance_by", "memory", "'time' or 'parameters'"),
        ("profile", 3, "an object"),
        ("min_improvement", 1, "less than 1"),
        ("min_improvement", float("nan"), "finite"),
        ("memory_limit", 0, "an int of bytes, a float in (0, 1], or a string such as"),
        ("memory_limit", 8e9, "an int of bytes, a float in (0, 1], or a string such as"),
        ("memory_limit", 0.0, "an int of bytes, a float in (0, 1], or a string such as"),
        ("memory_limit", True, "an int of bytes, a float in (0, 1], or a string such as"),
        ("memory_limit", 2, 'is 2 bytes, and should be at least 1048576, 1 MiB; did you mean "2GiB" or "2%"?'),
        ("memory_limit", 2**20 - 1, "is 1048575 bytes, and should be at least 1048576, 1 MiB; did you mean"),
        ("memory_limit", "30 parsecs", 'a string such as "30GiB", "30GB" or "80%"'),
        ("memory_limit", "120%", 'a string such as "30GiB", "30GB" or "80%"'),
        ("schedule", "zerobubble", "should be 'auto', '1f1b', 'zero_bubble', 'v' or 'loop'"),
        ("memory_limit", "0.9", "an int of bytes, a float in (0, 1], or a string such as"),
        ("initial_partition", {}, "a string or a list of ints"),
        ("initial_partition", [0, 3.0], "a string or a list of ints"),
        ("initial_partition", [False, True], "a string or a list of ints"),
        ("initial_partition", [0], "two or more boundaries"),
        ("initial_partition", [1, 3], "strictly increasing from 0"),
        ("initial_partition", [0, 3, 3], "strictly increasing from 0"),
        ("initial_partition", "unifrm", 'did you mean "uniform"?'),
        ("initial_partition", "type:block:0", 'the weight of "block" should be a number > 0'),
        ("randomness", False, "an object"),
        ("timeout_seconds", 0, "greater than 0"),
        ("timeout_seconds", float("inf"), "finite"),
        ("report", "", "at least 1 character"),
        ("log", 0, "valid boolean"),
        ("monitor", None, "valid boolean"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**{key: value})
    line = str(error.value)
    assert line.startswith(f"dynmo.{key} = {json.dumps(value)}: ")
    assert allowed in line
    assert "\n" not in line


@pytest.mark.parametrize("steps", [3, [3], [0, 3], [4, 3], [1, 2, 3], [1, 2.0], [True, 2], "1, 2", None])
def test_a_trace_needs_a_path_and_two_steps_in_order(steps: Any) -> None:
    with pytest.raises(ConfigError) as error:
        read(trace={"path": "trace.json", "steps": steps})
    allowed = "[first, last], two ints with 1 <= first <= last"
    assert str(error.value) == f"dynmo.trace.steps = {json.dumps(steps)}: should be {allowed}"


def test_missing_and_unknown_keys_of_a_trace_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        read(trace={"file": "trace.json"})
    assert str(error.value).splitlines() == [
        "dynmo.trace.path: is required (file that rank 0 writes, in Chrome's trace format)",
        "dynmo.trace.steps: is required ([first, last] batch that is traced, counted from 1)",
        'dynmo.trace.file = "trace.json": unknown key; should be one of path, steps',
    ]
    with pytest.raises(ConfigError, match=r'^dynmo\.trace\.path = "": .*at least 1 character'):
        read(trace={"path": "", "steps": [1, 2]})


SAME = [(value, value) for value in (2**20, 8_000_000_000, 0.9, 1.0, None)]


@pytest.mark.parametrize(
    ("given", "limit"),
    [*SAME, ("30GiB", 30 * 2**30), ("30 gb", 30 * 10**9), ("1.5MiB", 1_572_864), ("500B", 500), ("80%", 0.8)],
)
def test_memory_limit_in_bytes_as_a_fraction_or_with_a_unit(given: Any, limit: float | None) -> None:
    config = read(memory_limit=given)
    assert config.memory_limit == limit
    assert type(config.memory_limit) is type(limit)


OF_THE_SECTION = [name for name in WITHDRAWN if name.startswith("dynmo.")]


@pytest.mark.parametrize("name", ["dynmo.old", 'dynmo.repack.release = "old"', *OF_THE_SECTION])
def test_keys_that_were_withdrawn_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WITHDRAWN, name, WITHDRAWN.get(name, "remove it"))
    key, _, value = name.partition(" = ")
    settings = json.loads(value or "true")
    for part in reversed(key.split(".")):
        settings = {part: settings}
    with pytest.raises(ConfigError) as error:
        read_dynmo_config(settings)
    assert str(error.value) == f"{name}: withdrawn; {WITHDRAWN[name]}"


@pytest.mark.parametrize("command", WITHDRAWN_FLAGS)
def test_flags_that_were_withdrawn_are_refused_by_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WITHDRAWN_FLAGS[command], "--old", "use --new")
    for flag, instead in WITHDRAWN_FLAGS[command].items():
        for given in ([flag, "5"], [f"{flag}=5"]):
            with pytest.raises(ConfigError, match=f"^{flag}: withdrawn; {re.escape(instead)}$"):
                check_withdrawn(["--report", "r.jsonl", *given], command)


def test_a_schedule_may_be_its_kind_alone() -> None:
    assert read(schedule="zero_bubble") == read(schedule={"kind": "zero_bubble"})


@pytest.mark.parametrize("method", ["uniform", "parameters", "profile", "type:embed:2|block:1"])
def test_initial_partition_by_method(method: str) -> None:
    assert read(initial_partition=method).initial_partition == method


def test_stop_step_may_equal_start_step_but_not_come_before() -> None:
    assert read(start_step=5, stop_step=5).stop_step == 5
    with pytest.raises(ConfigError, match=r"^dynmo\.stop_step = 4: should be at least start_step, 5$"):
        read(start_step=5, stop_step=4)
    with pytest.raises(ConfigError, match=r"^dynmo\.start_step = -1: [^\n]+$"):  # and no word of stop_step
        read(start_step=-1, stop_step=0)


@pytest.mark.parametrize("balancer", ["partition", "diffusion", "makespan"])
def test_builtin_balancers_are_accepted(balancer: str) -> None:
    assert read(balancer=balancer).balancer == balancer


def test_the_default_balancer_follows_what_is_balanced() -> None:
    assert read().balancer == read(balance_by="time").balancer == "makespan"
    assert read(balance_by="parameters").balancer == "partition"
    assert read(balance_by="parameters", balancer="diffusion").balancer == "diffusion"


def test_an_unknown_balancer_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r'^dynmo\.balancer = "difusion": .*did you mean "diffusion"\? registered: '):
        read(balancer="difusion")
    ways = r'; registered: diffusion, makespan, partition; "module:function" imports one of yours$'
    with pytest.raises(ConfigError, match=rf'^dynmo\.balancer = "zzz": no balancer is named "zzz"{ways}'):
        read(balancer="zzz")


def test_makespan_balances_by_time() -> None:
    with pytest.raises(ConfigError, match=r'^dynmo\.balance_by = "parameters": should be "time": balancer "makespan"'):
        read(balancer="makespan", balance_by="parameters")


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"intervall": 5}, 'dynmo.intervall = 5: unknown key; did you mean "interval"?'),
        ({"Enabled": True}, 'dynmo.Enabled = true: unknown key; did you mean "enabled"?'),
        ({"profile": {"batchs": 2}}, 'dynmo.profile.batchs = 2: unknown key; did you mean "batches"?'),
        (
            {"randomness": {"per_laier": True}},
            'dynmo.randomness.per_laier = true: unknown key; did you mean "per_layer"?',
        ),
        ({"profile": {"zzz": 2}}, "dynmo.profile.zzz = 2: unknown key; should be one of batches, warmup_batches"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(section: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**section)
    assert str(error.value) == line


def test_all_problems_are_in_one_message_a_line_each() -> None:
    with pytest.raises(ConfigError) as error:
        read(interval="3", profile={"batches": 0}, randomness={"seed": -1}, intervals=1)
    heads = [line.split(": ")[0] for line in str(error.value).splitlines()]
    assert heads == [
        'dynmo.interval = "3"',
        "dynmo.profile.batches = 0",
        "dynmo.randomness.seed = -1",
        "dynmo.intervals = 1",
    ]


@pytest.mark.parametrize("section", [None, [], 3, "on", True])
def test_a_section_that_is_not_an_object_is_refused(section: Any) -> None:
    with pytest.raises(ConfigError, match=r"^dynmo = .*: should be an object"):
        read_dynmo_config({"dynmo": section})


@pytest.mark.parametrize("key", ["dynamo", "dynmoe", "DynMo", "DYNMO", "dyn_mo", "dynmo "])
def test_a_misspelt_block_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match='did you mean "dynmo"'):
        read_dynmo_config({key: {}})


def test_deepspeeds_keys_are_not_taken_for_misspellings() -> None:
    keys = "dynamic_loss_scale train_batch_size optimizer scheduler monitor_config compile dump_state zero_optimization"
    assert read_dynmo_config(dict.fromkeys(keys.split(), 0)) is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("gradient_accumulation_step", "gradient_accumulation_steps"),
        ("gradient_accumulation", "gradient_accumulation_steps"),
        ("gradientAccumulationSteps", "gradient_accumulation_steps"),
        ("gradient_clip", "gradient_clipping"),
        ("train_batchsize", "train_batch_size"),
        ("train_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
        ("zero_optimisation", "zero_optimization"),
        ("optimiser", "optimizer"),
        ("schedular", "scheduler"),
        ("step_per_print", "steps_per_print"),
        ("activation_checkpoint", "activation_checkpointing"),
    ],
)
def test_what_is_nearly_a_key_of_deepspeeds_is_refused_beside_it_too(key: str, meant: str) -> None:
    message = f'^{key} = 4: DeepSpeed has no such top-level key, .*did you mean "{meant}"'
    for settings in ({key: 4, "dynmo": {}}, {meant: 8, key: 4, "dynmo": {}}):
        with pytest.raises(ConfigError, match=message):
            read_dynmo_config(settings)
    read_dynmo_config({key: 4})  # without a section it is DeepSpeed's


def test_a_section_that_is_nearly_one_of_deepspeeds_is_refused() -> None:
    """Also where the name is short: "enabled" tells it from a setting of a script's own."""
    for key, meant in (("wandbb", "wandb"), ("nebulla", "nebula"), ("tensor_board", "tensorboard")):
        with pytest.raises(ConfigError, match=f'did you mean "{meant}"'):
            read_dynmo_config({key: {"enabled": True}, "dynmo": {}})
    read_dynmo_config({"wandbb": {"project": "mine"}, "comment": {"x": 1}, "fp8": {"enabled": True}, "dynmo": {}})


@pytest.mark.parametrize(
    ("key", "value"),
    [("interval", 10), ("balancer", "diffusion"), ("memory_limit", "80%"), ("schedule", "auto"), ("log", False)],
)
def test_a_key_of_the_section_outside_of_it_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f'^{key} = .*: is a key of the "dynmo" section, .*"dynmo": {{"{key}": '):
        read_dynmo_config({key: value, "dynmo": {}})


def test_settings_of_the_users_own_pass() -> None:
    named = "checkpoints optimizers pipelines timer comment mode date model data training trainer seed lr epochs steps"
    named += " dataset data_type my_optimizer tokenizer wandb_project lr_scheduler eval_batch_size fp32 fp8 zero"
    named += " eval_micro_batch_size_per_gpu"
    named += " gradient_checkpointing log_dir logging monitoring compiler checkpoint_dir train_steps batch_size"
    named += " pipeline_parallel_size model_parallel_size num_train_epochs max_grad_norm learning_rate weight_decay"
    own = {"log": {"level": "info"}, "schedule": [3, 5], "profile": True, "report": {}, "enabled": "yes", 3: 4}
    settings: dict[Any, Any] = {**{key: {"x": 1} for key in named.split()}, **own, "dynmo": {}}
    assert read_dynmo_config(settings) == DynMoConfig()


def test_a_config_as_dict_path_or_base64(tmp_path: Path) -> None:
    settings = {"train_batch_size": 8, "dynmo": {"interval": 7}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(settings))
    encoded = base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()
    with_comments = tmp_path / "with_comments.json"  # which DeepSpeed reads too
    with_comments.write_text("// what to train\n" + path.read_text().replace("8,", "8, # of 2 ranks\n"))
    for config in (settings, path, str(path), with_comments, encoded):
        found = read_dynmo_config(config)
        assert found is not None
        assert found.interval == 7


@pytest.mark.parametrize("config", ["no_such_file.json", "no_such_file", "abcd", "ZGVtbw==", "", None, 3])
def test_an_invalid_config_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"no such file|a path, a dict or a base64 string"):
        read_dynmo_config(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"dynmo": {"interval": 1, "log": true, "interval": 2}}', "more than once in one object: interval"),
        ('{"dynmo": {}, "dynmo": {}}', "more than once in one object: dynmo"),
        ('{"dynmo": {},}', "is no JSON: .* line 1 column"),
        ("// why\n{}", "is no JSON: .* line 1 column"),
        ("[]", r"should hold a JSON object, got \[\]"),
    ],
)
def test_a_file_without_a_json_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_json(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ("dynmo.interval=5", {"dynmo": {"interval": 5}, "bf16": None}),
        ("dynmo.memory_limit=30GiB", {"dynmo": {"interval": 1, "memory_limit": "30GiB"}, "bf16": None}),
        ('dynmo.report="a=b"', {"dynmo": {"interval": 1, "report": "a=b"}, "bf16": None}),
        ("dynmo.report=a=b", {"dynmo": {"interval": 1, "report": "a=b"}, "bf16": None}),
        ("dynmo.profile.batches=2", {"dynmo": {"interval": 1, "profile": {"batches": 2}}, "bf16": None}),
        ('model={"layers": 2}', {"dynmo": {"interval": 1}, "bf16": None, "model": {"layers": 2}}),
        ("dynmo.keep_together=[[6, 7]]", {"dynmo": {"interval": 1, "keep_together": [[6, 7]]}, "bf16": None}),
        ("bf16.enabled=true", {"dynmo": {"interval": 1}, "bf16": {"enabled": True}}),
        ("dynmo.interval=null", {"dynmo": {}, "bf16": None}),
        ("dynmo=null", {"bf16": None}),
        ("dynmo.min_improvement=NaN", {"dynmo": {"interval": 1, "min_improvement": "NaN"}, "bf16": None}),
    ],
)
def test_a_change_is_made_as_if_the_file_said_so(change: str, changed: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"dynmo": {"interval": 1}, "bf16": None}
    assert load_settings(settings, [change]) == changed
    assert settings == {"dynmo": {"interval": 1}, "bf16": None}


def test_changes_are_made_in_their_order() -> None:
    changes = ["a.b=1", "a.c=2", "a.b=3", "a.c=null", "a.c=4"]
    assert load_settings({}, changes) == {"a": {"b": 3, "c": 4}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dynmo.interval", "should be KEY=VALUE, such as dynmo.interval=10"),
        ("=5", "should be KEY=VALUE"),
        ("dynmo..interval=5", "should be KEY=VALUE"),
        ("dynmo.interval=", 'has no value; "" is the empty string, null removes the key'),
        ('model.case={"threshold": 0.0', "is no JSON: "),
        ("dynmo.keep_together=[6, 7", "is no JSON: "),
        ('model.case={"capacity": NaN}', "is no JSON: NaN is no number of JSON"),
        ('model.case={"every": 1, "every": 2}', "keys given more than once in one object: every"),
        ("dynmo.interval.steps=5", "dynmo.interval is 1, and has no keys; give it whole"),
        ("dynmo.trace=null", "there is no such key to remove"),
        ("model.case=null", "there is no such key to remove"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--set {re.escape(change)}: {re.escape(message)}"):
        load_settings({"dynmo": {"interval": 1}}, [change])


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "binary"):
        with pytest.raises(ConfigError, match="cannot be read") as error:
            load_json(path)
        assert str(error.value).count(str(path)) == 1


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("type:block", (("block", 1.0),)),
        ("type:embed:2|block:1", (("embed", 2.0), ("block", 1.0))),
        ("type:^GPT.*Block$:0.5", (("^GPT.*Block$", 0.5),)),
    ],
)
def test_type_partition(text: str, types: tuple[tuple[str, float], ...]) -> None:
    assert parse_type_partition(text) == types


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block", 'begin with "type:"'),
        ("type:", "no regex"),
        ("type:a||b", "no regex"),
        ("type::2", "no regex"),
        ("type:[", "not a regular expression"),
        ("type:(?:a)", "not a regular expression"),
        ("type:a:", "number > 0"),
        ("type:a:b", "number > 0"),
        ("type:a:0", "number > 0"),
        ("type:a:-1", "number > 0"),
        ("type:a:inf", "number > 0"),
        ("type:a:nan", "number > 0"),
        ("type:a:1:2", "number > 0"),
    ],
)
def test_an_invalid_type_partition_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_type_partition(text)


class Disc(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["disc"]
    radius: float


class Box(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["box"]
    width: int | None = None


class Drawing(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    title: str
    scale: int | bool = 1
    shapes: list[Annotated[Disc | Box, Field(discriminator="kind")]] = []
    tagged: Disc | Box | None = Field(default=None, discriminator="kind")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, "model.title: is required"),
        ({"title": "t", "scale": "2"}, 'model.scale = "2": should be a valid integer or should be a valid boolean'),
        ({"title": "t", "tagged": {"kind": "disc"}}, "model.tagged.radius: is required"),
        (
            {"title": "t", "tagged": {"kind": "box", "widht": 3}},
            'model.tagged.widht = 3: unknown key; did you mean "width"?',
        ),
        ({"title": "t", "titel": "u"}, 'model.titel = "u": unknown key; did you mean "title"?'),
    ],
)
def test_any_pydantic_model_is_parsed_the_same_way(data: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_section(Drawing, data, "model")
    assert str(error.value) == line


def test_a_key_path_through_a_list() -> None:
    with pytest.raises(ConfigError, match=r'^model\.shapes\[1\]\.width = "3": ') as error:
        parse_section(Drawing, {"title": "t", "shapes": [{"kind": "box"}, {"kind": "box", "width": "3"}]}, "model")
    assert "Box" not in str(error.value)


def test_parse_section_returns_the_model() -> None:
    assert parse_section(Drawing, {"title": "t"}, "model") == Drawing(title="t")


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"initial_partition": [0, 3, 8], "memory_limit": 0.5, "keep_together": [[1, 2], "type:norm"]},
        {"initial_partition": "uniform", "rank_attributes": ["args"], "trace": {"path": "t.json", "steps": [1, 2]}},
        {"repack": {"release": "command", "command": ["free", "them"]}},
    ],
)
def test_a_section_is_written_as_json_without_a_warning(section: dict[str, Any]) -> None:
    config = parse_section(DynMoConfig, section, "dynmo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = json.loads(config.model_dump_json())
    assert parse_section(DynMoConfig, written, "dynmo") == config
