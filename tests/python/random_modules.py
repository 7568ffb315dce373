"""Random small modules that compute with sizes as models of diffusers do, and random sequences of calls of them.

A module is a chain of steps, each a few lines that some model has: padding to a multiple, windows, position tables,
masks from lengths, branches that ask which side is longer. ``Chain(seed)`` is always the same module, and ``calls``
of it always the same calls.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C = 4
"""Channels of everything."""

Step = Callable[[Tensor, dict[str, Any], int, nn.Module], Tensor]
IMAGE: dict[str, tuple[Step, tuple[int, ...], str]] = {}
"""Steps from images to images: what they do, the constants they take, the arguments of the call they need."""
TOKENS: dict[str, tuple[Step, tuple[int, ...], str]] = {}
READS: dict[str, tuple[Step, tuple[int, ...], str]] = {}
"""Steps from tokens to tokens that read values of tensors."""


def image(*constants: int, needs: str = "") -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        IMAGE[step.__name__.strip("_")] = step, constants or (0,), needs
        return step

    return add


def tokens(*constants: int, needs: str = "") -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        TOKENS[step.__name__.strip("_")] = step, constants or (0,), needs
        return step

    return add


# -- images ----------------------------------------------------------------------------------------------------------------


@image(1, 2, 3)
def conv(x, given, k, layer):
    return F.conv2d(x, layer.kernel, layer.bias, stride=k, padding=1)


@image(2, 3)
def valid_conv(x, given, k, layer):
    return F.conv2d(x, layer.kernel, layer.bias, stride=k)


@image(2)
def downsample(x, given, k, layer):
    return F.conv2d(F.pad(x, (0, 1, 0, 1)), layer.kernel, layer.bias, stride=k)


@image(2, 3)
def pool_ceil(x, given, k, layer):
    return F.avg_pool2d(x, k, ceil_mode=True, count_include_pad=False)


@image(2, 3)
def pool_floor(x, given, k, layer):
    return F.avg_pool2d(x, k)


@image(2)
def max_pool(x, given, k, layer):
    return F.max_pool2d(x, 3, stride=k, padding=1, ceil_mode=True)


@image(2, 3)
def upsample(x, given, k, layer):
    return F.interpolate(x, scale_factor=float(k), mode="nearest")


@image(2)
def halve(x, given, k, layer):
    return F.interpolate(x, scale_factor=0.5, mode="nearest")


@image(0, 1)
def resize_half(x, given, k, layer):
    h, w = x.shape[-2:]
    return F.interpolate(x, size=(h // 2 + 1, w // 2 + 1), mode=("nearest", "bilinear")[k])


@image(3, 5)
def resize_ratio(x, given, k, layer):
    return F.interpolate(x, size=(math.ceil(x.shape[2] * k / 4), x.shape[3]), mode="bilinear", align_corners=False)


@image(0, 1)
def down_and_up(x, given, k, layer):
    small = F.conv2d(x, layer.kernel, layer.bias, stride=2, padding=1)
    if k:
        return F.interpolate(small, size=x.shape[-2:], mode="nearest") + x
    up = F.interpolate(small, scale_factor=2.0, mode="nearest")
    return up[:, :, : x.shape[2], : x.shape[3]] + x


@image()
def up_if_odd(x, given, k, layer):
    # UNet2DConditionModel: sizes that are no multiple of what the net halves are passed on.
    small = F.avg_pool2d(x, 2, ceil_mode=True)
    if any(side % 2 for side in x.shape[-2:]):
        return x + F.interpolate(small, size=x.shape[2:], mode="nearest")
    return x + F.interpolate(small, scale_factor=2.0, mode="nearest")


@image(2, 3)
def unshuffle(x, given, k, layer):
    h, w = x.shape[-2:]
    y = F.pixel_unshuffle(F.pad(x, (0, -w % k, 0, -h % k)), k)
    return y.unflatten(1, (C, k * k)).mean(2)


@image(2)
def shuffle(x, given, k, layer):
    return F.pixel_shuffle(x.repeat(1, k * k, 1, 1), k)


@image(2, 3, 4, 8)
def pad_multiple(x, given, k, layer):
    h, w = x.shape[-2:]
    return F.pad(x, (0, (k - w % k) % k, 0, (k - h % k) % k), mode="replicate")


@image(2, 4)
def pad_multiple_if(x, given, k, layer):
    h, w = x.shape[-2:]
    if h % k or w % k:
        x = F.pad(x, (0, -w % k, 0, -h % k))
    return x


@image()
def pad_square(x, given, k, layer):
    side = max(x.shape[-2:])
    return F.pad(x, (0, side - x.shape[3], 0, side - x.shape[2]))


@image()
def crop_square(x, given, k, layer):
    side = min(x.shape[-2:])
    top, left = (x.shape[2] - side) // 2, (x.shape[3] - side) // 2
    return x[:, :, top : top + side, left : left + side]


@image(16, 40)
def crop_most(x, given, k, layer):
    return x[:, :, : min(x.shape[2], k), : min(x.shape[3], k)]


@image(2, 8)
def crop_multiple(x, given, k, layer):
    h, w = x.shape[-2:]
    return x[:, :, : h // k * k or h, : w // k * k or w]


@image(2, 4, 7)
def windows(x, given, k, layer):
    b, c, h, w = x.shape
    y = F.pad(x, (0, -w % k, 0, -h % k))
    rows, columns = y.shape[-2:]
    y = torch.roll(y, shifts=(-(k // 2), -(k // 2)), dims=(2, 3))
    y = y.view(b, c, rows // k, k, columns // k, k).permute(0, 2, 4, 3, 5, 1).reshape(-1, k * k, c)
    y = F.scaled_dot_product_attention(y, y, y)
    y = y.view(b, rows // k, columns // k, k, k, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, rows, columns)
    y = torch.roll(y, shifts=(k // 2, k // 2), dims=(2, 3))
    return y[:, :, :h, :w] + x


@image(4, 6)
def windows_if_larger(x, given, k, layer):
    # Swin: no window is larger than the image, and none is shifted then.
    b, c, h, w = x.shape
    k = min(k, h, w)
    y = F.pad(x, (0, -w % k, 0, -h % k))
    rows, columns = y.shape[-2:]
    y = y.view(b, c, rows // k, k, columns // k, k).transpose(3, 4)
    y = (y - y.mean((-1, -2), keepdim=True)).transpose(3, 4).reshape(b, c, rows, columns)
    return y[:, :, :h, :w]


@image()
def if_landscape(x, given, k, layer):
    return x.transpose(2, 3) * 2 if x.shape[2] > x.shape[3] else x


@image(2, 3)
def if_wide(x, given, k, layer):
    return x * 2 if x.shape[3] > k * x.shape[2] else x


@image(64, 400, 1500)
def if_many(x, given, k, layer):
    return F.avg_pool2d(x, 2, ceil_mode=True) if x.shape[2] * x.shape[3] > k else x


@image(8, 30)
def if_large(x, given, k, layer):
    return x * 2 if x.shape[2] > k or x.shape[3] > k else x


@image(8, 30)
def if_both_large(x, given, k, layer):
    return x * 2 if min(x.shape[2:]) > k else x


@image(2, 4)
def if_multiple(x, given, k, layer):
    return x + 1 if x.shape[2] % k else x * 2


@image()
def if_square(x, given, k, layer):
    return x.transpose(2, 3) if x.shape[2] == x.shape[3] else x


@image()
def if_batch(x, given, k, layer):
    return x * 2 if x.shape[0] > 1 else x


@image()
def grid(x, given, k, layer):
    h, w = x.shape[-2:]
    y = torch.linspace(-1, 1, h, device=x.device)
    z = torch.linspace(-1, 1, w, device=x.device)
    ys, xs = torch.meshgrid(y, z, indexing="ij")
    return x + ys * xs


@image(16, 32)
def rotary_grid(x, given, k, layer):
    h, w = x.shape[-2:]
    rows = torch.arange(h, dtype=torch.float32) / (h / k)
    columns = torch.arange(w, dtype=torch.float32) / (w / k)
    return x * torch.cos(rows)[:, None] + columns.sin()


@image(8, 50)
def table(x, given, k, layer):
    # PatchEmbed: a part of the middle of a table.
    h, w = x.shape[-2:]
    if h > 160 or w > 160:
        raise ValueError("larger than the table")
    top, left = (160 - h) // 2, (160 - w) // 2
    return x + layer.table[top : top + h, left : left + w]


@image(7, 16)
def resized_table(x, given, k, layer):
    side = layer.table[:k, :k][None, None]
    if tuple(x.shape[-2:]) != (k, k):
        side = F.interpolate(side, size=x.shape[-2:], mode="bilinear", align_corners=False)
    return x + side


@image()
def by_area(x, given, k, layer):
    return x * math.sqrt(x.shape[2] * x.shape[3]) / (x.shape[2] + x.shape[3])


@image(64)
def by_base(x, given, k, layer):
    return x * (k / x.shape[2]) + math.log(x.shape[3] + 1, k)


@image()
def by_numel(x, given, k, layer):
    return x / x.numel() + x[0].numel()


@image(2, 3)
def halves(x, given, k, layer):
    first, *rest = x.chunk(k, dim=3)
    return torch.cat([*rest, first * 2], dim=3)


@image(3, 5)
def split_step(x, given, k, layer):
    return torch.cat([part + i for i, part in enumerate(x.split(k, dim=2))], dim=2)


@image(2, 3)
def tensor_split(x, given, k, layer):
    parts = x.tensor_split(k, dim=2)
    return torch.cat(parts[::-1], dim=2)


@image(2, 3)
def strided(x, given, k, layer):
    return x[..., ::k, :] * 2


@image(2, 3)
def offset_strided(x, given, k, layer):
    return x[:, :, 1::k, :] * 2 if x.shape[2] > 1 else x


@image(2, 3)
def last(x, given, k, layer):
    return x[:, :, -k:] + x.mean((2, 3), keepdim=True)


@image(1, 2)
def without_edges(x, given, k, layer):
    return x[:, :, k:-k, :] if x.shape[2] > 2 * k else x


@image()
def roll_half(x, given, k, layer):
    return x.roll((x.shape[2] // 2, x.shape[3] // 2), (2, 3)) + x


@image()
def cumulated(x, given, k, layer):
    return x.cumsum(2) / torch.arange(1, x.shape[2] + 1)[:, None]


@image(2, 3)
def repeated(x, given, k, layer):
    return x.repeat_interleave(k, dim=2)


@image()
def tile_to_square(x, given, k, layer):
    return x.repeat(1, 1, 1, math.ceil(x.shape[2] / x.shape[3]))[..., : max(x.shape[2], 1)]


@image(2, 4)
def folded(x, given, k, layer):
    # As many rows as there are whole groups of k.
    n = x.shape[2] // k
    return x[:, :, : n * k].unflatten(2, (n, k)).mean(3) if n else x


@image(2, 3)
def folded_ceil(x, given, k, layer):
    n = math.ceil(x.shape[3] / k)
    y = F.pad(x, (0, n * k - x.shape[3]))
    return y.unflatten(3, (n, k)).sum(4)


@image(2, 3)
def batch_chunks(x, given, k, layer):
    # Guidance: the batch is made of as many parts.
    if x.shape[0] % k:
        return x
    parts = x.chunk(k)
    return torch.cat([parts[0] + 2 * (part - parts[0]) for part in parts])


@image()
def over_batch(x, given, k, layer):
    return x - x.mean(0, keepdim=True) + torch.arange(x.shape[0])[:, None, None, None]


@image(2)
def group_std(x, given, k, layer):
    group = min(x.shape[0], k)
    if x.shape[0] % group:
        return x
    y = x.view(group, -1, *x.shape[1:])
    y = (y - y.mean(0)).square().mean(0).add(1e-4).sqrt().mean((1, 2, 3), keepdim=True)
    return x + y.repeat(group, 1, 1, 1)


@image(3)
def tiles(x, given, k, layer):
    # A decoder of large images: overlapping tiles, one after the other.
    rows = []
    for i in range(0, x.shape[2], 16):
        rows.append(x[:, :, i : i + 20] * (i + 1))
    return torch.cat(rows, dim=2)


@image()
def attention(x, given, k, layer):
    b, c, h, w = x.shape
    y = x.view(b, c, h * w).transpose(1, 2)
    y = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])[:, 0]
    return x + y.transpose(1, 2).reshape(b, c, h, w)


@image()
def rows_as_batch(x, given, k, layer):
    b, c, h, w = x.shape
    y = x.permute(0, 2, 3, 1).reshape(b * h, w, c)
    y = F.scaled_dot_product_attention(y, y, y)
    return y.view(b, h, w, c).permute(0, 3, 1, 2)


@image()
def tokens_and_back(x, given, k, layer):
    b, c, h, w = x.shape
    y = F.linear(x.flatten(2).transpose(1, 2), layer.matrix)
    side = int(y.shape[1] ** 0.5)
    if side * side == y.shape[1]:
        return y.transpose(1, 2).reshape(b, c, side, side)
    return y.transpose(1, 2).reshape(b, c, h, w)


@image(needs="scale")
def scaled(x, given, k, layer):
    return x * given["scale"]


@image(needs="count")
def first_rows(x, given, k, layer):
    return x[:, :, : given["count"]]


@image(needs="count")
def last_rows(x, given, k, layer):
    return x[:, :, -given["count"] :] * 2


@image(needs="count")
def by_count(x, given, k, layer):
    return x * given["count"] + given["count"] // 2


@image(3, 8, needs="count")
def if_count(x, given, k, layer):
    return x * 2 if given["count"] > k else x


@image(2, 3, needs="count")
def if_count_multiple(x, given, k, layer):
    return x * 2 if given["count"] % k else x


@image(needs="count")
def zeros_below(x, given, k, layer):
    rows = torch.arange(x.shape[2])
    return x * (rows < given["count"])[:, None]


@image(6, needs="count")
def most_rows(x, given, k, layer):
    return x[:, :, : max(given["count"], k)]


@image(needs="size")
def to_size(x, given, k, layer):
    return F.interpolate(x, size=given["size"], mode="nearest")


@image(needs="size")
def to_half_size(x, given, k, layer):
    h, w = given["size"]
    return F.interpolate(x, size=(h // 2 + 1, math.ceil(w / 2)), mode="bilinear")


@image(needs="size")
def crop_to(x, given, k, layer):
    h, w = given["size"]
    return x[:, :, : min(h, x.shape[2]), : min(w, x.shape[3])]


@image(needs="size")
def longer(x, given, k, layer):
    h, w = given["size"]
    return x + layer.table[max(h, w) - 1, min(h, w) - 1]


@image(needs="size")
def if_size_is(x, given, k, layer):
    return x if tuple(x.shape[-2:]) == given["size"] else F.interpolate(x, size=given["size"], mode="nearest")


@image(needs="size")
def aspect(x, given, k, layer):
    h, w = given["size"]
    return x * (h / w) + h * w


@image(needs="parts")
def beside_parts(x, given, k, layer):
    for part in given["parts"]:
        x = x + part.mean((1, 2))[:, None, None, None]
    return x


@image(needs="text")
def with_text(x, given, k, layer):
    return x + given["text"].mean(1)[:, :, None, None]


# -- tokens ----------------------------------------------------------------------------------------------------------------


@tokens()
def linear(x, given, k, layer):
    return F.linear(x, layer.matrix)


@tokens()
def self_attention(x, given, k, layer):
    return x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


@tokens(1, 2, 3)
def conv1d(x, given, k, layer):
    return F.conv1d(x.transpose(1, 2), layer.kernel[..., 0], stride=k, padding=1).transpose(1, 2)


@tokens()
def first_half(x, given, k, layer):
    return x[:, : x.shape[1] // 2 + 1]


@tokens()
def second_half(x, given, k, layer):
    return x[:, x.shape[1] // 2 :]


@tokens(3, 10)
def last_tokens(x, given, k, layer):
    return x[:, -k:]


@tokens(4, 64)
def first_tokens(x, given, k, layer):
    return x[:, :k]


@tokens(2, 8, 32)
def pad_to_multiple(x, given, k, layer):
    more = -x.shape[1] % k
    return torch.cat([x, x[:, -1:].repeat(1, more, 1)], dim=1) if more else x


@tokens(8, 32)
def fpad_to_multiple(x, given, k, layer):
    return F.pad(x, (0, 0, 0, -x.shape[1] % k))


@tokens(20, 50)
def pad_to_least(x, given, k, layer):
    return F.pad(x, (0, 0, 0, max(k - x.shape[1], 0)))


@tokens(20, 50)
def cut_or_pad(x, given, k, layer):
    x = x[:, :k]
    return torch.cat([x, x.new_zeros(x.shape[0], k - x.shape[1], C)], dim=1)


@tokens()
def class_token(x, given, k, layer):
    return torch.cat([layer.bias.expand(x.shape[0], 1, -1), x], dim=1)


@tokens()
def drop_first(x, given, k, layer):
    return x[:, 1:] if x.shape[1] > 1 else x


@tokens()
def largest_square(x, given, k, layer):
    side = int(x.shape[1] ** 0.5)
    y = x[:, : side * side].reshape(x.shape[0], side, side, C)
    return y.transpose(1, 2).flatten(1, 2)


@tokens(2, 3)
def interleaved(x, given, k, layer):
    return torch.cat([x[:, i::k] for i in range(k)], dim=1)


@tokens(2, 4)
def one_hot(x, given, k, layer):
    return x + F.one_hot(torch.arange(x.shape[1]) % k, C)


@tokens()
def log_scale(x, given, k, layer):
    return x * math.log(x.shape[1] + 1) / math.sqrt(x.shape[1])


@tokens(30)
def log_scale_if_long(x, given, k, layer):
    return x * (math.log(x.shape[1], k) if x.shape[1] > k else 1.0)


@tokens(2, 3)
def mask_part(x, given, k, layer):
    n = x.shape[1]
    return x * (torch.arange(n) < math.ceil(n / k))[:, None]


@tokens()
def causal(x, given, k, layer):
    n = x.shape[1]
    mask = torch.full((n, n), float("-inf")).triu(1)
    return ((x @ x.transpose(1, 2)) * 0.1 + mask).softmax(-1) @ x


@tokens(4, 9)
def local(x, given, k, layer):
    n = x.shape[1]
    at = torch.arange(n)
    mask = (at[:, None] - at[None]).abs() <= k
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask[None].expand(x.shape[0], n, n))


@tokens()
def flipped(x, given, k, layer):
    return x.flip(1) + x.cumsum(1) / x.shape[1]


@tokens(2, 3)
def every(x, given, k, layer):
    return x[:, torch.arange(0, x.shape[1], k)]


@tokens(2, 4)
def grouped(x, given, k, layer):
    b, n, c = x.shape
    groups = (n + k - 1) // k
    y = F.pad(x, (0, 0, 0, groups * k - n)).view(b, groups, k, c)
    return (y - y.mean(2, keepdim=True)).reshape(b, -1, c)[:, :n]


@tokens(2, 4)
def merged_if_even(x, given, k, layer):
    b, n, c = x.shape
    return x.view(b, n // k, k, c).mean(2) if n % k == 0 else x


@tokens(2, 3)
def chunked(x, given, k, layer):
    return torch.cat([part.mean(1, keepdim=True) for part in x.chunk(k, dim=1)], dim=1)


@tokens(2, 3)
def unbound(x, given, k, layer):
    first, second = x.split([x.shape[1] // k, x.shape[1] - x.shape[1] // k], dim=1)
    return torch.cat([second, first], dim=1)


@tokens(2, 3)
def repeat_tokens(x, given, k, layer):
    return x.repeat_interleave(k, dim=1) + x.repeat(1, k, 1)


@tokens()
def sinusoid(x, given, k, layer):
    at = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
    return x + torch.sin(at / 10000 ** (torch.arange(C) / C))


@tokens(128, 200)
def learned_positions(x, given, k, layer):
    return x + layer.table[: x.shape[1], :C]


@tokens(50)
def positions_or_resized(x, given, k, layer):
    n = x.shape[1]
    rows = layer.table[:k, :C]
    if n != k:
        rows = F.interpolate(rows.T[None], size=n, mode="linear")[0].T
    return x + rows


@tokens(10, 50)
def if_long(x, given, k, layer):
    return x * 2 if x.shape[1] > k else x


@tokens(2, 3)
def if_odd(x, given, k, layer):
    return x * 2 if x.shape[1] % k else x


@tokens(50, 200)
def if_all_long(x, given, k, layer):
    return x * 2 if x.shape[0] * x.shape[1] > k else x


@tokens()
def relative(x, given, k, layer):
    n = x.shape[1]
    at = torch.arange(n)
    distance = (at[None] - at[:, None]).clamp(-8, 8) + 8
    return (x @ x.transpose(1, 2) * 0.1 + layer.table[0, distance]).softmax(-1) @ x


@tokens()
def bucketed(x, given, k, layer):
    n = x.shape[1]
    return x + layer.table[torch.arange(n) // max(n // 4, 1), :C]


@tokens(2)
def half_batch(x, given, k, layer):
    b = x.shape[0]
    return torch.cat([x[: b // 2], x[b // 2 :] * 2])


@tokens()
def one_sequence(x, given, k, layer):
    b, n, c = x.shape
    y = x.reshape(1, b * n, c)
    y = y - y.mean(1, keepdim=True)
    return y.view(b, n, c) + torch.repeat_interleave(torch.arange(b), n).view(b, n, 1)


@tokens(needs="text")
def joint(x, given, k, layer):
    y = torch.cat([given["text"], x], dim=1)
    y = F.scaled_dot_product_attention(y, y, y)
    return y[:, given["text"].shape[1] :]


@tokens(needs="text")
def joined(x, given, k, layer):
    return torch.cat([x, given["text"]], dim=1)


@tokens(needs="text")
def cross(x, given, k, layer):
    return x + F.scaled_dot_product_attention(x, given["text"], given["text"])


@tokens(needs="text")
def longer_of_two(x, given, k, layer):
    text = given["text"]
    n = max(x.shape[1], text.shape[1])
    return F.pad(x, (0, 0, 0, n - x.shape[1])) + F.pad(text, (0, 0, 0, n - text.shape[1]))


@tokens(needs="text")
def if_text_is_longer(x, given, k, layer):
    return x * 2 if given["text"].shape[1] > x.shape[1] else x


@tokens(needs="text")
def shorter_of_two(x, given, k, layer):
    n = min(x.shape[1], given["text"].shape[1])
    return x[:, :n] + given["text"][:, :n]


@tokens(needs="text")
def position_behind_text(x, given, k, layer):
    s, n = given["text"].shape[1], x.shape[1]
    at = torch.cat([torch.arange(s), torch.arange(n) + s]) / (s + n)
    return x + at[s:, None]


@tokens(needs="text")
def text_of_batch(x, given, k, layer):
    text = given["text"]
    repeats = x.shape[0] // text.shape[0]
    return x + text.repeat_interleave(repeats, dim=0).mean(1, keepdim=True)


@tokens(needs="parts")
def with_parts(x, given, k, layer):
    return torch.cat([x, *given["parts"]], dim=1)


@tokens(needs="parts")
def longest_part(x, given, k, layer):
    n = max(part.shape[1] for part in given["parts"])
    return x + sum(F.pad(part, (0, 0, 0, n - part.shape[1])) for part in given["parts"]).mean(1, keepdim=True)


@tokens(needs="parts")
def offsets_of_parts(x, given, k, layer):
    lengths = [part.shape[1] for part in given["parts"]]
    ends = torch.tensor(lengths).cumsum(0)
    return x + ends.sum() + (torch.arange(x.shape[1])[:, None] >= ends).sum(1)[:, None]


@tokens(needs="parts")
def padded_parts(x, given, k, layer):
    # Z-Image: each to a multiple, all in one sequence.
    for part in given["parts"]:
        x = torch.cat([x, F.pad(part, (0, 0, 0, -part.shape[1] % 8))], dim=1)
    return x


@tokens(needs="count")
def first_count(x, given, k, layer):
    return x[:, : given["count"]]


@tokens(needs="count")
def last_count(x, given, k, layer):
    return x[:, -given["count"] :]


@tokens(needs="count")
def repeat_count(x, given, k, layer):
    return x.repeat(1, given["count"], 1)[:, : x.shape[1] + given["count"]]


@tokens(needs="count")
def frames(x, given, k, layer):
    b, n, c = x.shape
    f = given["count"]
    if n % f:
        return x
    return x.view(b, f, n // f, c).mean(1)


@tokens(needs="count")
def masked_count(x, given, k, layer):
    mask = torch.arange(x.shape[1])[None] < torch.tensor([given["count"]] * x.shape[0])[:, None]
    return x.masked_fill(~mask[..., None], 0.5)


@tokens(needs="count")
def windows_of_count(x, given, k, layer):
    f = given["count"]
    y = F.pad(x, (0, 0, 0, -x.shape[1] % f))
    return y.unflatten(1, (-1, f)).mean(2)


@tokens(needs="size")
def grid_of_size(x, given, k, layer):
    # Two-dimensional places, as many as the product of two ints.
    h, w = given["size"]
    rows = torch.arange(h)[:, None].expand(h, w).flatten()
    columns = torch.arange(w)[None].expand(h, w).flatten()
    n = min(h * w, x.shape[1])
    return x[:, :n] + (rows * 0.5 + columns)[:n, None]


@tokens(needs="size")
def by_size(x, given, k, layer):
    h, w = given["size"]
    return x * h / (w + 1)


@tokens(needs="lengths")
def masked(x, given, k, layer):
    mask = torch.arange(x.shape[1])[None] < given["lengths"][:, None]
    return x * mask[..., None]


@tokens(needs="scale")
def times(x, given, k, layer):
    return x * given["scale"] + (1 - given["scale"])


@tokens(needs="lengths")
def by_first_length(x, given, k, layer):
    return x[:, : given["lengths"].tolist()[0]]


@tokens(needs="lengths")
def up_to_longest(x, given, k, layer):
    return x[:, : int(given["lengths"].max().item())]


# -- tokens, of which the values of a tensor say how many ---------------------------------------------------------------


def reads(step: Step) -> Step:
    """A step that reads how long each sample is, or what that says about every token."""
    READS[step.__name__.strip("_")] = step, (0,), "lengths"
    return step


def counted(x: Tensor, given: dict[str, Any]) -> Tensor:
    """Which tokens of each sample count."""
    return torch.arange(x.shape[1])[None] < given["lengths"][: x.shape[0], None]


def spread(x: Tensor, given: dict[str, Any]) -> Tensor:
    """The same, not side by side."""
    return torch.arange(x.shape[1])[None] % (given["lengths"][: x.shape[0], None] % 5 + 1) == 0


@reads
def counted_first(x, given, k, layer):
    rows = [torch.cat([row[which], row[~which] * 0.5]) for row, which in zip(x, counted(x, given), strict=False)]
    return torch.stack(rows)


@reads
def scattered_first(x, given, k, layer):
    rows = [torch.cat([row[~which], row[which]]) for row, which in zip(x, spread(x, given), strict=False)]
    return torch.stack(rows) @ layer.matrix


@reads
def packed(x, given, k, layer):
    """All samples in one row."""
    return x[counted(x, given)][None] + layer.bias


@reads
def to_the_longest(x, given, k, layer):
    mask = counted(x, given)
    longest = mask.sum(dim=1).max().item()
    rows = [x[i, torch.nonzero(mask[i]).flatten()] for i in range(x.shape[0])]
    return torch.stack([F.pad(row, (0, 0, 0, longest - row.shape[0])) for row in rows])


@reads
def attended(x, given, k, layer):
    out = []
    for i in range(x.shape[0]):
        places = torch.nonzero(spread(x, given)[i][None].flatten(), as_tuple=False).flatten()
        key = x[i : i + 1, places]
        out.append(F.scaled_dot_product_attention(x[i : i + 1] @ layer.matrix, key, key))
    return torch.cat(out) + x


@reads
def unless_all(x, given, k, layer):
    mask = counted(x, given)
    return x * 2 if mask.all() else x.masked_fill(~mask[..., None], 0.25)


@reads
def if_equal(x, given, k, layer):
    return x @ layer.matrix if torch.equal(given["lengths"], given["lengths"].flip(0)) else x + layer.bias


@reads
def by_share(x, given, k, layer):
    share = counted(x, given).float().mean().item()
    return x * share if share > 0.4 else x - share


@reads
def positions(x, given, k, layer):
    lengths = counted(x, given).sum(dim=1).tolist()
    table = torch.zeros(x.shape[0], max(lengths) + 1, C)
    for i, length in enumerate(lengths):
        table[i, :length] = torch.arange(length)[:, None] / 16
        table[i, length:] = length / 16
    return x[:, : max(lengths)] + table[:, : x.shape[1]][:, : max(lengths)]


@reads
def by_roots(x, given, k, layer):
    """Floats that follow from sizes, and from what is read, by more than sums and products."""
    longest = counted(x, given).sum(dim=1).max().item()
    return x * (64 / (x.shape[1] + 3)) ** 0.5 + (longest * x.shape[0]) ** -0.25


@reads
def a_part(x, given, k, layer):
    length = int(given["lengths"][0])
    return x[:, : max(1, length // 2)] if length % 2 else x[:, -max(1, length // 3) :]


# -- modules ---------------------------------------------------------------------------------------------------------------


TABLES = {"image": IMAGE, "tokens": TOKENS, "reads": READS}


class Layer(nn.Module):
    """One step with its constant and weights."""

    def __init__(self, kind: str, name: str, k: int, seed: int) -> None:
        super().__init__()
        self.kind, self.name, self.k = kind, name, k
        made = torch.Generator().manual_seed(seed)
        self.kernel = nn.Parameter(torch.randn(C, C, 3, 3, generator=made) / 6)
        self.matrix = nn.Parameter(torch.randn(C, C, generator=made) / 2)
        self.bias = nn.Parameter(torch.randn(C, generator=made))
        self.table = nn.Parameter(torch.randn(160, 160, generator=made))

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        step, _, _ = TABLES[self.kind][self.name]
        return step(x, given, self.k, self)


class Chain(nn.Module):
    """Steps one after the other."""

    def __init__(self, steps: list[tuple[str, str, int]], wraps: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*step, seed) for seed, step in enumerate(steps))
        self.steps = steps
        self.wraps = wraps

    def forward(self, x: Tensor, **given: Any) -> Any:
        if "inner" in given:
            given = {**given, **given["inner"]}
        for layer in self.layers:
            if x.dim() == 4 and layer.kind != "image":
                x = x.flatten(2).transpose(1, 2)
            x = layer(x, given)
        if self.wraps == "dict":
            return {"sample": x, "sizes": tuple(x.shape), "rows": x.shape[1] // 2}
        if self.wraps == "list":
            return [part * 2 for part in x.unbind(0)] if x.shape[0] < 4 else [x]
        return x


def random_chain(draw: random.Random) -> Chain:
    kind = draw.choice(("image", "tokens", "both"))
    steps: list[tuple[str, str, int]] = []
    for pick, table in (("image", IMAGE), ("tokens", TOKENS)):
        if kind in (pick, "both"):
            for _ in range(draw.choice((1, 1, 2, 2, 3, 4) if kind != "both" else (1, 1, 2))):
                name = draw.choice(sorted(table))
                steps.append((pick, name, draw.choice(table[name][1])))
    return Chain(steps, draw.choice(("", "", "", "", "dict", "list")))


def reading_chain(draw: random.Random) -> Chain:
    """Tokens, and steps among theirs that read values of tensors."""
    steps: list[tuple[str, str, int]] = []
    for _ in range(draw.choice((0, 0, 1, 2))):
        name = draw.choice(sorted(TOKENS))
        steps.append(("tokens", name, draw.choice(TOKENS[name][1])))
    for _ in range(draw.choice((1, 1, 2))):
        steps.insert(draw.randrange(len(steps) + 1), ("reads", draw.choice(sorted(READS)), 0))
    return Chain(steps, draw.choice(("", "", "", "dict")))


def needs_of(chain: Chain) -> set[str]:
    found = {TABLES[kind][name][2] for kind, name, _ in chain.steps}
    return found - {""}


SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 17, 20, 23, 24, 25, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 72)
LENGTHS = (*SIDES, 77, 96, 100, 127, 128, 129, 144)


def near(draw: random.Random, before: int, pool: tuple[int, ...]) -> int:
    kind = draw.random()
    if kind < 0.25:
        return before
    if kind < 0.4:
        return max(1, before + draw.choice((-1, 1)))
    if kind < 0.5:
        return max(1, before * 2 if before < 40 else before // 2)
    return draw.choice(pool)


def sizes(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """What sizes the calls have."""
    at: dict[str, int] = {
        "b": draw.choice((1, 2, 2, 3)), "h": draw.choice(SIDES), "w": draw.choice(SIDES), "n": draw.choice(LENGTHS),
        "s": draw.choice(LENGTHS), "p": draw.choice(LENGTHS), "q": draw.choice(LENGTHS), "count": draw.randrange(1, 20),
        "rows": draw.choice(SIDES), "columns": draw.choice(SIDES),
    }  # fmt: skip
    if draw.random() < 0.4:
        at["w"] = at["h"]
    whole = draw.random() < 0.4
    for _ in range(count):
        if whole:
            at["rows"], at["columns"] = at["h"], at["w"]
        yield {**at, "seed": draw.randrange(1 << 30), "scale": draw.choice((0.0, 1.0, 0.5, 1.7, -2.25, 7.5))}
        for name, pool in (("h", SIDES), ("w", SIDES), ("n", LENGTHS), ("s", LENGTHS), ("p", LENGTHS), ("q", LENGTHS)):
            at[name] = near(draw, at[name], pool)
        if draw.random() < 0.2:
            at["h"], at["w"] = at["w"], at["h"]
        elif draw.random() < 0.2:
            at["w"] = at["h"]
        at["b"] = draw.choice((at["b"], 1, 2, 3, 4, 6))
        at["count"] = near(draw, at["count"], tuple(range(1, 20)))
        at["rows"], at["columns"] = near(draw, at["rows"], SIDES), near(draw, at["columns"], SIDES)


def arguments(chain: Chain, at: dict[str, Any], nested: bool = False) -> dict[str, Any]:
    made = torch.Generator().manual_seed(at["seed"])
    b = at["b"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    given: dict[str, Any] = {}
    given["x"] = normal(b, C, at["h"], at["w"]) if chain.steps[0][0] == "image" else normal(b, at["n"], C)
    needs = needs_of(chain)
    if "text" in needs:
        given["text"] = normal(b, at["s"], C)
    if "parts" in needs:
        given["parts"] = [normal(b, at["p"], C), normal(b, at["q"], C)]
    if "count" in needs:
        given["count"] = at["count"]
    if "size" in needs:
        given["size"] = (at["rows"], at["columns"])
    if "scale" in needs:
        given["scale"] = at["scale"]
    if "lengths" in needs:
        given["lengths"] = torch.randint(1, at["n"] + 1, (b,), generator=made)
    if nested:
        x = given.pop("x")
        given = {"x": x, "inner": given}
    return given
