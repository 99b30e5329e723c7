"""Weight gradients that are put off: a backward pass in two parts.

Only the gradient of a pass's input keeps another stage waiting. What a layer's weights need can be calculated later,
when the stage would have nothing to do (Qi et al. 2024, section 2). Here the weights of ``nn.Linear`` are put off, and
those of a user's kernel that calls :func:`defer_weight_gradient`; everything else stays in the first part.

While a micro-batch runs forward whose backward pass is in two parts, such a module's ``forward`` hides its weights from
autograd; going back, it keeps what their gradients are made of. In the second part autograd runs over a graph of these
weights alone, so that whatever hangs on their gradients (DeepSpeed's hooks, the user's) sees each of them once per
micro-batch, as ever.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_dynmo.errors import ConfigError

Compute = Callable[[], torch.Tensor]


class DeferredGradients:
    """The weight gradients of one pass that wait, in the order in which they came up."""

    def __init__(self) -> None:
        self._of: dict[nn.Parameter, list[Compute]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, parameter: nn.Parameter, compute: Compute) -> None:
        """Let ``compute`` give a part of the gradient of ``parameter`` later."""
        self._of.setdefault(parameter, []).append(compute)

    def root(self) -> torch.Tensor:
        """A scalar whose backward pass calculates all of them, one parameter after the other."""
        scalars = [_Gradient.apply(computes, parameter) for parameter, computes in self._of.items()]
        self._of = {}
        return torch.stack(scalars).sum()


class _Gradient(torch.autograd.Function):
    """A scalar whose gradient with respect to a parameter is a sum of what was put off."""

    @staticmethod
    def forward(ctx: Any, computes: list[Compute], parameter: torch.Tensor) -> torch.Tensor:
        ctx.computes = computes
        return parameter.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        first, *others = ctx.computes
        ctx.computes = []
        gradient = first()
        for compute in others:  # as autograd adds up the uses of a parameter before they reach it
            gradient = gradient + compute()
        return None, gradient


class WeightGradients:
    """What the passes of a stage put off, and the modules that do.

    Attributes:
        puts_off: does the pass that runs put its weight gradients off?
        observe: is given everything that is put off and the bytes that it holds, and gives what is called in its place;
            None: nobody measures.
    """

    def __init__(self) -> None:
        self.puts_off = False
        self.observe: Callable[[Compute, int], Compute] | None = None
        self._collecting: DeferredGradients | None = None
        self._waiting: deque[DeferredGradients] = deque()
        self._hidden: set[nn.Parameter | None] = set()

    @contextmanager
    def splitting(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """While a batch runs, ``modules`` can put their weight gradients off; afterwards they are as they were.

        Args:
            modules: of which :func:`splittable` says so.
        """
        global _current
        kinds, hooks = _kinds(), []
        for module in modules:
            module.forward = _Forward(self, module, kinds[type(module).forward])
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    hooks.append(parameter.register_hook(partial(self._reached, parameter)))
        outer, _current = _current, self
        try:
            yield
        finally:
            _current = outer
            for module in modules:
                del module.forward
            for hook in hooks:
                hook.remove()
            self._waiting.clear()
            self._hidden.clear()

    @contextmanager
    def forward_pass(self, *, split: bool) -> Iterator[None]:
        """A micro-batch runs forward whose backward pass will be ``split``, or not."""
        self.puts_off = split
        try:
            yield
        finally:
            self.puts_off = False

    @contextmanager
    def first_part(self) -> Iterator[None]:
        """A backward pass, recomputation too, whose weight gradients are put off."""
        self.puts_off, self._collecting = True, DeferredGradients()
        try:
            yield
            self._waiting.append(self._collecting)
        finally:
            self.puts_off, self._collecting = False, None

    def second_part(self) -> DeferredGradients:
        """What was put off first, and not taken yet."""
        return self._waiting.popleft()

    def _reached(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Where autograd sees a parameter beside its module (the model also uses it in a function), wait with that too.

        Uses of a parameter are added up before they reach what earlier micro-batches gave.
        """
        if parameter in self._hidden and self.add(parameter, lambda: gradient):
            _check_hooks(parameter)
            return torch.zeros_like(gradient)
        return gradient

    def hide(self, *parameters: nn.Parameter | None) -> None:
        """Note that autograd does not see the use of ``parameters`` by their module."""
        self._hidden.update(parameters)

    def add(self, parameter: nn.Parameter, compute: Compute, held_bytes: int = 0) -> bool:
        """Put ``compute`` off, if a first part runs. Returns whether it was."""
        if self._collecting is None:
            return False
        if self.observe is not None:
            compute = self.observe(compute, held_bytes)
        self._collecting.add(parameter, compute)
        return True


def _check_hooks(parameter: nn.Parameter) -> None:
    """Refuse hooks of the user's that would see the gradient of a micro-batch twice: in each part, what is known then.

    Raises:
        ConfigError: there is one.
    """
    accumulated = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    of_user = [hook for hook in accumulated.values() if not getattr(hook, "__module__", "").startswith("deepspeed")]
    if of_user or len(parameter._backward_hooks or {}) > 1:  # one is ours
        raise ConfigError(
            f"a weight of shape {list(parameter.shape)} has a hook of yours on its gradient, and is used outside its "
            "module too (in a penalty, say): a backward pass in two parts would call the hook in each; set "
            'dynmo.schedule.kind to "1f1b", or use the weight in one way'
        )


_current: WeightGradients | None = None


def defer_weight_gradient(parameter: nn.Parameter, compute: Compute, *, held_bytes: int = 0) -> None:
    """Calculate the gradient of a parameter later, where the pipeline schedule has time for it.

    Call it in ``backward`` of a ``torch.autograd.Function`` that hides ``parameter`` from autograd: it takes the
    parameter inside a tuple, say, and gives no gradient for it. ``compute()`` returns the gradient in the parameter's
    shape; it is added to ``parameter.grad``, and all hooks of the parameter see it. Where the backward pass is not
    split, and without a pipeline engine of ours, that happens at once.

    Args:
        parameter: a leaf that requires a gradient.
        compute: what it needs is held until it is called, once.
        held_bytes: of what it needs, for the memory that the schedule may take; what several calls share counts once.
    """
    if _current is None or not _current.add(parameter, compute, held_bytes):
        gradient = compute()
        with torch.enable_grad():
            parameter.backward(gradient)


# -- modules whose weight gradients can be put off --------------------------------------------------------


class _Linear(torch.autograd.Function):
    """``nn.functional.linear`` whose weight and bias, hidden in a tuple, get their gradients later.

    Formulas are those by which autograd differentiates ``addmm``, so that no bit differs. ``anchor`` makes autograd
    come here where the input needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, hidden: tuple[Any, Any], anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.hidden = hidden
        return nn.functional.linear(input, *hidden)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (input,) = ctx.saved_tensors
        weight, bias = ctx.hidden
        rows, of_rows = _rows(input), _rows(gradient)
        _defer(weight, lambda: of_rows.t().mm(rows), held_bytes=rows.nbytes + of_rows.nbytes)
        _defer(bias, lambda: of_rows.sum(0))
        return of_rows.mm(weight).view(input.shape) if ctx.needs_input_grad[0] else None, None, None


class _Conv1D(torch.autograd.Function):
    """The ``Conv1D`` of Hugging Face's GPT-2: a linear layer whose weight is ``[inputs, outputs]``."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, hidden: tuple[Any, Any], anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.hidden = weight, bias = hidden
        return torch.addmm(bias, _rows(input), weight).view(*input.shape[:-1], weight.shape[1])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (input,) = ctx.saved_tensors
        weight, bias = ctx.hidden
        rows, of_rows = _rows(input), _rows(gradient)
        _defer(weight, lambda: rows.t().mm(of_rows), held_bytes=rows.nbytes + of_rows.nbytes)
        _defer(bias, lambda: of_rows.sum(0))
        return of_rows.mm(weight.t()).view(input.shape) if ctx.needs_input_grad[0] else None, None, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _defer(parameter: nn.Parameter | None, compute: Compute, held_bytes: int = 0) -> None:
    if parameter is not None and parameter.requires_grad:
        defer_weight_gradient(parameter, compute, held_bytes=held_bytes)


def _kinds() -> dict[Any, Any]:
    """Per ``forward`` of a kind of module, the function that stands in for it."""
    kinds: dict[Any, Any] = {nn.Linear.forward: _Linear}
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None:
        kinds[transformers.Conv1D.forward] = _Conv1D
    return kinds


class _Forward:
    """``forward`` of such a module while a batch runs."""

    def __init__(self, gradients: WeightGradients, module: nn.Module, function: Any) -> None:
        self._gradients, self._module, self._function = gradients, module, function
        self._plain = type(module).forward

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module: Any = self._module
        if torch.compiler.is_compiling() or not self._gradients.puts_off or not _is_plain(input):
            output: torch.Tensor = self._plain(module, input)
            return output
        self._gradients.hide(module.weight, module.bias)
        anchor = torch.empty(0, requires_grad=True)
        split: torch.Tensor = self._function.apply(input, (module.weight, module.bias), anchor)
        return split


def _is_plain(input: Any) -> bool:
    """Is this an input for which the gradients above are autograd's to the bit?"""
    return (
        isinstance(input, torch.Tensor)
        and input.dim() in (2, 3)
        and input.is_contiguous()
        and input.numel() > 0
        and not torch.is_autocast_enabled(input.device.type)
    )


def splittable(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Of all modules of a stage, those that can put their weight gradients off without changing a number.

    They are ``nn.Linear``, Hugging Face's ``Conv1D`` and subclasses that compute as they do, with weights that are
    parameters of theirs (not parametrised ones) and of no module of another kind. What ``torch.compile`` compiled is
    left alone.
    """
    kinds = _kinds()
    compiled = {id(inner) for module in modules if _is_compiled(module) for inner in module.modules()}
    found: list[nn.Module] = []
    of_others: set[int] = set()
    for module in modules:
        if id(module) not in compiled and type(module).forward in kinds and _is_untouched(module):
            found.append(module)
        else:
            of_others.update(id(parameter) for parameter in module.parameters(recurse=False))
    return [module for module in found if of_others.isdisjoint(map(id, module.parameters(recurse=False)))]


def _is_untouched(module: nn.Module) -> bool:
    """Has it the parameters of its kind, the usual ``forward``, and anything to train?"""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        "forward" not in vars(module)
        and "weight" in parameters
        and parameters.keys() <= {"weight", "bias"}
        and any(parameter.requires_grad for parameter in parameters.values())
    )


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in dict(module.named_children())
