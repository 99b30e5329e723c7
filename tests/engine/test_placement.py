"""Which stage owns which layers, in a chain, a V and a loop, and that no other module calculates it."""

from __future__ import annotations

import ast
import doctest
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from ds_dynmo import placement
from ds_dynmo.errors import PartitionError
from ds_dynmo.placement import Placement, Shape, check_partition, owners_of

CHAIN = Placement.chain([0, 2, 3, 8])
V = Placement.v([0, 2, 3, 8, 9, 10, 12])
LOOP = Placement.loop([0, 2, 3, 8, 9, 10, 12])


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(placement).failed == 0


@pytest.mark.parametrize("where", [CHAIN, V, LOOP], ids=lambda where: where.shape)
def test_from_layers_to_stages_and_back(where: Placement) -> None:
    assert where.num_stages == 3
    assert sorted(layer for stage in where.stages for layer in where.layers_of(stage)) == [*range(where.num_layers)]
    for stage in where.stages:
        assert [where.stage_of(layer) for layer in where.layers_of(stage)] == [stage] * len(where.layers_of(stage))
        assert where.layers_of(stage) == tuple(layer for run in where.chunks_of(stage) for layer in run)
    for layer in range(where.num_layers):
        assert layer in where.chunk(where.chunk_of(layer))


def test_the_v_comes_back_to_the_first_stage() -> None:
    assert [V.stage_of(layer) for layer in range(12)] == [0, 0, 1, 2, 2, 2, 2, 2, 2, 1, 0, 0]
    assert V.chunks_of(0) == (range(0, 2), range(10, 12))


def test_the_loop_goes_down_the_stages_twice() -> None:
    assert [LOOP.stage_of(layer) for layer in range(12)] == [0, 0, 1, 2, 2, 2, 2, 2, 0, 1, 2, 2]
    assert LOOP.chunks_of(0) == (range(0, 2), range(8, 9))


def test_the_shape_is_known_from_the_owners() -> None:
    for shape in get_args(Shape):
        for stages in (2, 3, 4):
            boundaries = range(len(owners_of(shape, stages)) + 1)
            placement = Placement.of_shape(shape, boundaries)
            assert placement.shape == shape and placement.num_stages == stages
            assert Placement.of(boundaries, placement.owners) == placement
    assert Placement.v([0, 1, 2]) == Placement.loop([0, 1, 2])  # one stage
    assert Placement.loop([0, 1, 2]).shape == "v" and Placement.loop([0, 1, 2]).num_stages == 1


def test_a_layer_that_does_not_exist_is_refused() -> None:
    for where, layer in itertools.product((CHAIN, V, LOOP), (-1, 12)):
        with pytest.raises(PartitionError, match=f"layer {layer} is in no stage"):
            pytest.fail(f"{layer} of {where}: {where.stage_of(layer)}")


def test_a_stage_without_layers() -> None:
    released = Placement.chain([0, 2, 2, 8], empty=[1])
    assert released.empty_stages == (1,) and released.layers_of(1) == ()
    assert [released.stage_of(layer) for layer in (1, 2)] == [0, 2]
    assert CHAIN.empty_stages == () and released == Placement.chain([0, 2, 2, 8], empty=[0, 1])


def test_on_some_of_more_stages_the_others_are_empty() -> None:
    for shape, stages, more in itertools.product(get_args(Shape), range(1, 4), range(1, 6)):
        few = Placement.of_shape(shape, range(len(owners_of(shape, stages)) + 1))
        for places in itertools.combinations(range(more), stages):
            embedded = few.among(places, more)
            assert embedded.num_stages == more and embedded.shape == few.shape
            assert [embedded.layers_of(place) for place in places] == [few.layers_of(stage) for stage in few.stages]
            assert set(embedded.empty_stages) == {*range(more)} - {*places}
            assert embedded.without_empty_stages() == few


def test_boundaries_are_for_stages_of_the_same_shape_or_else_of_a_chain() -> None:
    assert [CHAIN.stages_for(range(count)) for count in range(8)] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert [V.stages_for(range(count)) for count in range(8)] == [0, 0, 1, 2, 3, 2, 5, 3]
    assert (V.shape_on(2), V.shape_on(1), CHAIN.shape_on(2)) == ("v", "chain", "chain")


def test_other_boundaries_keep_the_owners() -> None:
    for where in (V, LOOP):
        assert where.at([0, 1, 2, 3, 4, 5, 12]) == Placement((0, 1, 2, 3, 4, 5, 12), where.owners)
    for wrong in ([0, 6, 12], [0, 1, 2, 3, 4, 5, 13], [0, 1, 2, 3, 3, 5, 12]):
        with pytest.raises(PartitionError):
            V.at(wrong)


def test_a_placement_is_read_from_its_lists() -> None:
    assert Placement.of([0, 2, 3, 8]) == CHAIN
    for where in (CHAIN, V, LOOP):
        record = where.as_record("new")
        assert Placement.of(record["new"], record.get("new_owners")) == where


@pytest.mark.parametrize(
    ("boundaries", "owners", "message"),
    [
        ([0, 3, 8], [0], "should be 2 boundaries for its 1 owner"),
        ([0, 3, 8], [0, 2], "owners"),
        ([0, 3, 8], [0, -1], "owners"),
        ([0], [], "owners"),
        ([0, 3, 8], [1, 0], r"owners \[1, 0\] of chunks are those of no chain, V or loop"),
        ([0, 1, 2, 3, 4, 5], [0, 1, 1, 0, 0], "those of no chain, V or loop"),
        ([1, 3, 8], [0, 1], "should begin at 0"),
        ([0, 3, 3], [0, 1], "stage 1 would own no layer"),
        ([0, 3, 2], [0, 1], "not strictly increasing"),
        ([0, 2.5, 8], [0, 1], "list of ints"),
    ],
)
def test_an_invalid_placement_is_refused(boundaries: Any, owners: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Placement.of(boundaries, owners)


def test_boundaries_that_are_no_v_or_loop_are_refused_with_both_numbers() -> None:
    expected = {
        (0, 3, 5, 8): "should be 5 boundaries, from 0 to 8, for a (V|loop) of 2 stages and 8 layers",
        (0, 3, 8): "should be 5 boundaries, from 0 to 8, for a (V|loop) of 2 stages",
        (0, 3, 3, 5, 8): "stage 1 would own no layer",
        (0, 2, 4, 6, 7): "from 0 to 8, for a (V|loop)",
        (): "should be 5 boundaries",
    }
    shapes: tuple[Shape, ...] = "v", "loop"
    for shape, (boundaries, message) in itertools.product(shapes, expected.items()):
        with pytest.raises(PartitionError, match=message):
            pytest.fail(f"{shape}: {Placement.of_shape(shape, boundaries, num_layers=8, num_stages=2)}")


def test_fewer_layers_than_chunks_are_refused_with_both_numbers() -> None:
    for shape in get_args(Shape):
        needed = len(owners_of(shape, 3))
        numbers = f"3 stages needs? at least {needed} layers, the model has {needed - 1}"
        with pytest.raises(PartitionError, match=numbers):
            pytest.fail(f"{Placement.of_shape(shape, range(needed), num_layers=needed - 1, num_stages=3)}")


def test_a_partition_becomes_plain_ints() -> None:
    assert check_partition([0, np.int64(3), 8], 8, 2) == (0, 3, 8)
    assert all(type(bound) is int for bound in check_partition([0, np.int64(3), 8], 8, 2))


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([0, 8], "should be 3 boundaries, from 0 to 8, for 2 stages and 8 layers"),
        ([], "should be 3 boundaries, from 0 to 8"),
        ([0, 3, 7], "for 2 stages and 8 layers"),
        ([1, 3, 8], "from 0 to 8"),
        ([0, 0, 8], "stage 0 would own no layer"),
        ([0, 8, 8], "stage 1 would own no layer"),
        ([0, 9, 8], "not strictly increasing"),
        ([0, 2.5, 8], "list of ints"),
        ("abc", "list of ints"),
        (None, "list of ints"),
    ],
)
def test_an_invalid_partition_is_refused(partition: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        check_partition(partition, 8, 2)


# -- no other module calculates with boundaries -------------------------------------------------------

PACKAGE = Path(placement.__file__).parent
CALCULATE = {PACKAGE / "placement.py", PACKAGE / "layer_groups.py"} | {*(PACKAGE / "partitioners").rglob("*.py")}
BOUNDARIES = {"partition", "parts", "boundaries", "old_partition", "new_partition", "proposed"}


def arithmetic(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of ``p[s]``, ``zip(p, p[1:])`` and ``len(p) - 1`` where ``p`` has a name of boundaries.

    Also of ``p[s : s + 2]``, and of ``p[s]`` and ``p[s + 1]`` in one function, whatever ``p`` is called.
    """
    nodes = [*ast.walk(tree)]
    has_following = any(isinstance(node, ast.Subscript) and is_following(node.slice) for node in nodes)
    for node in nodes:
        found = False
        if isinstance(node, ast.Subscript):
            found = named(node.value) in BOUNDARIES or is_adjacent_pair(node.slice)
        elif isinstance(node, ast.Call) and named(node.func) in ("zip", "pairwise"):
            found = any(named(argument) in BOUNDARIES for argument in node.args)
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call) and named(node.left.func) == "len":
            found = isinstance(node.op, ast.Sub) and named(node.left.args[0]) in BOUNDARIES
        elif has_following and isinstance(node, ast.FunctionDef):
            following = {ast.unparse(each) for each in subscripts(node) if is_following(each.slice)}
            found = any(
                f"{ast.unparse(each.value)}[{ast.unparse(each.slice)} + 1]" in following for each in subscripts(node)
            )
        if found:
            yield node.lineno, ast.unparse(node).splitlines()[0]


def subscripts(tree: ast.AST) -> list[ast.Subscript]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)]


def named(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_following(index: ast.AST) -> bool:
    """Tell whether ``index`` is ``s + 1``."""
    return isinstance(index, ast.BinOp) and isinstance(index.op, ast.Add) and ast.unparse(index.right) == "1"


def is_adjacent_pair(index: ast.AST) -> bool:
    """Tell whether ``index`` is ``s : s + 2``."""
    if not isinstance(index, ast.Slice) or index.lower is None or index.upper is None:
        return False
    return ast.unparse(index.upper) == f"{ast.unparse(index.lower)} + 2"


@pytest.mark.parametrize(
    "text",
    [
        *("partition[stage]", "engine.partition[-1]", "x[s:s + 2]", "zip(parts, parts[1:])", "len(module.parts) - 1"),
        "def size(x, s): return x[s + 1] - x[s]",
    ],
)
def test_boundary_arithmetic_is_recognised(text: str) -> None:
    assert [*arithmetic(ast.parse(text))]
    assert not [*arithmetic(ast.parse("plan.old.layers_of(stage); costs[layer]; zip(a, b[1:]); len(costs) - 1"))]


def test_no_other_module_calculates_with_boundaries() -> None:
    assert not [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in sorted({*PACKAGE.rglob("*.py")} - CALCULATE)
        for line, text in arithmetic(ast.parse(path.read_text()))
    ]
