"""The trainer's numbers are those of transformers' Trainer and TRL's SFTTrainer, however the layers are placed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.trainer.batches import collate_rows
from tests.support import harness
from tests.support.trainer_runs import TrainerRun, differences, model_of, rows_of, train, train_library

pytestmark = pytest.mark.ranks

pytest.importorskip("transformers")

run = partial(harness.run, backend="gloo")  # the arguments say use_cpu

EXACT = ("learning_rate", "epoch", "step")
MOVES = {4: [0, 2, 7], 11: [0, 5, 7], 12: [0, 4, 7]}


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], *, norm: float = 1e-3) -> None:
    """Check that two runs have the same numbers: rounding alone may differ, which training amplifies.

    Args:
        norm: relative difference of gradient norms.
    """
    first = differences(found[:1], expected[:1])
    assert first["loss"] <= 1e-6 and first["grad_norm"] <= 1e-6, first
    largest = differences(found, expected)
    assert all(largest[key] == 0 for key in EXACT), largest
    assert all(largest[key] <= 1e-4 for key in largest if key.endswith("loss")), largest
    assert largest["grad_norm"] <= norm, largest


@pytest.mark.parametrize(
    ("ours", "stages"),
    [
        pytest.param(TrainerRun(moves=MOVES), 2, id="llama"),
        pytest.param(TrainerRun(tied=True, moves={5: [0, 1, 4, 7]}), 3, id="llama, tied, three stages"),
        pytest.param(TrainerRun("qwen2", lora=True, moves=MOVES), 2, id="qwen2, LoRA"),
        pytest.param(TrainerRun("qwen3", tied=True), 1, id="qwen3, tied, one stage"),
        pytest.param(
            TrainerRun(
                tied=True, layers={"vocabulary_slices": 3, "split_blocks": True}, moves={6: [0, 5, 15], 9: [0, 8, 15]}
            ),
            *(2,),
            id="llama, tied, in slices and halves",
        ),
    ],
)
def test_it_trains_as_the_trainer_of_transformers(ours: TrainerRun, stages: int, tmp_path: Path) -> None:
    (expected,) = run(1, train_library, ours, str(tmp_path / "library"))
    for of_rank in run(stages, train, ours, str(tmp_path / "ours")):
        check_same(of_rank["logs"], expected["logs"])
        moved = list(ours.moves.values())
        assert not moved or of_rank["partition"] == moved[-1]


@pytest.mark.parametrize(
    ("chats", "arguments"),
    [
        ("messages", {"assistant_only_loss": True}),
        ("prompt", {}),
        ("text", {"max_length": 5}),
        pytest.param("messages", {}, marks=pytest.mark.nightly),
        pytest.param("prompt messages", {"completion_only_loss": True}, marks=pytest.mark.nightly),
        pytest.param("prompt", {"completion_only_loss": False}, marks=pytest.mark.nightly),
    ],
)
def test_it_trains_chats_as_trl_does(chats: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    ours = TrainerRun("qwen2", chats=chats, arguments={"max_steps": 12, "eval_steps": 6, **arguments})
    (expected,) = run(1, train_library, ours, str(tmp_path / "library"))
    for of_rank in run(2, train, ours, str(tmp_path / "ours")):
        check_same(of_rank["logs"], expected["logs"])


def test_replicas_train_the_rows_of_one_process_with_as_many_micro_batches(tmp_path: Path) -> None:
    ours = TrainerRun(arguments={"max_steps": 8, "eval_steps": 4}, num_stages=2, rows=48)
    more = replace(ours, arguments={**ours.arguments, "gradient_accumulation_steps": 6})
    (expected,) = run(1, train_library, more, str(tmp_path / "library"))
    for of_rank in run(4, train, ours, str(tmp_path / "ours")):
        check_same(of_rank["logs"], expected["logs"])


def test_a_resumed_run_on_other_stages_goes_on_where_it_was(tmp_path: Path) -> None:
    saving = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10, "save_total_limit": 1}
    ours = TrainerRun(arguments=saving, moves={4: [0, 2, 7]})
    (expected,) = run(1, train_library, replace(ours, arguments={"max_steps": 20}), str(tmp_path / "library"))
    folder = str(tmp_path / "ours")
    half = replace(ours, arguments={**saving, "num_train_epochs": 3})
    run(2, train_until, half, folder, 13)
    found = run(3, train, ours, folder, True)
    assert [of_rank["first"] for of_rank in found] == [True, False, False]
    for of_rank in found:
        check_same(of_rank["logs"][:-1], expected["logs"][:-1])  # the last entry has the mean loss since it was resumed
    assert sorted(path.name for path in Path(folder).glob("checkpoint-*")) == ["checkpoint-20"]


def test_packed_rows_train_alike_on_any_stages(tmp_path: Path) -> None:
    """Documents share rows as in TRL, but not the same ones: there is nothing of its to compare with."""
    packing = {"max_steps": 6, "eval_steps": 3, "packing": True, "max_length": 24, "per_device_eval_batch_size": 2}
    ours = TrainerRun("qwen2", chats="messages", arguments={**packing, "assistant_only_loss": True})
    (expected,) = run(1, train, ours, str(tmp_path / "one"))
    moved = replace(ours, moves={3: [0, 2, 3, 6, 7]}, dynmo={"interval": 0, "schedule": "v"})  # rows have one length
    for of_rank in run(2, train, moved, str(tmp_path / "two")):
        check_same(of_rank["logs"], expected["logs"])


BEST = {
    "max_steps": -1,
    "num_train_epochs": 6,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "logging_steps": 3,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "include_for_metrics": ["loss"],
}


def stopping(function: Any, ours: TrainerRun, folder: str) -> Any:
    from transformers import EarlyStoppingCallback

    return function(ours, folder, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])


def test_it_stops_early_and_loads_the_best_as_the_trainer_of_transformers(tmp_path: Path) -> None:
    """With several epochs, whose last batch has fewer rows."""
    ours = TrainerRun(arguments=BEST, moves={4: [0, 2, 7]}, measures=True)
    (expected,) = run(1, stopping, train_library, ours, str(tmp_path / "library"))
    for of_rank in run(2, stopping, train, ours, str(tmp_path / "ours")):
        metric, *best = of_rank["best"]
        assert best == [*expected["best"][1:]] and metric == pytest.approx(expected["best"][0], rel=1e-4)
        assert of_rank["step"] == expected["step"] < 6 * 8 and of_rank["checkpoints"] == expected["checkpoints"]
        assert of_rank["loss at the end"] == pytest.approx(metric, rel=1e-6)
        check_same(of_rank["logs"], expected["logs"], norm=0.1)
        assert "eval_largest_of_11" in of_rank["logs"][-2]


def adapters(ours: TrainerRun, folder: str) -> Any:
    """Train fresh adapters, and write them."""
    from ds_dynmo.trainer import PipelineTrainer
    from tests.support.trainer_runs import arguments_of, rows_of

    trainer = PipelineTrainer(
        f"{folder}/base",
        arguments_of(ours, folder),
        train_dataset=rows_of(12),
        eval_dataset={"held": rows_of(11, seed=6)},
        peft_config={"r": 4, "target_modules": ["q_proj", "down_proj"]},
        dynmo={"interval": 0},
    )
    trainer.train()
    trainer.save_model(f"{folder}/adapters")
    shown = "PrinterCallback" in trainer.callback_handler.callback_list  # as progress bars are off
    assert shown == trainer.is_world_process_zero() and "Progress" not in trainer.callback_handler.callback_list
    return trainer.evaluate()["eval_held_loss"]


def test_adapters_of_a_folder_are_written_as_peft_reads_them(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ours = TrainerRun("qwen2", arguments={"max_steps": 3, "save_strategy": "steps", "save_steps": 2})
    model_of(ours).save_pretrained(tmp_path / "base")
    (loss, same) = run(2, adapters, ours, str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    rows, total = rows_of(11, seed=6), 0.0
    for first in range(0, 11, 4):
        batch = collate_rows(rows[first : first + 4])
        total += float(model(**batch).loss.detach()) * len(batch["labels"])
    assert loss == same == pytest.approx(total / 11, rel=1e-5)
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()
    assert not [path.name for path in (tmp_path / "adapters").iterdir() if path.is_dir()], "nothing is left there"


def refusals(folder: str) -> list[str]:
    from transformers import AutoTokenizer

    from ds_dynmo.errors import ConfigError
    from ds_dynmo.trainer import PipelineTrainer
    from tests.support.trainer_runs import arguments_of, chats_of, rows_of, tokenizer_of

    def refused(**settings: Any) -> str:
        run = TrainerRun("mixtral" if "router" in settings else "llama", arguments={"max_steps": 40})
        router = {"output_router_logits": True} if settings.pop("router", False) else {}
        model = model_of(run)
        model.config.update(router)
        given = {"train_dataset": rows_of(45), "dynmo": {"interval": 0}, **settings}
        call = given.pop("call", "train")
        with pytest.raises((ConfigError, ValueError)) as error:
            getattr(PipelineTrainer(model, arguments_of(run, folder), **given), call)()
        return str(error.value)

    changed = AutoTokenizer.from_pretrained(tokenizer_of(Path(folder)))
    changed.chat_template = "{{ raise_exception('the template of the script') }}"
    return [
        refused(num_stages=2),
        refused(train_dataset=[]),
        refused(train_dataset=[[1, 2]]),
        refused(train_dataset=None),
        refused(eval_dataset=None, call="evaluate"),
        refused(train_dataset=[{"text": "one"}]),
        refused(router=True),
        refused(train_dataset=chats_of("messages", 2), processing_class=changed),
    ]


def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path) -> None:
    (found,) = run(1, refusals, str(tmp_path))
    words = (
        "num_stages = 2: 1 ranks",
        "train_dataset: has no rows",
        "train_dataset[0]: is a list",
        "train_dataset: is None",
        "eval_dataset: is None",
        "train_dataset[0]: is text, and no tokenizer is given",
        "45 rows are no whole number of batches",
        "the chat template",  # the tokenizer counts as the script has changed it
    )
    for said, expected in zip(found, words, strict=True):
        assert expected in said


def train_until(ours: TrainerRun, folder: str, step: int) -> None:
    """Train until a callback ends the run."""
    from transformers import TrainerCallback

    from tests.support.trainer_runs import trainer_of

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            import torch

            control.should_training_stop = state.global_step == step and torch.distributed.get_rank() == 0

    trainer = trainer_of(ours, folder)
    trainer.add_callback(Ends())
    assert trainer.train().global_step == step
