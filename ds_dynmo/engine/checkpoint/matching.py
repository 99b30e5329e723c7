"""Is a checkpoint one of this model and optimizer? And what a checkpoint of stock DeepSpeed's has to look like."""

from __future__ import annotations

import glob
import os
import re

from ds_dynmo.engine.checkpoint.applying import LoadOptions
from ds_dynmo.engine.checkpoint.context import CheckpointContext
from ds_dynmo.engine.checkpoint.kinds import optimizer_files
from ds_dynmo.engine.checkpoint.layout import MANIFEST, Manifest, SliceLayout, stage_file
from ds_dynmo.engine.checkpoint.replica_files import check_replicas
from ds_dynmo.engine.checkpoint.tied_files import saved_as
from ds_dynmo.errors import CheckpointError
from ds_dynmo.placement import Placement


def check_model(context: CheckpointContext, manifest: Manifest, path: str, options: LoadOptions) -> None:
    """Was it written by an engine like this one?"""
    _check_slices(context, len(manifest.slices), path)
    check_replicas(manifest, context.engine.grid.get_data_parallel_world_size(), context.stage.replicas_differ, path)
    num_layers = context.stage.layers.num_layers
    if manifest.placement.num_layers != num_layers:
        raise CheckpointError(f"{path}: a model of {manifest.placement.num_layers} layers, expected {num_layers}")
    for index, origin in context.origin.layers.items():
        layout = manifest.slices[context.engine.grid.get_slice_parallel_rank()]
        found = layout.shapes.get(saved_as(context.stage.layers, layout, index))
        if found is None:
            raise CheckpointError(f"{path}: layer {index} has no parameters there, expected {origin.shapes}")
        differ = {
            name: found.get(name)
            for name in {*found, *origin.shapes}
            if found.get(name) != origin.shapes.get(name)
            and (options.strict or (name in found and name in origin.shapes))
        }
        if differ:
            expected = {name: origin.shapes.get(name) for name in differ}
            raise CheckpointError(
                f"{path}: layer {index} was built with parameters of shapes {differ}, expected {expected}"
            )
    if options.strict:
        _check_no_more_layers(context, manifest, path)
    if options.module_only or not options.optimizer:
        return
    ours = context.engine.basic_optimizer
    kind = optimizer_files(context.stage).kind
    name = type(ours).__name__ if ours is not None else ""
    written = (manifest.optimizer_class, manifest.optimizer)
    if written != (name, kind):
        raise CheckpointError(
            f"{path}: optimizer state of {written[0] or 'none'} ({written[1]}), expected {name or 'none'} ({kind}); "
            "load_optimizer_states=False loads the rest"
        )


def _check_no_more_layers(context: CheckpointContext, manifest: Manifest, path: str) -> None:
    """No layer has parameters there that here are another one's, as those of a tied layer are, or nobody's.

    But for a later use of a key that was a module of its own there and is the first use's module here.
    """
    shapes = manifest.slices[context.engine.grid.get_slice_parallel_rank()].shapes
    first_there = {use: uses[0] for uses in manifest.ties.values() for use in uses}
    for index, found in shapes.items():
        first = first_there.get(index)
        tied = first is not None and first == context.stage.layers.first_use(index) and found == shapes.get(first)
        if found and index not in context.origin.layers and not tied:
            raise CheckpointError(f"{path}: layer {index} has parameters {found} there, expected none of its own")


def _check_slices(context: CheckpointContext, found: int, path: str) -> None:
    expected = context.engine.grid.slice_parallel_size
    if found != expected:
        raise CheckpointError(
            f"{path}: written with {found} tensor-parallel slices, expected {expected}, the ranks on the topology's "
            "'model' axis: layers are not cut into slices anew"
        )


def stock_manifest(
    context: CheckpointContext, folder: str, slices: tuple[SliceLayout, ...], options: LoadOptions
) -> Manifest:
    """What the manifest of a checkpoint would be that stock DeepSpeed wrote of this engine's pipeline."""
    names = glob.glob(os.path.join(glob.escape(folder), "layer_*-model_states.pt"))
    cut = {found.group() for name in names if (found := re.search(r"-model_\d+-", os.path.basename(name)))}
    _check_slices(context, len(cut) or 1, folder)
    pattern = os.path.join(glob.escape(folder), "mp_rank_*_model_states.pt")
    stages = sorted(map(os.path.basename, glob.glob(pattern)))
    expected = sorted(stage_file(number) for layout in slices for number in layout.numbers)
    if options.module_only and stages:
        expected = stages
    if stages != expected:
        raise CheckpointError(
            f"{folder}: written by stock DeepSpeed with the stage files {stages}, expected {expected}: without a "
            f"{MANIFEST} optimizer state loads at the same number of stages only; load_module_only=True loads weights"
        )
    return Manifest(
        placement=Placement.chain(context.origin.partition),
        replicas=0,
        optimizer=optimizer_files(context.stage).kind,
        optimizer_class="",
        slices=slices,
        frozen_excluded=False,
        files={},
        state={},
    )
