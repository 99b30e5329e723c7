"""The modules of a stage that multiply by their weights, and their ``forward`` while a batch runs.

``nn.Linear`` and Hugging Face's ``Conv1D`` are products. In all other modules with weights, products by these weights
are found while ``forward`` runs, and in the ``forward_fn`` of a tied layer those by all weights of its module:
``F.linear`` by a weight or by a row of a weight ``[experts, outputs, inputs]``, and ``F.grouped_mm`` by such a weight
or its transpose. All other uses are left to autograd; if the same weight is in such a product too, their gradients wait
for those of the products, so that all are added in autograd's order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_dynmo.engine.run.products import Conv1D, Linear, Operand, operand, split, split_grouped
from ds_dynmo.torch_private import compiled_call_of, grouped_mm, saved_tensors_hooks
from ds_dynmo.weight_gradients import defer_seen, is_split


def forwards(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield the modules that may multiply by their weights, and a replacement for their ``forward``.

    Modules compiled by ``torch.compile`` or TorchScript are left out.
    """
    kinds = _kinds()
    compiled = {id(inner) for module in modules if _is_compiled(module) for inner in module.modules()}
    for module in modules:
        weights = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        if not weights or id(module) in compiled:
            continue
        if is_linear(module):
            yield module, _Forward(module, kinds[type(module).forward])
        elif any(weight.ndim > 1 for weight in weights) and not any(id(m) in compiled for m in module.modules()):
            yield module, _Watched(module.forward, module.parameters(recurse=False))


def watched(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Find the products by weights of ``module`` while ``function`` runs, which is called outside its ``forward``."""
    return function if any(map(_is_compiled, module.modules())) else _Watched(function, module.parameters())


def shared_weights(modules: Sequence[nn.Module]) -> set[int]:
    """Return the ids of weights that several of ``modules`` share, unless all of these are linear layers."""
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for parameter in {id(parameter) for parameter in module.parameters(recurse=False)}:
            owners.setdefault(parameter, []).append(module)
    return {weight for weight, users in owners.items() if len(users) > 1 and not all(map(is_linear, users))}


def _kinds() -> dict[Any, Any]:
    """Map the ``forward`` of each kind of module to its product."""
    kinds: dict[Any, Any] = {nn.Linear.forward: Linear}
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None:
        kinds[transformers.Conv1D.forward] = Conv1D
    return kinds


def is_linear(module: nn.Module) -> bool:
    """Return whether it computes as ``nn.Linear`` or ``Conv1D`` do, with plain (not parametrised) parameters."""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        type(module).forward in _kinds()
        and "forward" not in vars(module)
        and "weight" in parameters
        and parameters.keys() <= {"weight", "bias"}
    )


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or compiled_call_of(module) is not None
        or "_orig_mod" in dict(module.named_children())
    )


class _Forward:
    """``forward`` of a linear layer while a batch runs.

    Attributes:
        __wrapped__: the usual ``forward``, for callers that inspect its signature.
    """

    def __init__(self, module: nn.Module, product: Any) -> None:
        self._module, self._product, self.__wrapped__ = module, product, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        if is_split() and len(args) == 1 and not kwargs and compiled_call_of(module) is None:  # compiled since?
            result = split(self._product, args[0], operand(module.weight), operand(module.bias))
            if result is not None:
                return result
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Copy as the usual ``forward``."""
        return _same, (self.__wrapped__,)


class _Watched:
    """A function that uses ``weights``, such as ``forward`` of another module, while a batch runs."""

    def __init__(self, function: Callable[..., Any], weights: Iterable[nn.Parameter]) -> None:
        self.__wrapped__, self._weights = function, list(weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_split():
            return self.__wrapped__(*args, **kwargs)
        with _ProductFinder(self._weights):
            return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _same, (self.__wrapped__,)


def _same(value: Any) -> Any:
    return value


class _ProductFinder(TorchFunctionMode):
    """Finds the products by some weights while a function runs.

    An inner function that is recomputed outside of it (checkpointing inside ``forward``) would not be watched the
    second time, so there weights are left to autograd the first time too.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._weights = {id(parameter): parameter for parameter in weights}
        self._rows: dict[int, tuple[torch.Tensor, Operand]] = {}  # kept alive, so that their ids are not reused
        self._transposes: dict[int, tuple[torch.Tensor, Operand]] = {}
        self._hooks = _saved_tensors_hooks()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(function) if len(args) > 1 else None
        before = {given.grad_fn for given in _tensors((args, kwargs))} if self._uses_weight(args, kwargs) else None
        result = None if handler is None else handler(self, *args, **kwargs)
        if result is None:
            result = function(*args, **kwargs)
        if before is not None:
            self._keep_order(result, before)
        return result

    def _uses_weight(self, args: Any, kwargs: Any) -> bool:
        return any(map(self._is_weight, _flat((args, kwargs))))

    def _keep_order(self, result: Any, before: set[Any]) -> None:
        """Let the nodes of a function's graph that end at weights defer these gradients, if others of them are.

        Args:
            before: nodes where the function's graph ends.
        """
        nodes = [given.grad_fn for given in _tensors(result)]
        while nodes:
            node = nodes.pop()
            if node is None or node in before:
                continue
            before.add(node)
            ends = [getattr(end, "variable", None) for end, _ in node.next_functions]
            if any(map(self._is_weight, ends)):
                node.register_hook(partial(_defer_seen, ends))
            nodes += [end for end, _ in node.next_functions]

    def getitem(self, weight: Any, index: Any) -> torch.Tensor | None:
        """Record a row of a weight."""
        if not self._is_weight(weight) or weight.ndim != 3 or not _is_number(index):
            return None
        number = int(index)
        row: torch.Tensor = weight[number]
        self._rows[id(row)] = row, Operand(row.detach(), weight, number % len(weight))
        return row

    def transpose(self, weight: Any, dim0: int, dim1: int) -> torch.Tensor | None:
        """Record the transpose of a weight."""
        if not self._is_weight(weight) or weight.ndim != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
            return None
        transposed: torch.Tensor = torch.transpose(weight, 1, 2)
        self._transposes[id(transposed)] = transposed, Operand(weight, weight)
        return transposed

    def linear(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        """Multiply by one of the weights, or a row of one."""
        _, row = self._rows.get(id(weight), (None, None))
        by = row or self._operand(weight)
        is_seen = bias is not None and bias.requires_grad and not self._is_weight(bias)
        if by is None or is_seen or self._hooks != _saved_tensors_hooks():
            return None
        return split(Linear, input, by, operand(bias))

    def grouped_mm(
        self, rows: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> torch.Tensor | None:
        """Multiply groups of rows by the weights, or by their transposes."""
        _, transposed = self._transposes.get(id(weight), (None, None))
        by = transposed or self._operand(weight)
        if by is None or offs is None or bias is not None or out_dtype is not None:
            return None
        if self._hooks != _saved_tensors_hooks():
            return None
        return split_grouped(rows, by, offs, transposed=transposed is not None)

    def _is_weight(self, weight: Any) -> bool:
        return id(weight) in self._weights

    def _operand(self, weight: Any) -> Operand | None:
        return operand(weight) if self._is_weight(weight) else None


_HANDLERS: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.Tensor.__getitem__: _ProductFinder.getitem,
    torch.Tensor.transpose: _ProductFinder.transpose,
    torch.transpose: _ProductFinder.transpose,
    nn.functional.linear: _ProductFinder.linear,
    grouped_mm: _ProductFinder.grouped_mm,
}


def _defer_seen(
    ends: Sequence[nn.Parameter | None], gradients: tuple[torch.Tensor | None, ...], _: Any
) -> tuple[torch.Tensor | None, ...]:
    """Defer gradients of weights; autograd goes on without them.

    Args:
        ends: the weight that each gradient is of, or None.
    """
    return tuple(
        None
        if weight is not None
        and gradient is not None
        and defer_seen(weight, gradient.sum_to_size(weight.shape).to(weight.dtype))
        else gradient
        for weight, gradient in zip(ends, gradients, strict=True)
    )


def _flat(values: Any) -> Iterator[Any]:
    """Yield the values in nested containers."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, tuple | list | dict):
            yield from _flat(value)
        else:
            yield value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in _flat((values,)) if isinstance(value, torch.Tensor))


def _is_number(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and index.dtype in (torch.int64, torch.int32)
    return type(index) is int


def _saved_tensors_hooks() -> Any:
    """Return the hooks of saved tensors now in force, such as those of checkpointing."""
    return saved_tensors_hooks(ignore_disabled=True)
