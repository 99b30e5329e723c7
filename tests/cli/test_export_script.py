"""ds-dynmo-export: what a run saved, pruned and in slices, loads into the plain model, which computes the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ds_dynmo.cli.export import main
from ds_dynmo.models import language_model_loss, load_text, model_layers, read_model_config
from tests.support.case_runs import CASES, SIZES
from tests.support.harness import run
from tests.support.saved_runs import metadata_of, save_metadata
from tests.support.script import flags, run_script

pytestmark = pytest.mark.ranks


def test_exported_weights_are_dense_and_compute_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    given = flags(tmp_path, "slices and pruning", 8)
    trained = run(2, run_script, [*given, "--save", str(saved)])[0]
    whole, new, old = (
        saved / name for name in ("global_step8", ".global_step8.writing", ".global_step8.dynmo-removed")
    )
    whole.rename(new), old.mkdir()  # a save was killed while it replaced the tag
    assert main([str(saved), str(out)]) == 0
    new.rename(whole), old.rmdir()
    layers, pruned, weights = [], 0, 0
    for number, spec in enumerate(model_layers(read_model_config({"model": SIZES}))):
        state = torch.load(out / f"layer_{number:02d}-model_states.pt", weights_only=True)
        layers.append(spec.build())
        layers[-1].load_state_dict(state)
        if 0 < number <= SIZES["layers"]:
            pruned += sum(int((value == 0).sum()) for value in state.values() if value.dim() == 2)
            weights += sum(value.numel() for value in state.values() if value.dim() == 2)
    assert pruned == round(weights * CASES["pruning"]["case"]["final_sparsity"])
    data = load_text(given[given.index("--data") + 1]).batches(
        "validation", micro_batch_size=2, sequence_length=12, seed=0
    )
    losses = []
    for tokens, targets in itertools.islice(data.iterate(micro_batches=2), 2):
        for layer in layers:
            tokens = layer(tokens)
        losses.append(language_model_loss(tokens, targets).item())
    assert sum(losses) / 2 == pytest.approx(trained["validation"][-1][1], rel=1e-5)
    assert main([str(saved), str(out)]) == 2
    assert "should be an empty folder" in capsys.readouterr().err
    (saved / "global_step8" / "layer_02-model_states.pt").rename(saved / "elsewhere")
    assert main([str(saved), str(tmp_path / "again")]) == 2
    assert "layer_02-model_states.pt: there is no such file" in capsys.readouterr().err
    facts = metadata_of(saved / "global_step8")
    facts["model"]["case"] = facts["model"]["vocabulary_slices"] = None
    save_metadata(saved / "global_step8", facts)
    assert main([str(saved), str(tmp_path / "again")]) == 2
    assert (
        'no kind "pruning", model.vocabulary_slices is null: its weights are dense and whole' in capsys.readouterr().err
    )
    assert not (tmp_path / "again").exists()
