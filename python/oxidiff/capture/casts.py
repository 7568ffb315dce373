"""Autocast: the casts that eager makes around each op, recorded as ops.

PyTorch casts what real tensors an op is given, before it comes to a dispatch mode; meta tensors it leaves as they are. Here
the same is decided for each op that a trace meets, by PyTorch's own table (``aten/src/ATen/autocast_mode.h`` for GPUs,
``autocast_mode.cpp`` for the CPU). Which ops the running version has an entry for its dispatcher knows; an op with an entry
that is not in the table here is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .aliasing import is_view_op
from .handlers import HANDLERS

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["POLICIES", "check_uncast", "dispatch_key", "mapped", "recorded"]

aten = torch.ops.aten
_C = torch._C

# --- PyTorch's table ------------------------------------------------------------------------------------------------

_LOWER = "to autocast's type"
_FLOAT = "to float32"
_FLOAT_RESULT = "to float32, by the argument dtype if none is given"
_WIDEST = "to the widest of their types"

_LOWER_BOTH = """
    _convolution.deprecated addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input linalg_vecdot linear matmul mm prelu scaled_dot_product_attention
"""
_FLOAT_BOTH = """
    cdist cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss
"""
_TABLE: dict[str, dict[str, str]] = {
    "cpu": {
        _LOWER: _LOWER_BOTH + "conv1d.padding conv2d.padding conv3d.padding",
        _FLOAT: _FLOAT_BOTH
        + """
            adaptive_avg_pool3d avg_pool3d fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft
            fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn grid_sampler grid_sampler_2d grid_sampler_3d
            inverse linalg_cond linalg_inv linalg_solve max_pool3d pinverse polar prod prod.dim_int quantile
            quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
            stft stft.center trace view_as_complex
        """,
        _WIDEST: "cat index_copy stack",
    },
    "cuda": {
        _LOWER: _LOWER_BOTH
        + """
            _convolution addmv addr chain_matmul convolution einsum gru_cell linalg_multi_dot lstm_cell mv rnn_relu_cell
            rnn_tanh_cell
        """,
        _FLOAT: _FLOAT_BOTH
        + """
            _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
            _upsample_nearest_exact3d acos asin cosh cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm
            layer_norm log log10 log1p log2 logsumexp native_layer_norm nuclear_norm nuclear_norm.dim pdist pow.Scalar
            pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh softplus tan upsample_bicubic2d
            upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
            upsample_trilinear3d
        """,
        _FLOAT_RESULT: """
            cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int norm.Scalar
            norm.ScalarOpt_dim prod prod.dim_int softmax.int sum sum.dim_IntList
        """,
        _WIDEST: "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
    },
}
POLICIES = {
    kind: {name: policy for policy, names in table.items() for name in names.split()} for kind, table in _TABLE.items()
}
"""By kind of device, by the name of an op, which of its arguments are cast to what."""
_CASTING_INSIDE = frozenset(
    (
        "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_trilinear", "affine_grid_generator", "bilinear",
    )
)  # fmt: skip
"""Ops of which PyTorch's kernels call others that are cast."""
_WITH_DTYPE = {"norm.Scalar": aten.norm.ScalarOpt_dtype, "norm.ScalarOpt_dim": aten.norm.ScalarOpt_dim_dtype}
"""Ops that have the argument ``dtype`` in another one."""


def dispatch_key(kind: str) -> str:
    """PyTorch's name for autocast on a kind of device."""
    return f"Autocast{kind.upper()}"


@functools.cache
def _policy_of(func: Any, kind: str) -> str | None:
    """What becomes of an op's arguments; ``None`` if they stay.

    Raises:
        LookupError: The table has no entry where PyTorch has one.
    """
    if func.namespace != "aten":
        if _C._dispatch_has_kernel_for_dispatch_key(func.name(), dispatch_key(kind)):
            raise LookupError
        return None
    name = func.name().removeprefix("aten::")
    # `interpolate` with factors is the same op with sizes, of which PyTorch has the entry.
    name = name.removesuffix(".vec") if name.startswith(("upsample_", "_upsample_")) else name
    if not _C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", dispatch_key(kind)):
        if name in _CASTING_INSIDE:
            raise LookupError
        return None
    return POLICIES[kind][name]


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """What ops are given, with other tensors: these are arguments, or in lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)) and not all(type(item) is int for item in value):
        return (list if isinstance(value, list) else tuple)(mapped(function, item) for item in value)
    return {name: mapped(function, item) for name, item in value.items()} if type(value) is dict else value


def _is_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64


def _widest(args: Any, lower: torch.dtype) -> torch.dtype:
    """The type of what is cast together.

    Raises:
        RuntimeError: As PyTorch does for another type of 16 bits.
    """
    found = {x.dtype for x in tree_flatten(args)[0] if _is_cast(x)}
    if torch.float32 in found:
        return torch.float32
    if found - {lower}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return lower


def recorded(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lower: torch.dtype) -> Any:
    """Records an op with the casts that autocast makes around it."""
    kind = rec.autocast_kind
    try:
        policy = _policy_of(func, kind)
        is_composite = policy is None and _has_parts(func) and _has_cast_parts(rec, func, args, kwargs)
    except LookupError:
        raise rec.error(f"what autocast makes of {func} is not known", func) from None
    if is_composite:
        # Its parts are cast, each by itself, as they are in eager.
        with rec:
            return func.decompose(*args, **kwargs)
    if policy is None:
        return rec.handle(func, args, kwargs)
    rec.cast_to = None
    try:
        if policy is _FLOAT_RESULT:
            if _is_cast(args[0]):
                func, kwargs = _with_dtype(func, args, kwargs)
            return rec.handle(func, args, kwargs)
        dtype = {_LOWER: lower, _FLOAT: torch.float32}.get(policy) or _widest((args, kwargs), lower)

        def cast(x: Tensor) -> Any:
            is_other = _is_cast(x) and x.dtype is not dtype
            return rec.handle(aten._to_copy.default, (x,), {"dtype": dtype}) if is_other else x

        args, kwargs = mapped(cast, args), mapped(cast, kwargs)
        return rec.handle(func, args, kwargs)
    finally:
        rec.cast_to = lower


def check_uncast(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises an exception for an op that autocast would cast if it was on: of what TorchScript runs nobody can tell."""
    try:
        policy = _policy_of(func, rec.autocast_kind)
    except LookupError:
        policy = _LOWER
    lower = torch.get_autocast_dtype(rec.autocast_kind)
    wanted = _widest((args, kwargs), lower) if policy is _WIDEST else lower if policy is _LOWER else torch.float32
    given = tree_flatten((args, kwargs))[0]
    # What is put together is of the widest type without being cast.
    if (
        policy is not None
        and func._opname not in ("cat", "stack")
        and any(_is_cast(x) and x.dtype is not wanted for x in given)
    ):
        raise rec.error(f"what autocast makes of {func} in TorchScript is not known", func)


def _with_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An op, and its keywords, that gives float32 if its caller asks for nothing else."""
    name = func.name().removeprefix("aten::")
    if name in _WITH_DTYPE:
        named = {} if name == "norm.Scalar" or len(args) > 3 else {"keepdim": kwargs.get("keepdim", False)}
        return _WITH_DTYPE[name], {**kwargs, **named, "dtype": torch.float32}
    place = [argument.name for argument in func._schema.arguments].index("dtype")
    is_given = (args[place] if len(args) > place else kwargs.get("dtype")) is not None
    return func, kwargs if is_given else {**kwargs, "dtype": torch.float32}


# --- ops that are made of others ------------------------------------------------------------------------------------

_WHOLE = frozenset(HANDLERS)
"""Ops that are recorded in a way of their own: they compute nothing that is cast, or depend on who runs them."""
_MOVING = frozenset(("expand_as", "flatten", "reshape", "reshape_as", "unflatten", "view_as"))
"""Names of ops that compute nothing."""


@functools.cache
def _has_parts(func: Any) -> bool:
    kernel = "CompositeImplicitAutograd"
    if func in _WHOLE or func._opname in _MOVING or func._schema.is_mutable or is_view_op(func):
        return False
    return bool(_C._dispatch_has_kernel_for_dispatch_key(func.name(), kernel))


_known: dict[Any, bool] = {}
"""Whether ops, by the kinds of what they are given, have parts that are cast."""


def _has_cast_parts(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autocast casts parts of an op, which PyTorch's own code for it shows. That may depend on ranks, types,
    flags, names and small numbers (exponents), but on no sizes."""
    leaves, form = tree_flatten((args, kwargs))
    key = (func, rec.autocast_kind, form, *map(_kind_of, leaves))
    found = _known.get(key)
    if found is None:
        args, kwargs = mapped(rec.stand_in, args), mapped(rec.stand_in, kwargs)
        try:
            with _Parts(rec.autocast_kind):
                func.decompose(*args, **kwargs)
            found = False
        except _Found:
            found = True
        _known[key] = found
    return found


def _kind_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dim(), value.dtype
    if isinstance(value, (int, float)) and type(value) is not bool and abs(value) > _MAX_EXPONENT:
        return type(value)
    return value


_MAX_EXPONENT = 16


class _Found(Exception):
    """A part is cast."""


class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises :class:`_Found` where autocast casts what an op is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _policy_of(func, self._kind) is not None:
            raise _Found
        if _has_parts(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
