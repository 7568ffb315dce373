"""Every ATen op of `data/aten_ops.txt`, compiled and interpreted, against f64: in f32, bf16 and f16, at two sizes.

A case is a function of tensors that calls the op. It is compiled whole (`strict=True`: nothing may fall back to eager)
and, apart from that, captured and run by the interpreter, which is the meaning of the graph. Both must be as near to the
f64 result as the type and the length of the longest sum allow, or nearly as near as eager is.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import oxidiff
from nets import lies_as
from oxidiff import _native
from oxidiff.capture import Capturer
from oxidiff.capture.weights import as_stored
from oxidiff.outputs import builder

pytestmark = pytest.mark.usefixtures("one_long_capture")

OPS = tuple(
    line.split()[1]
    for line in (Path(__file__).parent / "data" / "aten_ops.txt").read_text().splitlines()
    if not line.startswith("#")
)

SIZES = ((2, 8, 6), (3, 16, 10))
"""Batch, height and width: at the first call, and at another that the same program serves."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

UNRECORDED = {
    "aten.add_.Tensor": "writes become the op that computes what is written",
    "aten.div_.Tensor": "writes become the op that computes what is written",
    "aten.copy_.default": "writes become the op that computes what is written",
    "aten._assert_tensor_metadata.default": "asserts what is checked by the key of the call",
    "aten.to.device": "all tensors are on one device",
    "aten.to.dtype_layout": "recorded as the conversion that it is",
    "aten.type_as.default": "recorded as the conversion that it is",
    "aten.clone.default": "values have no memory of their own to copy",
    "aten.contiguous.default": "values have no memory of their own to copy",
    "aten.alias.default": "values have no memory of their own to copy",
    "aten.dropout.default": "the identity in inference",
    "aten.lift_fresh_copy.default": "what it copies is a constant of the graph",
}
"""Ops that a captured graph need not contain by this name."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of the module that calls the op."""

    data: Tensor


class Caller(torch.nn.Module):
    """Calls a function with its own parameters behind the arguments."""

    def __init__(self, function: Callable[..., Any], weights: list[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args, *self.weights)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that calls `op`, and makers of its arguments from batch, height and width; weights come last."""

    op: str
    name: str
    function: Callable[..., Any]
    makers: tuple[Callable[[int, int, int], Tensor] | Weight, ...]
    terms: int
    """Length of the longest sum."""
    roundings: int
    """Roundings to the type on the way to the result."""

    def module(self, dtype: torch.dtype) -> torch.nn.Module | Callable[..., Any]:
        """What is compiled: a module if there are weights, else the function itself."""
        weights = [maker.data.to(dtype) for maker in self.makers if isinstance(maker, Weight)]
        return Caller(self.function, weights).eval() if weights else self.function


CASES: list[Case] = []


def case(
    op: str, function: Callable[..., Any], *makers: Any, terms: int = 1, roundings: int = 1, name: str = ""
) -> None:
    full = f"aten.{op}" if op.count(".") else f"aten.{op}.default"
    CASES.append(Case(full, f"{full[5:]}{'-' if name else ''}{name}", function, makers, terms, roundings))


def rand(*shape: int, low: float = -2.0, high: float = 2.0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * (high - low) + low


def image(b: int, h: int, w: int) -> Tensor:
    return rand(b, 4, h, w)


def positive(b: int, h: int, w: int) -> Tensor:
    return rand(b, 4, h, w, low=0.25, high=3.0)


def tokens(b: int, h: int, w: int) -> Tensor:
    return rand(b, h * w, 32)


def pooled(b: int, h: int, w: int) -> Tensor:
    return rand(b, 32)


def video(b: int, h: int, w: int) -> Tensor:
    return rand(b, 4, 3, h, w)


def ids(b: int, h: int, w: int) -> Tensor:
    return torch.randint(0, 11, (b, h))


def bools(b: int, h: int, w: int) -> Tensor:
    return torch.rand(b, 4, h, w) > 0.5


def timestep(b: int, h: int, w: int) -> Tensor:
    return torch.randint(0, 1000, (b,))


def weight(*shape: int, seed: int = 0) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    return Weight(torch.rand(*shape, dtype=torch.float64, generator=generator) * 2 - 1)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, 8)).transpose(1, 2)


# -- attention, contractions -----------------------------------------------------------------------------------------------

SDPA = "scaled_dot_product_attention"
case(
    SDPA,
    lambda q, k, v: F.scaled_dot_product_attention(heads(q), heads(k), heads(v)),
    tokens,
    tokens,
    tokens,
    terms=160,
    roundings=3,
)
case(
    SDPA,
    lambda q: F.scaled_dot_product_attention(heads(q), heads(q), heads(q), is_causal=True),
    tokens,
    terms=160,
    roundings=3,
    name="causal",
)
case(
    SDPA,
    lambda q, k: F.scaled_dot_product_attention(
        heads(q), heads(k), heads(k), attn_mask=(k.sum(-1) > 0)[:, None, None, :]
    ),
    lambda b, h, w: rand(b, h * w, 32),
    lambda b, h, w: torch.randint(-2, 3, (b, 7, 32)).double() / 4,
    terms=32,
    roundings=3,
    name="bool_mask",
)
case(
    SDPA,
    lambda q, k, m: F.scaled_dot_product_attention(heads(q), heads(k), heads(k), attn_mask=m),
    tokens,
    lambda b, h, w: rand(b, 7, 32),
    lambda b, h, w: rand(b, 1, 1, 7),
    terms=32,
    roundings=3,
    name="float_mask",
)
# A mask that comes by itself: nothing but the op says that its rows are the queries.
case(
    SDPA,
    lambda q, k, m: F.scaled_dot_product_attention(heads(q), heads(k), heads(k), attn_mask=m[:, None]),
    tokens,
    lambda b, h, w: rand(b, 7, 32),
    lambda b, h, w: rand(b, h * w, 7),
    terms=32,
    roundings=3,
    name="mask_of_queries",
)
case("linear", F.linear, tokens, weight(24, 32), weight(24, seed=1), terms=32)
case("linear", lambda x, w: F.linear(x, w), tokens, weight(24, 32), terms=32, name="no_bias")
case("linear", F.linear, pooled, weight(24, 32), weight(24, seed=1), terms=32, name="rows")
case("outer", lambda x, y: torch.outer(x[0], y), pooled, weight(16))
case("einsum", lambda x, y: torch.einsum("bsc,btc->bst", x, y), tokens, tokens, terms=32)
case("einsum", lambda x, w: torch.einsum("bsc,cd->bsd", x, w), tokens, weight(32, 24), terms=32, name="weight")
case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), image, weight(8, 4, 3, 3), weight(8, seed=1), terms=36)
case(
    "conv2d",
    lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
    image,
    weight(8, 4, 3, 3),
    weight(8, seed=1),
    terms=36,
    name="stride",
)
case("conv2d", lambda x, w: F.conv2d(x, w), image, weight(8, 4, 1, 1), terms=4, name="pointwise")
case("conv2d", lambda x, w: F.conv2d(x, w, groups=4, padding=1), image, weight(8, 1, 3, 3), terms=9, name="depthwise")
case("conv2d", lambda x, w: F.conv2d(x, w, stride=2), image, weight(8, 4, 2, 2), terms=16, name="patches")
case("conv3d", lambda x, w, b: F.conv3d(x, w, b, padding=1), video, weight(8, 4, 3, 3, 3), weight(8, seed=1), terms=108)
case(
    "conv3d",
    lambda x, w: F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), w),
    video,
    weight(8, 4, 3, 3, 3),
    terms=108,
    name="causal",
)

# -- norms -----------------------------------------------------------------------------------------------------------------

case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b, eps=1e-6), image, weight(4), weight(4, seed=1), terms=320)
case(
    "group_norm",
    lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)),
    image,
    weight(4),
    weight(4, seed=1),
    terms=320,
    roundings=2,
    name="silu",
)
case("group_norm", lambda x: F.group_norm(x, 4), video, terms=480, name="video")
case("layer_norm", lambda x, w, b: F.layer_norm(x, (32,), w, b), tokens, weight(32), weight(32, seed=1), terms=32)
case("layer_norm", lambda x: F.layer_norm(x, (32,), eps=1e-6), tokens, terms=32, name="plain")
case("rms_norm", lambda x, w: F.rms_norm(x, (32,), w, eps=1e-6), tokens, weight(32), terms=32, roundings=2)
case("rms_norm", lambda x: F.rms_norm(x, (32,)), tokens, terms=32, name="plain")

# -- pointwise -------------------------------------------------------------------------------------------------------------

case("add.Tensor", torch.add, image, image)
case("add.Tensor", lambda x: x + 0.3, image, name="number")
case("add.Tensor", lambda x, y: torch.add(x, y, alpha=0.3), image, image, name="alpha")
case("add.Tensor", lambda x, y: x + y[:, :, None, None], image, lambda b, h, w: rand(b, 4), name="broadcast")
case("sub.Tensor", torch.sub, image, image)
case("mul.Tensor", torch.mul, image, image)
case("mul.Tensor", lambda x: x * 0.7071, image, name="number")
case("mul.Tensor", lambda x, t: x * t[:, None, None, None], image, timestep, name="integer")
case("div.Tensor", torch.div, image, positive)
case("div.Tensor", lambda x: x / 0.3, image, name="number")
case("rsub.Scalar", lambda x: torch.rsub(x, 1.5), image)
for op in ("silu", "sigmoid", "tanh", "exp", "sin", "cos", "abs", "neg"):
    case(op, getattr(torch, op, None) or getattr(F, op), image)
for op in ("rsqrt", "log", "reciprocal"):
    case(op, getattr(torch, op), positive)
case("gelu", F.gelu, image)
case("gelu", lambda x: F.gelu(x, approximate="tanh"), image, name="tanh")
case("pow.Tensor_Scalar", lambda x: x.pow(2), image)
case("pow.Tensor_Scalar", lambda x: x**0.5, positive, name="half")
case("pow.Tensor_Scalar", lambda x: x**1.7, positive, name="real", roundings=4)
case("pow.Scalar", lambda x: torch.pow(1.5, x), image, roundings=4)
case("where.self", torch.where, bools, image, image)
case("where.ScalarOther", lambda c, x: torch.where(c, x, 0.5), bools, image)
case("gt.Scalar", lambda x: x > 0.1, image)
case("lt.Scalar", lambda x: x < 0.1, image)
case("ge.Scalar", lambda x: x >= 0, image)
case("eq.Scalar", lambda i: i == 3, ids)
case("le.Tensor", lambda x, y: x <= y, image, image)
case("__and__.Tensor", lambda a, b: a & b, bools, bools)
case("min.other", torch.min, image, image)
case("add_.Tensor", lambda x, y: (x * 1).add_(y), image, image)
case("div_.Tensor", lambda x: (x * 1).div_(3), image)
case("dropout", lambda x: F.dropout(x, 0.3, training=False) * 1, image)

# -- types, copies, creation -----------------------------------------------------------------------------------------------

case("to.dtype", lambda t: t.to(torch.float32) * 0.1, timestep)
case("to.dtype", lambda x: (x.double() * 3).to(x.dtype), image, name="there_and_back")
case(
    "to.dtype_layout",
    lambda x, y: torch.ops.aten.to.dtype_layout(x, dtype=y.dtype) * y,
    timestep,
    lambda b, h, w: rand(b),
)
case("to.device", lambda x: torch.ops.aten.to.device(x, x.device, x.dtype) * 2, image)
case("type_as", lambda t, x: t.type_as(x) + x, timestep, lambda b, h, w: rand(b))
case("contiguous", lambda x: x.transpose(1, 2).contiguous(), image)
case("clone", lambda x: x.clone(), image)
case("lift_fresh_copy", lambda x: x[:, :3] * torch.tensor([0.5, 1.5, 2.0], dtype=x.dtype)[:, None, None], image)
case("copy_", lambda x, y: torch.empty_like(x).copy_(y[:, :1]) + x, image, image)
case("empty_like", lambda x: torch.empty_like(x).fill_(0.5) * x, image)
case("cat", lambda x, y: torch.cat([x, y[:, :1]], dim=1), image, image)
case("cat", lambda x, y: torch.cat([x * 2, y], dim=-1), tokens, tokens, name="last")
case("concat", lambda x, y: torch.concat([x, y], dim=2), image, image)
case("stack", lambda x, y: torch.stack([x, y], dim=-1), image, image)
case("repeat", lambda x: x.repeat(1, 2, 1, 1), image)
case("repeat_interleave.self_int", lambda x: x.repeat_interleave(2, dim=1), image)
case("pad", lambda x: F.pad(x, (0, 1, 0, 1)), image)
case("arange", lambda x: torch.arange(x.shape[3]) + x, image)
case("arange.start", lambda x: x * torch.exp(-torch.arange(0, 4, dtype=torch.float32))[:, None, None], image)
case("arange.start_step", lambda x: torch.arange(0, 2 * x.shape[3], 2) + x, image)
case("ones", lambda x: x + torch.ones(x.shape[3], dtype=x.dtype), image)
case("zeros", lambda x: torch.cat([x, torch.zeros(x.shape[0], 1, *x.shape[2:], dtype=x.dtype)], 1), image)
case("full_like", lambda t: torch.full_like(t, 3), timestep)
case("new_ones", lambda x: x.new_ones(x.shape[2:]) + x, image)
case("new_zeros", lambda x: x.new_zeros(x.shape[0], 2), image)
case("meshgrid.indexing", lambda x: torch.meshgrid(x[0, 0, :, 0], x[0, 0, 0, :], indexing="ij"), image)

# -- gathers, reductions, resampling ---------------------------------------------------------------------------------------

case("embedding", F.embedding, ids, weight(11, 16))
case("index.Tensor", lambda x, i: x[torch.arange(x.shape[0]), i.argmax(dim=-1) % 6], tokens, ids)
case("mean.dim", lambda x: x.mean(dim=-1, keepdim=True), tokens, terms=32)
case("mean.dim", lambda x: x.mean(dim=(2, 3)), image, terms=160, name="plane")
case("mean.dim", lambda x: x.float().pow(2).mean(-1, keepdim=True), tokens, terms=32, name="squares")
case("argmax", lambda i: i.argmax(dim=-1), ids)
case("any.dim", lambda x: x.any(dim=1), bools)
case("max.dim", lambda x: x.max(dim=2), image)
case("upsample_nearest2d.vec", lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), image)
case("upsample_nearest2d.vec", lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] // 2)), image, name="size")

# -- views -----------------------------------------------------------------------------------------------------------------

case("view", lambda x: x.view(x.shape[0], -1) * 2, image)
case("reshape", lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4), image)
case("permute", lambda x: x.permute(0, 2, 3, 1) * 2, image)
case("transpose.int", lambda x: x.flatten(2).transpose(1, 2) * 2, image)
case("unflatten.int", lambda x: x.unflatten(1, (2, 2)), image)
case("flatten.using_ints", lambda x: x.flatten(2), image)
case("unsqueeze", lambda x: x.unsqueeze(1), image)
case("squeeze.dim", lambda x: x[:, :1].squeeze(1), image)
case("slice.Tensor", lambda x: x[:, 1:3, ::2, -3:] * 2, image)
case("select.int", lambda x: x[:, -1] * 2, image)
case("chunk", lambda x: [a * 2 for a in x.chunk(2, dim=1)], image)
case("unbind.int", lambda x: torch.unbind(x, 1)[2] - x.unbind(1)[0], image)
case("split_with_sizes", lambda x: x.split([1, 3], dim=1)[1] * 2, image)
case("expand", lambda x: x[:, :1].expand(-1, 5, -1, -1), image)
case("broadcast_to", lambda x: torch.broadcast_to(x[:1], x.shape) + x, image)
case("alias", lambda x: torch.ops.aten.alias(x) * 2, image)
case(
    "view_as_complex",
    lambda x: torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * 2j),
    tokens,
)
case("view_as_real", lambda x: torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * 2j), tokens)
case("_assert_tensor_metadata", lambda x: x.float().to(x.dtype) * 2, image)

CASE_IDS = [c.name for c in CASES]


def arguments(case: Case, dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
    """Arguments at each size, rounded to the type."""
    for i, size in enumerate(SIZES):
        torch.manual_seed(i)
        made = [make(*size) for make in case.makers if not isinstance(make, Weight)]
        yield tuple(t.to(dtype) if t.is_floating_point() else t for t in made)


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for v in value for leaf in leaves(v)]


UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
"""Relative error of one rounding."""


def check(got: Any, case: Case, module: Any, args: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Compares with f64: eager's dtype, shape and order in memory, its numbers up to the error that the case allows."""
    eager = leaves(module(*args))
    # The f64 result is that of the rounded arguments and weights.
    wide = copy.deepcopy(module).double() if isinstance(module, torch.nn.Module) else module
    exact = leaves(wide(*(a.double() if a.is_floating_point() else a for a in args)))
    results = leaves(got)
    assert len(results) == len(eager)
    for result, reference, truth in zip(results, eager, exact, strict=True):
        assert result.dtype is reference.dtype
        assert result.shape == reference.shape
        assert lies_as(result, reference), (result.stride(), reference.stride())
        if not result.is_floating_point():
            # Compared with eager: a comparison of rounded numbers is exact, one of f64 numbers is another.
            assert torch.equal(result, reference)
            continue
        scale = truth.abs().max().item()
        # Roundings on the way are to the arguments' type; the last one is to the result's.
        units = UNIT[result.dtype] + (case.roundings - 1) * UNIT[dtype]
        allowed = (2 * units + 8 * UNIT[torch.float32] * math.sqrt(case.terms)) * scale
        error = (result.double() - truth).abs().max().item()
        eager_error = (reference.double() - truth).abs().max().item()
        assert error <= max(allowed, 1.25 * eager_error), (error, allowed, eager_error)


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_compiled(case: Case, dtype: torch.dtype) -> None:
    module = case.module(dtype)
    compiled = oxidiff.compile(module, options=oxidiff.CompileOptions(strict=True))
    with torch.inference_mode():
        for args in arguments(case, dtype):
            before = copy.deepcopy(args)
            check(compiled(*args), case, module, args, dtype)
            assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True)), "an argument was written"
    assert not oxidiff.report(compiled).fallbacks


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
@torch.no_grad()
def test_interpreted(case: Case, dtype: torch.dtype) -> None:
    module = case.module(dtype)
    capturer = Capturer(module)
    calls = list(arguments(case, dtype))
    graph, lowered = capturer.lowered(capturer.call(calls[0], {}), _native.GraphBuilder)
    lowered.builder.verify()
    for args in calls:
        call = capturer.call(args, {})
        point = graph.plan.read(call.sizes)
        assert point is not None
        assert graph.accepts(point) or capturer.extend(graph, call)
        inputs = [(call.numbers if a.is_number else call.tensors)[a.index] for a in lowered.arguments]
        weights = [
            as_stored(slot.fetch(module if isinstance(module, torch.nn.Module) else None)) for slot in lowered.weights
        ]
        outputs = lowered.builder.interpret(lowered.sizes(point), inputs, weights)
        build = builder(lowered.outputs, point, {}, range(len(call.tensors)))
        check(build(outputs, call.tensors), case, module, args, dtype)


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_case_calls_its_op(case: Case) -> None:
    """A case that does not reach its op tests something else."""
    if case.op in UNRECORDED:
        pytest.skip(UNRECORDED[case.op])
    capturer = Capturer(case.module(torch.float32))
    graph = capturer.capture(capturer.call(next(arguments(case, torch.float32)), {}))
    assert case.op in {str(node.op) for node in graph.nodes}


def test_every_op_has_a_case() -> None:
    assert len(OPS) > 80
    assert {c.op for c in CASES} == set(OPS)
    assert set(UNRECORDED) <= set(OPS)
