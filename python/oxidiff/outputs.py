"""From the tensors that a program made to what the module would return: on the path of every call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from .call import Leaf
from .capture.graph import OutputSpec, children_of
from .capture.parts import steps_at
from .errors import is_interrupt

__all__ = ["builder"]

Build = Callable[[list[Tensor], Sequence[Leaf]], Any]

_RECORDS = ("diffusers.utils.outputs", "transformers.utils.generic")
"""Where the base classes of model outputs are: dictionaries that show their entries as attributes too."""
_put = OrderedDict.__setitem__


def builder(outputs: OutputSpec, point: Mapping[str, Any], live: Mapping[str, int], places: Sequence[int]) -> Build:
    """The function that puts results together as the module would, from a program's tensors and the leaves of the call.

    Args:
        outputs: What the module returned when it was captured. Of a result that lies otherwise than row-major in memory,
            the program's tensor has its dimensions in that order.
        point: Values of the symbols in it.
        live: Symbols that are numbers of the call, each with the index of its leaf.
        places: For each tensor of the call, the index of its leaf.
    """
    if any(leaf.steps for leaf in outputs.leaves) and not live:
        # Places that are the same in each call.
        known = (replace(leaf, steps=steps_at(leaf.steps, point)) for leaf in outputs.leaves)
        outputs = replace(outputs, leaves=tuple(known))
    leaves_out = [leaf for leaf in outputs.leaves if leaf.value is not None]
    laid = [(i, order) for i, leaf in enumerate(leaves_out) if (order := leaf.laid()) is not None]
    if laid:
        return _shown(builder(_usual(outputs), point, live, places), laid)
    # An argument that the module returns as it is: the caller gets its own tensor back.
    returned = [(i, places[leaf.input]) for i, leaf in enumerate(leaves_out) if leaf.input is not None]
    if not returned and len(leaves_out) == len(outputs.leaves):
        simple = _simple_builder(outputs.spec)
        if simple is not None:
            return simple

    def build(tensors: list[Tensor], leaves: Sequence[Leaf]) -> Any:
        for i, at in returned:
            tensors[i] = cast(Tensor, leaves[at])
        now = {**point, **{name: leaves[at] for name, at in live.items()}} if live else point
        return outputs.build(tensors, now)

    return build


def _usual(outputs: OutputSpec) -> OutputSpec:
    """The same results, all of them row-major."""
    return replace(outputs, leaves=tuple(replace(leaf, order=()) for leaf in outputs.leaves))


def _shown(build: Build, laid: Sequence[tuple[int, Sequence[int]]]) -> Build:
    """As ``build``, of tensors of which some have their dimensions in the order in which they lie in memory."""
    turned = [(i, [order.index(dim) for dim in range(len(order))]) for i, order in laid]

    def shown(tensors: list[Tensor], leaves: Sequence[Leaf]) -> Any:
        for i, dims in turned:
            tensors[i] = tensors[i].permute(dims)
        return build(tensors, leaves)

    return shown


def _simple_builder(spec: TreeSpec) -> Build | None:
    """As :func:`builder` for a tensor, or a flat tuple, list or record of tensors."""
    if spec.is_leaf():
        return lambda tensors, leaves: tensors[0]
    if not all(child.is_leaf() for child in children_of(spec)):
        return None
    if spec.type is list:
        return lambda tensors, leaves: tensors
    if spec.type is tuple:
        return lambda tensors, leaves: tuple(tensors)
    return _record_builder(spec)


def _record_builder(spec: TreeSpec) -> Build | None:
    """As :func:`builder` for an output class of diffusers or transformers: what its constructor would come to, which takes
    ten times as long to look at its fields. ``None`` unless both come to the same."""
    cls = cast(Any, spec.type)
    # Of a namedtuple it is the function that makes such classes.
    is_dict = isinstance(cls, type) and issubclass(cls, OrderedDict)
    is_record = is_dict and is_dataclass(cls) and cls.__new__ is OrderedDict.__new__
    if not is_record or getattr(getattr(cls, "__post_init__", None), "__module__", "") not in _RECORDS:
        return None
    probes = [torch.empty(0) for _ in range(spec.num_leaves)]
    try:
        made = tree_unflatten(probes, spec)
    except Exception as error:
        if is_interrupt(error):
            raise
        # It looks at its tensors.
        return None
    names = list(made)
    if len(names) != len(probes):
        return None
    blank = {field.name: None for field in fields(cls)}

    def build(tensors: list[Tensor], leaves: Sequence[Leaf]) -> Any:
        record = cls.__new__(cls)
        attributes = record.__dict__
        attributes.update(blank)
        for name, tensor in zip(names, tensors, strict=True):
            attributes[name] = tensor
            _put(record, name, tensor)
        return record

    ours = build(probes, ())
    if list(ours) != names or list(vars(ours)) != list(vars(made)):
        return None
    pairs = [
        *zip(ours.values(), made.values(), strict=True),
        *zip(vars(ours).values(), vars(made).values(), strict=True),
    ]
    return build if all(is_(*pair) for pair in pairs) else None
