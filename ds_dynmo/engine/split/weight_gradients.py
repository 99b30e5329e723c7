"""Weight gradients that are put off: a backward pass in two parts.

Only the gradient of a pass's input keeps another stage waiting. What a layer's weights need can be calculated later,
when the stage would have nothing to do (Qi et al. 2024, section 2). Put off are weights by which a module multiplies
(:mod:`ds_dynmo.engine.split.split_modules`), and those of kernels that call :func:`ds_dynmo.defer_weight_gradient`;
everything else stays in the first part.

While a micro-batch runs forward whose backward pass is in two parts, these hide their weights from autograd; going
back, they keep what the gradients are made of. In the second part autograd runs over a graph of these weights alone, so
that whatever hangs on their gradients (DeepSpeed's hooks, the user's) sees each of them once per micro-batch, as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_dynmo.engine.split import split_modules
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import backward_pass_number, hooks_of, is_only_tensor_of_its_memory
from ds_dynmo.weight_gradients import Compute, Part, collected_by, whole

Parts = list[tuple[Part, Compute]]


class DeferredGradients:
    """The weight gradients of one pass that wait, in the order in which they came up.

    Autograd adds up the uses of a parameter before they reach what earlier micro-batches gave, in each of its runs:
    under reentrant checkpointing there are several in a pass.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[nn.Parameter, int], Parts] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, parameter: nn.Parameter, part: Part, compute: Compute) -> None:
        """Let ``compute`` give the gradient of ``parameter[part]`` later, or a share in it."""
        key = parameter, backward_pass_number()
        self._of[key] = [*self._of.pop(key, []), (part, compute)]  # a run that goes on is later than those inside it

    def roots(self) -> list[torch.Tensor]:
        """Return scalars whose backward passes, one after the other, compute all gradients."""
        of_parameter: dict[nn.Parameter, list[torch.Tensor]] = {}
        for (parameter, _), parts in self._of.items():
            of_parameter.setdefault(parameter, []).append(_Gradient.apply(parts, parameter))  # type: ignore[no-untyped-call]
        self._of = {}
        rounds = zip_longest(*of_parameter.values())
        return [torch.stack([scalar for scalar in scalars if scalar is not None]).sum() for scalars in rounds]


class _Gradient(torch.autograd.Function):
    """A scalar whose gradient with respect to a parameter is a sum of what was put off."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, parameter: torch.Tensor) -> torch.Tensor:
        ctx.parts, ctx.parameter = parts, parameter
        return parameter.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        parts, ctx.parts = ctx.parts, []
        return None, _sum(ctx.parameter, parts)


def _sum(parameter: nn.Parameter, parts: Parts) -> torch.Tensor:
    """Add up as autograd does, to which the gradient of a row is a whole one with zeros around it."""
    rows = {part for part, _ in parts}
    if len(rows) == 1 or None in rows:
        common = rows.pop() if len(rows) == 1 else None
        gradients = [compute() if part == common else whole(parameter, part, compute()) for part, compute in parts]
        return whole(parameter, common, reduce(torch.add, gradients))
    sums = torch.zeros_like(parameter)
    for row, compute in parts:
        sums[row] += compute()
    return sums


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
        self._visible: set[int] = set()
        self._hidden: set[nn.Parameter] = set()

    @contextmanager
    def splitting(self, modules: Iterable[nn.Module], *, splits: bool = True) -> Iterator[None]:
        """Let ``modules`` defer their weight gradients while a batch runs, and restore them afterwards.

        Args:
            modules: all of a stage.
            splits: are there passes in two parts in this batch?
        """
        modules = list(dict.fromkeys(modules))
        self._visible = split_modules.shared_weights(modules)
        with ExitStack() as stack:
            stack.callback(self._forget)
            stack.enter_context(collected_by(self))
            for parameter in {parameter for module in modules for parameter in module.parameters(recurse=False)}:
                if parameter.requires_grad:
                    stack.callback(parameter.register_hook(partial(self._reached, parameter)).remove)
            for module, forward in split_modules.forwards(modules if splits else []):
                stack.callback(_set_forward, module, vars(module).get("forward"))
                _set_forward(module, forward)
            yield

    def _forget(self) -> None:
        self._hidden, self._visible = set(), set()
        self._waiting.clear()

    @contextmanager
    def forward_pass(self, *, split: bool) -> Iterator[None]:
        """Run a forward pass whose backward pass will be ``split`` or not."""
        self.puts_off = split
        try:
            yield
        finally:
            self.puts_off = False

    @contextmanager
    def first_part(self) -> Iterator[None]:
        """Run a backward pass, with recomputation, whose weight gradients are deferred."""
        self.puts_off, self._collecting = True, DeferredGradients()
        try:
            yield
            self._waiting.append(self._collecting)
        finally:
            self.puts_off, self._collecting = False, None

    def second_part(self) -> DeferredGradients:
        """Return the oldest deferred gradients that have not been computed."""
        return self._waiting.popleft()

    @property
    def hidden(self) -> Set[nn.Parameter]:
        """Parameters of which a gradient was put off in this batch."""
        return self._hidden

    def hides(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Say whether all ``parameters`` are hidden from autograd where they are used now."""
        if not self.puts_off or not self._visible.isdisjoint(map(id, parameters)):
            return False
        self._hidden.update(parameters)
        return True

    def _reached(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return what autograd adds to ``parameter.grad`` now.

        Where it sees a hidden parameter too (the model also uses it in a function), wait with that as well: uses of a
        parameter are added up before they reach what earlier micro-batches gave.

        Autograd may keep a gradient as ``parameter.grad``, and add those of later micro-batches in place. So where
        something else holds its memory, it gets a copy: for one sample, ``linear(x) + places[None]`` makes one gradient
        for both, and that of ``linear`` waits, as do messages.
        """
        if parameter in self._hidden and self.add(parameter, lambda: gradient):
            _check_hooks(parameter)
            return torch.zeros_like(gradient)
        return gradient.clone() if _is_shared(gradient) else gradient

    def add(self, parameter: nn.Parameter, compute: Compute, *, part: Part = None, held_bytes: int = 0) -> bool:
        """Put ``compute`` off, if a first part runs. Returns whether it was."""
        if self._collecting is None:
            return False
        if self.observe is not None:
            compute = self.observe(compute, held_bytes)
        self._collecting.add(parameter, part, compute)
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
    """Refuse hooks of the user's that would see the gradient of a micro-batch twice: in each part, what is known then.

    Raises:
        ConfigError: there is one.
    """
    accumulated = hooks_of(parameter, "register_post_accumulate_grad_hook")
    of_user = [hook for hook in accumulated if not getattr(hook, "__module__", "").startswith("deepspeed")]
    if of_user or len(hooks_of(parameter, "register_hook")) > 1:  # one is ours
        raise ConfigError(
            f"a weight of shape {list(parameter.shape)} has a hook of yours on its gradient, and is used outside its "
            "module too (in a penalty, say): a backward pass in two parts would call the hook in each; set "
            'dynmo.schedule.kind to "1f1b", or use the weight in one way'
        )
