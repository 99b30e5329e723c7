"""LoRA adapters of Hugging Face's peft in pipeline layers.

peft puts its modules into a transformers model that has no memory. Each pipeline layer gets a copy of those in its
part, around the weights that it has read or drawn. So no rank builds more than its own layers, and adapters compute by
peft's own code.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.lora_config import COPIES, Lora, check_config, peft_package
from ds_dynmo.models.huggingface.lora_targets import check_names, choose_targets, default_targets, targets_in
from ds_dynmo.models.huggingface.shares import Share
from ds_dynmo.torch_private import buffers_of, parameters_of

__all__ = ["Adapters", "adapters_in", "base_tensors", "is_adapters", "plain_name"]


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model, or of one part of it.

    Attributes:
        model: peft's, around transformers', without memory.
        config: of transformers' model, which parts refer to.
        name: the adapter's.
        tensors: values by peft's names; None: fresh ones.
        trainable: ``requires_grad`` by peft's names.
        chosen: names of the modules that were chosen to have adapters; empty: the user or peft says which.
    """

    model: Any
    config: Any
    name: str
    tensors: Mapping[str, torch.Tensor] | None
    trainable: Mapping[str, bool]
    chosen: tuple[str, ...] = ()

    @property
    def lora_config(self) -> Any:
        """Peft's, with what it found out about the model."""
        return self.model.peft_config[self.name]

    def part(self, path: str) -> nn.Module:
        """Find the part ``path`` of the model, without memory."""
        found: nn.Module = self.model.get_base_model().get_submodule(path)
        return found

    def own_names(self) -> list[str]:
        """List the tensors that the adapters have beside the base."""
        return [name for name in self.model.get_base_model().state_dict() if is_adapters(name)]

    def of(self, path: str) -> Adapters:
        """Narrow this to the part ``path``, so that no other's values are kept alive."""
        if self.tensors is None:
            return self
        kept = {name: tensor for name, tensor in self.tensors.items() if name.startswith(f"{path}.")}
        return replace(self, tensors=kept)

    def into(
        self, part: nn.Module, path: str, share: Share | None, drawing: Callable[[], AbstractContextManager[None]]
    ) -> nn.Module:
        """Put adapters into ``part``, whose weights stay the same objects.

        Args:
            share: what ``part`` has of the part ``path``; None: all. Fresh adapters are drawn for all of it.
            drawing: gives the context in which fresh adapters draw random numbers.
        """
        adapted = copy.deepcopy(self.part(path), {id(self.config): self.config}).train()
        _take_over(adapted, part)
        if self.tensors is None:
            with drawing():
                self._draw(adapted)
        if share is not None:
            adapted = share.of(adapted)
        if self.tensors is not None:
            rows = None if share is None else share.rows
            for name in filter(is_adapters, adapted.state_dict()):
                value = self.tensors[f"{path}.{name}"].detach()
                value = value if rows is None else value[rows.start : rows.stop]
                _set(adapted, name, nn.Parameter(value.to("cpu", torch.float32, copy=True)))
        for name, parameter in adapted.named_parameters():
            parameter.requires_grad_(self.trainable[f"{path}.{name}"])
            if not parameter.requires_grad:
                parameter.stays_frozen = True  # type: ignore[attr-defined]  # no optimizer keeps state for it
        return adapted

    def _draw(self, adapted: nn.Module) -> None:
        """Let peft make its parameters again, now that there are weights: some are made of those."""
        for module in list(adapted.modules()):
            if isinstance(module, peft_package().tuners.lora.LoraLayer):
                rank, alpha = module.r[self.name], module.lora_alpha[self.name]
                module.update_layer(self.name, rank, lora_alpha=alpha, config=self.lora_config)

    def merge(self, path: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add adapters to the weights of a part, and give its tensors by transformers' names.

        Args:
            values: of all tensors of the part, by peft's names; they change.
        """
        adapted = copy.deepcopy(self.part(path), {id(self.config): self.config})
        for name, value in values.items():
            _set(adapted, name, nn.Parameter(value, requires_grad=False))
        for module in adapted.modules():
            if isinstance(module, peft_package().tuners.lora.LoraLayer):
                module.merge(adapter_names=[self.name])
        state = adapted.state_dict()
        names = sorted(state, key=is_adapters)  # copies that trained come last
        return {own: state[name] for name in names if (own := plain_name(name)) is not None}


def adapters_in(
    skeleton: Any, blocks: Sequence[nn.Module], lora: Lora, label: str, *, weights: bool = True
) -> Adapters:
    """Let peft put adapters into a copy of ``skeleton``, transformers' model without memory.

    Args:
        blocks: its decoder layers.
        weights: take the values of the adapters that ``lora`` has, if any.

    Raises:
        ConfigError: peft refuses, or the model that has the adapters differs from what its config says.
    """
    config, kind = copy.deepcopy(lora.config), skeleton.config.model_type
    config.task_type, config.base_model_name_or_path = config.task_type or "CAUSAL_LM", None
    chosen: tuple[str, ...] = ()
    if config.target_modules is None and (default := default_targets(kind)) is not None:
        config.target_modules = default if isinstance(default, str) else set(default)
    elif config.target_modules is None:
        chosen = _accepted(skeleton, config, choose_targets(skeleton, blocks), lora.name, label)
        if not chosen:
            raise ConfigError(
                f"{label}: peft.target_modules: peft has no default for model_type {kind}, and its decoder layers have "
                f"no linear layers but those of routers and experts; the model has {targets_in(skeleton)}"
            )
        config.target_modules = set(chosen)
    check_names(config, skeleton, label)
    model = _with_adapters(skeleton, config, lora.name, label)
    check_config(config)  # peft may have changed it
    config.base_model_name_or_path = lora.config.base_model_name_or_path
    base = model.get_base_model()
    of_base = {own for name in base.state_dict() if (own := plain_name(name)) is not None}
    if of_base != skeleton.state_dict().keys():
        raise ConfigError(f"{label}: peft: {sorted(of_base ^ skeleton.state_dict().keys())[0]} is not the model's own")
    tensors = None
    if lora.model is None:
        trainable = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    else:
        found = _found_like(lora.model, base)
        _check_like(found, base, label)
        _check_factors(lora, base, label)
        trainable = {name: found[name].requires_grad for name, _ in base.named_parameters()}
        tensors = {name: found[name] for name in filter(is_adapters, found)} if weights else None
    if not any(trainable.values()):
        raise ConfigError(f"{label}: peft: nothing of its adapter trains; from_pretrained() needs is_trainable=True")
    return Adapters(model, skeleton.config, lora.name, tensors, trainable, chosen)


def _accepted(skeleton: Any, config: Any, names: list[str], adapter: str, label: str) -> tuple[str, ...]:
    """Leave out those of ``names`` that peft takes for weights of experts, which they were before transformers 5."""
    trial = copy.deepcopy(config)
    trial.target_modules = set(names)
    if names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of what it does for those
            _with_adapters(skeleton, trial, adapter, label)
    return tuple(name for name in names if name in trial.target_modules)


def _with_adapters(skeleton: Any, config: Any, adapter: str, label: str) -> Any:
    """Let peft put adapters into a copy of ``skeleton``; ``config`` changes."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return peft_package().get_peft_model(
                copy.deepcopy(skeleton, {id(skeleton.config): skeleton.config}), config, adapter_name=adapter
            )
    except Exception as error:  # peft's own checks raise many kinds
        raise ConfigError(f"{label}: peft: {error}") from error


def base_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect the tensors of a model's base by transformers' names."""
    named = ((plain_name(name), tensor) for name, tensor in model.state_dict().items() if not is_adapters(name))
    return {own: tensor for own, tensor in named if own is not None}


def plain_name(name: str) -> str | None:
    """Name a tensor as without adapters; None: it is an adapter's.

    >>> plain_name("mlp.up_proj.base_layer.weight"), plain_name("lm_head.modules_to_save.default.weight")
    ('mlp.up_proj.weight', 'lm_head.weight')
    >>> plain_name("mlp.up_proj.lora_A.default.weight")
    """
    if is_adapters(name):
        before, _, copied = name.partition(f"{COPIES}.")
        if not copied:
            return None
        name = before + copied.partition(".")[2]  # without the adapter's name
    parts = name.split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def is_adapters(name: str) -> bool:
    """Return whether a tensor is an adapter's, or its copy of one of the base (``modules_to_save``)."""
    return any(part == COPIES or part.startswith("lora_") for part in name.split("."))


def _take_over(adapted: nn.Module, part: nn.Module) -> None:
    """Let ``adapted`` have the parameters and buffers of ``part``, if it has them; a second use of one is a copy."""
    given = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    used = set()
    for name, _ in [*adapted.named_parameters(), *adapted.named_buffers()]:
        own = plain_name(name)
        if own in given:
            tensor = given[own]
            _set(adapted, name, nn.Parameter(tensor.detach().clone()) if own in used else tensor)
            used.add(own)


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    (buffers_of(owner) if leaf in buffers_of(owner) else parameters_of(owner))[leaf] = tensor  # type: ignore[assignment]


def _found_like(model: nn.Module, like: nn.Module) -> dict[str, torch.Tensor]:
    """Find the tensors of ``model`` by their names in ``like``, which has its active adapter alone."""
    every = model.state_dict(keep_vars=True)
    of_base = {plain_name(name): tensor for name, tensor in every.items() if not is_adapters(name)}
    found = {}
    for name in like.state_dict():
        tensor = every.get(name) if is_adapters(name) else of_base.get(plain_name(name))
        if tensor is not None:
            found[name] = tensor
    return found


def _check_like(found: Mapping[str, torch.Tensor], like: nn.Module, label: str) -> None:
    for name, expected in like.state_dict().items():
        tensor = found.get(name)
        if tensor is None or tensor.shape != expected.shape or not tensor.is_floating_point():
            has = "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ConfigError(
                f"{label}: {name} should be a floating-point tensor {list(expected.shape)} by the adapter's config, "
                f"has {has}; adapters that were added in other ways, and quantized bases, do not work in a pipeline"
            )


def _check_factors(lora: Lora, like: nn.Module, label: str) -> None:
    """Refuse adapters that compute with other factors than their config says, as by ``set_scale``."""
    for path, module in like.named_modules():
        if isinstance(module, peft_package().tuners.lora.LoraLayer):
            has, says = (_factors(one, lora.name) for one in (lora.model.get_submodule(path), module))
            for key in says:
                if has[key] != says[key]:
                    raise ConfigError(
                        f"{label}: {path}: its adapter's {key} is {has[key]}, by the adapter's config {says[key]}"
                    )


def _factors(layer: Any, name: str) -> dict[str, float]:
    return {"scaling": layer.scaling[name], "dropout": getattr(layer.lora_dropout[name], "p", 0.0)}
