"""Caches of keys and values among results: objects that a ``forward`` makes, taken apart into what their attributes hold.

A text encoder that is a language model returns one unless it is told not to, mostly for nobody; so does a transformer that
keeps what it made of the images that it was given. Pytree knows no such class; :class:`Made` stands for an object in a
structure of results, and pytree makes the object itself of it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Made", "fits", "found_class", "is_kept", "name_of", "taken_apart"]

KEEPING: dict[str, tuple[str, ...]] = {
    "diffusers.models.transformers.transformer_flux2": (),
    "diffusers.models.transformers.transformer_glm_image": (),
    "diffusers.models.transformers.transformer_qwenimage21": ("QwenImage21KVLayerCache",),
}
"""Modules of diffusers whose models are one program with such objects, and which of their classes, if not all: Qwen-Image
2.1 makes lists of positions in Python, so that no program is all of it; its layers, which are given a cache each, have one.
Of other modules, classes may count their instances, or note them somewhere."""
_LANGUAGE = "transformers.cache_utils"


class Made:
    """An object of a class with an own ``__dict__``, by what is in it.

    Attributes:
        context: The name of its class, then those of its attributes. Behind a colon is the class that one is; nothing is
            there for the device of the tensors.
        values: What the others are.
    """

    __slots__ = ("context", "values")

    def __init__(self, context: list[str], values: list[Any]) -> None:
        self.context = context
        self.values = values


def found_class(name: str) -> type | None:
    """The class of that name of which objects are taken apart, if there is one here."""
    module, _, attribute = name.rpartition(".")
    is_one = module == _LANGUAGE or is_kept(module, attribute)
    found = getattr(sys.modules.get(module), attribute, None) if is_one else None
    return found if isinstance(found, type) and found.__module__ == module and _is_open(found) else None


def is_kept(module: str, name: str) -> bool:
    """Whether a class of a module of diffusers is that of a cache which a pipeline passes to its model."""
    classes = KEEPING.get(module)
    return classes is not None and (not classes or name in classes)


def name_of(kind: type) -> str:
    """The name by which :func:`found_class` finds a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def taken_apart(value: Any, held: Collection[int] = ()) -> Any:
    """A result with :class:`Made` in the place of the caches in it; they are leaves to pytree.

    Args:
        value: The result.
        held: Ids of objects that were there before: a caller is to get these themselves.
    """
    return pytree.tree_map(lambda leaf: _taken_apart(leaf, held), value)


def _taken_apart(leaf: Any, held: Collection[int]) -> Any:
    kind = type(leaf)
    if found_class(name_of(kind)) is not kind or id(leaf) in held:
        return leaf
    held = {*held, id(leaf)}
    context = [name_of(kind)]
    values: list[Any] = []
    for name, value in vars(leaf).items():
        if isinstance(value, type) and found_class(name_of(value)) is value:
            context.append(f"{name}:{name_of(value)}")
        elif isinstance(value, torch.device):
            context.append(f"{name}:")
        else:
            context.append(name)
            values.append(taken_apart(value, held))
    is_placed = any(isinstance(value, Tensor) for value in values)
    return Made(context, values) if is_placed or not any(name.endswith(":") for name in context) else leaf


def _is_open(kind: type) -> bool:
    """Whether the ``__dict__`` of instances is all that they are."""
    methods = ("__new__", "__setattr__")
    return kind.__dictoffset__ != 0 and all(getattr(kind, name) is getattr(object, name) for name in methods)


def _flatten(made: Made) -> tuple[list[Any], list[str]]:
    return made.values, made.context


def _unflatten(values: Iterable[Any], context: Any) -> Any:
    kind, *names = context
    made: Any = object.__new__(_class(kind))
    values = list(values)
    rest = iter(values)
    for name in names:
        name, is_constant, of = name.partition(":")
        if not is_constant:
            made.__dict__[name] = next(rest)
        elif of:
            made.__dict__[name] = _class(of)
        else:
            made.__dict__[name] = next(value.device for value in values if isinstance(value, Tensor))
    return made


def fits(context: Any, count: int) -> bool:
    """Whether a context from a file makes an object of so many values."""
    if not context or not all(isinstance(part, str) for part in context):
        return False
    constants = [part.partition(":")[2] for part in context if ":" in part]
    classes = [context[0], *filter(None, constants)]
    return all(found_class(name) is not None for name in classes) and len(context) - 1 - len(constants) == count


def _class(name: str) -> type:
    kind = found_class(name)
    assert kind is not None, "a class that was found once"
    return kind


pytree.register_pytree_node(Made, cast(Any, _flatten), _unflatten)
