"""A checkpoint of another model is refused by what differs, with what to do about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_dynmo import CheckpointError
from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.matching import check_model
from ds_dynmo.placement import Placement

Shapes = dict[str, list[int]]

EMBEDDING, BLOCK, HEAD = {"weight": [32, 8]}, {"up": [16, 8], "norm": [8]}, {"weight": [32, 8], "bias": [32]}
MODEL = [EMBEDDING, BLOCK, BLOCK, HEAD]
ROWS = {"weight": [16, 8]}  # a slice of the vocabulary
HALVES = [{"norm": [8]}, {"up": [16, 8]}]
GATED = {**BLOCK, "gate": [8]}
FUNCTION: Shapes = {}
EXPORT = "; with other vocabulary_slices or split_blocks a model begins from its export"
FILES = "; layer_NN-model_states.pt in the checkpoint has the weights of layer NN, for its load_state_dict before"


def refusal(saved: list[Shapes], here: list[Shapes], *, strict: bool = True) -> str:
    """Check a checkpoint of one stage."""
    slices = [SimpleNamespace(shapes={index: shapes for index, shapes in enumerate(saved) if shapes})]
    origins = {index: SimpleNamespace(shapes=shapes) for index, shapes in enumerate(here) if shapes}
    context: Any = SimpleNamespace(
        here=SimpleNamespace(tp_size=1, tp_rank=0, replicas=1),
        stage=SimpleNamespace(layers=SimpleNamespace(num_layers=len(here)), replicas_differ=False),
        origin=SimpleNamespace(layers=origins),
    )
    manifest: Any = SimpleNamespace(
        placement=Placement.chain((0, len(saved))), replicas=1, replicas_differ=False, slices=slices
    )
    options = LoadOptions(strict, True, True, True)
    with pytest.raises(CheckpointError) as error:
        check_model(context, manifest, "manifest", options)
    return str(error.value)


@pytest.mark.parametrize(
    ("here", "differs", "remedy"),
    [
        ([*MODEL, HEAD], "4, with parameters of shapes {'weight': None, 'bias': None} there, expected {'wei", FILES),
        ([*MODEL, FUNCTION], "4, with parameters of shapes {} there, expected {}", FILES),
        ([EMBEDDING, BLOCK, HEAD], "2, with parameters of shapes {'up': [16, 8], 'norm': [8], 'weight': None", FILES),
        ([EMBEDDING, GATED, *MODEL[1:]], "1, with parameters of shapes {'gate': None} there, expected {'gat", FILES),
        ([FUNCTION, *MODEL], "0, with parameters of shapes {'weight': [32, 8]} there, expected {'weight': N", FILES),
        ([ROWS, ROWS, *MODEL[1:]], "0, with parameters of shapes {'weight': [32, 8]} there, expected ", EXPORT),
        ([EMBEDDING, *HALVES, *HALVES, HEAD], "1, with parameters of shapes {'up': [16, 8]} there, expected ", EXPORT),
    ],
)
def test_other_layers_are_named(here: list[Shapes], differs: str, remedy: str) -> None:
    for strict in (True, False):
        said = refusal(MODEL, here, strict=strict)
        assert said.startswith(
            f"manifest: a model of 4 layers, expected {len(here)}: the first that differs is layer {differs}"
        )
        assert remedy in said


def test_other_parameters_of_a_layer_are_named() -> None:
    more = [EMBEDDING, BLOCK, GATED, HEAD]
    rest = "; load_module_strict=False loads what both have"
    layer = "manifest: layer 2 was built with parameters of shapes"
    assert refusal(MODEL, more) == f"{layer} {{'gate': None}}, expected {{'gate': [8]}}{rest}"
    assert refusal(more, MODEL) == f"{layer} {{'gate': [8]}}, expected {{'gate': None}}{rest}"
    wide = [EMBEDDING, BLOCK, {**BLOCK, "norm": [16]}, HEAD]
    for strict in (True, False):
        assert refusal(MODEL, wide, strict=strict) == f"{layer} {{'norm': [8]}}, expected {{'norm': [16]}}"
    none = [EMBEDDING, BLOCK, FUNCTION, HEAD]
    assert refusal(MODEL, none).endswith(f"there, expected none of its own{rest}")
    assert "layer 2 has no parameters there" in refusal(none, MODEL)
