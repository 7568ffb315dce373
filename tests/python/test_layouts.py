"""Arguments that lie in memory otherwise than those that a program was made for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import assert_close, shallow
from oxidiff import testing


class Tokens(nn.Module):
    """A layer of a transformer: what it gives lies as its last layer makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, factor: float = 1.0) -> Any:
        return self.last(torch.nn.functional.gelu(self.first(self.norm(x)))) * factor


class Following(Tokens):
    """What it gives lies as what it is given, in eager."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Any:
        return x * 2 + 1, super().forward(x, factor)


class Asking(Tokens):
    """Another thing where a tensor has gaps in its rows, from some size on."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Any:
        y = super().forward(x, factor)
        return y + 1 if x.stride(2) > 9 else y


class Returning(Tokens):
    def forward(self, x: Tensor, factor: float = 1.0) -> Any:
        return x, x.transpose(1, 2), super().forward(x, factor)


def latents(batch: int, tokens: int, seed: int = 0) -> Tensor:
    """As pipelines of videos pack them: channels first in memory."""
    packed = torch.randn(batch, 8, tokens, generator=torch.Generator().manual_seed(seed))
    return packed.transpose(1, 2)


def rows(batch: int, tokens: int) -> Tensor:
    return latents(batch, tokens).contiguous()


@pytest.mark.parametrize("order", [(rows, latents), (latents, rows)])
@torch.no_grad()
def test_small_arguments_in_another_order_are_copied(order: tuple[Callable[..., Tensor], ...]) -> None:
    module = Tokens().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for make in order:
        for batch, tokens, factor in ((2, 12, 1.0), (1, 20, 0.5), (1, 12, 0.25), (3, 7, 2.0)):
            x = make(batch, tokens)
            kept = x.clone(memory_format=torch.preserve_format)
            result, expected = compiled(x, factor), module(x, factor)
            assert_close(result, expected)
            assert torch.equal(x, kept)
    report = oxidiff.report(compiled)
    assert (report.captures, report.programs) == (1, 1)


@pytest.mark.parametrize("cls", [Following, Asking, Returning])
@torch.no_grad()
def test_what_depends_on_the_order_is_as_in_eager(cls: type[Tokens]) -> None:
    module = cls().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for make in (rows, latents, rows):
        for batch, tokens in ((2, 8), (1, 20), (2, 9), (3, 12), (2, 40)):
            x = make(batch, tokens)
            result, expected = compiled(x), module(x)
            assert_close(result, expected)
            if cls is Returning:
                assert result[0] is x


@torch.no_grad()
def test_large_arguments_have_programs_of_their_own() -> None:
    module = nn.Sequential(nn.Linear(8, 4)).eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True, tune="off")
    for make in (rows, latents):
        x = make(1, 300_000)
        assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 2


@torch.no_grad()
def test_what_is_copied_is_copied_by_a_loaded_graph(tmp_path: Path) -> None:
    module = Tokens().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for make in (rows, latents):
        compiled(make(2, 12))
    oxidiff.save_graph(compiled, tmp_path / "graph")
    other = Tokens().eval()
    loaded: Any = oxidiff.compile(other, cache=False, strict=True)
    oxidiff.load_graph(loaded, tmp_path / "graph")
    for make in (latents, rows):
        assert_close(loaded(make(2, 12)), other(make(2, 12)))
    assert oxidiff.report(loaded).captures == 0


class Lying(nn.Module):
    """Computes something else of a tensor that lies otherwise in memory."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(x) + x.sum()


_LYING: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "contiguous": (lambda x: x * (2 if x.is_contiguous() else 3), False),
    "transposed": (lambda x: x * (2 if x.mT.is_contiguous() else 3), False),
    "stride": (lambda x: x * x.stride(0), False),
    "after a copy of a view": (lambda x: x.mT.contiguous().mT * x.stride(0), False),
    "strides": (lambda x: x * x[1:].stride()[-1], False),
    "strided": (lambda x: x.as_strided((2, 2), (1, 2)).sum() + torch.as_strided(x, (3,), (2,)).sum(), True),
    "offset": (lambda x: x * (x.storage_offset() + 1), True),
    "memory": (lambda x: x * x.untyped_storage().nbytes(), True),
}


def _parts_of(whole: Tensor) -> list[tuple[Tensor, bool]]:
    """Tensors of 6 rows of 4, and whether they have gaps."""
    return [
        (whole[2:8, :4].clone(), False), (whole[:, ::2][:6], True), (whole.view(-1)[5:29].view(6, 4), False),
        (whole[1:7, 2:6], True), (whole[:1, :4].expand(6, 4), True), (whole.t()[:6, 1:5], True),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("name", _LYING)
@torch.no_grad()
def test_where_forward_asks_how_arguments_lie_each_has_what_eager_makes_of_it(
    name: str, is_loaded: bool, tmp_path: Path
) -> None:
    ask, is_of_memory = _LYING[name]
    module = Lying(ask)
    compiled: Any = oxidiff.compile(module, cache=False)
    dense = torch.randn(6, 4)
    assert_close(compiled(dense), module(dense))
    if is_loaded:
        oxidiff.save_graph(compiled, tmp_path / "graph")
        compiled = oxidiff.compile(module, cache=False)
        oxidiff.load_graph(compiled, tmp_path / "graph")
    for x, has_gaps in _parts_of(torch.randn(10, 8)):
        before = oxidiff.report(compiled)
        assert_close(compiled(x), module(x))
        after = oxidiff.report(compiled)
        runs_eager = has_gaps or (is_of_memory and x.untyped_storage().nbytes() > x.nbytes)
        assert after.eager_calls - before.eager_calls == runs_eager, (x.shape, x.stride())
    reasons = [row["reason"] for row in oxidiff.report(compiled).fallbacks]
    assert any("how an argument lies" in reason for reason in reasons)


@torch.no_grad()
def test_parts_of_tensors_run_where_nothing_asks_how_they_lie() -> None:
    module = Tokens().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for x, _ in _parts_of(torch.randn(10, 16)):
        x = x.unsqueeze(-1).expand(-1, -1, 8)
        assert_close(compiled(x), module(x))


_OF_GRADIENTS: dict[str, Callable[[Tensor], bool]] = {
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: not x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is not None,
    "grad": lambda x: x.grad is not None,
}


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("name", _OF_GRADIENTS)
def test_where_forward_asks_for_gradients_of_arguments_each_has_what_eager_makes_of_it(name: str) -> None:
    ask = _OF_GRADIENTS[name]
    module = Lying(lambda x: x * (2 if ask(x) else 3))
    compiled: Any = oxidiff.compile(module, cache=False)
    leaf = torch.randn(6, 4, requires_grad=True)
    (leaf * leaf).sum().backward()  # type: ignore[no-untyped-call]
    for x in (torch.randn(6, 4), leaf, leaf * 2, torch.randn(6, 4)):
        with torch.no_grad():
            assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).eager_calls == 2


class Image(nn.Module):
    """An image, its sums and its pixels as tokens, with something between its layers."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        y = torch.nn.functional.silu(self.first(x))
        y = self.last(y if self.between is None else self.between(y))
        return y, y + 1, y.flatten(2).transpose(1, 2), {"sums": y.sum(1), "part": y[:, :2], "one": y[:, :1]}


def _of_columns(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, width, height).transpose(2, 3)


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@torch.no_grad()
def test_results_lie_as_those_of_eager(is_last: bool, is_staged: bool, is_loaded: bool, tmp_path: Path) -> None:
    """A user's ``view`` of them raises or not, and noise like them is drawn in the order of their memory."""
    # An op that runs eager.
    module = Image(lambda y: y.sort(1).values if is_staged else y).eval()
    if is_last:
        module = module.to(memory_format=torch.channels_last)
    compiled: Any = oxidiff.compile(module, cache=False)
    sizes = [(2, 8, 6), (1, 8, 8), (3, 5, 7), (1, 1, 9), (2, 4, 1)]
    makers = [torch.rand, lambda *s: torch.rand(s).contiguous(memory_format=torch.channels_last), _of_columns]
    for again in range(1 + is_loaded):
        for make in makers:
            for batch, height, width in sizes:
                x = make(batch, 3, height, width) if make is not _of_columns else make(batch, height, width)
                assert_close(compiled(x), module(x))
        if is_loaded and not again:
            oxidiff.save_graph(compiled, tmp_path / "graph")
            compiled = oxidiff.compile(module, cache=False)
            oxidiff.load_graph(compiled, tmp_path / "graph")


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_noise_between_parts_is_drawn_in_the_order_of_eager() -> None:
    module = (
        Image(lambda y: y + torch.randn_like(y) if y.sum() < 1e9 else y).eval().to(memory_format=torch.channels_last)
    )
    compiled: Any = oxidiff.compile(module, cache=False)
    for batch in (2, 1, 3):
        x = torch.randn(batch, 3, 6, 8)
        torch.manual_seed(0)
        expected = module(x)
        torch.manual_seed(0)
        assert_close(compiled(x), expected)
    assert oxidiff.report(compiled).captures > 1


class Patches(nn.Module):
    """Patches of one pixel put together: a permutation among dimensions of which some have one place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        y = self.layer(x.permute(0, 2, 3, 1).reshape(batch, height * width, channels))
        y = y.reshape(batch, height, width, 1, 1, 6).permute(0, 5, 1, 3, 2, 4)
        return y.reshape(batch, 6, height, width)


class Frames(nn.Module):
    """Frames among the samples and back, as the resampling of Wan's decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, frames, height, width = x.shape
        y = self.layer(x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width))
        return y.view(batch, frames, 6, height, width).permute(0, 2, 1, 3, 4)


@pytest.mark.parametrize("cls", [Patches, Frames])
@torch.no_grad()
def test_where_dimensions_of_one_place_lie_is_no_program_of_its_own(cls: Callable[[], nn.Module]) -> None:
    module = cls().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for batch, height, width in ((1, 8, 12), (1, 12, 8), (2, 8, 12), (1, 10, 10), (3, 9, 7)):
        x = torch.randn(batch, 4, *([1] if cls is Frames else []), height, width)
        assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 1


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_what_contiguous_gives_of_an_argument_with_gaps_is_another() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.contiguous(), x + 1

    compiled: Any = oxidiff.compile(Net(), cache=False)
    for x in (torch.randn(3, 4), torch.randn(3, 8)[:, ::2], torch.randn(3, 4)):
        result = compiled(x)[0]
        assert torch.equal(result, x)
        assert result.is_contiguous()
        assert (result is x) == x.is_contiguous()


class Attends(nn.Module):
    """Attention of PyTorch's, whose fast path in eager gives another order than its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]  # type: ignore[no-any-return]


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bcn,dc->bdn", x, self.weight)


@pytest.mark.parametrize(("cls", "shape"), [(Attends, (5, 8)), (Mixes, (4, 12))])
@torch.no_grad()
def test_views_of_results_work_where_their_order_is_not_known(cls: Any, shape: tuple[int, int]) -> None:
    module = cls().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for batch in (2, 1, 3):
        x = torch.randn(batch, *shape)
        torch.testing.assert_close(compiled(x).view(batch, -1), module(x).reshape(batch, -1), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_one_image_behind_an_attention_that_is_scaled() -> None:
    """The batch has a stride that says nothing, and keeps it where it is divided by a number: PyTorch takes one image for
    row-major then, two for channels-last. Where traces do not agree results are row-major."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm, self.conv = (
                nn.Linear(16, 16),
                nn.GroupNorm(2, 16),
                nn.Conv2d(16, 8, 3, padding=1),
            )

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.attention(x.flatten(2).transpose(1, 2))
            x = (tokens.transpose(1, 2).reshape(x.shape) + x) / 1.5
            return self.conv(self.norm(x))

    module = Block().eval()
    compiled: Any = oxidiff.compile(module, strict=True, cache=False)
    for batch in (1, 2, 1):
        x = torch.randn(batch, 16, 8, 8)
        result, expected = compiled(x), module(x)
        torch.testing.assert_close(result, expected)
        assert result.is_contiguous()
        assert expected.is_contiguous() is (batch == 1)


@pytest.mark.parametrize("name", ["sd15-unet", "sdxl-unet", "sd15-vae-decoder"])
@torch.no_grad()
def test_inside_a_unet_nothing_is_copied(name: str) -> None:
    """Latents are laid channels-last as they come, and small vectors of conditions are joined. Skip connections are written
    where they are read, tokens are pixels, and heads lie as products leave them."""
    compiled: Any = oxidiff.compile(shallow(name), strict=True)
    compiled(**testing.example_inputs(name))
    (variant,) = compiled.explain().variants
    places = [row["module"] for row in variant["costs"] if row["kernel"] == "copy"]
    assert places.count("conv_in") == 1 and set(places) <= {"conv_in", ""}
