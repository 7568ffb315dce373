"""A function that calls something else where it calls certain modules and methods, and does everything else as it does.

Libraries that wrap a model (DeepCache, ParaAttention, scripts with ``block.forward = wrapped``) put a function in the place
of ``forward`` that calls what was there before, a bound method that it keeps wherever it likes. Nothing can come in front of
such a method, so what is changed is the call: the function is compiled anew from its source with ``f(x)`` as
``redirect(f)(x)``. Variables, globals and objects are those of the function; what is called in the place of a method is kept
nowhere.

The source is believed only if it compiles to the very code that the function has. Where there is none, or of a lambda, there
is no such function.

Threads: what is made of a code is kept, and made once more where two threads are the first.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import tokenize
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .hooks import function_in

__all__ = ["Redirecting"]

_NAME = "__oxidiff_redirect__"
_FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
_WHAT_RUNS = (
    "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount",
    "co_kwonlyargcount", "co_exceptiontable",
)  # fmt: skip


class Redirecting:
    """Calls functions so that what they call is found by way of ``redirect``.

    Args:
        redirect: Gives what is called in the place of a function, a method or a module; itself if nothing else is.
    """

    def __init__(self, redirect: Callable[[Any], Any]) -> None:
        self._redirect = redirect

    def can(self, function: Any) -> bool:
        """Whether the source of a function, or of what a method or partial calls, is there."""
        found = function_in(function)
        return found is not None and _redirecting(found.__code__, _qualname(found)) is not None

    def of(self, function: Any, file: str | None = None) -> Any:
        """The function to call in the place of one; itself where its source is not there.

        Args:
            function: The function, method, partial or object with a ``__call__``.
            file: Takes functions of this file alone.
        """
        if type(function) is functools.partial:
            inner = self._redirect(function.func)
            inner = self.of(inner, file) if inner is function.func else inner
            return functools.partial(inner, *function.args, **function.keywords)
        found = function_in(function)
        if found is None or (file is not None and found.__code__.co_filename != file):
            return function
        code = _redirecting(found.__code__, _qualname(found))
        if code is None:
            return function

        def redirect(called: Any) -> Any:
            other = self._redirect(called)
            # What the same file has beside it may be what calls the model.
            return self.of(called, found.__code__.co_filename) if other is called else other

        cells = dict(zip(found.__code__.co_freevars, found.__closure__ or (), strict=True))
        cells[_NAME] = types.CellType(redirect)
        closure = tuple(cells[name] for name in code.co_freevars)
        made = types.FunctionType(code, found.__globals__, found.__name__, found.__defaults__, closure)
        made.__kwdefaults__ = found.__kwdefaults__
        if function is found:
            return made
        return types.MethodType(made, function.__self__ if isinstance(function, types.MethodType) else function)


@functools.lru_cache(maxsize=4096)
def _redirecting(code: types.CodeType, qualname: str) -> types.CodeType | None:
    """The code of a function with each call by way of a variable of the name :data:`_NAME`."""
    try:
        lines, first = inspect.findsource(code)
        source = "".join(inspect.getblock(lines[first:]))
        # As indented as it is: so are the lines of texts in it.
        is_inner = source[:1].isspace()
        body: Any = ast.parse(f"if 1:\n{source}").body[0] if is_inner else ast.parse(source)
        imports = _imports("".join(lines))
    except (OSError, TypeError, ValueError, SyntaxError, RecursionError, tokenize.TokenError):
        return None
    ast.increment_lineno(body, code.co_firstlineno - 1 - is_inner)
    function = body.body[0] if len(body.body) == 1 else None
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or function.name != code.co_name:
        return None
    same = _compiled(function, code, qualname, code.co_freevars, imports)
    if same is None or not _is_same(same, code):
        return None
    _Calls().visit(ast.fix_missing_locations(ast.Module(function.body, [])))
    made = _compiled(function, code, qualname, (*code.co_freevars, _NAME), imports)
    return made if made is not None and _NAME in made.co_freevars else None


@functools.lru_cache(maxsize=64)
def _imports(text: str) -> list[ast.stmt]:
    """The imports at the top of a file. Methods of what is imported there are called by other instructions."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = [ast.parse(text)]
    for node in waiting:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            # Of these, neither makes a name in the file.
            if not (isinstance(node, ast.ImportFrom) and (node.module == "__future__" or node.names[0].name == "*")):
                found.append(node)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.expr)):
            waiting += ast.iter_child_nodes(node)
    return found


class _Calls(ast.NodeTransformer):
    """Makes ``redirect(f)(x)`` of ``f(x)``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        # Without an argument it is about the frame that it stands in, and the compiler's.
        if not (isinstance(node.func, ast.Name) and node.func.id == "super"):
            found = ast.Call(ast.Name(_NAME, ast.Load()), [node.func], [])
            node.func = ast.copy_location(found, node.func)
        return node


def _compiled(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    code: types.CodeType,
    qualname: str,
    variables: tuple[str, ...],
    imports: Sequence[ast.stmt],
) -> types.CodeType | None:
    """The code of a function that is defined where these variables are, in a file with these imports."""
    # What is evaluated where it is defined is not done again.
    own = function.args
    plain = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in own.posonlyargs],
        args=[ast.arg(a.arg) for a in own.args],
        vararg=own.vararg and ast.arg(own.vararg.arg),
        kwonlyargs=[ast.arg(a.arg) for a in own.kwonlyargs],
        kw_defaults=[None] * len(own.kwonlyargs),
        kwarg=own.kwarg and ast.arg(own.kwarg.arg),
        defaults=[],
    )
    inner = type(function)(function.name, plain, function.body, [])
    outer = ast.FunctionDef(
        "outer", ast.arguments([], [ast.arg(v) for v in variables], None, [], [], None, []), [inner], []
    )
    # Private names are those of its class.
    owner = qualname.rpartition(".")[0].rpartition(".")[2]
    is_method = owner not in ("", "<locals>")
    if is_method:
        outer.body = [ast.copy_location(ast.ClassDef(owner, [], [], [inner], []), function)]
    for node in (inner, outer, *outer.body):
        node.lineno = node.end_lineno = function.lineno
        node.col_offset = node.end_col_offset = 0
        if "type_params" in node._fields:
            setattr(node, "type_params", [])  # noqa: B010  # There since Python 3.12.
    module = ast.fix_missing_locations(ast.Module([*imports, outer], []))
    try:
        made = compile(module, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    except (SyntaxError, ValueError, TypeError):
        return None
    found = next(_inner(made), None)
    for _ in range(1 + is_method):
        found = found and next(_inner(found), None)
    before = f"outer.<locals>.{owner}.{function.name}" if is_method else f"outer.<locals>.{function.name}"
    return found and _named(found, before, qualname)


def _qualname(function: types.FunctionType) -> str:
    """The name of a function as its code has it, which a decorator leaves as it is."""
    return str(getattr(function.__code__, "co_qualname", function.__qualname__))


def _named(code: types.CodeType, before: str, qualname: str) -> types.CodeType:
    """The code of a function of another name, and of what is defined in it: names of classes are constants, and before
    Python 3.11 those of functions."""

    def named(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _named(value, before, qualname)
        is_name = isinstance(value, str) and (value == before or value.startswith(f"{before}.<locals>."))
        return qualname + value[len(before) :] if is_name else value

    changes: dict[str, Any] = {"co_consts": tuple(map(named, code.co_consts))}
    if hasattr(code, "co_qualname"):
        changes["co_qualname"] = named(code.co_qualname)
    return code.replace(**changes)


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (one for one in code.co_consts if isinstance(one, types.CodeType))


def _is_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two codes do the same, wherever they stand."""
    if any(getattr(one, name, None) != getattr(other, name, None) for name in _WHAT_RUNS):
        return False
    # One may be defined in a function, the other at the top of a file.
    if (one.co_flags ^ other.co_flags) & ~inspect.CO_NESTED:
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for mine, theirs in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType):
            if not _is_same(mine, theirs):
                return False
        elif type(mine) is not type(theirs) or repr(mine) != repr(theirs):
            return False
    return True
