"""Types of arguments that ops refuse where they run, and that meta kernels take: eager raises, so a program may not compute.

Each check gives whether the arguments are refused. It is asked once per op of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_types"]

aten = torch.ops.aten

_INDICES = (torch.int32, torch.int64)


def _is_bool(value: Any) -> bool:
    return value.dtype is torch.bool if isinstance(value, Tensor) else type(value) is bool


def _with_bool(*args: Any, **kwargs: Any) -> bool:
    return any(map(_is_bool, args))


def _of_bool(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    return x.dtype is torch.bool


def _with_integer(*args: Any, **kwargs: Any) -> bool:
    return any(isinstance(one, Tensor) and not one.dtype.is_floating_point for one in args)


def _of_integer(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


def _with_float(*args: Any, **kwargs: Any) -> bool:
    return any(one.dtype.is_floating_point if isinstance(one, Tensor) else type(one) is float for one in args)


def _of_several(*args: Any, **kwargs: Any) -> bool:
    return len({one.dtype for one in args if isinstance(one, Tensor)}) > 1


def _enlarged(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    return not (x.dtype.is_floating_point or x.dtype is torch.uint8)


def _negative_power(x: Tensor, exponent: Any) -> bool:
    is_whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
    return is_whole and isinstance(exponent, int) and exponent < 0


def _looked_up(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> bool:
    return indices.dtype not in _INDICES


def _selected(x: Tensor, dim: int, index: Tensor) -> bool:
    return index.dtype not in _INDICES


_REFUSED: Sequence[tuple[Callable[..., bool], Sequence[Any]]] = (
    (_with_bool, (
        aten.sub.Tensor, aten.sub.Scalar, aten.sub_.Tensor, aten.sub_.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
    )),
    (_of_bool, (
        aten.addcmul.default, aten.argmax.default, aten.argmin.default, aten.max_pool2d.default,
        aten.max_pool3d.default,
    )),
    (_of_integer, (aten.max_pool1d.default, aten.silu.default, aten.silu_.default, aten.gelu.default)),
    (_with_float, (
        aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_not.default,
        aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor,
    )),
    (_of_several, (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.matmul.default)),
    (_with_integer, (aten.logaddexp.default, aten.prelu.default)),
    (_enlarged, (
        aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
        aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact3d.vec,
    )),
    (_negative_power, (aten.pow.Tensor_Scalar, aten.pow_.Scalar)),
    (_looked_up, (aten.embedding.default,)),
    (_selected, (aten.index_select.default,)),
)  # fmt: skip
_CHECKS = {op: check for check, ops in _REFUSED for op in ops}


def check_types(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises what stands for the error of the op that runs, if there is one.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Those that are passed by name.
    """
    check = _CHECKS.get(func)
    if check is not None and check(*args, **kwargs):
        types = [str(one.dtype if isinstance(one, Tensor) else type(one).__name__) for one in args]
        raise RuntimeError(f"{func} does not take {', '.join(types)}".replace("torch.", ""))
