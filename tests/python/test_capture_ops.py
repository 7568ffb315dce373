"""Every row of the op table: captured at one size, interpreted there and at another, compared with eager."""

import functools
import itertools
import math
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

native = pytest.importorskip("oxidiff._native")

import oxidiff  # noqa: E402
from oxidiff.capture import Capturer  # noqa: E402
from oxidiff.capture.aten import ROWS  # noqa: E402
from oxidiff.capture.weights import as_stored  # noqa: E402
from oxidiff.outputs import builder  # noqa: E402

SIZES = ((2, 8, 6), (3, 16, 10))
"""Batch, height and width at the capture, and at a call that the same graph must serve."""


def rand(*shape, dtype=torch.float32, low=-2.0, high=2.0):
    return (torch.rand(*shape, dtype=torch.float64) * (high - low) + low).to(dtype)


def image(b, h, w, channels=4):
    return rand(b, channels, h, w)


def positive(b, h, w):
    return rand(b, 4, h, w, low=0.1, high=3.0)


def unit(b, h, w):
    return rand(b, 4, h, w, low=-0.9, high=0.9)


def ints(b, h, w):
    return torch.randint(-5, 9, (b, 4, h, w))


def bytes_of(x):
    return x.to(torch.uint8)


def on_bytes(function):
    return lambda x: function(bytes_of(x))


def bools(b, h, w):
    return torch.rand(b, 4, h, w) > 0.5


def tokens(b, h, w, width=8):
    return rand(b, h, width)


def ids(b, h, w):
    return torch.randint(0, 11, (b, h))


SCALARS = {
    "gt": lambda x: x > -1,
    "eq": lambda x: x == 256,
    "ge": lambda x: x >= 300,
    "clamp": lambda x: x.clamp(-1, 1),
    "floor_divide": lambda x: x // -2,
    "truncated": lambda x: torch.div(x, -2, rounding_mode="trunc"),
    "remainder": lambda x: x % -2,
    "fmod": lambda x: x.fmod(-2),
    "add": lambda x: x + 300,
    "sub": lambda x: 3 - x,
    "mul": lambda x: x * -3,
}
"""What is done with a number that a tensor's own type does not hold."""


@functools.cache
def fixed(*shape, seed=0, **kwargs):
    """A weight: the same at every size."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    out = rand(*shape, **kwargs)
    torch.set_rng_state(state)
    return out


def heads(b, h, w):
    # Not 4-D: the last two dimensions of an image are free sizes, a head's is not.
    return rand(b, h, 32)


def nearest_value(x):
    """Away from the points where rounding is a matter of taste."""
    return x * 3 + 0.25


CASES = {}


def case(name, function, *makers):
    assert name not in CASES, name
    CASES[name] = (function, makers)


# -- pointwise -------------------------------------------------------------------------------------------------------------

for op, of_scalar in SCALARS.items():
    case(f"{op}_of_bytes", on_bytes(of_scalar), ints)
case("eq_of_int", lambda x: x.int() == 2**32 + 5, ints)

for op in ("neg", "abs", "sign", "exp", "sin", "cos", "tanh", "sigmoid", "relu", "erf", "floor", "ceil", "trunc", "square",
           "isnan", "isinf", "isfinite", "exp2", "expm1", "nan_to_num"):  # fmt: skip
    case(op, getattr(torch, op), image)
case("round", lambda x: torch.round(nearest_value(x)), image)
for op in ("log", "sqrt", "rsqrt", "reciprocal", "log2", "log10", "log1p"):
    case(op, getattr(torch, op), positive)
case("tan", torch.tan, unit)
for op in ("silu", "gelu", "softplus", "mish", "elu", "selu", "celu", "leaky_relu", "hardswish", "hardsigmoid", "relu6",
           "hardtanh", "softsign", "logsigmoid"):  # fmt: skip
    case(op, getattr(F, op), image)
case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), image)
case("softplus_beta", lambda x: F.softplus(x, beta=2.0), image)
case("softplus_threshold", lambda x: F.softplus(x, threshold=1), image)
case("softplus_of_large", lambda x: F.softplus(x * 1e38, beta=2.5), image)
case("elu_alpha", lambda x: F.elu(x, alpha=0.7), image)
case("prelu", lambda x: F.prelu(x, fixed(4)), image)
case("glu", lambda x: F.glu(x, dim=1), image)
case("logical_not", torch.logical_not, bools)
case("bitwise_not", torch.bitwise_not, ints)
case("cos_of_int", torch.cos, ints)
for op in ("add", "sub", "mul", "maximum", "minimum", "atan2", "eq", "ne", "lt", "le", "gt", "ge"):
    case(op, getattr(torch, op), image, image)
    case(f"{op}_int", getattr(torch, op), ints, ints)
case("div", torch.div, image, positive)
case("div_int", torch.div, ints, lambda b, h, w: torch.full((b, 4, h, w), 3))
case("div_floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), image, positive)
case("div_trunc", lambda x, y: torch.div(x, y, rounding_mode="trunc"), image, positive)
case("div_trunc_int", lambda x: torch.div(x, 3, rounding_mode="trunc"), ints)
case("floor_divide", lambda x: x // 3, ints)
case("remainder", lambda x: x % 3, ints)
case("remainder_float", torch.remainder, image, positive)
case("fmod", torch.fmod, image, positive)
case("add_alpha", lambda x, y: torch.add(x, y, alpha=0.5), image, image)
case("add_to_a_number", lambda x: torch.add(1e-6, x, alpha=0.5), image)
case("sub_from_a_number", lambda x: torch.sub(2.0, x, alpha=0.5), image)
case("sub_alpha", lambda x, y: torch.sub(x, y, alpha=2), image, image)
case("rsub", lambda x: 1 - x, image)
case("scalars", lambda x: ((x + 1) * 0.3 - 2) / 0.7, image)
case("broadcast", lambda x, y: x * y[:, :1, :, :1], image, image)
case("promote", lambda x, y: x + y, image, ints)
case("pow_2", lambda x: x**2, image)
case("pow_3", lambda x: x**3, image)
case("pow_half", lambda x: x**0.5, positive)
case("pow_real", lambda x: x**1.7, positive)
case("pow_negative", lambda x: x**-1, positive)
case("pow_of_scalar", lambda x: 2.0**x, image)
case("pow_tensor", torch.pow, positive, image)
case("bitwise_and", lambda x, y: x & y, ints, ints)
case("bitwise_or", lambda x, y: x | y, bools, bools)
case("bitwise_xor", lambda x, y: x ^ y, bools, bools)
case("shift_left", lambda x: x << 3, ints)
case("shift_right", lambda x: x >> 1, ints)
case("shift_by_tensor", lambda x, y: torch.bitwise_left_shift(x, y) + torch.bitwise_right_shift(x, y), ints, ints)
case("shift_bytes", on_bytes(lambda x: (x << 5) ^ (x >> 4) ^ (x >> 9)), ints)
case("shift_out", lambda x: (x.int() << 40) + (x.to(torch.int8) >> 7), ints)
for op in ("logical_and", "logical_or", "logical_xor"):
    case(op, getattr(torch, op), bools, bools)
case("max_other", torch.max, image, image)
case("min_other", torch.min, ints, ints)
case("clamp", lambda x: x.clamp(-0.5, 0.7), image)
case("clamp_min", lambda x: x.clamp(min=0.1), image)
case("clamp_max", lambda x: x.clamp(max=1), ints)
case("where", torch.where, bools, image, image)
case("where_scalar_other", lambda c, x: torch.where(c, x, 0.0), bools, image)
case("where_scalar_self", lambda c, x: torch.where(c, 1.5, x), bools, image)
case("where_negative_zero", lambda x: 1 / torch.where(x > 0, x, -0.0), image)
case("masked_fill", lambda x, c: x.masked_fill(c, -1e4), image, bools)
case("masked_fill_inf", lambda x, c: x.masked_fill(c, float("-inf")), image, bools)
case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), image, image, image)
case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z), image, image, positive)
case("lerp", lambda x, y: torch.lerp(x, y, 0.3), image, image)
case("to_int", lambda x: (x * 3).to(torch.int32), image)
case("to_bool", lambda x: x.to(torch.bool), ints)
case("to_double", lambda x: x.double() * 2, image)
case("type_as", lambda x, y: x.type_as(y), ints, image)

# -- movement --------------------------------------------------------------------------------------------------------------

case("view", lambda x: x.view(x.shape[0], -1), image)
case("reshape", lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], x.shape[2] * x.shape[3], 4), image)
case("flatten", lambda x: x.flatten(2).transpose(1, 2), image)
case("unflatten", lambda x: x.unflatten(1, (2, 2)), image)
case("squeeze", lambda x: x[:, :1].squeeze(1).unsqueeze(-1), image)
case("t", lambda x: x[0, 0].t(), image)
case("movedim", lambda x: x.movedim(1, -1), image)
case("swapaxes", lambda x: x.swapaxes(1, 3), image)
case("expand", lambda x: x[:, :1].expand(-1, 5, -1, -1), image)
case("expand_as", lambda x, y: x[:1].expand_as(y), image, image)
case("broadcast_to", lambda x: torch.broadcast_to(x[:1], x.shape), image)
case("slice", lambda x: x[:, 1:3, ::2, -3:], image)
case("slice_beyond", lambda x: x[:, :100, 2:], image)
case("slice_negative_end", lambda x: x[..., 1:-1], image)
case("slice_by_size", lambda x: x[:, :, : x.shape[2] // 2, x.shape[3] // 2 :], image)
case("select", lambda x: x[:, -1, 0], image)
case("narrow", lambda x: x.narrow(1, 1, 2), image)
case("unbind", lambda x: torch.unbind(x, 1)[2] - x.unbind(1)[0], image)
case("chunk", lambda x: [a * 2 for a in x.chunk(3, dim=1)], image)
case("split", lambda x: x.split(3, dim=1), image)
case("split_sizes", lambda x: x.split([1, 3], dim=1)[1], image)
case("tensor_split", lambda x: torch.tensor_split(x, 3, dim=1)[2], image)
case("cat", lambda x, y: torch.cat([x, y[:, :1]], dim=1), image, image)
case("cat_promotes", lambda x, y: torch.cat([x, y], dim=-3), image, ints)
case("stack", lambda x, y: torch.stack([x, y], dim=-1), image, image)
case("hstack_of_numbers", lambda x: torch.hstack([x.sum(), x[0, 0, 0], x.mean()]), image)
case("vstack_of_numbers", lambda x: torch.vstack([x.sum(), x.mean()]), image)
case("repeat", lambda x: x.repeat(1, 2, 1, 3), image)
case("repeat_leading", lambda x: x.repeat(2, 1, 1, 1, 1), image)
case("tile", lambda x: x.tile(2), image)
case("repeat_interleave", lambda x: x.repeat_interleave(3, dim=1), image)
case("repeat_interleave_flat", lambda x: x.repeat_interleave(2), image)
case("flip", lambda x: x.flip(1, 3), image)
case("roll", lambda x: x.roll((1, -2), (1, 3)), image)
case("roll_flat", lambda x: x.roll(3), image)
case("reversed", lambda x: x.T * 1.0, image)
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), image)
case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), image)
case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), image)
case("meshgrid", lambda x: torch.meshgrid(x[0, 0, :, 0], x[0, 0, 0, :], indexing="ij"), image)
case("meshgrid_xy", lambda x: torch.meshgrid(x[0, 0, :, 0], x[0, 0, 0, :], indexing="xy")[0], image)
case("pad", lambda x: F.pad(x, (1, 2, 0, 3), value=0.5), image)
case("pad_asymmetric", lambda x: F.pad(x, (0, 1, 0, 1)), image)
case("pad_negative", lambda x: F.pad(x, (-1, 2)), image)
case("pad_reflect", lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"), image)
case("pad_replicate", lambda x: F.pad(x, (1, 2, 3, 1), mode="replicate"), image)
case("pad_circular", lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), image)
case("tril", lambda x: x.tril(1), image)
case("triu", lambda x: x.triu(-1), image)

# -- creation --------------------------------------------------------------------------------------------------------------

case("zeros", lambda x: x + torch.zeros(x.shape[2], x.shape[3]), image)
case("ones_like", lambda x: torch.ones_like(x) * x, image)
case("full", lambda x: torch.full((x.shape[2], 1), 2.5) * x, image)
case("full_like", lambda x: torch.full_like(x, 3), ints)
case("new_ones", lambda x: x.new_ones(x.shape[0], 2), image)
case("arange", lambda x: torch.arange(x.shape[3]) + x, image)
case("arange_start", lambda x: torch.arange(1, x.shape[3] + 1, dtype=torch.float32) + x, image)
case("arange_step", lambda x: torch.arange(0, 2 * x.shape[3], 2) + x, image)
case("arange_real", lambda x: torch.arange(0.5, 4.0, 0.25) + x.mean(), image)
case("linspace", lambda x: torch.linspace(-1, 1, x.shape[3]) + x, image)
case("eye", lambda x: torch.eye(x.shape[2]) + x[:, :, :, :1], image)
case("one_hot", lambda x: F.one_hot(x, 11), ids)
case("tensor", lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None], image)
case("tensor_by_size", lambda x: x * torch.tensor([x.shape[2], x.shape[3]])[0], image)
case("size_as_number", lambda x: x * x.shape[2] + x.shape[3], image)

# -- indexing --------------------------------------------------------------------------------------------------------------

case("embedding", lambda i: F.embedding(i, fixed(11, 5)), ids)
case("index_select", lambda x: x.index_select(1, torch.tensor([2, 0, 2])), image)
case("index", lambda x: x[:, torch.tensor([1, 3])], image)
case("index_negative", lambda x: x[:, torch.tensor([-1, 0])], image)
case("index_pair", lambda x, i: x[torch.arange(x.shape[0]), i.argmax(dim=-1)], tokens, ids)
case("index_apart", lambda x: x[torch.tensor([0, 1]), :, torch.tensor([2, 3])], image)
case("gather", lambda x, i: x.gather(1, i[:, :, None].clamp(0, 3).expand(-1, -1, 2)), tokens, ids)
case("masked_assign", lambda x: x.clone().index_put_((x > 0,), torch.tensor(0.5)), image)
case("masked_rows", lambda x: x.clone().index_put_((x[:, :, 0] > 0,), fixed(8)), tokens)
case("pad_sequence", lambda x: nn.utils.rnn.pad_sequence([x[0], x[1]], batch_first=True, padding_value=3.0), tokens)
case("pad_sequence_shorter", lambda x: nn.utils.rnn.pad_sequence([x[0], x[1, :3], x[0, 1:]], True, 0.5), tokens)
case("pad_sequence_left",
     lambda x: nn.utils.rnn.pad_sequence([x[0, :2], x[1]], True, 0.5, padding_side="left"), tokens)  # fmt: skip
case("pad_sequence_first", lambda x: nn.utils.rnn.pad_sequence([x[0], x[1]]), tokens)


def _assign_columns(x):
    out = x.clone()
    out[..., torch.arange(1, 7, 3)] = x[..., [0, 2]] * 2
    out[:, :, torch.tensor([-1])] = 1.5 * x[:, :, :1]
    return out


case("assign_columns", _assign_columns, tokens)


def _zeros_per_item(x):
    return x + torch.tensor([0] * x.shape[0])[:, None, None].cos()


case("zeros_per_item", _zeros_per_item, tokens)

# -- reductions ------------------------------------------------------------------------------------------------------------

case("sum", lambda x: x.sum(dim=(2, 3)), image)
case("sum_all", lambda x: x.sum(), image)
case("sum_bool", lambda x: x.sum(dim=-1), bools)
case("mean", lambda x: x.mean(dim=-1, keepdim=True), image)
case("mean_all", lambda x: x.mean(), image)
case("amax", lambda x: x.amax(dim=(1, 2)), image)
case("amin", lambda x: x.amin(dim=1, keepdim=True), image)
case("max_all", lambda x: x.max(), image)
case("max_dim", lambda x: x.max(dim=2), image)
case("min_dim", lambda x: tuple(x.min(dim=1, keepdim=True)), image)
case("argmax", lambda x: x.argmax(dim=-1), image)
case("argmax_flat", lambda x: x.argmax(), image)
case("argmin", lambda x: x.argmin(dim=1, keepdim=True), image)
case("any", lambda x: x.any(dim=1), bools)
case("all", lambda x: x.all(), bools)
case("prod", lambda x: x.prod(dim=1), image)
case("diff", lambda x: (torch.diff(x), x.diff(n=2, dim=2), x.diff(prepend=x[..., :1], append=x[..., -1:] * 2)), image)
case("diff_bool", lambda x: x.diff(dim=2), bools)
case("diff_int", lambda x: x.diff(dim=2), ints)
case("cumsum", lambda x: x.cumsum(dim=2), image)
case("cumsum_bool", lambda x: x.cumsum(dim=-1), bools)
case("softmax", lambda x: x.softmax(dim=1), image)
case("log_softmax", lambda x: F.log_softmax(x, dim=-1), image)
case("logsumexp", lambda x: x.logsumexp(dim=(1, 2)), image)
case("var", lambda x: x.var(dim=-1), image)
case("var_biased", lambda x: x.var(dim=(1, 2), unbiased=False, keepdim=True), image)
case("var_of_a_part", lambda x: x.var(dim=-1, correction=0.5), image)
case("std_of_a_part", lambda x: x.std(dim=(1, 2), correction=1.5, keepdim=True), image)
case("vector_norm_of_zero", lambda x: torch.linalg.vector_norm(x.clamp(min=0), 0, dim=-1), image)
case("all_of_bytes", lambda x: bytes_of(x).all(1), ints)
case("any_of_bytes", lambda x: bytes_of(x).any(), ints)
case("std", lambda x: x.std(), image)
case("std_mean", lambda x: torch.std_mean(x, dim=1), image)
case("vector_norm", lambda x: torch.linalg.vector_norm(x, dim=1), image)
case("norm_1", lambda x: torch.linalg.vector_norm(x, ord=1, dim=(1, 2)), image)
case("norm_inf", lambda x: torch.linalg.vector_norm(x, ord=math.inf, dim=-1), image)
case("norm_3", lambda x: torch.linalg.vector_norm(x, ord=3, dim=1), image)
case("normalize", lambda x: F.normalize(x, dim=1), image)

# -- contractions ----------------------------------------------------------------------------------------------------------

case("linear", lambda x: F.linear(x, fixed(5, 8), fixed(5)), tokens)
case("linear_no_bias", lambda x: F.linear(x, fixed(5, 8)), tokens)
case("matmul", lambda x: x @ x.transpose(-1, -2), image)
case("matmul_vector", lambda x: x @ fixed(8), tokens)
case("matmul_broadcast", lambda x: x @ fixed(8, 3), tokens)
case("bmm", lambda x: torch.bmm(x, x.transpose(1, 2)), tokens)
case("mm", lambda x: torch.mm(x[0], fixed(8, 3)), tokens)
case("addmm", lambda x: torch.addmm(fixed(3), x[0], fixed(8, 3)), tokens)
case("addmm_scaled", lambda x: torch.addmm(fixed(3), x[0], fixed(8, 3), beta=0.5, alpha=2.0), tokens)
case("baddbmm", lambda x: torch.baddbmm(x @ x.transpose(1, 2), x, x.transpose(1, 2), beta=0.5), tokens)
case("outer", lambda x: torch.outer(x[0, :, 0], fixed(4)), tokens)
case("einsum_heads", lambda x: torch.einsum("bic,bjc->bij", x, x), tokens)
case("einsum_patches", lambda x: torch.einsum("nchw->nhwc", x), image)
case("einsum_outer", lambda x: torch.einsum("...m,d->...md", x[:, :, 0], fixed(3)), tokens)
case("einsum_sum", lambda x: torch.einsum("bsc,cd->bd", x, fixed(8, 3)), tokens)
case("einsum_of_one", lambda x: torch.einsum("bsc,dsc->bd", x[:, :1], fixed(5, 1, 8).expand(5, 3, 8)), tokens)
case("einsum_of_many", lambda x: torch.einsum("bsc,dsc->bd", x, fixed(5, 1, 8)), tokens)
case("einsum_lone", lambda x: torch.einsum("bsd,bte->bsd", x, x.cos()), tokens)
case("einsum_lone_sum", lambda x: torch.einsum("bsd,bde->bs", x, x[:, :2].transpose(1, 2)), tokens)
case("inner", lambda x: torch.inner(x, fixed(5, 3, 8)), tokens)
case("inner_vector", lambda x: torch.inner(x, fixed(8)), tokens)
case("sdpa", lambda q, k: F.scaled_dot_product_attention(split_heads(q), split_heads(k), split_heads(k)), heads, heads)
case("sdpa_causal", lambda q: F.scaled_dot_product_attention(split_heads(q), split_heads(q), split_heads(q), is_causal=True),
     heads)  # fmt: skip


def sdpa_masked(x, boolean):
    q = split_heads(x)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() if boolean else q @ q.transpose(-1, -2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


case("sdpa_bool_mask", lambda x: sdpa_masked(x, True), heads)
case("sdpa_float_mask", lambda x: sdpa_masked(x, False), heads)
case(
    "sdpa_scale",
    lambda x: F.scaled_dot_product_attention(split_heads(x), split_heads(x), split_heads(x), scale=0.3),
    heads,
)


def sdpa_gqa(x):
    q = split_heads(x)
    return F.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], enable_gqa=True)


case("sdpa_gqa", sdpa_gqa, heads)
case("conv2d", lambda x: F.conv2d(x, fixed(5, 4, 3, 3), fixed(5), padding=1), image)
case("conv2d_stride", lambda x: F.conv2d(x, fixed(5, 4, 3, 3), stride=2, padding=1), image)
case("conv2d_groups", lambda x: F.conv2d(x, fixed(6, 2, 3, 3), fixed(6), groups=2, dilation=2, padding=2), image)
case("conv2d_same", lambda x: F.conv2d(x, fixed(5, 4, 4, 4), fixed(5), padding="same"), image)
case("conv1d", lambda x: F.conv1d(x.transpose(1, 2), fixed(5, 8, 3), fixed(5)), tokens)
case(
    "conv3d", lambda x: F.conv3d(x[:, :, None].repeat(1, 1, 3, 1, 1), fixed(5, 4, 3, 3, 3), fixed(5), padding=1), image
)
case("conv_transpose2d", lambda x: F.conv_transpose2d(x, fixed(4, 5, 3, 3), fixed(5), stride=2, padding=1, output_padding=1),
     image)  # fmt: skip
case("conv_transpose2d_uneven", lambda x: F.conv_transpose2d(x, fixed(4, 5, 5, 2), fixed(5), stride=(3, 1), padding=(4, 0)),
     image)  # fmt: skip
case(
    "conv_transpose2d_cropped", lambda x: F.conv_transpose2d(x, fixed(4, 5, 3, 2), stride=(2, 3), padding=(4, 2)), image
)
case("conv_transpose2d_beyond", lambda x: F.conv_transpose2d(x, fixed(4, 5, 1, 3), stride=4, output_padding=(3, 2)),
     image)  # fmt: skip
case(
    "conv_transpose2d_dilated",
    lambda x: F.conv_transpose2d(x, fixed(4, 5, 3, 3), fixed(5), stride=2, dilation=2),
    image,
)
case(
    "conv_transpose3d",
    lambda x: F.conv_transpose3d(x[:, None], fixed(1, 3, 2, 3, 4), fixed(3), stride=2, padding=1),
    image,
)
case("conv_transpose2d_groups", lambda x: F.conv_transpose2d(x, fixed(4, 3, 2, 2), stride=2, groups=2), image)
case("conv_transpose1d", lambda x: F.conv_transpose1d(x.transpose(1, 2), fixed(8, 5, 4), stride=2, padding=1), tokens)

# -- norms -----------------------------------------------------------------------------------------------------------------

case("group_norm", lambda x: F.group_norm(x, 2, fixed(4), fixed(4, seed=1), eps=1e-6), image)
case("group_norm_plain", lambda x: F.group_norm(x, 4), image)
case("layer_norm", lambda x: F.layer_norm(x, (8,), fixed(8), fixed(8, seed=1)), tokens)
case("layer_norm_plain", lambda x: F.layer_norm(x, (8,)), tokens)
case("layer_norm_no_bias", lambda x: F.layer_norm(x, (8,), fixed(8)), tokens)
case("rms_norm", lambda x: F.rms_norm(x, (8,), fixed(8), eps=1e-6), tokens)
case("rms_norm_plain", lambda x: F.rms_norm(x, (8,)), tokens)
case("batch_norm_of_batch", lambda x: F.batch_norm(x, None, None, fixed(4), fixed(4, seed=1), True), image)
case("standardized", lambda x: F.batch_norm(x[:1], None, None, training=True), image)
case("batch_norm", lambda x: F.batch_norm(x, fixed(4), fixed(4, low=0.5), fixed(4), fixed(4, seed=1)), image)
case("instance_norm", lambda x: F.instance_norm(x, weight=fixed(4), bias=fixed(4, seed=1)), image)

# -- resampling ------------------------------------------------------------------------------------------------------------

case("nearest", lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), image)
case("nearest_size", lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] // 2), mode="nearest"), image)
case("nearest_exact", lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest-exact"), image)
case("nearest_1d", lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2.0), tokens)
case("bilinear", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), image)
case("bilinear_corners", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True), image)
case("bilinear_down", lambda x: F.interpolate(x, size=(4, 3), mode="bilinear"), image)
case("bicubic", lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), image)
case("avg_pool", lambda x: F.avg_pool2d(x, 2), image)
case("avg_pool_padded", lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False), image)
case("max_dim_of_flags", lambda x: x.max(dim=1), bools)
case("sum_of_flags", lambda x: x.sum(dim=1, dtype=torch.bool), bools)
case("linear_of_a_vector", lambda x: F.linear(x, fixed(8), fixed(())), tokens)
case("flip_of_a_number", lambda x: x.sum().flip(0), tokens)
case("max_pool_wide", lambda x: F.max_pool2d(x, 5, stride=1, padding=2), image)
case("max_pool_dilated", lambda x: F.max_pool2d(x, 3, stride=2, padding=1, dilation=2), image)
case("max_pool_of_infinity", lambda x: F.max_pool2d(torch.where(x > 0, -torch.inf, x), 3, stride=2, padding=1), image)
case("max_pool", lambda x: F.max_pool2d(x, 3, stride=2, padding=1), image)
case("avg_pool_overlapping", lambda x: F.avg_pool2d(x, (3, 2), stride=(2, 1), padding=(1, 0)), image)
case("avg_pool_large", lambda x: F.avg_pool2d(x, 5, stride=1), image)
case("avg_pool_1d", lambda x: F.avg_pool1d(x.transpose(1, 2), 2), tokens)
case("avg_pool_3d", lambda x: F.avg_pool3d(x[:, None], (1, 2, 2)), image)
case("max_pool_plain", lambda x: F.max_pool2d(x, 3, stride=2), image)
case("adaptive_half", lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, x.shape[3])), image)
case("adaptive_one", lambda x: F.adaptive_avg_pool2d(x, 1), image)

# -- in-place and aliasing -------------------------------------------------------------------------------------------------


def write_into_slices(x):
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 1::2]
    out[..., 1::2] = -x[..., 0::2]
    return out


def write_through_views(x):
    y = x * 1
    row = y[:, 1]
    flat = y.view(y.shape[0], -1)
    row.add_(1)
    part = flat[:, :3]
    part.mul_(2)
    y.transpose(2, 3)[:, 0].fill_(0.5)
    return y, row, part, flat


def write_into_diagonal(x):
    rows, columns = x.shape[2:]
    mask = torch.zeros(rows + 2, columns + 1)
    mask[:rows] = -3.0
    mask[:rows, :columns].fill_diagonal_(1.5)
    return x + mask[:-2, :-1], mask


case("write_into_diagonal", write_into_diagonal, image)
case("write_into_slices", write_into_slices, image)
case("write_through_views", write_through_views, image)
case("zero_", lambda x: (x * 1).zero_() + x, image)
case("copy_", lambda x, y: (x * 1).copy_(y[:, :1]), image, image)
case("chunk_write", lambda x: [c.mul_(i) for i, c in enumerate((x * 1).chunk(2, dim=1))], image)
case("relu_", lambda x: F.relu(x * 1, inplace=True), image)
case("div_", lambda x: (x * 1).div_(3), image)


def split_heads(x):
    return x.unflatten(-1, (4, 8)).transpose(1, 2)


def run(function, makers, dtype=torch.float32):
    capturer = Capturer(function)
    calls = []
    for i, size in enumerate(SIZES):
        torch.manual_seed(i)
        made = [make(*size) for make in makers]
        function(*made)  # fills the cache of `fixed`
        calls.append(tuple(t.to(dtype) if t.dtype is torch.float32 else t for t in made))
    graph, lowered = capturer.lowered(capturer.call(calls[0], {}), native.GraphBuilder)
    lowered.builder.verify()
    for args in calls:
        call = capturer.call(args, {})
        point = graph.plan.read(call.sizes)
        assert point is not None
        assert graph.accepts(point) or capturer.extend(graph, call)
        inputs = [(call.numbers if a.is_number else call.tensors)[a.index] for a in lowered.arguments]
        weights = [as_stored(slot.fetch(None)) for slot in lowered.weights]
        outputs = lowered.builder.interpret(lowered.sizes(point), inputs, weights)
        yield builder(lowered.outputs, point, {}, range(len(call.tensors)))(outputs, call.tensors), function(*args)


TOLERANCES = {torch.float32: 2e-5, torch.float64: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Relative: a few roundings of the type; f32 leaves room for sums of up to 300 products."""


def check(got, wanted):
    if isinstance(wanted, (tuple, list)):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            check(a, b)
        return
    assert got.dtype is wanted.dtype
    assert got.shape == wanted.shape
    if not wanted.dtype.is_floating_point:
        assert torch.equal(got, wanted)
        return
    tolerance = TOLERANCES[wanted.dtype]
    scale = wanted[torch.isfinite(wanted)].abs().max().item() if torch.isfinite(wanted).any() else 1.0
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)


# -- complex numbers -------------------------------------------------------------------------------------------------------


def turns(x):
    """Complex numbers of a tensor of tokens: one for two channels."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def flat(z):
    return torch.view_as_real(z).flatten(-2)


case("complex_rotary", lambda x: flat(turns(x) * torch.polar(torch.ones(4), torch.arange(4.0))), tokens)
ANGLES = torch.view_as_complex(fixed(4, 2))
case("complex_weight", lambda x: flat(turns(x) * ANGLES), tokens)
case("complex_of_parts", lambda x: flat(torch.complex(x, x.cos())), tokens)
case("complex_parts", lambda x: turns(x).real * turns(x).imag, tokens)
case("complex_conj", lambda x: flat(turns(x).conj() * turns(x)), tokens)
case("complex_abs", lambda x: turns(x).abs() + torch.zeros(1, dtype=torch.complex64).abs(), tokens)
case("complex_abs_of_large", lambda x: (turns(x) * 1e30).abs(), tokens)
case("complex_angle", lambda x: turns(x).angle(), tokens)
case("complex_exp", lambda x: flat(torch.exp(turns(x))), tokens)
case("complex_neg", lambda x: flat(-turns(x)), tokens)
case("complex_add", lambda x: flat(turns(x) + turns(x.cos()) - turns(x.sin())), tokens)
case("complex_add_alpha", lambda x: flat(torch.add(turns(x), turns(x.cos()), alpha=3)), tokens)
case("complex_add_real", lambda x: flat(turns(x)[:, :1] + x[..., :4] - 0.5), tokens)
case("complex_scalar", lambda x: flat(turns(x) * 2j + (1 - 3j)), tokens)
case("complex_mul_real", lambda x: flat(turns(x) * x[..., :4] * 0.5), tokens)
case("complex_real_mul", lambda x: flat(x[..., :4] * turns(x)), tokens)
case("complex_div_real", lambda x: flat(turns(x) / (x[..., :4].abs() + 1)), tokens)
case("complex_where", lambda x: flat(torch.where(x[..., :4] > 0, turns(x), turns(x.cos()))), tokens)
case("complex_cat", lambda x: flat(torch.cat([turns(x), turns(x.cos())], dim=1)), tokens)
case("complex_cat_real", lambda x: flat(torch.cat([turns(x), x[..., :4].to(torch.complex64)], dim=1)), tokens)
case("complex_stack", lambda x: flat(torch.stack([turns(x), turns(x.cos())], dim=1)), tokens)
case("complex_split", lambda x: flat(turns(x).split([1, 3], dim=-1)[1] * turns(x).chunk(4, dim=-1)[0]), tokens)
case("complex_moves", lambda x: flat(turns(x).unsqueeze(1).expand(-1, 3, -1, -1).transpose(1, 2).flatten(1, 2)), tokens)
case("complex_slices", lambda x: flat(turns(x)[:, 1:, -2:].permute(2, 0, 1).roll(1, 0).flip(1)), tokens)
case("complex_index", lambda x, i: flat(turns(fixed(11, 8))[i.clamp(0, 10)]), tokens, ids)
case(
    "complex_gather",
    lambda x: flat(turns(x).gather(2, torch.tensor([[[3, 0]]]).expand(x.shape[0], x.shape[1], 2))),
    tokens,
)
case("complex_pad", lambda x: flat(F.pad(turns(x), (1, 2))), tokens)
case("complex_pad_value", lambda x: flat(F.pad(turns(x), (0, 2), value=3.0)), tokens)
case(
    "complex_double",
    lambda x: flat(turns(x.double()) * torch.polar(torch.ones(4).double(), torch.ones(4).double())),
    tokens,
)
case("complex_repeat", lambda x: flat(turns(x).repeat(1, 2, 1) + turns(x).repeat_interleave(2, dim=1)), tokens)
case("complex_zeros", lambda x: flat(torch.zeros_like(turns(x)) + torch.ones_like(turns(x)) * turns(x)), tokens)
case("complex_write", lambda x: flat(written(turns(x).clone())), tokens)


def written(z):
    z[:, :, 1:3] = z[:, :, :2] * 2
    return z


@pytest.mark.parametrize("name", CASES)
def test_row(name):
    function, makers = CASES[name]
    for got, wanted in run(function, makers):
        check(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    "name",
    ["silu", "gelu", "scalars", "softmax", "mean", "group_norm_plain", "layer_norm_plain", "cat", "einsum_lone_sum"],
)
def test_row_16_bit(name, dtype):
    function, makers = CASES[name]
    for got, wanted in run(function, makers, dtype):
        check(got, wanted)


def test_every_row_is_a_known_overload():
    assert len(ROWS) > 300
    assert all(isinstance(op, torch._ops.OpOverload) for op in ROWS)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 2),
        nn.ConvTranspose2d(4, 5, 4, stride=2, padding=1).eval().requires_grad_(False),
    ],
    ids=["avg_pool", "max_pool", "conv_transpose"],
)
@torch.no_grad()
def test_is_no_slow_step(function):
    """Nothing is interpreted, and no zeros are put between the elements of an image."""
    compiled, x = oxidiff.compile(function, cache=False, strict=True), image(2, 8, 6)
    torch.testing.assert_close(compiled(x), function(x))
    assert {step["kernel"] for step in compiled.profile(x).steps}.isdisjoint({"interpret", "pad"})


def unpacked_nibbles(x):
    shifted = x[:, None] >> torch.tensor([0, 4], dtype=torch.uint8).reshape(1, 2, 1)
    return (shifted & 15).flatten(1).to(torch.int8) - 8


def unpacked_high_bits(x):
    """Of 32 bits that lie in four bytes."""
    word = [x[:, i : i + 1].to(torch.int32) << 8 * i for i in range(4)]
    bits = functools.reduce(operator.or_, word) >> torch.arange(32, dtype=torch.int32)
    return (bits & 1).to(torch.uint8) << 4 | x[:, 4:36] & 15


def looked_up(x):
    values = torch.tensor([-127, -65, -10, 1, 25, 113, 7, 8], dtype=torch.float32)
    return torch.take_along_dim(values.expand(x.shape[0], -1), (x % 8).long(), 1) * 0.5


def bucketed(x):
    signed = x.long() - 128
    return torch.where(signed.abs() < 20, signed.abs() + (signed > 0) * 32, (signed.float() * 1.7).long().clamp(max=31))


@pytest.mark.parametrize("function", [unpacked_nibbles, unpacked_high_bits, looked_up, bucketed])
@torch.no_grad()
def test_integers_have_kernels(function):
    compiled = oxidiff.compile(function, cache=False, strict=True)
    for rows in (3, 70):
        x = torch.arange(rows * 40).reshape(rows, 40).mul(37).to(torch.uint8)
        got, wanted = compiled(x), function(x)
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    assert "interpret" not in {step["kernel"] for step in compiled.profile(x).steps}


@torch.no_grad()
def test_a_mask_whose_keys_lie_apart_is_copied_once():
    def function(x, bias):
        mask = bias.permute(2, 0, 1)[None].expand(x.shape[0], -1, -1, -1)
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x

    compiled = oxidiff.compile(function, cache=False, strict=True)
    for rows in (9, 20):
        x, bias = torch.randn(3, 4, rows, 8), torch.randn(rows, rows, 4)
        torch.testing.assert_close(compiled(x, bias), function(x, bias))
    kernels = [step["kernel"] for step in compiled.profile(x, bias).steps]
    assert kernels.count("copy") == 1 and kernels.count("attention") == 2


@torch.no_grad()
def test_division_of_integers_rounds_down_at_the_bounds():
    compiled = oxidiff.compile(lambda x, y: (x // y, x % y), cache=False, strict=True)
    bounds = torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max, 1, -1, 7])
    x, y = bounds.repeat_interleave(5), bounds.repeat(5)
    # The smallest over -1 is no number of 64 bits, which x86 traps.
    defined = (x != bounds[0]) | (y != -1)
    for got, wanted in zip(
        compiled(x[defined], y[defined]), (x[defined] // y[defined], x[defined] % y[defined]), strict=True
    ):
        assert torch.equal(got, wanted)
    with pytest.raises(RuntimeError, match=r"[dD]ivi"):
        compiled(x, torch.zeros_like(y))


@torch.no_grad()
def test_integers_beside_numbers_that_are_passed():
    class Compared(nn.Module):
        def forward(self, x, value):
            return x == value, x > value, x.clamp(min=value).float().var(-1, correction=value)

    module = Compared()
    compiled = oxidiff.compile(module, cache=False, strict=True)
    for value in (2.5, -2.5, 0.25, 3.0):
        x = torch.arange(-4, 5)
        for got, wanted in zip(compiled(x, value), module(x, value), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.uint8, torch.int8, torch.int32, torch.int64])
@torch.no_grad()
def test_floats_that_no_integer_is(source, target):
    """C leaves open what they become; PyTorch gives the same on all x86 processors, `(image * 255).to(uint8)` for one."""

    class Converted(nn.Module):
        def forward(self, x):
            return x.to(target), (x * 2).to(target)

    values = [-2.55, -1.0, 256.3, 300.0, float("nan"), float("inf"), -3e9, 3e9, 1e19]
    module = Converted()
    compiled = oxidiff.compile(module, cache=False)
    for repeats in (1, 7, 64):
        x = torch.tensor(values).to(source).repeat(repeats)
        for got, wanted in zip(compiled(x), module(x), strict=True):
            assert torch.equal(got, wanted)


@torch.no_grad()
def test_take_along_dim_broadcasts():
    class Taken(nn.Module):
        def forward(self, x, index):
            return x.take_along_dim(index, 1)

    module = Taken()
    compiled = oxidiff.compile(module, cache=False, strict=True)
    for batch, width in ((2, 4), (3, 7)):
        x, index = rand(batch, 3, width), torch.tensor([[[2], [0]]])
        assert torch.equal(compiled(x, index), module(x, index))
        assert torch.equal(compiled(x, index.expand(batch, 2, width)), module(x, index.expand(batch, 2, width)))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic"])
@torch.no_grad()
def test_scale_factors_that_are_rounded(mode):
    """A factor that makes a size of a whole one, or twice that, is asked for by some of PyTorch's kernels only."""
    ranks = {"linear": (1,), "bilinear": (2,), "trilinear": (3,), "bicubic": (2,)}.get(mode, (1, 2, 3))
    factors = ((1.02, 1.02, 1.02), (2.02, 2.02, 2.02), (2.0, 1.02, 1.5))
    for rank, scales in itertools.product(ranks, factors):
        if mode == "nearest-exact" and rank != 2:
            continue

        class Resized(nn.Module):
            def forward(self, x, scales=scales[:rank]):
                return F.interpolate(x, scale_factor=scales, mode=mode)

        module = Resized()
        compiled = oxidiff.compile(module, cache=False)
        for size in ((10, 7, 5), (60, 5, 4)):
            x = torch.randn(1, 2, *size[:rank], generator=torch.Generator().manual_seed(1))
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)


def same(function, *calls, strict=True):
    """Compiles `function` once and calls it: bit for bit what eager gives, signs of zeros too."""

    class Called(nn.Module):
        def forward(self, *args):
            return function(*args)

    module = Called()
    compiled = oxidiff.compile(module, cache=False, strict=strict)
    with torch.no_grad():
        for args in calls:
            got, wanted = compiled(*args), module(*args)
            assert got.dtype is wanted.dtype
            assert got.shape == wanted.shape
            is_same = (got == wanted) & (got.signbit() == wanted.signbit()) | got.isnan() & wanted.isnan()
            assert is_same.all(), (got[~is_same], wanted[~is_same])


LARGE = 2**53 + 1
"""The smallest integer that no f64 is."""

LONGEST = torch.iinfo(torch.int64).max

OF_LARGE = {
    "add": lambda x: x + LARGE,
    "sub": lambda x: LARGE - x,
    "mul": lambda x: x * LARGE,
    "and": lambda x: x & LONGEST,
    "eq": lambda x: x == LARGE,
    "lt": lambda x: x < LARGE,
    "clamp": lambda x: x.clamp(max=LONGEST),
    "where": lambda x: torch.where(x > 2, x, LARGE),
    "masked_fill": lambda x: x.masked_fill(x < 2, LONGEST).argmin(0, keepdim=True),
    "full": lambda x: torch.full((3, 1), LARGE) + x,
    "full_of_size": lambda x: torch.full((x.shape[0],), LARGE),
    "full_like": lambda x: torch.full_like(x, -LARGE),
    "new_full": lambda x: x.new_full((2, 1), 2**62 + 1) - x,
    "tensor": lambda x: torch.tensor(2**62 + 1) + x,
    "float": lambda x: x.float() * 0 + (2**54 + 2**30 + 1),
}
"""What is done with integers that f64 rounds."""


@pytest.mark.parametrize("name", OF_LARGE)
def test_integers_that_no_double_is(name):
    same(OF_LARGE[name], (torch.arange(4),), (torch.tensor([2**53, LARGE, LARGE + 1, 1, 0, -1, LONGEST]),))


def test_integers_that_are_padded_with_one_that_no_double_is():
    # `F.pad` itself takes the number for a float.
    same(lambda x: torch.constant_pad_nd(x, (1, 2), LARGE), (torch.arange(4),), strict=False)


@pytest.mark.parametrize("weight", [0.9999, 1.0])
def test_lerp_goes_from_the_nearer_end(weight):
    start, end = torch.tensor([1e8, -1e8, 3e7]), torch.tensor([0.1, 0.2, 0.3])
    for function in (lambda x, y: torch.lerp(x, y, weight), lambda x, y: torch.lerp(x, y, torch.full((3,), weight))):
        wanted = function(start, end)
        got = oxidiff.compile(function, cache=False, strict=True)(start, end)
        # A rounding of the product and one of the sum, which is not in one as eager's may be.
        bound = 2**-23 * ((1 - weight) * start).abs().maximum(wanted.abs())
        assert ((got - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logarithms_of_powers_are_whole(dtype):
    smallest, largest, tens = (-149, 127, 10) if dtype is torch.float32 else (-1074, 1023, 22)
    twos = torch.tensor([2.0**i for i in range(smallest, largest + 1)], dtype=torch.float64).to(dtype)
    same(torch.log2, (twos,))
    same(torch.log10, (torch.tensor([10.0**i for i in range(tens + 1)], dtype=torch.float64).to(dtype),))
    for function in (torch.log2, torch.log10):
        same(function, (torch.tensor([0.0, -0.0, -1.0, math.inf, math.nan], dtype=dtype),))


def test_log1p_of_large():
    check(oxidiff.compile(torch.log1p, cache=False, strict=True)(torch.tensor([1e38])), torch.tensor([1e38]).log1p())


def test_lengths_of_infinite_numbers():
    same(
        lambda x: torch.view_as_complex(x).abs(),
        (torch.tensor(list(itertools.product([math.inf, -math.inf, math.nan, 1.0], repeat=2))),),
    )


def test_linspace_counts_from_both_ends():
    """Which places are chosen (frames of a video, steps of a schedule) hangs on the last bit."""
    calls = [(torch.zeros(n, steps),) for n in (9, 17, 33, 49, 81, 121) for steps in (2, 15, 27, 29, 43, 101, 1)]
    same(lambda x: torch.linspace(0, x.shape[0] - 1, x.shape[1]), *calls)
    same(lambda x: torch.linspace(0, x.shape[0] - 1, x.shape[1]).long(), *calls)
    same(lambda x: torch.linspace(0.7, x.shape[0] + 0.7, x.shape[1], dtype=torch.int64), *calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_comparisons_in_16_bits(dtype):
    """A tensor of no dimensions is rounded to the type of one that has some, integers to that of any of 16-bit floats."""
    numbers = torch.tensor([1.0, 2.0], dtype=dtype)
    for function in (torch.ge, torch.eq, torch.lt):
        same(function, (numbers, torch.tensor(1.0001)), (torch.arange(3.0).to(dtype), torch.tensor(2.0001)))
        same(lambda x, y, function=function: function(y, x), (numbers, torch.tensor(1.0001)))
        same(function, (torch.tensor([4097, 4096]), torch.tensor([4096.0, 4097.0]).to(dtype)))


def test_comparisons_with_tensors_of_no_dimensions():
    same(torch.eq, (torch.tensor([0.1, 0.2]), torch.tensor(0.1, dtype=torch.float64)))
    same(torch.eq, (torch.tensor([4, 5], dtype=torch.int32), torch.tensor(2**32 + 5)))


ZEROS = torch.tensor([-0.0, 0.0, -1.0, 1.0, math.inf, -math.inf, math.nan])

KEEP_SIGNS = {
    "relu": torch.relu,
    "floor_divide": lambda x: x // 3,
    "floor_divide_down": lambda x: torch.div(x, -3, rounding_mode="floor"),
    "fmod": lambda x: x.fmod(math.inf),
    "nan_to_num": lambda x: x.nan_to_num(nan=-0.0),
    "where": lambda x: torch.where(x > 0, x, -0.0),
}


@pytest.mark.parametrize("name", KEEP_SIGNS)
def test_zeros_keep_their_sign(name):
    same(KEEP_SIGNS[name], (ZEROS,), (ZEROS.repeat(9),))


REFUSED = {
    "one_hot_beyond": (lambda x: F.one_hot(x, 4), torch.tensor([0, 3]), torch.tensor([0, 5])),
    "one_hot_negative": (lambda x: F.one_hot(x, 4), torch.tensor([0, 3]), torch.tensor([-1, 2])),
    "subtracted_flags": (lambda x: 5 - x, None, torch.tensor([True, False])),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=0.3, mode="bilinear"), rand(1, 2, 8, 9), rand(1, 2, 8, 3)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=0.3, mode="bicubic"), None, rand(1, 2, 3, 8)),
    "mask_of_a_row": (lambda x: F.scaled_dot_product_attention(x, x, x, x[0, 0, 0]), None, rand(1, 2, 4, 4)),
}
"""A function, what it takes, if anything, and what it refuses."""


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_eager_refuses(name):
    function, taken, refused = REFUSED[name]
    compiled = oxidiff.compile(function, cache=False)
    if taken is not None:
        check(compiled(taken), function(taken))
    with pytest.raises((RuntimeError, IndexError)) as wanted:
        function(refused)
    with pytest.raises(type(wanted.value), match=re.escape(str(wanted.value))):
        compiled(refused)


def test_rolls_by_more_than_a_size():
    same(lambda x: x.roll(5, 0), *((rand(n, 2),) for n in (16, 3, 5, 1, 4, 2)))
    same(lambda x: x.roll(3, 1), *((rand(2, n, 4),) for n in (16, 77, 1, 2)))
    same(lambda x: x.roll((-3, -3), (2, 3)), *((rand(1, 4, h, w),) for h, w in ((16, 16), (2, 2), (2, 8), (24, 32))))
    same(lambda x: x.roll(11), *((rand(n, 2),) for n in (16, 3, 5, 1)))


@pytest.mark.parametrize("at", [(3, 1), (5, 2, 4)])
def test_parts_that_start_anywhere(at):
    for part in range(len(at) + 1):
        same(lambda x, part=part: torch.tensor_split(x, at, 1)[part] * 2, (rand(2, 9),), (rand(2, 6),))


def test_numbers_before_tensors_of_integers():
    for function in (lambda x: 5 // x, lambda x: 5 % x, lambda x: 5 & x, lambda x: -5.5 // x):
        same(function, (torch.tensor([3, 4, -7]),), (torch.arange(1, 9),))


def test_groups_that_are_sizes():
    images = (rand(2, 4, 8, 8), rand(2, 8, 8, 8), rand(1, 6, 3, 3))
    weights = [rand(x.shape[1], 1, 3, 3) for x in images]
    for function in (lambda x, _: F.group_norm(x, x.shape[1]), lambda x, w: F.conv2d(x, w, groups=x.shape[1])):
        compiled = oxidiff.compile(function, cache=False, strict=True)
        for args in zip(images, weights, strict=True):
            check(compiled(*args), function(*args))


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (
            lambda x: torch.einsum("ij,jk->ik", x, x),
            (torch.ones(3, 3, dtype=torch.int64),),
            "a product of integer matrices",
        ),
        (lambda x, number: x * float(number), (torch.ones(3), 2**63), "an integer of more than 64 bits is passed"),
    ],
    ids=["einsum", "number"],
)
def test_reasons_say_what_is_not_supported(function, args, why):
    compiled = oxidiff.compile(function, cache=False)
    with pytest.warns(oxidiff.FallbackWarning, match=why):
        assert torch.equal(compiled(*args), function(*args))


def test_a_result_that_gets_its_size_from_an_op():
    linear = torch.nn.Linear(4, 4).requires_grad_(False)

    def function(x):
        return linear(torch.cat([x, x], out=torch.empty(0)))

    compiled = oxidiff.compile(function, cache=False)
    x = torch.randn(3, 4)
    with pytest.warns(oxidiff.FallbackWarning, match="cat.out writes into its arguments"):
        torch.testing.assert_close(compiled(x), function(x))
    torch.testing.assert_close(compiled(x[:2]), function(x[:2]))


# --- ops that are their parts -----------------------------------------------------------------------------------------

COMPOSITES = {
    "tensordot": lambda x: torch.tensordot(x, x, dims=([1], [1])),
    "column_stack": lambda x: torch.column_stack([x, x]),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=-1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(0)),
    "kron": lambda x: torch.kron(x[0, 0], x[1, 1]),
    "trapezoid": lambda x: torch.trapezoid(x, dx=0.5),
    "positive": lambda x: (+x) * 2,
    "hsplit": lambda x: torch.hsplit(x, 2)[1] + 1,
    "special.logsumexp": lambda x: torch.special.logsumexp(x, -1),
    "vecdot": lambda x: torch.linalg.vecdot(x, x),
    "multi_dot": lambda x: torch.linalg.multi_dot([x[0, 0], x[0, 1].mT, x[1, 0]]),
    "lstm_cell": lambda x: torch.lstm_cell(x[:, 0, 0, :4], (x[:, 0, 1, :4],) * 2, *(torch.ones(16, 4) / 3,) * 2)[0],
    "gru_cell": lambda x: torch.gru_cell(x[:, 0, 0, :4], x[:, 0, 1, :4], *(torch.ones(12, 4) / 3,) * 2),
    "rot90": lambda x: torch.rot90(x, 1, (2, 3)) + 1,
    "rot90 three times": lambda x: torch.rot90(x, 3, (1, 2)) + 1,
    "aminmax": lambda x: torch.stack(torch.aminmax(x, dim=2)),
    "fmax": lambda x: torch.fmax(torch.where(x > 1, torch.nan, x), torch.where(x < -1, torch.nan, x.flip(0))),
    "fmin": lambda x: torch.fmin(torch.where(x > 1, torch.nan, x), torch.where(x < -1, torch.nan, x.flip(0))),
    "logaddexp": lambda x: torch.logaddexp(torch.where(x > 1, torch.inf, x), torch.where(x > 0, torch.inf, -torch.inf)),
    "xlogy": lambda x: torch.xlogy(torch.where(x > 0, 0.0, x), x.flip(0)) + torch.xlogy(2.0, x) + torch.xlogy(x, 3),
    "ldexp": lambda x: torch.ldexp(x, (x * 3).long()),
    "logit": lambda x: torch.logit(x, eps=0.1) + torch.special.logit(x),
    "isin": lambda x: torch.isin((x * 3).long(), torch.tensor([[1, 0], [-2, 4]]), invert=True),
    "isin of one": lambda x: torch.isin((x * 3).long(), 1),
    "linalg.norm": lambda x: (
        torch.linalg.norm(x, dim=-1) + torch.linalg.norm(x) + torch.linalg.norm(x, ord=1, dim=(1, 2)).sum()
    ),
    "numbers in front": lambda x: torch.mul(0.1, x) + torch.div(2.0, x) + torch.div(7, x, rounding_mode="floor"),
    "integers in front": lambda x: (
        torch.mul(3, (x * 3).long()) + torch.div(7, (x * 3).long().abs() + 1, rounding_mode="trunc")
    ),
    **{
        name: functools.partial(getattr(torch, name))
        for name in ("asinh", "atan", "cosh", "sinh", "sinc", "frac", "arctan")
    },
    **{name: lambda x, name=name: getattr(torch, name)(x / 2) for name in ("acos", "asin", "atanh")},
    "acosh": lambda x: torch.acosh(x.abs() * 2),
    "of integers": lambda x: torch.atan((x * 3).long()) + torch.sinc((x * 3).int()),
    "of large ones": lambda x: torch.stack([op(x * 1e18) for op in (torch.asinh, torch.acosh, torch.atan, torch.sinh)]),
    "shrunk": lambda x: F.softshrink(torch.where(x > 1, torch.nan, x), 0.3) + F.hardshrink(x, 0.3),
    "hypot": lambda x: torch.hypot(x, x.flip(0)) + torch.hypot(torch.where(x > 1, torch.inf, x * 0), x * 1e30),
    "heaviside": lambda x: torch.heaviside(torch.where(x > 1, torch.nan, torch.where(x > 0, x * 0, x)), x.flip(0)),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0), reduction="none") + F.mse_loss(x, x.flip(0)),
    "vdot": lambda x: torch.vdot(x.flatten(), x.flip(0).flatten()),
    "trace": lambda x: torch.trace(x[0, 0]) + torch.trace((x[0] * 9).long()[0]),
    "count_nonzero": lambda x: (
        torch.count_nonzero(x > 0, (1, 2)) + torch.count_nonzero(x, -2)[:, 0] + x.count_nonzero()
    ),
    "nansum": lambda x: torch.nansum(torch.where(x > 1, torch.nan, x), (0, -1), keepdim=True) + torch.nansum(x),
    "nanmean": lambda x: torch.nanmean(torch.where(x > 1, torch.nan, x), -1),
    "isclose": lambda x: torch.isclose(torch.where(x > 1, torch.nan, x), x, rtol=0.5, equal_nan=True),
    "cross": lambda x: torch.cross(x[:, :3], x[:1, 1:], dim=1) + torch.linalg.cross(x[:, 1:], x[:, :3].flip(0), dim=-3),
    "take": lambda x: torch.take(x, torch.tensor([[0, -1], [3, 2]])),
    "diag_embed": lambda x: (
        torch.diag_embed(x, 0, -1, 3) + torch.diag_embed(x[..., 1:], 1) + torch.diag_embed(x[..., 1:], -1)
    ),
    "dstack": lambda x: torch.dstack([x[0], x[1]]),
    "affine_grid": lambda x: torch.stack(
        [F.affine_grid(x[:, 0, :2, :3], x.shape, align_corners=corners) for corners in (True, False)]
    ),
    "bucketize": lambda x: torch.stack(
        [
            torch.bucketize(torch.where(x > 1, torch.nan, x.round()), torch.tensor([-1.0, 0, 1]), right=r)
            for r in (False, True)
        ]
    ),
    "searchsorted": lambda x: torch.searchsorted(torch.arange(-1.5, 1.5, 0.2), x, out_int32=True, side="right"),
    "cumprod": lambda x: x[:, :, :5].cumprod(2),
    "cumprod of integers": lambda x: (x * 3).long().cumprod(1) + (x > 0).cumprod(-3),
    "cumprod of another type": lambda x: (x * 2)[:, :3].cumprod(1, dtype=torch.int32),
    "cummax": lambda x: torch.stack(torch.cummax(torch.where(x > 1.9, torch.nan, x.round()), 1)),
    "cummin": lambda x: torch.stack(torch.cummin((x * 3).long()[..., :6], -1)),
    "windows": lambda x: x.unfold(-1, 3, 1).unfold(2, 2, 2) * 2,
    "windows with steps": lambda x: x.unfold(1, 2, 2) + x.unfold(-3, 1, 2),
    "diagonal": lambda x: x[..., :4, :5].diagonal(1, -2, -1) + x[..., :5, :5].diagonal(-1, 3, 2),
    "diagonal of a square": lambda x: torch.linalg.diagonal(x @ x.mT),
    "fold": lambda x: F.fold(F.unfold(x, 3, 2, 2), x.shape[2:], 3, 2, 2),
    "fold side by side": lambda x: F.fold(F.unfold(x, 2, stride=2) * 2, x.shape[2:], 2, stride=2),
    "fold of infinite ones": lambda x: F.fold(F.unfold(torch.where(x > 1.5, torch.inf, x), 3), x.shape[2:], 3),
    "fold with steps": lambda x: F.fold(x.flatten(2)[..., :6], (5, 7), (1, 2), (1, 3), 0, (2, 2)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(torch.where(x > 1.9, torch.nan, x), 1, return_indices=True)[
        1
    ],
    "adaptive_max_pool2d of windows": lambda x: torch.stack(
        [*F.adaptive_max_pool2d(x[..., :6, :6].round(), (2, 3), return_indices=True)]
    ),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x[:, :, 0], 1),
    "index_copy": lambda x: x.index_copy(1, torch.tensor([2, 0]), x[:, 1:3]),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([2, 0]), 3),
    "in place": lambda x: (x * 1).atan_().frac_() + torch.sinh_(x * 1),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "unfold with steps": lambda x: F.unfold(x, (2, 3), (2, 1), (0, 1), (2, 3)),
    "bilinear with antialias": lambda x: F.interpolate(x, (5, 7), mode="bilinear", antialias=True),
    "bicubic with antialias": lambda x: F.interpolate(x, (5, 7), mode="bicubic", antialias=True),
    "larger with antialias": lambda x: F.interpolate(x, (40, 30), mode="bicubic", antialias=True),
    "a factor with antialias": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
    "corners with antialias": lambda x: F.interpolate(x, (5, 7), mode="bicubic", antialias=True, align_corners=True),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_ops_that_are_their_parts(name):
    function = COMPOSITES[name]
    compiled = oxidiff.compile(function, cache=False, strict=True)
    for size in SIZES:
        x = image(*size)
        torch.testing.assert_close(compiled(x), function(x), equal_nan=True, rtol=1e-5, atol=1e-5)
    # Of some, sizes decide what the parts are, or are rounded.
    is_one = name not in ("multi_dot", "unfold with steps", "a factor with antialias", "trace")
    assert oxidiff.report(compiled).captures == 1 or not is_one


ROUNDED_ONCE = ("sinh", "sinc", "shrunk", "mse_loss", "nansum", "cross", "cumprod", "fold")


@pytest.mark.parametrize("name", ROUNDED_ONCE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_in_16_bits_are_rounded_once(name, dtype):
    function = COMPOSITES[name]
    x = image(*SIZES[0]).to(dtype)
    got = oxidiff.compile(function, cache=False, strict=True)(x)
    assert got.dtype is dtype
    # That of doubles, of which several are added here.
    torch.testing.assert_close(
        got.double(), function(x.double()), rtol=4 * torch.finfo(dtype).eps, atol=1e-2, equal_nan=True
    )


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("op", ["unfold", "diagonal"])
def test_writing_into_windows_and_diagonals(op):
    def function(x):
        x = x * 1
        (x.unfold(2, 2, 2) if op == "unfold" else x.diagonal(0, 2, 3)).mul_(2)
        return x

    x = image(*SIZES[0])
    torch.testing.assert_close(oxidiff.compile(function, cache=False)(x), function(x))


def tokens_of_images(batch, length, count, rows):
    kinds = torch.zeros(batch, length, dtype=torch.long)
    kinds.view(-1)[torch.randperm(batch * length)[:count]] = 9
    return rand(batch, length, 8), kinds, rand(rows, 8)


SCATTERED = {
    "rows": lambda x, kinds, rows: x.masked_scatter((kinds == 9)[..., None], rows),
    "of another shape": lambda x, kinds, rows: x.masked_scatter((kinds == 9)[..., None], rows.flatten()[None]),
    "elements": lambda x, kinds, rows: x.masked_scatter((x > 0) & (kinds == 9)[..., None], rows),
    "broadcast": lambda x, kinds, rows: x[:1].masked_scatter((kinds == 9)[..., None], rows),
    "in place": lambda x, kinds, rows: (x * 1).masked_scatter_((kinds == 9)[..., None], rows),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_elements_scattered_where_a_mask_holds(name):
    function = SCATTERED[name]
    compiled = oxidiff.compile(function, cache=False, strict=True)
    for sizes in ((2, 7, 5, 5), (3, 9, 8, 8), (2, 8, 0, 4), (2, 11, 4, 6), (4, 7, 20, 28)):
        given = tokens_of_images(*sizes)
        torch.testing.assert_close(compiled(*given), function(*given))
    assert oxidiff.report(compiled).captures <= 2


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_too_few_elements_to_be_scattered():
    function = SCATTERED["rows"]
    compiled = oxidiff.compile(function, cache=False)
    for first in ((2, 7, 5, 5), (2, 7, 5, 4)):
        for sizes in (first, (2, 7, 6, 5), (3, 9, 4, 4), (2, 7, 0, 0), (2, 7, 1, 0)):
            given = tokens_of_images(*sizes)
            if sizes[2] > sizes[3]:
                with pytest.raises(RuntimeError, match="Number of elements of source < number of ones in mask"):
                    compiled(*given)
            else:
                torch.testing.assert_close(compiled(*given), function(*given))
        compiled = oxidiff.compile(function, cache=False)


def test_a_product_of_vectors_whose_dimension_is_found():
    def function(x):
        return torch.cross(x, x.flip(0) * 2 + 1)

    compiled = oxidiff.compile(function, cache=False)
    for batch in (2, 3, 4):
        x = rand(batch, 3, 5)
        torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_images_at_places(mode, padding, align_corners):
    def function(x, grid):
        return F.grid_sample(x, grid, mode, padding, align_corners)

    compiled = oxidiff.compile(function, cache=False, strict=True)
    for (height, width), places in (((9, 11), (7, 6)), ((16, 8), (12, 20))):
        x, grid = image(2, height, width, channels=16), rand(2, *places, 2, low=-1.7, high=1.7)
        torch.testing.assert_close(compiled(x, grid), function(x, grid), rtol=1e-5, atol=1e-5)


def test_edges_of_images_at_places():
    for padding, corners in itertools.product(("zeros", "border", "reflection"), (True, False)):

        def function(x, grid, padding=padding, corners=corners):
            return F.grid_sample(x, grid, "bilinear", padding, corners)

        compiled = oxidiff.compile(function, cache=False, strict=True)
        one, many = rand(1, 16, 1, 1), rand(1, 16, 5, 5)
        many[..., 0, 0], many[..., 4, 4] = torch.inf, -torch.inf
        for x in (one, many):
            grid = rand(1, 6, 6, 2, low=-1.5, high=1.5)
            torch.testing.assert_close(compiled(x, grid), function(x, grid), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_of_one_pixel_with_antialias(mode):
    for corners in (True, False):

        def function(x, corners=corners):
            return F.interpolate(x, (1, 1), mode=mode, antialias=True, align_corners=corners)

        compiled = oxidiff.compile(function, cache=False, strict=True)
        x = image(2, 6, 7)
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-5, atol=1e-5)


def test_integers_and_flags_that_are_written_in_place():
    def function(x):
        flags, counts = x > 0.5, (x * 9).long()
        flags |= x < -0.5
        flags ^= x > 1
        counts &= 7
        counts |= 8
        counts <<= 2
        counts >>= 1
        y = x * 9
        y //= 2
        y[:, 0] //= x[:, 0]
        return flags, counts, y

    compiled = oxidiff.compile(function, cache=False, strict=True)
    for size in SIZES:
        x = image(*size)
        torch.testing.assert_close(compiled(x), function(x))


WRITTEN_ROWS = {
    "one row": lambda y, v: y.index_put_((torch.tensor([0]),), v),
    "a list": lambda y, v: operator.setitem(y, [0], v),
    "with one more dimension": lambda y, v: operator.setitem(y, [0], v[None]),
    "of a part": lambda y, v: operator.setitem(y[1:], [0], v),
    "two rows": lambda y, v: operator.setitem(y, [3, 1], v),
}


@pytest.mark.parametrize("name", WRITTEN_ROWS)
def test_rows_that_are_written_are_one_or_as_many(name):
    """What is written is broadcast: on meta tensors nobody looks whether it can be."""

    def function(x, v):
        y = torch.zeros(4, x.shape[1], x.shape[2])
        WRITTEN_ROWS[name](y, v)
        return y + x.sum()

    compiled = oxidiff.compile(function, cache=False, strict=True)
    for length in (5, 7, 9):
        x = rand(1, length, 4)
        torch.testing.assert_close(compiled(x, x), function(x, x))
    assert oxidiff.report(compiled).captures == 1
    x = rand(2, 5, 4)
    if name == "two rows":
        torch.testing.assert_close(compiled(x, x), function(x, x))
    compiled = oxidiff.compile(function, cache=False)
    x = rand(3, 5, 4)
    with pytest.raises(RuntimeError, match="shape mismatch: value tensor"):
        compiled(x, x)


def test_legacy_constructors():
    def function(x):
        count = torch.IntTensor([4])
        scale = torch.FloatTensor([0.5])[0] + torch.Tensor([1.0, 2.0])[1] + torch.DoubleTensor([0.1])
        return x[:, : count[0]], x[:, count[0] :].sum() * torch.BoolTensor([True]) * scale, count * 2

    def of_sizes(x):
        return x[:, : torch.LongTensor([[x.shape[1] // 2]])[0, 0]] * torch.FloatTensor([0.5, x.shape[2]])[1]

    for made in (function, of_sizes):
        compiled = oxidiff.compile(made, cache=False, strict=True)
        for size in ((2, 8, 5), (2, 10, 5), (3, 9, 5)):
            x = rand(*size)
            torch.testing.assert_close(compiled(x), made(x))
        assert oxidiff.report(compiled).captures == 1 or made is of_sizes


class Recurrent(nn.Module):
    def __init__(self, cls):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(16, 4)
        self.between = cls(6, 8, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5)

    def forward(self, x):
        return self.last(self.between(self.first(x))[0])


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_recurrent_layers_run_between_programs(cls):
    module = Recurrent(cls).eval()
    compiled = oxidiff.compile(module, cache=False)
    with torch.no_grad():
        for batch, length in ((2, 7), (3, 30)):
            x = rand(batch, length, 4)
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    report = oxidiff.report(compiled)
    assert (report.captures, report.eager_calls) == (1, 0)


@torch.no_grad()
@pytest.mark.parametrize("size", [8, 11, 12])
@pytest.mark.parametrize(("width", "padding", "dilation"), [(2, 0, 1), (3, 0, 1), (3, 1, 1), (3, 1, 2)])
def test_windows_that_overhang(size: int, width: int, padding: int, dilation: int) -> None:
    module = nn.MaxPool2d(width, 2, padding, dilation, ceil_mode=True)
    compiled = oxidiff.compile(module, cache=False, strict=True)
    x = torch.randn(2, 3, size, size + 2)
    assert torch.equal(compiled(x), module(x))


@torch.no_grad()
@pytest.mark.parametrize("module", [nn.ConvTranspose1d(4, 6, 3, 2), nn.ConvTranspose2d(4, 6, 3)])
def test_transposed_convolutions_without_a_batch(module: nn.Module) -> None:
    compiled = oxidiff.compile(module, cache=False, strict=True)
    for size in (5, 8):
        x = torch.randn(4, *[size] * (module.weight.dim() - 2))
        torch.testing.assert_close(compiled(x), module(x))


class Reflecting(nn.Module):
    def __init__(self, pad: tuple[int, ...], mode: str) -> None:
        super().__init__()
        self.pad, self.mode = pad, mode

    def forward(self, x):
        return F.pad(x, self.pad, self.mode)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("pad", [(-1, 1), (1, -1), (-1, 2, 1, -1), (2, -2, -1, -1)])
def test_padding_beside_what_is_cut_off(pad: tuple[int, ...], mode: str) -> None:
    module = Reflecting(pad, mode)
    compiled = oxidiff.compile(module, cache=False, strict=True)
    for height, width in ((3, 3), (4, 3), (3, 5)):
        x = torch.randn(2, height, width)
        assert torch.equal(compiled(x), module(x))


class Attending(nn.Module):
    def forward(self, q, k, v, mask=None):
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask)


@torch.no_grad()
@pytest.mark.parametrize("lead", [(2, 3), (1, 3), (2, 2, 3)])
@pytest.mark.parametrize("kind", ["none", "own", "shared", "hidden"])
def test_attention_with_many_leading_dimensions(lead: tuple[int, ...], kind: str) -> None:
    module = Attending()
    compiled = oxidiff.compile(module, cache=False, strict=True)
    for queries, keys in ((5, 7), (16, 9)):
        q = torch.randn(*lead, queries, 4, 8)
        k, v = (torch.randn(*lead, keys, 4, 8) for _ in range(2))
        mask = {
            "own": torch.randn(*lead, 4, queries, keys),
            "shared": torch.randn(lead[-1], 1, 1, keys),
            # A row of nothing else gives each value the same weight in f32, as eager does.
            "hidden": torch.full((queries, keys), -1e10),
        }.get(kind)
        torch.testing.assert_close(compiled(q, k, v, mask), module(q, k, v, mask), rtol=1e-5, atol=1e-5)


class Scaling(nn.Module):
    def forward(self, x):
        doubled = torch.cat([x, x])
        n = doubled.shape[0]
        return doubled, n, n * 0.5, n / 2, n // 2, float(n), n * 1.0, x.shape[0] * 2.0 / 4, 2 * x.shape[0]


@torch.no_grad()
def test_floats_that_follow_from_sizes_stay_floats() -> None:
    module = Scaling()
    compiled = oxidiff.compile(module, cache=False, strict=True)
    for n in (2, 1, 3, 4, 5):
        x = torch.randn(n, 4)
        expected, found = module(x)[1:], compiled(x)[1:]
        assert found == expected and list(map(type, found)) == list(map(type, expected))


class Locating(nn.Module):
    def forward(self, x, y):
        return x * 3 if x.data_ptr() == y.data_ptr() else x - y


@torch.no_grad()
def test_where_tensors_are_in_memory_is_asked_of_them() -> None:
    module = Locating()
    compiled = oxidiff.compile(module, cache=False)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.warns(oxidiff.FallbackWarning, match="asks where a tensor is in memory"):
        torch.testing.assert_close(compiled(x, y), module(x, y))
    torch.testing.assert_close(compiled(x, x), module(x, x))
