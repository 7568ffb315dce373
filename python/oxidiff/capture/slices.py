"""What diffusers computes a part at a time to save memory, at once: a loop over parts of a tensor has as many ops as there
are parts, so that each size would be another program.

A program needs no parts to save memory. A module that is told to make some (sliced attention, feed-forward layers in
chunks, split inference) is traced as an object of its own with the same tensors, submodules and attributes but for the one
that says how large the parts are. Its own code runs, so all else is done as it is, and neither the module nor what other
threads see is written.

Only what is known is taken for another: classes of diffusers as they are, whose code names what it did, and where what is
done to each part is the same for parts of any size. A class that is derived from one, a layer that somebody put in the
place of another, hooks: their loops are traced as they stand.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..adapters import base_of
from ..hooks import casting

__all__ = ["unsliced", "unsliced_forward"]

_ATTENTION = "diffusers.models.attention_processor"
_BLOCKS = "diffusers.models.attention"
_FRAMES = "diffusers.models.autoencoders.autoencoder_kl_mochi"
_GATES = "diffusers.models.autoencoders.ltx2_diffusion_decoder"
_SPLIT = "diffusers.pipelines.free_noise_utils"
_WHOLE = sys.maxsize
"""The size of a part that is all there is: a slice that ends there ends nowhere."""


def unsliced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """The module to run where ``module`` is called with these arguments: it does at once what that does in parts. It is the
    module itself where that makes none, or is not known."""
    make = _making(module)
    return module if make is None or not _is_plain(module) else _changed(module, make(module, *args, **kwargs))


def unsliced_forward(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same of what a program is traced of: the ``forward`` of a module's class, whatever hooks lie around that."""
    module = forward.__self__ if isinstance(forward, MethodType) else None
    if not isinstance(module, nn.Module) or forward.__func__ is not type(module).forward:
        return forward
    make = _making(module)
    made = module if make is None else _changed(module, make(module, *args, **kwargs))
    return forward if made is module else made.forward


_Changes = dict[str, Any] | None
"""Attributes that are others; ``None`` if none are."""


def _making(module: nn.Module) -> Callable[..., _Changes] | None:
    """What may say which attributes are others where a module makes no parts; ``None`` of most modules."""
    is_chunked = module.__dict__.get("_chunk_size") is not None
    kind = type(module)
    return _of_block if is_chunked else _KNOWN.get((kind.__module__, kind.__qualname__))


def _changed(module: nn.Module, changes: _Changes) -> nn.Module:
    if changes is None:
        return module
    table = {name: value for name, value in module.__dict__.items() if name != "forward"}
    made = object.__new__(type(module))
    object.__setattr__(made, "__dict__", {**table, **changes})
    return made


# -- attention -----------------------------------------------------------------------------------------------------------


def _of_attention(
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> _Changes:
    """Of attention by slices of the heads of all items of a batch."""
    kind, processor = type(attn), attn.__dict__.get("processor")
    named = _SLICED.get(type(processor).__qualname__)
    if named is None or not _is_code_of(_ATTENTION, type(processor), "__call__", named, is_all=True):
        return None
    scores = frozenset({"baddbmm", "softmax"})
    if not _is_code_of(_ATTENTION, kind, "forward", {"processor"}) or "get_attention_scores" in attn.__dict__:
        return None
    if not _is_code_of(_ATTENTION, kind, "get_attention_scores", scores) or processor.__dict__.keys() != {"slice_size"}:
        return None
    if not _is_size(processor.slice_size):
        return None
    # Parts of tensors that have other items are others.
    batch = hidden_states.shape[0]
    if encoder_hidden_states is not None and encoder_hidden_states.shape[0] != batch:
        return None
    if attention_mask is not None and attention_mask.shape[0] not in (batch, batch * attn.heads):
        return None
    return {"processor": type(processor)(_WHOLE)}


_PROJECTIONS = frozenset(
    {
        "batch_to_head_dim", "bmm", "device", "dtype", "get_attention_scores", "group_norm", "head_to_batch_dim", "heads",
        "norm_cross", "norm_encoder_hidden_states", "prepare_attention_mask", "range", "reshape", "shape", "slice_size",
        "to_k", "to_out", "to_q", "to_v", "torch", "transpose", "view", "zeros",
    }
)  # fmt: skip
_SLICED = {
    "SlicedAttnProcessor": _PROJECTIONS | {"ndim", "rescale_output_factor", "residual_connection"},
    "SlicedAttnAddedKVProcessor": _PROJECTIONS
    | {"add_k_proj", "add_v_proj", "cat", "only_cross_attention", "spatial_norm"},
}
"""Processors that make slices, by name, with all that their code names."""


# -- feed-forward layers -------------------------------------------------------------------------------------------------


def _of_block(block: Any, *args: Any, **kwargs: Any) -> _Changes:
    """Of a transformer block that runs its feed-forward layers in chunks."""
    forward = vars(type(block)).get("forward")
    chunked = getattr(sys.modules.get(_BLOCKS), "_chunked_feed_forward", None)
    known = {"ValueError", "cat", "chunk", "shape", "torch"}
    if chunked is None or not _is_function_of(_BLOCKS, chunked, known, is_all=True):
        return None
    names = {"_chunk_dim", "_chunk_size", "_chunked_feed_forward"}
    module = type(block).__module__
    if not module.startswith("diffusers.models.") or not _is_function_of(module, forward, names):
        return None
    if forward.__globals__["_chunked_feed_forward"] is not chunked:
        return None
    layers = {name: block._modules[name] for name in _LAYERS if name in block._modules}
    size, dim = block._chunk_size, block._chunk_dim
    if not (layers and _is_size(size) and isinstance(dim, int) and all(map(_is_by_token, layers.values()))):
        return None
    return {
        "_chunk_size": None,
        **{name: functools.partial(_fed, chunked, layer, dim, size) for name, layer in layers.items()},
    }


_LAYERS = ("ff", "ff_in", "ff_context")
"""Names of the layers that run in chunks."""


def _fed(chunked: Callable[..., Tensor], layer: nn.Module, dim: int, size: int, x: Tensor) -> Tensor:
    """What a feed-forward layer gives for all tokens; chunks that cannot be made are an error as ever."""
    is_by_token = -x.ndim <= dim < x.ndim - 1 and dim != -1
    if is_by_token and x.shape[dim] and x.shape[dim] % size == 0:
        result: Tensor = layer(x)
        return result
    return chunked(layer, x, dim, size)


# -- layers of autoencoders ----------------------------------------------------------------------------------------------


def _of_frames(norm: Any, *args: Any, **kwargs: Any) -> _Changes:
    """Of a norm of each frame, of some frames at a time."""
    layer = norm._modules.get("norm_layer")
    known = {"cat", "chunk_size", "flatten", "norm_layer", "permute", "size", "split", "torch", "unflatten"}
    is_known = _is_code_of(_FRAMES, type(norm), "forward", known, is_all=True)
    if not is_known or type(layer) is not nn.GroupNorm or not _is_plain(layer) or not _is_size(norm.chunk_size):
        return None
    return {"chunk_size": _WHOLE}


def _of_gates(layer: Any, *args: Any, **kwargs: Any) -> _Changes:
    """Of a gated layer, of some tokens at a time."""
    parts = ("w_up", "w_gate", "w_down")
    known = {
        "F",
        "_SWIGLU_TILE_SIZE",
        "empty_like",
        "math",
        "prod",
        "range",
        "reshape",
        "shape",
        "silu",
        "torch",
        *parts,
    }
    is_known = _is_code_of(_GATES, type(layer), "forward", known, is_all=True)
    if not is_known or not all(_is_by_token(layer._modules[name]) for name in parts):
        return None
    return {"forward": functools.partial(_gated, layer)}


def _gated(layer: Any, hidden_states: Tensor) -> Any:
    return layer.w_down(nn.functional.silu(layer.w_gate(hidden_states)) * layer.w_up(hidden_states))


# -- split inference -----------------------------------------------------------------------------------------------------


def _of_split(split: Any, *args: Any, **kwargs: Any) -> _Changes:
    """Of a module that is run on some items of a batch at a time."""
    inner, names = split._modules.get("module"), split.input_kwargs_to_split
    known = {"cat", "input_kwargs_to_split", "module", "split", "split_dim", "split_size"}
    if not _is_code_of(_SPLIT, type(split), "forward", known):
        return None
    if split.split_dim != 0 or not _is_size(split.split_size) or inner is None or not _is_by_item(inner):
        return None
    # Each part is given all of what is not split.
    others = [args, *(value for name, value in kwargs.items() if name not in names)]
    parts = [x for name, x in kwargs.items() if name in names and isinstance(x, Tensor)]
    if not parts or any(isinstance(x, Tensor) for x in tree_leaves(others)):
        return None
    if any(x.shape[0] != parts[0].shape[0] for x in parts):
        return None
    return {"split_size": _WHOLE}


# -- what is known -------------------------------------------------------------------------------------------------------


_KNOWN: Mapping[tuple[str, str], Callable[..., _Changes]] = {
    (_ATTENTION, "Attention"): _of_attention,
    (_GATES, "LTX2VideoVaeSwiGLU"): _of_gates,
    (_FRAMES, "MochiChunkedGroupNorm3D"): _of_frames,
    (_SPLIT, "SplitInferenceModule"): _of_split,
}
"""By the module and the name of a class."""


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_code_of(module: str, kind: type, name: str, named: Iterable[str], *, is_all: bool = False) -> bool:
    """Whether a class is one of this module, and has a method of this name as it is written there."""
    return kind.__module__ == module and _is_function_of(module, vars(kind).get(name), named, is_all=is_all)


def _is_function_of(module: str, function: Any, named: Iterable[str], *, is_all: bool = False) -> bool:
    """Whether something is a function that is written in this module, and whose code has these names, and no others if these
    are all: another version that does something else needs others."""
    if not isinstance(function, FunctionType) or function.__globals__.get("__name__") != module:
        return False
    found = _names_in(function.__code__)
    return found == frozenset(named) if is_all else found.issuperset(named)


@functools.lru_cache(maxsize=256)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function, and in what is defined there."""
    inner = [_names_in(value) for value in code.co_consts if isinstance(value, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of a module is its class's ``forward`` and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _is_by_token(module: nn.Module | None) -> bool:
    """Whether a layer does the same to each token, whichever others there are."""
    if module is None:
        return False
    module = base_of(module) or module
    kind = type(module)
    if not (_is_plain(module) or casting(module) is not None):
        return False
    if kind is nn.Linear:
        # A tensor of another class may scale all tokens by the largest.
        return type(module.weight) is nn.Parameter
    if kind is nn.Dropout:
        return not (module.training and module.p)
    if kind in _POINTWISE:
        return True
    is_known = kind is nn.ModuleList or kind.__module__ == "diffusers.models.activations"
    is_known |= kind.__module__ == _BLOCKS and kind.__qualname__ == "FeedForward"
    return is_known and all(map(_is_by_token, module.children()))


_POINTWISE = frozenset({nn.GELU, nn.Identity, nn.ReLU, nn.SiLU})


def _is_by_item(module: nn.Module) -> bool:
    """Whether a module does the same to each item of a batch, whichever others there are."""
    if type(module) is not nn.Linear and (type(module).__module__, type(module).__qualname__) not in _BY_ITEM:
        return False
    layers = [*module.modules()]
    if not all(map(_is_as_written, layers)):
        return False
    processors = [layer.__dict__["processor"] for layer in layers if "processor" in layer.__dict__]
    # Others share keys among the items, or do something else to a third of them.
    return all(type(one).__module__ == _ATTENTION and type(one).__qualname__ in _PROCESSORS for one in processors)


def _is_as_written(layer: nn.Module) -> bool:
    """Whether a layer is one of PyTorch's or diffusers', or an adapter that is in a weight, and does nothing at random."""
    if not (_is_plain(layer) or casting(layer) is not None) or (
        isinstance(layer, nn.Dropout) and layer.training and layer.p
    ):
        return False
    is_known = type(layer).__module__.startswith(("torch.nn.modules.", "diffusers.models."))
    parameters = [one for one in layer._parameters.values() if one is not None]
    return (is_known or base_of(layer) is not None) and all(type(one) is nn.Parameter for one in parameters)


_BY_ITEM = frozenset(
    {
        (_BLOCKS, "BasicTransformerBlock"),
        (_BLOCKS, "FreeNoiseTransformerBlock"),
        ("diffusers.models.downsampling", "Downsample2D"),
        ("diffusers.models.resnet", "ResnetBlock2D"),
        ("diffusers.models.transformers.transformer_2d", "Transformer2DModel"),
        ("diffusers.models.upsampling", "Upsample2D"),
    }
)
_PROCESSORS = frozenset({"AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor"})
