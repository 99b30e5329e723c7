"""Deferred weight gradients: backward passes in two parts.

Another stage waits only for the gradient of a pass's input. Weight gradients can be computed later, when the stage
would be idle (Qi et al. 2024, section 2). Gradients of weights in matrix products are deferred
(:mod:`ds_dynmo.engine.run.split_modules`), and those of kernels that call :func:`ds_dynmo.defer_weight_gradient`.
All other gradients are computed in the first part.

In a forward pass whose backward pass is in two parts, these weights are hidden from autograd. The first part of the
backward pass keeps the inputs of their gradients. In the second part autograd runs over a graph of these weights only,
so that hooks on their gradients (of DeepSpeed and of the user) see each gradient once per micro-batch, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_dynmo.engine.deepspeed.flat_adapter import is_of_wrapper
from ds_dynmo.engine.run import split_modules
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import backward_pass_number, hooks_of, is_only_tensor_of_its_memory
from ds_dynmo.unmarked import register_hook
from ds_dynmo.weight_gradients import Compute, RowIndex, collected_by, whole

Pass = tuple[int, int]  # chunk and micro-batch
Terms = list[tuple[RowIndex, Compute]]  # of a sum, which is the gradient of a parameter


class DeferredGradients:
    """The deferred weight gradients of one pass, in the order in which they were deferred.

    In each of its runs, autograd sums the uses of a parameter before it adds them to the gradient of earlier
    micro-batches. Under reentrant checkpointing there are several runs in a pass.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[nn.Parameter, int], Terms] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, parameter: nn.Parameter, row: RowIndex, compute: Compute) -> None:
        """Defer ``compute``, which returns the gradient of ``parameter[row]`` or a term of it."""
        key = parameter, backward_pass_number()
        self._of[key] = [*self._of.pop(key, []), (row, compute)]  # an outer run ends after those inside it

    def roots(self) -> list[torch.Tensor]:
        """Return scalars whose backward passes, one after the other, compute all gradients."""
        of_parameter: dict[nn.Parameter, list[torch.Tensor]] = {}
        for (parameter, _), terms in self._of.items():
            of_parameter.setdefault(parameter, []).append(_Gradient.apply(terms, parameter))  # type: ignore[no-untyped-call]
        self._of = {}
        rounds = zip_longest(*of_parameter.values())
        return [torch.stack([scalar for scalar in scalars if scalar is not None]).sum() for scalars in rounds]


class _Gradient(torch.autograd.Function):
    """A scalar whose gradient with respect to a parameter is the sum of deferred gradients."""

    @staticmethod
    def forward(ctx: Any, terms: Terms, parameter: torch.Tensor) -> torch.Tensor:
        ctx.terms, ctx.parameter = terms, parameter
        return torch.zeros((), dtype=torch.float32, device=parameter.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        terms, ctx.terms = ctx.terms, []
        return None, _sum(ctx.parameter, terms)


def _sum(parameter: nn.Parameter, terms: Terms) -> torch.Tensor:
    """Sum in the order of autograd, for which the gradient of a row is a whole gradient with zeros elsewhere."""
    rows = {row for row, _ in terms}
    if len(rows) == 1 or None in rows:
        common = rows.pop() if len(rows) == 1 else None
        gradients = [compute() if row == common else whole(parameter, row, compute()) for row, compute in terms]
        return whole(parameter, common, reduce(torch.add, gradients))
    sums = torch.zeros_like(parameter)
    for row, compute in terms:
        sums[row] += compute()
    return sums


class WeightGradients:
    """The deferred weight gradients of a stage's passes.

    Attributes:
        defers: whether the running pass defers weight gradients.
        observe: called with each deferred function and the bytes that it holds; returns the function to call instead.
            None: no measurement.
    """

    def __init__(self) -> None:
        self.defers = False
        self.observe: Callable[[Compute, int], Compute] | None = None
        self._collecting: DeferredGradients | None = None
        self._waiting: dict[Pass, DeferredGradients] = {}
        self._never_deferred: set[int] = set()
        self._hidden: set[nn.Parameter] = set()

    @contextmanager
    def splitting(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let ``modules``, all of a stage, defer their weight gradients while a batch runs; restore them afterwards."""
        modules = list(dict.fromkeys(modules))
        self._never_deferred = split_modules.shared_weights(modules)
        with ExitStack() as stack:
            stack.callback(self._forget)
            stack.enter_context(collected_by(self))
            for parameter in {parameter for module in modules for parameter in module.parameters(recurse=False)}:
                if parameter.requires_grad:
                    stack.callback(register_hook(parameter, partial(self._reached, parameter)).remove)
            for module, forward in split_modules.forwards(modules):
                stack.callback(_set_forward, module, vars(module).get("forward"))
                _set_forward(module, forward)
            yield

    def _forget(self) -> None:
        self._hidden, self._never_deferred = set(), set()
        self._waiting.clear()

    @contextmanager
    def forward_pass(self, *, split: bool) -> Iterator[None]:
        """Run a forward pass whose backward pass will be ``split`` or not."""
        self.defers = split
        try:
            yield
        finally:
            self.defers = False

    @contextmanager
    def first_part(self, which: Pass) -> Iterator[None]:
        """Run a backward pass, with recomputation, whose weight gradients are deferred."""
        self.defers, self._collecting = True, DeferredGradients()
        try:
            yield
            self._waiting[which] = self._collecting
        finally:
            self.defers, self._collecting = False, None

    def second_part(self, which: Pass) -> DeferredGradients:
        """Return the gradients that this pass deferred."""
        return self._waiting.pop(which)

    @property
    def hidden(self) -> Set[nn.Parameter]:
        """Parameters with a deferred gradient in this batch."""
        return self._hidden

    def hide_from_autograd(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Hide ``parameters`` from autograd in their present use if this pass defers them; return whether it does."""
        if not self.defers or not self._never_deferred.isdisjoint(map(id, parameters)):
            return False
        self._hidden.update(parameters)
        return True

    def _reached(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return what autograd adds to ``parameter.grad`` now.

        If autograd also sees a hidden parameter (the model uses it in a function too), this gradient is deferred as
        well: the uses of a parameter are summed before they are added to the gradient of earlier micro-batches. It is
        the sum of all uses but those of the module's own, which are deferred one by one (``_ProductFinder``).

        Autograd may keep a gradient as ``parameter.grad``, and add those of later micro-batches in place. So a gradient
        whose memory is shared is copied: for one sample, ``linear(x) + places[None]`` has one gradient for both, and
        that of ``linear`` is deferred, as messages may be.
        """
        if gradient is None:
            return None
        if self.add_seen(parameter, gradient):
            return torch.zeros_like(gradient)
        return gradient.clone() if _is_shared(gradient) else gradient

    def add_seen(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Defer a gradient that autograd has computed, if others of the parameter are deferred.

        Raises:
            ConfigError: a hook of the user's would see the gradient twice.
        """
        if parameter not in self._hidden or not self.add(parameter, lambda: gradient):
            return False
        _check_hooks(parameter)
        return True

    def add(self, parameter: nn.Parameter, compute: Compute, *, row: RowIndex = None, held_bytes: int = 0) -> bool:
        """Defer ``compute`` if the first part of a backward pass runs; return whether it was deferred."""
        if self._collecting is None:
            return False
        if self.observe is not None:
            compute = self.observe(compute, held_bytes)
        self._collecting.add(parameter, row, compute)
        return True


def _set_forward(module: nn.Module, forward: Any) -> None:
    """Set the ``forward`` of a module; None: that of its class."""
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _is_shared(tensor: torch.Tensor) -> bool:
    """Return whether another tensor shares the memory."""
    return tensor.layout is torch.strided and not is_only_tensor_of_its_memory(tensor)


def _check_hooks(parameter: nn.Parameter) -> None:
    """Refuse user's hooks that would see the gradient of a micro-batch twice, once per part.

    Raises:
        ConfigError: there is such a hook.
    """
    accumulated = hooks_of(parameter, "register_post_accumulate_grad_hook")
    on_gradient = hooks_of(parameter, "register_hook")  # one is from splitting()
    if not all(map(is_of_wrapper, accumulated)) or len(on_gradient) > 1:
        raise ConfigError(
            f"a weight of shape {list(parameter.shape)} has a hook of yours on its gradient, and is used in a product "
            "and in other ways (in a penalty, say): a backward pass in two parts would call the hook in each; set "
            'dynmo.schedule.kind to "1f1b", or use the weight in one way'
        )
