"""Caches of keys and values among results: objects that a ``forward`` makes, taken apart into what their attributes hold.

A text encoder that is a language model returns one unless it is told not to, mostly for nobody. Pytree knows no such class;
:class:`Made` stands for an object in a structure of results, and pytree makes the object itself of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Made", "found_class", "taken_apart"]

_MODULE = "transformers.cache_utils"
_DEVICE = "device"


class Made:
    """An object of a class with an own ``__dict__``, by what is in it.

    Attributes:
        context: The name of its class, then those of its attributes.
        values: What these are. A device is that of the first tensor.
    """

    __slots__ = ("context", "values")

    def __init__(self, context: list[str], values: list[Any]) -> None:
        self.context = context
        self.values = values


def found_class(name: str) -> type | None:
    """The class of that name of which objects are taken apart, if there is one here."""
    found = getattr(sys.modules.get(_MODULE), name, None)
    return found if isinstance(found, type) and found.__module__ == _MODULE and _is_open(found) else None


def taken_apart(value: Any) -> Any:
    """A result with :class:`Made` in the place of the caches in it; they are leaves to pytree."""
    return pytree.tree_map(_taken_apart, value)


def _taken_apart(leaf: Any) -> Any:
    kind = type(leaf)
    if found_class(kind.__name__) is not kind:
        return leaf
    attributes = {name: value for name, value in vars(leaf).items() if not isinstance(value, torch.device)}
    values = [taken_apart(value) for value in attributes.values()]
    if len(attributes) < len(vars(leaf)):
        is_alone = list(vars(leaf).keys() - attributes.keys()) == [_DEVICE]
        if not is_alone or not any(isinstance(value, Tensor) for value in values):
            return leaf
        attributes[_DEVICE] = None
        values.append(None)
    return Made([kind.__name__, *attributes], values)


def _is_open(kind: type) -> bool:
    """Whether the ``__dict__`` of instances is all that they are."""
    methods = ("__new__", "__setattr__")
    return kind.__dictoffset__ != 0 and all(getattr(kind, name) is getattr(object, name) for name in methods)


def _flatten(made: Made) -> tuple[list[Any], list[str]]:
    return made.values, made.context


def _unflatten(values: Iterable[Any], context: Any) -> Any:
    name, *names = context
    kind = found_class(name)
    assert kind is not None, "a class that was found once"
    made: Any = object.__new__(kind)
    made.__dict__.update(zip(names, values, strict=True))
    if names[-1:] == [_DEVICE]:
        made.device = next(value.device for value in vars(made).values() if isinstance(value, Tensor))
    return made


pytree.register_pytree_node(Made, cast(Any, _flatten), _unflatten)
