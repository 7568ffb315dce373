"""Result sizes without meta kernels: what a rule says is what torch makes on the CPU."""

import random

import pytest
import torch

from oxidiff.capture.meta import META_DEVICE, RULES, is_nhwc

aten = torch.ops.aten

FLOATS = (torch.float32, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64, torch.int32)
ANY = (*NUMBERS, torch.bool)


def tensor(rng, shape, dtype=torch.float32):
    """A tensor of a shape, laid out somehow: its dimensions in another order, a part of a larger one, repeated."""
    order = list(range(len(shape)))
    kind = rng.choice(["plain", "plain", "permuted", "part", "repeated", "channels_last", "channels_behind"])
    if kind == "permuted":
        rng.shuffle(order)
    if kind == "channels_last" and len(shape) in (4, 5):
        order = [0, *order[2:], 1]
    sizes = [shape[i] for i in order]
    pads = [rng.choice([0, 0, 2]) if kind == "part" else 0 for _ in sizes]
    whole = torch.ones([size + pad for size, pad in zip(sizes, pads, strict=True)], dtype=dtype)
    x = whole[tuple(slice(0, size) for size in sizes)]
    x = x.permute([order.index(i) for i in range(len(shape))])
    if kind == "channels_behind" and len(shape) == 4:
        # As a transformer of pixels gives them.
        rows = torch.ones(shape[0], shape[2] * shape[3], shape[1], dtype=dtype)
        x = rows.transpose(1, 2).reshape(shape)
    if kind == "repeated" and shape:
        dim = rng.randrange(len(shape))
        x = x.narrow(dim, 0, 1).expand(shape) if shape[dim] else x
    assert list(x.shape) == list(shape)
    return x


def shape_of(rng, rank=None):
    return [rng.choice([1, 2, 3, 5]) for _ in range(rng.randint(0, 5) if rank is None else rank)]


def beside(rng, shape):
    """A shape that is broadcast to another, or to which that is."""
    return [
        1 if rng.random() < 0.3 else size for size in shape[rng.randint(0, len(shape)) if rng.random() < 0.3 else 0 :]
    ]


def unary(rng):
    return [tensor(rng, shape_of(rng), rng.choice(FLOATS))], {}


def signed(rng):
    return [tensor(rng, shape_of(rng), rng.choice(NUMBERS))], {}


def clamp(rng):
    dtype = rng.choice(NUMBERS)
    low, high = (0.5, 2.5) if dtype.is_floating_point else (0, 2)
    return [tensor(rng, shape_of(rng), dtype), *rng.choice([(low,), (None, high), (low, high)])], {}


def clamp_one(rng):
    (x, *_), _ = clamp(rng)
    return [x, 1], {}


def softmax(rng):
    shape = shape_of(rng, rng.randint(1, 5))
    return [tensor(rng, shape, rng.choice(FLOATS)), rng.randrange(len(shape)) - rng.choice([0, len(shape)])], {}


def pair(rng, dtypes=NUMBERS):
    shape = shape_of(rng)
    return tensor(rng, shape, rng.choice(dtypes)), tensor(rng, beside(rng, shape), rng.choice(dtypes))


def binary(rng):
    x, y = pair(rng)
    return [*rng.choice([(x, y), (y, x)])], {}


def with_number(rng):
    return [tensor(rng, shape_of(rng), rng.choice(NUMBERS)), rng.choice([2, 0.5])], {}


def number_first(rng):
    return [rng.choice([2, 0.5]), tensor(rng, shape_of(rng), rng.choice(NUMBERS))], {}


def bits(rng):
    return [*pair(rng, (torch.bool, torch.int64))], {}


def one_of_bits(rng):
    return [tensor(rng, shape_of(rng), rng.choice((torch.bool, torch.int32)))], {}


def anything(rng):
    return [tensor(rng, shape_of(rng), rng.choice(ANY))], {}


def where(rng):
    x, y = pair(rng)
    return [tensor(rng, beside(rng, list(x.shape)), torch.bool), x, y], {}


def addcmul(rng):
    shape, dtype = shape_of(rng), rng.choice(FLOATS)
    return [tensor(rng, beside(rng, shape), dtype) for _ in range(3)], {}


def made_like(rng):
    return [tensor(rng, shape_of(rng), rng.choice(ANY))], rng.choice([{}, {"dtype": torch.float16}])


def full_like(rng):
    (x,), named = made_like(rng)
    return [x, 1], named


def arange(count):
    def make(rng):
        bounds = [rng.randint(-4, 4), rng.randint(4, 30), rng.choice([1, 2, 3])][:count]
        return bounds if count > 1 else [rng.randint(0, 9)], rng.choice([{}, {"dtype": torch.float32}])

    return make


def outer(rng):
    return [tensor(rng, shape_of(rng, 1), rng.choice(NUMBERS)) for _ in range(2)], {}


def linear(rng):
    shape, dtype = shape_of(rng, rng.randint(1, 4)), rng.choice(FLOATS)
    weight = tensor(rng, [4, shape[-1]], dtype)
    return [tensor(rng, shape, dtype), weight, *rng.choice([(), (tensor(rng, [4], dtype),)])], {}


def conv(rank):
    def make(rng):
        x = tensor(rng, [2, 4, *(rng.randint(3, 7) for _ in range(rank))])
        groups = rng.choice([1, 2])
        weight = tensor(rng, [6, 4 // groups, *(rng.choice([1, 3]) for _ in range(rank))])
        return [x, weight, None, [rng.choice([1, 2])] * rank, [rng.choice([0, 1])], [1], groups], {}

    return make


def conv_transpose(rank):
    def make(rng):
        return [tensor(rng, [2, 4, *([5] * rank)]), tensor(rng, [4, 6, *([3] * rank)])], {}

    return make


def normed(rng):
    shape, dtype = shape_of(rng, rng.randint(1, 5)), rng.choice(FLOATS)
    shape[-1] = 6
    return [tensor(rng, shape, dtype), [6], *rng.choice([(), (tensor(rng, [6], dtype),)])], {}


def group_norm(rng):
    dtype = rng.choice(FLOATS)
    shape = shape_of(rng, rng.randint(2, 5))
    shape[1] = 6
    weights = (tensor(rng, [6], dtype), tensor(rng, [6], dtype))
    return [tensor(rng, shape, dtype), 3, *rng.choice([(), weights])], {}


def upsample(*rest):
    def make(rng):
        x = tensor(rng, [2, 3, rng.randint(2, 5), rng.randint(2, 5)])
        size = rng.choice([[7, 6], [2, 3], None])
        return [x, size, *rest, None if size else [rng.choice([2.0, 1.5]), 2.0]], {}

    return make


def frames(rng):
    width, hop = rng.choice([(16, 4), (15, 5)])
    x = torch.randn(*rng.choice([(), (2,)]), width // 2 + 1, rng.randint(9, 12), dtype=torch.complex64)
    return [x, width, hop, width, torch.ones(width), rng.random() < 0.5], rng.choice([{}, {"length": 30}])


def attention(rng):
    heads, length, keys, size = rng.choice([2, 4]), 5, 7, 8
    shared = rng.choice([1, 2])
    query = torch.ones(2, length, heads, size).transpose(1, 2)
    query = query.contiguous() if rng.random() < 0.5 else query
    key, value = (torch.ones(2, keys, heads // shared, size).transpose(1, 2) for _ in range(2))
    return [query, key, value], {"enable_gqa": True} if shared > 1 else {}


def grouped(rng):
    dtype, groups, inner = rng.choice((*FLOATS, torch.float16)), rng.choice([1, 3]), rng.choice([4, 8, 16])
    rows, columns = rng.choice([5, 16]), rng.choice([7, 8, 16])
    is_matrix, is_one = rng.choice([(True, True), (True, False), (False, True), (False, False)])
    a = tensor(rng, [rows, inner] if is_matrix else [groups, rows, inner], dtype)
    b = tensor(rng, [inner, columns] if is_one else [groups, inner, columns], dtype)
    # Where the last group ends: of rows, of columns, of what is summed.
    end = inner if is_matrix and is_one else rows if is_matrix else columns
    return [a, b, *([torch.tensor([*[0] * (groups - 1), end]).int()] if is_matrix or is_one else [])], {}


def cat(rng):
    shape = shape_of(rng, rng.randint(1, 5))
    dim = rng.randrange(len(shape))
    parts = [tensor(rng, [*shape[:dim], rng.randint(1, 3), *shape[dim + 1 :]]) for _ in range(rng.randint(1, 3))]
    return [parts, dim - rng.choice([0, len(shape)])], {}


def stack(rng):
    shape = shape_of(rng)
    dim = rng.randint(0, len(shape))
    return [[tensor(rng, shape, torch.int64) for _ in range(3)], dim - rng.choice([0, len(shape) + 1])], {}


def index(rng):
    x = tensor(rng, shape_of(rng, rng.randint(1, 3)), rng.choice(ANY))
    return [x, [torch.zeros(4, 2, dtype=rng.choice((torch.int32, torch.int64)))[:, rng.choice([0, slice(0, 2)])]]], {}


def weight_norm(rng):
    return [tensor(rng, [4, 3, 5]), tensor(rng, [4, 1, 1])], {}


def reduced(dtypes):
    def make(rng):
        shape = shape_of(rng, rng.randint(1, 5))
        dims = rng.sample(range(len(shape)), rng.randint(1, len(shape)))
        return [tensor(rng, shape, rng.choice(dtypes)), dims, rng.choice([False, True])], {}

    return make


def vector_norm(rng):
    (x, dims, keep), _ = reduced(FLOATS)(rng)
    return [x, rng.choice([1, 2]), dims, keep], {}


def converted(rng):
    return [tensor(rng, shape_of(rng), rng.choice(ANY)), rng.choice(ANY)], {}


def recurrent(gates, has_cell=False):
    def make(rng):
        width, size, layers = rng.choice([1, 3]), rng.choice([2, 4]), rng.choice([1, 2])
        is_both, is_batch_first = rng.random() < 0.5, rng.random() < 0.5
        sides, sets = shape_of(rng, 2), layers * (1 + is_both)
        x = tensor(rng, [*sides, width], torch.float32)
        state = torch.ones(sets, sides[0 if is_batch_first else 1], size)
        weights = []
        for layer in range(layers):
            inputs = width if layer == 0 else size * (1 + is_both)
            weights += [torch.ones(gates * size, n) for _ in range(1 + is_both) for n in (inputs, size)]
        return [
            x,
            [state, state] if has_cell else state,
            weights,
            False,
            layers,
            0.0,
            False,
            is_both,
            is_batch_first,
        ], {}

    return make


ARGUMENTS = {
    aten.lstm.input: recurrent(4, has_cell=True),
    aten.gru.input: recurrent(3),
    aten.rnn_tanh.input: recurrent(1),
    aten.rnn_relu.input: recurrent(1),
    **dict.fromkeys(
        (aten.silu.default, aten.gelu.default, aten.sigmoid.default, aten.tanh.default, aten.exp.default, aten.sin.default,
         aten.cos.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default, aten.log.default,
         aten.mish.default, aten.leaky_relu.default, aten.softplus.default, aten.elu.default, aten.erf.default),
        unary,
    ),
    **dict.fromkeys((aten.neg.default, aten.abs.default, aten.relu.default, aten.square.default), signed),
    **dict.fromkeys((aten.clamp.default, aten.clip.default), clamp),
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_max.default), clamp_one),
    aten.softmax.int: softmax,
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Tensor,
                     aten.maximum.default, aten.minimum.default), binary),
    **dict.fromkeys((aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar,
                     aten.pow.Tensor_Scalar), with_number),
    aten.pow.Scalar: number_first,
    **dict.fromkeys((aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
                    binary),
    **dict.fromkeys((aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
                    with_number),
    **dict.fromkeys((aten.__and__.Tensor, aten.__or__.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor), bits),
    aten.bitwise_not.default: one_of_bits,
    aten.logical_not.default: anything,
    aten.where.self: where,
    aten.addcmul.default: addcmul,
    **dict.fromkeys((aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default), made_like),
    aten.full_like.default: full_like,
    aten.arange.default: arange(1),
    aten.arange.start: arange(2),
    aten.arange.start_step: arange(3),
    aten.outer.default: outer,
    aten.linear.default: linear,
    aten.conv1d.default: conv(1),
    aten.conv2d.default: conv(2),
    aten.conv3d.default: conv(3),
    aten.conv_transpose1d.default: conv_transpose(1),
    aten.conv_transpose2d.input: conv_transpose(2),
    aten.conv_transpose3d.input: conv_transpose(3),
    aten.layer_norm.default: normed,
    aten.rms_norm.default: normed,
    aten.group_norm.default: group_norm,
    aten.upsample_nearest2d.vec: upsample(),
    aten.upsample_bilinear2d.vec: upsample(False),
    aten.upsample_bicubic2d.vec: upsample(False),
    aten.scaled_dot_product_attention.default: attention,
    aten._grouped_mm.default: grouped,
    **dict.fromkeys((aten.cat.default, aten.concat.default, aten.concatenate.default), cat),
    aten.stack.default: stack,
    aten.index.Tensor: index,
    aten._weight_norm.default: weight_norm,
    aten.mean.dim: reduced(FLOATS),
    aten.sum.dim_IntList: reduced(ANY),
    aten.linalg_vector_norm.default: vector_norm,
    aten.to.dtype: converted,
    aten.istft.default: frames,
}  # fmt: skip
"""What an overload is called with, of a random generator."""

NEVER_SAID = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
"""Rules that only refuse what does not fit."""


def placed(x):
    """Where elements lie: what strides say of dimensions that have several."""
    return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def on_meta(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META_DEVICE)
    return [on_meta(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("overload", RULES, ids=str)
def test_rule_is_what_torch_does(overload):
    rng = random.Random(str(overload))
    said = 0
    for _ in range(150):
        args, named = ARGUMENTS[overload](rng)
        result = RULES[overload](*map(on_meta, args), **named)
        if result is None:
            continue
        said += 1
        expected = overload(*args, **named)
        shown = [(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        if isinstance(result, list):
            assert all(part.is_meta for part in result)
            assert [(p.shape, p.dtype, placed(p)) for p in result] == [(p.shape, p.dtype, placed(p)) for p in expected]
            continue
        assert result.is_meta
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype), shown
        if len({a.dtype for a in args if isinstance(a, torch.Tensor)} - {torch.bool}) < 2:
            # Others are converted first, on some devices.
            assert placed(result) == placed(expected), shown
    assert (said > 20) is (overload not in NEVER_SAID)


@pytest.mark.parametrize("batch", [1, 2])
def test_images_of_a_transformer_are_channels_last(batch):
    """Of one image, too, whose batch has a stride that says nothing: a convolution gives it back with channels innermost."""
    x = torch.ones(batch, 12, 5).transpose(1, 2).reshape(batch, 5, 3, 4)
    for overload, args in ((aten.add.Tensor, (x, x)), (aten.silu.default, (x,)), (aten.mul.Tensor, (x, x))):
        expected, result = overload(*args), RULES[overload](*map(on_meta, args))
        assert result.stride() == expected.stride()
        assert is_nhwc(result)


def somehow(rng, shape):
    """A tensor without gaps, its dimensions in any order; those of size 1 with any stride."""
    order = rng.sample(range(len(shape)), len(shape))
    x = torch.ones([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    strides = [rng.choice([1, 2, 8, 16, 100, s]) if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


def test_strides_of_dimensions_of_size_1_are_torchs_too():
    """They say whether an image is channels-last, and go their own way where a number or a smaller tensor takes part."""
    rng = random.Random(5)
    with_numbers = (aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.gt.Scalar, aten.mul.Tensor)
    alone = (aten.silu.default, aten.neg.default, aten.exp.default, aten.relu.default)
    of_two = (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.gt.Tensor)
    for _ in range(1500):
        shape = [rng.choice([1, 1, 2, 3, 8]) for _ in range(rng.choice([2, 3, 4, 4, 5]))]
        other = [1 if rng.random() < 0.3 else size for size in shape][rng.choice([0, 0, 1]) :]
        x, y = somehow(rng, shape), somehow(rng, other)
        cases = [(rng.choice(with_numbers), (x, 2.0)), (rng.choice(alone), (x,)), (rng.choice(of_two), (x, y))]
        for overload, args in cases:
            expected, result = overload(*args), RULES[overload](*map(on_meta, args))
            shown = [(tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a for a in args]
            assert result.stride() == expected.stride(), (overload, shown)
