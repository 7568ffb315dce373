"""What a call looks like, apart from its sizes.

A :class:`Binder` belongs to one callable. It turns ``(args, kwargs)`` into a :class:`Call`: a hashable *key* that holds
all that selects a program (nesting, dtypes, ranks, memory orders, which tensors are one, ``None``, flags, strings), and a
flat tuple of *sizes*: every dimension of every tensor, then every Python number. Positional and keyword arguments, their
order, and arguments equal to their default make no difference.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autocast import State, autocast_state
from ..errors import CaptureError
from .classes import held_by_member
from .guards import plain
from .members import are_taken_apart, has_members, is_settable, members_of, with_members
from .parts import placed

__all__ = [
    "ANSWERS",
    "ATTRIBUTES",
    "Answer",
    "Binder",
    "Call",
    "PLAIN",
    "PLAIN_TENSORS",
    "Number",
    "Place",
    "Question",
    "TENSORS",
    "Written",
    "attributes_of",
    "classes_of",
    "container_at",
    "containers",
    "content_of",
    "dict_like",
    "first_places",
    "in_objects",
    "is_constant",
    "item_in",
    "items_of",
    "share_of",
    "with_answers",
    "without_orders",
    "write",
    "written",
]

Number = int | float

Answer = Tensor | bool | int | float
"""What ``forward`` reads out of tensors: where something is that is not zero, a number, or whether something is so."""

ANSWERS = "what forward reads"
"""The name under which :attr:`Call.bound` has the answers; no parameter can have it."""

ATTRIBUTES = "what forward sets"
"""The name under which the arguments of a call have the attributes of modules, by the path of each, that a program sets."""

TENSORS = "what forward writes into"
"""The name under which they have the tensors among them, of which a program writes into some."""

Place = tuple[tuple[Any, ...], Any, bool]
"""Where a program writes into a list, a dictionary or an object that it is given, or into a module's: the way to that (a
parameter's name, then indices, keys and attributes), the index, key or attribute, and whether something is there
afterwards."""


@dataclass(frozen=True, slots=True)
class Question:
    """What ``forward`` wants to know of the values of a tensor.

    Attributes:
        name: What is read, by the name of the op.
        shape: The sizes of the tensor.
        opposite: The number of an earlier question of which this is the opposite: the answer is all other places.
    """

    name: str
    shape: tuple[int, ...]
    opposite: int | None = None


@dataclass(slots=True)
class Call:
    """One call, taken apart.

    Attributes:
        key: What selects the program. Equal keys have equally many tensors of equal ranks, and numbers.
        sizes: The dimensions of all ``tensors``, then all ``numbers``.
        tensors: The tensors among the arguments, in canonical order.
        numbers: The Python ints and floats among the arguments (bools belong to the key).
        bound: The arguments by parameter name, in the order of the signature.
        autocast: What autocast is on for.
        thread_modes: Whether gradients are enabled, and inference mode, where ``forward`` may ask.
        process_modes: Modes of the process that ``forward`` may ask for: what says how each is, and how it is in the call.
        kept: How many of ``numbers``, the last ones, are no arguments but attributes of the module.
        plain_key: The key of the call as it was made, where it has answers as further arguments.
        questions: What these answer; see :mod:`~oxidiff.capture.reads`.
    """

    key: tuple[Any, ...]
    sizes: tuple[Number, ...]
    tensors: list[Tensor]
    numbers: list[Number]
    bound: dict[str, Any]
    autocast: State = ()
    kept: int = 0
    plain_key: tuple[Any, ...] = ()
    questions: tuple[Question, ...] = ()
    thread_modes: tuple[bool, bool] = (False, False)
    process_modes: Sequence[tuple[Callable[[], Any], Any]] = ()

    @property
    def answers(self) -> list[Answer]:
        """What ``forward`` read, in the order of :attr:`questions`."""
        found: list[Answer] = self.bound.get(ANSWERS, [])
        return found

    @property
    def answer_tensors(self) -> int:
        """How many of ``tensors``, the last ones, are answers."""
        return sum(isinstance(answer, Tensor) for answer in self.answers)


def with_answers(call: Call, questions: Sequence[Question], answers: Sequence[Answer]) -> Call:
    """The call of a graph to which what ``forward`` reads is passed, too: behind the arguments of ``call``.

    Flags select the graph, and so does whether a tensor has all places, some or none: a prompt without padding is another
    program.
    """
    key: list[Any] = [*call.key, ANSWERS]
    tensors: list[Tensor] = []
    numbers: list[Number] = []
    for question, answer in zip(questions, answers, strict=True):
        key.append(question.name)
        if isinstance(answer, Tensor):
            key += [(answer.dtype, layout_of(answer)), share_of(answer, question)]
            tensors.append(answer)
        elif isinstance(answer, bool):
            key.append(("flag", answer))
        else:
            key.append(type(answer).__name__)
            numbers.append(answer)
    passed = len(call.numbers) - call.kept
    every = [*call.numbers[:passed], *numbers, *call.numbers[passed:]]
    tensors = [*call.tensors, *tensors]
    sizes = [size for tensor in tensors for size in tensor.shape]
    bound = {**call.bound, ANSWERS: list(answers)}
    return Call(
        tuple(key), (*sizes, *every), tensors, every, bound, call.autocast, call.kept, call.key, tuple(questions),
        call.thread_modes, call.process_modes,
    )  # fmt: skip


def share_of(answer: Tensor, question: Question) -> str:
    """How many of the places of a tensor an answer has."""
    rows = answer.shape[0]
    if rows and question.name != "nonzero":
        return "some"
    return "none" if rows == 0 else "all" if rows == math.prod(question.shape) else "some"


class Binder:
    """Takes calls of one callable apart and puts them together again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._parameters: list[tuple[str, Any]] = []
        self._positional: list[str] = []
        self._only_positional = 0
        self._rest: str | None = None
        self._extra: str | None = None
        self._required: set[str] = set()
        try:
            parameters = inspect.signature(_without_marks(function)).parameters
        except ValueError:
            # A builtin: what it takes is not known, so arguments stay as they are passed.
            parameters = inspect.signature(_anything).parameters
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = name
            elif parameter.kind is parameter.VAR_KEYWORD:
                self._extra = name
            else:
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    self._positional.append(name)
                    self._only_positional += parameter.kind is parameter.POSITIONAL_ONLY
                default = parameter.default
                if default is parameter.empty:
                    self._required.add(name)
                    default = None
                self._parameters.append((name, default))
        self._names = {name for name, _ in self._parameters}

    @property
    def positional(self) -> Sequence[str]:
        """The names of the parameters that positional arguments are for, but for those of ``*args``."""
        return self._positional

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by parameter name with the defaults filled in.

        Raises:
            TypeError: If the arguments do not fit the signature.
        """
        given: dict[str, Any] = dict(zip(self._positional, args, strict=False))
        rest = args[len(self._positional) :]
        if rest and self._rest is None:
            raise TypeError(f"{len(args)} positional arguments, at most {len(self._positional)} are taken")
        extra = []
        for name, value in kwargs.items():
            if name in self._names and name not in self._positional[: self._only_positional]:
                if name in given:
                    raise TypeError(f"got multiple values for argument {name!r}")
                given[name] = value
            else:
                extra.append((name, value))
        if len(given) < len(self._parameters) and not self._required <= given.keys():
            raise TypeError(f"missing argument {min(self._required - given.keys())!r}")
        bound = {name: given.get(name, default) for name, default in self._parameters}
        if rest and self._rest is not None:
            bound[f"*{self._rest}"] = tuple(rest)
        if extra:
            if self._extra is None:
                raise TypeError(f"got an unexpected keyword argument {extra[0][0]!r}")
            bound[f"**{self._extra}"] = dict(extra)
        return bound

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Takes a call apart.

        Raises:
            TypeError: If the arguments do not fit the signature.
            CaptureError: If an argument is of a kind that a graph cannot take.
        """
        bound = self.bind(args, kwargs)
        key: list[Any] = [torch.get_default_dtype()]
        tensors: list[Tensor] = []
        numbers: list[Number] = []
        defaults = dict(self._parameters)
        for name, value in bound.items():
            if value is None:
                key.append(None)
            elif isinstance(value, _CODE) and value is defaults.get(name):
                # It belongs to the function, as what is in closures does.
                key.append(("default", name))
            else:
                _take_apart(value, key, tensors, numbers)
        places = first_places(tensors)
        if places != [*range(len(tensors))]:
            key.append(("same", *places))
        state = autocast_state()
        key += [("autocast", *cast) for cast in state]
        sizes: list[Number] = []
        for tensor in tensors:
            sizes += tensor.shape
        sizes += numbers
        return Call(tuple(key), tuple(sizes), tensors, numbers, bound, state)

    def arguments(self, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` that pass ``bound``."""
        values = dict(bound)
        rest = values.pop(f"*{self._rest}", ())
        extra = values.pop(f"**{self._extra}", {})
        count = len(self._positional) if rest else self._only_positional
        args = tuple(values.pop(name) for name in self._positional[:count])
        return (*args, *rest), {**values, **extra}


class Double(float):
    """What stands for a ``numpy.float64`` that is passed: a float of which torch makes a tensor of 64 bits."""


# What a wrapper holds in a default of its own.
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, torch.nn.Module)


def _without_marks(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, whose signature Python takes for another's: `update_wrapper(partial(of, module), of)` is marked
    as a function of all arguments of `of`, and takes one less."""
    if isinstance(function, functools.partial) and getattr(function, "__wrapped__", None) is function.func:
        return functools.partial(function.func, *function.args, **function.keywords)
    return function


def _anything(*args: Any, **kwargs: Any) -> None:
    """The signature of a callable that has none."""


def is_constant(value: Any) -> bool:
    """Whether an argument is a constant of a program, as texts and types are, that its text says all of."""
    return type(value) in (bytes, complex, range, torch.layout, torch.memory_format)


def _take_apart(value: Any, key: list[Any], tensors: list[Tensor], numbers: list[Number]) -> None:
    if isinstance(value, Tensor):
        key.append((value.dtype, layout_of(value), value.device))
        if value.__dict__ and (attributes := attributes_of(value)):
            key.append(("attributes", *[text for _, text in attributes.values()]))
        tensors.append(value)
    elif isinstance(value, enum.Enum):
        key.append((value, text_of_member(value)))
    elif value is None or isinstance(value, (bool, str)):
        # `True == 1`, but a flag is not a number.
        key.append(value if not isinstance(value, bool) else ("flag", value))
    elif isinstance(value, (int, float)):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise CaptureError("an integer of more than 64 bits is passed")
        if not math.isfinite(value):
            raise CaptureError(f"the number {value} is passed")
        key.append(Double if type(value) is Double else int if isinstance(value, int) else float)
        numbers.append(value)
    elif isinstance(value, (list, tuple)):
        key.append((type(value), len(value)))
        for item in value:
            _take_apart(item, key, tensors, numbers)
    elif isinstance(value, dict):
        names = _names(value)
        # A program may go through it, so that its order is part of what the program is.
        key.append((type(value), *map(key_text, value)))
        for name in names:
            _take_apart(value[name], key, tensors, numbers)
    elif isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, type)):
        key.append(value)
    elif is_constant(value):
        key.append((type(value), repr(value)))
    elif has_members(value):
        members = members_of(value)
        key.append((type(value), *members))
        for item in members.values():
            _take_apart(item, key, tensors, numbers)
    else:
        raise CaptureError(f"an argument of type {type(value).__name__}")


PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Classes of tensors that are no more than their memory."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of values whose text says all."""


def text_of_member(member: enum.Enum) -> str:
    """What a member of an enumeration holds: what a program computes of it, whatever its name, and may change. Objects are
    told by who they are."""
    return _text_of(held_by_member(member), 8)


def key_text(name: Any) -> Any:
    """A name in a dictionary that is passed, with what members of enumerations in it hold."""
    if isinstance(name, enum.Enum):
        return name, text_of_member(name)
    return tuple(map(key_text, name)) if type(name) is tuple else name


def _text_of(value: Any, depth: int) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in PLAIN or is_constant(value):
        return f"{name} {value!r}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}"
    if depth and kind in (list, tuple, dict, set, frozenset):
        texts = [f"{_text_of(k, 0)}: {_text_of(v, depth - 1)}" for k, v in value.items()] if kind is dict else []
        items = sorted if kind in (set, frozenset) else list
        return f"{name} {texts or items(_text_of(item, depth - 1) for item in value)}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    if depth and kind is functools.partial:
        return f"{name} {_text_of((value.func, value.args, value.keywords), depth - 1)}"
    return f"{name} {id(value)} {value._version if isinstance(value, Tensor) else ''}"


def attributes_of(tensor: Tensor) -> dict[str, tuple[Any, str]]:
    """What Python code put on a tensor, by name: the value, and a text that says name, type and value. Not what Dynamo keeps
    there.

    Raises:
        CaptureError: It is of a type whose values cannot be told apart, and it may change what ``forward`` does.
    """
    found = {}
    for name, value in tensor.__dict__.items():
        if name.startswith("_dynamo"):
            continue
        if not _is_plain(value):
            raise CaptureError(f"a tensor with an attribute {name!r}, of type {type(value).__name__}, is passed")
        found[name] = value, f"{name}: {type(value).__name__} = {value!r}"
    return found


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in PLAIN


def first_places(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, where the same object is passed first."""
    places: dict[int, int] = {}
    return [places.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)]


def layout_of(tensor: Tensor) -> int | tuple[int, ...]:
    """The rank of a row-major tensor, also of one with gaps, or expanded as timesteps are to a batch; of others the
    dimensions from the outermost in memory to the innermost."""
    if tensor.layout is not torch.strided:
        raise CaptureError("a sparse argument")
    rank = tensor.dim()
    if tensor.is_contiguous():
        return rank
    strides = tensor.stride()
    # What is expanded lies anywhere.
    steps = [step for step, size in zip(strides, tensor.shape, strict=True) if step and size > 1]
    if steps == sorted(steps, reverse=True):
        return rank
    return tuple(sorted(range(rank), key=lambda i: (-strides[i], i)))


def memory_orders(key: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """For each tensor of the calls of a structure key, its dimensions from the outermost in memory to the innermost;
    ``None`` for a row-major one."""
    layouts = [part[1] for part in key if isinstance(part, tuple) and part and isinstance(part[0], torch.dtype)]
    return [None if isinstance(layout, int) else layout for layout in layouts]


def without_orders(key: Sequence[Any]) -> list[Any]:
    """A structure key in which all tensors are row-major."""
    found = []
    for part in key:
        is_tensor = isinstance(part, tuple) and part and isinstance(part[0], torch.dtype) and isinstance(part[1], tuple)
        found.append((part[0], len(part[1]), *part[2:]) if is_tensor else part)
    return found


def content_of(key: Sequence[Any]) -> tuple[frozenset[Any], int]:
    """What is in the calls of a structure key, and how many items their lists and dictionaries have."""
    content, items = set(), 0
    for part in key:
        head = part[0] if isinstance(part, tuple) and part else None
        if isinstance(head, type) and issubclass(head, (list, tuple, dict)):
            items += len(part) - 1 if issubclass(head, dict) else part[1]
            content.add(head)
        elif head != "same":
            content.add(part)
    return frozenset(content), items


def classes_of(key: Sequence[Any]) -> frozenset[type]:
    """The classes of the objects in the calls of a structure key that are no containers."""
    heads = (part[0] for part in key if isinstance(part, tuple) and part)
    return frozenset(head for head in heads if isinstance(head, type) and are_taken_apart(head))


def dict_like(value: dict[Any, Any]) -> Callable[..., Any]:
    """What makes dictionaries of the class of one."""
    kind = type(value)
    return functools.partial(kind, value.default_factory) if isinstance(value, defaultdict) else kind


def rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """``value`` with every tensor and number replaced, in the order in which calls are taken apart."""
    if isinstance(value, Tensor):
        return replace(value)
    if value is None or isinstance(value, (bool, str, enum.Enum)):
        return value
    if isinstance(value, (int, float)):
        return replace(value)
    if isinstance(value, (list, tuple)):
        items = [rebuild(item, replace) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        fresh = {name: rebuild(value[name], replace) for name in _names(value)}
        # In the caller's order: a program may go through a dict.
        return dict_like(value)((name, fresh[name]) for name in value)
    if has_members(value):
        return with_members(value, {name: rebuild(item, replace) for name, item in members_of(value).items()})
    return value


def labels(bound: Mapping[str, Any]) -> list[str]:
    """A readable name for each tensor, then for each number, in the order in which calls are taken apart."""
    tensors: list[str] = []
    numbers: list[str] = []
    for name, value in bound.items():
        _label(name.lstrip("*"), value, tensors, numbers)
    return tensors + numbers


def _label(prefix: str, value: Any, tensors: list[str], numbers: list[str]) -> None:
    if isinstance(value, Tensor):
        tensors.append(prefix)
    elif isinstance(value, (int, float)) and not isinstance(value, (bool, enum.Enum)):
        numbers.append(prefix)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _label(f"{prefix}[{i}]", item, tensors, numbers)
    elif isinstance(value, dict):
        for name in _names(value):
            _label(f"{prefix}.{name}", value[name], tensors, numbers)
    elif has_members(value):
        for name, item in members_of(value).items():
            _label(f"{prefix}.{name}", item, tensors, numbers)


def in_objects(bound: Mapping[str, Any]) -> list[bool]:
    """For each tensor, in the order in which calls are taken apart, whether an object holds it that is no container."""
    found: list[bool] = []
    for value in bound.values():
        _find_objects(value, False, found)
    return found


def _find_objects(value: Any, is_inside: bool, found: list[bool]) -> None:
    if isinstance(value, Tensor):
        found.append(is_inside)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _find_objects(item, is_inside, found)
    elif isinstance(value, dict):
        for name in _names(value):
            _find_objects(value[name], is_inside, found)
    elif has_members(value):
        for item in members_of(value).values():
            _find_objects(item, True, found)


@dataclass(slots=True)
class Written:
    """What ``forward`` gives where it also writes into lists and dictionaries that are passed to it.

    Attributes:
        result: What it returns.
        places: Where it writes.
        values: What it leaves there, one for each place with something.
    """

    result: Any
    places: tuple[Place, ...]
    values: tuple[Any, ...]


def containers(bound: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Every list and dictionary among the arguments, and what else could be written into, each with the way to it."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    for name, value in bound.items():
        if name.startswith("*"):
            # A fresh one in each call, which nobody else sees.
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                _add_containers((name, key), item, found)
        else:
            _add_containers((name,), value, found)
    return found


def _add_containers(path: tuple[Any, ...], value: Any, found: list[tuple[tuple[Any, ...], Any]]) -> None:
    if isinstance(value, (list, tuple)):
        items: Any = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    elif has_members(value):
        items = items_of(value).items()
    else:
        return
    if not isinstance(value, tuple):
        found.append((path, value))
    for key, item in items:
        _add_containers((*path, key), item, found)


def items_of(container: Any) -> dict[Any, Any]:
    """What is in a list, a dictionary or an object now."""
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container) if isinstance(container, dict) else members_of(container)


def written(result: Any, before: Sequence[tuple[tuple[Any, ...], Any, dict[Any, Any]]]) -> Any:
    """The result of a ``forward``, and what it wrote into its arguments.

    Args:
        result: What it returned.
        before: Every container among its arguments: the way to it, itself, and what was in it.

    Raises:
        CaptureError: It wrote something that a graph cannot.
    """
    places: list[Place] = []
    values: list[Any] = []
    for path, container, old in before:
        now = {plain(key): item for key, item in items_of(container).items()}
        if len(now) == len(old) and all(k in now and now[k] is v for k, v in old.items()):
            continue
        label = f"{path[0]}{''.join(f'[{key!r}]' for key in path[1:])}".lstrip("*")
        if not isinstance(container, (list, dict)) and not is_settable(container):
            raise CaptureError(f"forward changes an attribute of its argument {label}")
        for key in (*path[1:], *now, *old):
            if type(key) not in (str, int):
                raise CaptureError(f"forward writes into its argument {label}, which has a key that is {key!r}")
        for key in dict.fromkeys((*old, *now)):
            if key not in now:
                places.append((path, key, False))
            elif key not in old or now[key] is not old[key]:
                if any(now[key] is item for _, item, _ in before):
                    raise CaptureError(f"forward puts one of its arguments into another, {label}")
                if isinstance(now[key], (list, dict)) and any(now[key] is item for item in values):
                    raise CaptureError(f"forward puts one list or dictionary into two places of its argument {label}")
                places.append((path, key, True))
                values.append(now[key])
    return Written(result, tuple(places), tuple(values)) if places else result


def write(bound: Mapping[str, Any], places: Sequence[Place], values: Sequence[Any]) -> None:
    """Writes into the arguments of a call what :func:`written` saw."""
    rest = iter(values)
    for path, key, is_kept in places:
        container = container_at(bound, path)
        if path[0] == TENSORS:
            part, value = placed(container[key], next(rest))
            part.copy_(value)
            continue
        if isinstance(container, list):
            # A list ends where the first item is missing.
            container[key : key + 1 if is_kept else None] = [next(rest)] if is_kept else []
            continue
        table = container if isinstance(container, dict) else vars(container)
        if is_kept:
            table[key] = next(rest)
        else:
            table.pop(key, None)


def container_at(bound: Mapping[str, Any], path: Sequence[Any]) -> Any:
    """The container at the end of a way."""
    found: Any = bound
    for step in path:
        found = item_in(found, step)
    return found


def item_in(container: Any, key: Any) -> Any:
    """What a container has under an index or a key, or an object as an attribute."""
    if isinstance(container, (list, tuple, dict, types.MappingProxyType)):
        return container[key]
    return members_of(container)[key]


def _names(mapping: Mapping[Any, Any]) -> list[Any]:
    """The keys of a mapping in an order that does not depend on how it was filled, where they can be ordered."""
    try:
        return sorted(mapping)
    except TypeError:
        return list(mapping)
