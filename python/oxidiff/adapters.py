"""LoRA adapters of PEFT as weights: the graph of a module with adapters is the graph of the module without them.

A LoRA layer wraps a linear or convolution and adds ``scale * B(A(x))`` for every active adapter. That is the wrapped
layer with the weight ``W + sum(scale * B @ A)`` (with DoRA, each row of it scaled to a learned magnitude), so an adapter
that is loaded, scaled, switched, disabled or deleted changes weights and nothing else. The effective weight is computed
afresh from the pristine ``W`` whenever one of its parts changes; nothing is ever added to or subtracted from a weight in
place, so going back to an adapter gives the same bits again. Merged adapters (``fuse_lora``) are in ``W`` already.

What is not of this kind (a bias in the adapter, dropout in training, other layer types) is left to be captured as
it is: :func:`base_of` says which is which.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .autocast import without_autocast

__all__ = [
    "EffectiveWeights",
    "TensorState",
    "adapter_class",
    "base_of",
    "disabled_while_merged",
    "named_modules",
    "split_scale",
    "tensor_state",
    "walk",
]

_LAYERS = "peft.tuners.lora.layer"
_TUNERS = "peft.tuners.tuners_utils"
_DORA = frozenset({"DoraLinearVariant", "DoraConv2dVariant"})
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SCALED = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")

TensorState = tuple[int, int, int, tuple[int, ...]]
"""Identity, address, version and strides of a tensor."""


def tensor_state(tensor: Tensor) -> TensorState:
    """What changes when a tensor, its memory or (as far as torch counts) its content does."""
    return id(tensor), tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version, tensor.stride()


def base_of(module: nn.Module) -> nn.Module | None:
    """The layer inside a LoRA layer that does nothing but change that layer's weight; ``None`` for all else."""
    library = sys.modules.get(_LAYERS)
    if library is None or not isinstance(module, library.LoraLayer):
        return None
    table: Any = module
    base = module._modules.get("base_layer")
    if base is None or not _is_plain(module, base, library):
        return None
    if module._forward_hooks or module._forward_pre_hooks or getattr(table, "fan_in_fan_out", False):
        return None
    variants = getattr(table, "lora_variant", {})
    if any(type(variant).__name__ not in _DORA for variant in variants.values()):
        return None
    if any(is_dora and name not in variants for name, is_dora in getattr(table, "use_dora", {}).items()):
        return None
    if table.merged and table.disable_adapters:
        # PEFT unmerges at the next call.
        return None
    downs, ups = module._modules.get("lora_A"), module._modules.get("lora_B")
    if downs is None or ups is None or downs._modules.keys() != ups._modules.keys():
        return None
    parts = [*downs._modules.values(), *ups._modules.values()]
    if any(part is None or part._parameters.get("bias") is not None or _has_hooks(part) for part in parts):
        return None
    if any(type(part).forward is not type(base).forward for part in parts):
        return None
    if any(_is_patched(part) for part in (module, base, *parts)):
        return None
    if isinstance(base, _CONVOLUTIONS) and not all(_are_windows_alike(base, part) for part in downs._modules.values()):
        return None
    dropout = module._modules.get("lora_dropout")
    if module.training and dropout is not None and any(getattr(d, "p", 0) for d in dropout._modules.values()):
        return None
    return cast(nn.Module, base)


def adapter_class() -> type[nn.Module] | None:
    """The class of the layers that PEFT puts around others, of whichever kind; ``None`` if it is not imported."""
    library = sys.modules.get(_TUNERS)
    return None if library is None else cast(type[nn.Module], library.BaseTunerLayer)


def disabled_while_merged(root: nn.Module) -> list[Any]:
    """The layers of adapters whose weights PEFT restores, in place, when they are called next."""
    kind = adapter_class()
    layers: list[Any] = [] if kind is None else [layer for layer in root.modules() if isinstance(layer, kind)]
    return [layer for layer in layers if layer.merged and layer.disable_adapters]


def _is_patched(module: Any) -> bool:
    """Whether the module itself, not its class, says what it computes."""
    return "forward" in module.__dict__ or "_conv_forward" in module.__dict__


def _are_windows_alike(base: Any, down: Any) -> bool:
    """Whether the first of an adapter's two convolutions reads what the layer does."""
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    return all(getattr(base, name) == getattr(down, name) for name in names)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_plain(module: nn.Module, base: nn.Module, library: Any) -> bool:
    weight = base._parameters.get("weight")
    if weight is None or not weight.is_floating_point() or type(weight) is not nn.Parameter:
        return False
    if type(module) is library.Linear:
        return type(base).forward is nn.Linear.forward
    kinds = [getattr(library, kind.__name__, None) for kind in _CONVOLUTIONS]
    if type(module) not in kinds:
        return False
    return type(base) is _CONVOLUTIONS[kinds.index(type(module))] and getattr(base, "groups", 0) == 1


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``root.named_modules()`` while another thread may add modules and remove some."""
    return ((path, module) for path, module, _ in _walk(root, has_adapters=False))


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """The same as if no adapter was loaded: ``(path, module, LoRA layer around it)``."""
    return _walk(root, has_adapters=_LAYERS in sys.modules)


def _walk(root: nn.Module, has_adapters: bool) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    seen: set[nn.Module] = set()
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        path, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        layer = None
        if has_adapters and (base := base_of(module)) is not None:
            layer, module = module, base
            seen.add(base)
        yield path, module, layer
        prefix = f"{path}." if path else ""
        children = list(module._modules.items())
        stack.extend((prefix + name, child) for name, child in reversed(children) if child is not None)


def split_scale(module: nn.Module, kwargs: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """A call without the factor for all adapters that diffusers' models take in their attention arguments, and it."""
    for name in _SCALED:
        given = kwargs.get(name)
        if isinstance(given, dict) and type(given.get("scale")) in (int, float) and _scales_by(module, name):
            rest = given.copy()
            return {**kwargs, name: rest}, float(rest.pop("scale"))
    return kwargs, 1.0


def _scales_by(module: nn.Module, name: str) -> bool:
    """Whether a model's ``forward`` scales its adapters by what is in its argument ``name``: not every one that has such an
    argument does."""
    return name in _scaled_arguments(cast(Hashable, type(module)))


@functools.cache
def _scaled_arguments(kind: Hashable) -> tuple[str, ...]:
    # A compiled module's class stands before the module's own.
    own: Any = next(cls for cls in cast(type, kind).__mro__ if "_oxidiff" not in cls.__dict__)
    function = own.forward
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "scale_lora_layers" in code.co_names:
            # `apply_lora_scale` has the name in a closure; elsewhere `forward` has an argument of this name.
            closure = [cell.cell_contents for cell in function.__closure__ or ()]
            return tuple(name for name in _SCALED if name in closure or name in code.co_varnames)
        function = getattr(function, "__wrapped__", None)
    return ()


class EffectiveWeights:
    """The effective weights of one module's LoRA layers, as long as their parts stay as they are."""

    def __init__(self) -> None:
        self.scale = 1.0
        """Factor for all adapters."""
        self.peak_bytes = 0
        """The most that was held for a call."""
        self._made: dict[str, tuple[list[Tensor], list[Any], Tensor]] = {}
        self._merged: dict[str, list[Any]] = {}

    def note_merged(self, layers: Mapping[str, nn.Module], suspects: set[int]) -> None:
        """Adds the ids of weights into which adapters were merged, or from which they were taken, since the last time: PEFT
        writes them where torch does not count."""
        now = {path: _merged_into(layer) for path, layer in layers.items()}
        changed = [path for path, merged in now.items() if merged != self._merged.get(path, [])]
        suspects.update(id(p) for path in changed for p in layers[path].base_layer.parameters())  # type: ignore[union-attr]
        self._merged = now

    def forget_written(self, suspects: Collection[int]) -> None:
        """Forgets what was made of tensors that were written even if torch did not count it, by their ids."""
        for path, (parts, *_) in list(self._made.items()) if suspects else ():
            if any(id(part) in suspects for part in parts):
                del self._made[path]

    def weight(self, path: str, layer: Any) -> Tensor:
        """The effective weight of one layer: its own where no adapter is active.

        Args:
            path: Names the layer.
            layer: The LoRA layer.
        """
        base: Tensor = layer.base_layer.weight
        terms = [] if layer.disable_adapters or layer.merged else list(self._terms(layer))
        if not terms:
            self._made.pop(path, None)
            return base
        parts = [base, *(t for term in terms for t in (term.down, term.up, term.magnitude) if t is not None)]
        state: list[Any] = [*map(tensor_state, parts), *(term.factor for term in terms)]
        known = self._made.get(path)
        if known is not None and known[1] == state:
            return known[2]
        weight = _effective(base, terms)
        self._made[path] = (parts, state, weight)
        return weight

    def _terms(self, layer: Any) -> Iterator[_Term]:
        variants = getattr(layer, "lora_variant", {})
        for name in layer.active_adapters:
            if name not in layer.lora_A:
                continue
            factor = float(layer.scaling[name] * self.scale)
            magnitude = layer.lora_magnitude_vector[name].weight if name in variants else None
            if factor != 0 or magnitude is not None:
                yield _Term(layer.lora_A[name].weight, layer.lora_B[name].weight, factor, magnitude)

    def keep(self, paths: Collection[str]) -> None:
        """Forgets all but these layers."""
        for path in self._made.keys() - set(paths):
            del self._made[path]
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def clear(self) -> None:
        """Forgets everything."""
        self._made.clear()
        self._merged.clear()

    @property
    def bytes(self) -> int:
        """Memory of the weights that were computed."""
        # Other threads put more there meanwhile.
        return sum(weight.nbytes for *_, weight in list(self._made.values()))


def _merged_into(layer: Any) -> list[Any]:
    """Which adapters are in a layer's weight, and how: they may have been taken out and put in again with another factor."""
    parts = {name: (layer.lora_A[name], layer.lora_B[name]) for name in layer.merged_adapters if name in layer.lora_A}
    return [
        (name, layer.scaling.get(name), [tensor_state(part.weight) for part in parts.get(name, ())])
        for name in layer.merged_adapters
    ]


@dataclass(frozen=True, slots=True)
class _Term:
    """What one adapter adds: ``factor * up @ down``; and the magnitude of each row, with DoRA."""

    down: Tensor
    up: Tensor
    factor: float
    magnitude: Tensor | None


@without_autocast
def _effective(base: Tensor, terms: list[_Term]) -> Tensor:
    # Weights that are written later must be counted by torch, whatever mode this call is made in.
    with torch.inference_mode(False), torch.no_grad():
        work = torch.float64 if base.dtype is torch.float64 else torch.float32
        pristine = total = base.flatten(1).to(work)
        for term in terms:
            factors = term.up.flatten(1).to(work), term.down.flatten(1).to(work)
            total = torch.addmm(total, *factors, alpha=term.factor)
            if term.magnitude is not None:
                # The norm is that of the pristine weight with this adapter alone, as PEFT has it.
                alone = torch.addmm(pristine, *factors, alpha=term.factor)
                total = total * (term.magnitude.flatten().to(work) / torch.linalg.vector_norm(alone, dim=1)).unsqueeze(
                    1
                )
        return total.to(base.dtype).view(base.shape)
