"""Objects that are passed to a module: caches of keys and values, mostly, which pipelines keep between steps."""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import Tensor, nn

import oxidiff
from nets import assert_close
from oxidiff import testing
from oxidiff.capture import objects
from small_pipes import drawing, network, random
from small_pipes import tested_net as net_of
from small_pipes import tested_vae as vae_of


@pytest.fixture(autouse=True)
def _is_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objects.KEEPING, LIBRARY.__name__, ())


LIBRARY = sys.modules.setdefault("diffusers.models.kept", types.ModuleType("diffusers.models.kept"))


def of_diffusers(kind: type) -> Any:
    """Has a class stand among diffusers', of which objects are taken apart."""
    kind.__module__ = LIBRARY.__name__
    setattr(LIBRARY, kind.__name__, kind)
    return kind


@of_diffusers
class Layer:
    """What one layer keeps."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.all: list[Tensor] = []
        self.mode: str | None = None
        self.count = 0

    def store(self, keys: Tensor) -> None:
        self.first = keys
        self.all.append(keys * 2)
        self.count += 1


@of_diffusers
class Cache:
    """What all layers keep."""

    def __init__(self, count: int = 2, mode: str | None = None) -> None:
        self.layers = [Layer() for _ in range(count)]
        self.set_mode(mode)

    def __getitem__(self, index: int) -> Layer:
        return self.layers[index]

    def set_mode(self, mode: str | None) -> None:
        for layer in self.layers:
            layer.mode = mode


class Keeping(nn.Module):
    """A layer or two, each of which writes its keys into a cache or reads them there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            kept = None if cache is None else cache[i]
            if kept is not None and kept.mode == "write":
                kept.store(y)
            elif kept is not None and kept.mode == "read":
                y = torch.cat([kept.first, *kept.all, y], 1)[:, -x.shape[1] :] + kept.first.mean() * kept.count
            x = torch.relu(y) + x
        return x


def steps(module: Any, length: int) -> tuple[list[Tensor], Cache]:
    """A call that writes and two that read, of another length."""
    x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length))
    cache = Cache(mode="write")
    first = module(x, cache)
    cache.set_mode("read")
    return [first, module(x[:, :3], cache), module(2 * x, cache)], cache


def assert_steps_equal(compiled: Any, module: nn.Module, length: int) -> None:
    results, cache = steps(compiled, length)
    expected, filled = steps(module, length)
    assert_close(results, expected)
    for layer, other in zip(cache.layers, filled.layers, strict=True):
        assert list(vars(layer)) == list(vars(other))
        assert_close((layer.first, layer.all), (other.first, other.all))
        assert (layer.count, layer.mode) == (other.count, other.mode) == (1, "read")


@torch.no_grad()
def test_caches_are_written_and_read_at_any_size() -> None:
    module = Keeping()
    compiled = oxidiff.compile(module, strict=True)
    for length in (5, 9, 6, 4):
        assert_steps_equal(compiled, module, length)
    assert oxidiff.report(compiled).captures == 2, "one writes, one reads"


@torch.no_grad()
def test_a_saved_graph_has_objects(tmp_path: Path) -> None:
    module = Keeping()
    first = oxidiff.compile(module, strict=True)
    steps(first, 5)
    oxidiff.save_graph(first, tmp_path / "keeping.oxi")
    second = oxidiff.compile(copy.deepcopy(module), strict=True, cache=False)
    oxidiff.load_graph(second, tmp_path / "keeping.oxi")
    assert_steps_equal(second, module, 7)
    assert oxidiff.report(second).captures == 0


class Adds(nn.Module):
    """What an attribute holds, times a number of the object's."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x * given.factor + given.tensor


@dataclasses.dataclass
class Record:
    tensor: Tensor
    factor: float


@dataclasses.dataclass(slots=True)
class Slots:
    tensor: Tensor
    factor: float


class Private:
    __slots__ = ("__tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.__tensor = tensor

    @property
    def tensor(self) -> Tensor:
        return self.__tensor


@dataclasses.dataclass
class PrivateSlots(Private):
    factor: float

    def __init__(self, tensor: Tensor, factor: float) -> None:
        super().__init__(tensor)
        self.factor = factor


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    factor: float


@dataclasses.dataclass
class Computed:
    """One whose constructor changes what it is given, and sets what it is not."""

    tensor: Tensor
    start: dataclasses.InitVar[float]
    factor: float = dataclasses.field(init=False)

    def __post_init__(self, start: float) -> None:
        self.tensor = self.tensor + 1
        self.factor = 2 * start


@pytest.mark.parametrize("kind", [Record, Slots, PrivateSlots, Frozen, Computed])
@torch.no_grad()
def test_dataclasses_are_passed(kind: Any) -> None:
    compiled = oxidiff.compile(Adds(), strict=True)
    for size, factor in ((3, 2.0), (4, 2.5), (5, -1.0)):
        x, given = torch.randn(size), kind(torch.randn(size), factor)
        assert_close(compiled(x, given), Adds()(x, given))
    assert oxidiff.report(compiled).captures == 1


class Sums(nn.Module):
    """Keeps a sum where it is no field."""

    def forward(self, x: Tensor, record: Any) -> Tensor:
        if not hasattr(record, "sum"):
            record.sum = torch.zeros(())
        record.sum = record.sum + x.sum()
        return record.sum * record.factor  # type: ignore[no-any-return]


@torch.no_grad()
def test_attributes_that_are_no_fields_count() -> None:
    compiled, records = oxidiff.compile(Sums()), [Record(torch.ones(3), 2.0) for _ in range(2)]
    with pytest.warns(oxidiff.FallbackWarning, match="changes an attribute of its argument record"):
        for _ in range(3):
            assert torch.equal(
                *[each(torch.ones(3), record) for each, record in zip((compiled, Sums()), records, strict=True)]
            )
    scaled = oxidiff.compile(lambda x, record: x * getattr(record, "extra", 1), strict=True)
    for extra in (5, 7):
        vars(records[0])["extra"] = extra
        assert torch.equal(scaled(torch.ones(3), records[0]), torch.full((3,), float(extra)))
    assert torch.equal(scaled(torch.ones(3), records[1]), torch.ones(3))


class Choice:
    """One of a few that a module knows, or finds in a dictionary."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


TWICE, THRICE = Choice(torch.ones(1)), Choice(torch.ones(1))
FACTORS = {TWICE: 2, THRICE: 3}


class Chooses(nn.Module):
    def forward(self, x: Tensor, choice: Any = TWICE) -> Tensor:
        return x * (2 if choice is TWICE else 3) * FACTORS[choice] * choice.tensor


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_objects_of_other_classes_are_themselves() -> None:
    compiled, x = oxidiff.compile(Chooses()), torch.randn(3)
    for choice in (TWICE, THRICE, TWICE):
        assert torch.equal(compiled(x, choice), Chooses()(x, choice))
    assert torch.equal(compiled(x), x * 4)
    reasons = {row["reason"] for row in oxidiff.report(compiled).fallbacks}
    assert "an argument of type test_objects.Choice is passed to it" in reasons


@of_diffusers
class Context:
    """One with a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class GivesBack(nn.Module):
    def forward(self, x: Tensor, given: Any) -> Any:
        return x + given.tensor, given


@torch.no_grad()
def test_an_argument_that_is_returned_is_the_callers_own() -> None:
    compiled, given = oxidiff.compile(GivesBack()), Context(torch.randn(3))
    with pytest.warns(oxidiff.FallbackWarning, match="returns its argument of type Context"):
        assert compiled(torch.ones(3), given)[1] is given


@of_diffusers
class Tree:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.children: list[Any] = [self]


@torch.no_grad()
def test_what_holds_itself_runs_eager() -> None:
    itself: list[Any] = [torch.ones(3)]
    itself.append(itself)
    for given in (Tree(torch.ones(3)), itself):
        compiled = oxidiff.compile(lambda x, given: x + (given[0] if isinstance(given, list) else given.tensor))
        with pytest.warns(oxidiff.FallbackWarning, match="an argument that holds itself is passed to it"):
            assert torch.equal(compiled(torch.ones(3), given), torch.full((3,), 2.0))


@torch.no_grad()
def test_a_result_that_holds_itself_runs_eager() -> None:
    compiled = oxidiff.compile(lambda x, given: (x + given.tensor, Tree(x)))
    with pytest.warns(oxidiff.FallbackWarning, match="forward returns Tree"):
        result, tree = compiled(torch.ones(3), Context(torch.ones(3)))
    assert torch.equal(result, torch.full((3,), 2.0))
    assert tree.children == [tree]


@of_diffusers
class Finalized(Context):
    def __del__(self) -> None:
        pass


@of_diffusers
class WithSlots(Context):
    __slots__ = ("more",)


@of_diffusers
class Setting(Context):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


@of_diffusers
class Equal(Context):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


@of_diffusers
class Locked(Context):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [Finalized, WithSlots, Setting, Equal, Locked])
@torch.no_grad()
def test_what_is_more_than_its_attributes_runs_eager(kind: Any) -> None:
    given, x = kind(torch.ones(3)), torch.ones(3)
    compiled = oxidiff.compile(GivesTensor())
    of = "_thread.lock" if kind is Locked else f"diffusers.models.kept.{kind.__name__}"
    with pytest.warns(oxidiff.FallbackWarning, match=f"an argument of type {of} is passed to it"):
        assert torch.equal(compiled(x, given), x * 2)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (lambda x, given: x * given.factor, "factor", 5),
        (lambda x, given: x * given.inherited, "inherited", 5),
        (lambda x, given: x * given.twice(), "twice", lambda given: 5),
        (lambda x, given: x * given.twice(), "factor", 5),
        (lambda x, given: x * given.computed, "computed", 5),
        (lambda x, given: x * getattr(given, "missing", 2), "missing", 5),
        (lambda x, given: x * len(given), "__len__", lambda given: 5),
    ],
)
@torch.no_grad()
def test_classes_of_arguments_are_watched(function: Any, name: str, value: Any) -> None:
    class Base:
        inherited = 2

        def __len__(self) -> int:
            return 2

    @dataclasses.dataclass
    class Given(Base):
        own: int = 1
        factor: ClassVar[int] = 2

        def twice(self) -> int:
            return self.factor

        @property
        def computed(self) -> int:
            return self.factor

    @dataclasses.dataclass
    class MetLater(Given):
        further: int = 3

    compiled: Any = oxidiff.compile(function, cache=False, strict=True)
    x = torch.ones(3)
    for given in (Given(), MetLater()):
        assert torch.equal(compiled(x, given), x * 2)
    setattr(Base if name in vars(Base) else Given, name, value)
    for given in (Given(), MetLater()):
        assert torch.equal(compiled(x, given), x * 5)


@torch.no_grad()
def test_what_a_class_counts_in_its_constructor_is_no_program_each() -> None:
    @dataclasses.dataclass
    class Counting:
        factor: float
        made: ClassVar[int] = 0

        def __post_init__(self) -> None:
            Counting.made += 1

    compiled: Any = oxidiff.compile(lambda x, given: x * given.factor, cache=False, strict=True)
    for factor in (1.0, 2.0, 3.0):
        assert torch.equal(compiled(torch.ones(3), Counting(factor)), torch.full((3,), factor))
    assert oxidiff.report(compiled).captures == 1


class Unhashed(type):
    """A class of classes that are equal to others, and so have no hash."""

    def __eq__(cls, other: object) -> bool:
        return cls is other


class Odd(metaclass=Unhashed):
    factor = 2


@dataclasses.dataclass
class OddRecord(metaclass=Unhashed):
    factor: int = 2


class OddPair(tuple[int, int], metaclass=Unhashed):
    factor = property(lambda self: self[0])


class OddTable(dict[str, int], metaclass=Unhashed):
    factor = property(lambda self: self["factor"])


class Refusing(Unhashed):
    def __hash__(cls) -> int:
        raise TypeError("not this one")


class OddChild(Odd, metaclass=Refusing):
    pass


ODD: dict[str, Any] = {
    "an object": Odd(), "a dataclass": OddRecord(), "a tuple": OddPair((2, 3)), "a dictionary": OddTable(factor=2),
    "a class": Odd, "an object of one that refuses": OddChild(), "a class that refuses": OddChild,
}  # fmt: skip


class Scales(nn.Module):
    def forward(self, x: Tensor, given: Any, scale: float = 1.0) -> Tensor:
        return x * (given[0] if isinstance(given, list) else given).factor * scale


class ScalesByDefault(nn.Module):
    def forward(self, x: Tensor, given: Any = ODD["an object"]) -> Tensor:
        return x * given.factor  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("name", ODD)
@torch.no_grad()
def test_what_is_of_a_class_without_a_hash_runs_eager(name: str) -> None:
    x, given = torch.randn(3), ODD[name]
    compiled: Any = oxidiff.compile(Scales(), cache=False)
    for scale in (1.0, numpy.float64(2.0)):
        for result in (compiled(x, given, scale), compiled(x, given=given, scale=scale), compiled(x, [given], scale)):
            assert torch.equal(result, x * 2 * scale)
    report = oxidiff.report(compiled)
    assert report.eager_calls == 6
    assert all("an argument that cannot be taken apart" in row["reason"] for row in report.fallbacks)


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_a_default_of_a_class_without_a_hash_runs_eager() -> None:
    compiled: Any = oxidiff.compile(ScalesByDefault(), cache=False)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert "an argument of type Odd" in oxidiff.report(compiled).fallbacks[0]["reason"]


class GivesTensor(nn.Module):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x + given.tensor


class WritesBoth(nn.Module):
    def forward(self, x: Tensor, one: Any, other: Any) -> Tensor:
        one.tensor = x
        return other.tensor + 1


@torch.no_grad()
def test_an_object_that_is_passed_twice_is_written_by_eager() -> None:
    compiled, x = oxidiff.compile(WritesBoth()), torch.ones(2)
    one, other = Context(x * 3), Context(x * 5)
    assert torch.equal(compiled(x, one, other), x * 6)
    assert one.tensor is x and torch.equal(other.tensor, x * 5)
    with pytest.warns(oxidiff.FallbackWarning, match="twice"):
        assert torch.equal(compiled(x, other, other), x + 1)


@torch.no_grad()
def test_what_is_only_read_may_be_passed_twice_beside_what_is_written() -> None:
    compiled, x, settings = oxidiff.compile(WritesBoth(), strict=True), torch.ones(2), {"a": [1]}
    for factor in (3, 5):
        one, other = Context(x), Context(x * factor)
        vars(one)["settings"] = vars(other)["settings"] = settings
        assert torch.equal(compiled(x * 2, one, other), x * factor + 1)
        assert torch.equal(one.tensor, x * 2)


class Steps(nn.Module):
    """Counts its calls in an object."""

    def forward(self, x: Tensor, state: Any) -> Tensor:
        state.count += 1
        return x * state.count


@of_diffusers
class State:
    def __init__(self, count: int) -> None:
        self.count = count


@torch.no_grad()
def test_counts_in_objects_are_no_program_each() -> None:
    compiled, state = oxidiff.compile(Steps(), strict=True), State(3)
    for count in range(4, 12):
        assert_close(compiled(torch.ones(2), state), torch.full((2,), float(count)))
        assert state.count == count and type(state.count) is int
    assert oxidiff.report(compiled).captures == 1


class PutsTwice(nn.Module):
    """The same list in two attributes, where the first call finds none."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        if not hasattr(given, "one"):
            given.one = given.other = [x]
        given.one.append(x * 2)
        return sum(given.other) + given.tensor


@torch.no_grad()
def test_one_list_in_two_places_is_put_there_by_eager() -> None:
    compiled, contexts = oxidiff.compile(PutsTwice()), [Context(torch.ones(3)) for _ in range(2)]
    with pytest.warns(oxidiff.FallbackWarning):
        for _ in range(3):
            results = [each(torch.ones(3), c) for each, c in zip((compiled, PutsTwice()), contexts, strict=True)]
            assert torch.equal(*results)
    assert contexts[0].one is contexts[0].other


@torch.no_grad()
def test_checked_calls_write_once() -> None:
    module = Keeping()
    compiled = oxidiff.compile(module, check=True)
    assert_steps_equal(compiled, module, 5)


def qwen_images(height: int, width: int, length: int, batch: int) -> dict[str, Any]:
    """What Qwen-Image 2.1 is given in a step: a prompt with padding, behind it the slots of patches of 2 by 2 tokens."""
    count = height * width
    text = torch.arange(length) < length - 2
    return {
        "hidden_states": random(batch, count, 16),
        "encoder_hidden_states": random(batch, length, 24, seed=1),
        "encoder_hidden_states_mask": text.repeat(batch, 1),
        "timestep": torch.full((batch,), 0.7),
        "img_shapes": [[(1, height, width)]] * batch,
        "img_mask": torch.cat([torch.zeros(batch, length), torch.ones(batch, count // 4)], 1).bool(),
        "return_dict": False,
    }


@torch.no_grad()
def test_a_prompt_is_kept_for_pictures_of_any_size() -> None:
    """Its layers are given a cache each, the first step a slice of what to keep, rows of a table one more than samples."""
    eager = net_of("qwen-image-21")
    compiled = oxidiff.compile(net_of("qwen-image-21"), cache=False)
    captures = 0
    for sizes in ((8, 8, 9, 1), (12, 8, 9, 1), (8, 12, 7, 1), (16, 10, 12, 3)):
        given = qwen_images(*sizes)
        mine, own = QwenImage21KVCache(2), QwenImage21KVCache(2)
        for mode in ("extract", "cached", "cached"):
            expected = eager(**given, kv_cache=own, kv_cache_mode=mode)
            actual = compiled(**given, kv_cache=mine, kv_cache_mode=mode)
            assert testing.relative_error(actual, expected) <= 2e-5, (sizes, mode)
            assert_close(mine.get_layer(1).get(), own.get_layer(1).get())
        report = oxidiff.report(compiled)
        captures = captures or report.captures
        assert report.captures == captures and report.eager_calls == 0, sizes
    assert {row["reason"] for row in report.fallbacks} == {
        f"an argument of type {QwenImage21KVCache.__module__}.QwenImage21KVCache is passed to it"
    }


def glm_image() -> Any:
    transformer = network(
        diffusers.GlmImageTransformer2DModel,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=32,
    )
    vae = vae_of("kl", latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    absent: dict[str, Any] = {"processor": None, "vision_language_encoder": None}
    absent |= {"tokenizer": None, "text_encoder": None}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.GlmImagePipeline(scheduler=scheduler, vae=vae, transformer=transformer, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def glm_images(height: int, width: int, length: int, picture: tuple[int, int]) -> dict[str, Any]:
    """A picture as another one in so many patches of 4 by 4 shows it, whose keys and values an object keeps."""
    count, shown = height * width // 16, picture[0] * picture[1]
    return {
        "prompt_embeds": random(1, length, 32),
        "negative_prompt_embeds": random(1, length, 32, seed=1),
        "prior_token_ids": torch.arange(count)[None] % 32,
        "prior_token_image_ids": [torch.arange(shown) % 32],
        "source_image_grid_thw": [torch.tensor([[1, *picture]])],
        "image": [drawing(4 * picture[0], 4 * picture[1])],
        "height": height,
        "width": width,
        "guidance_scale": 2.0,
        "num_inference_steps": 2,
        "output_type": "pt",
        "generator": torch.Generator().manual_seed(0),
    }


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_a_pipeline_keeps_keys_of_pictures_of_any_size() -> None:
    # Two steps and the decoder; a difference of two results, times 2, is added to one of these.
    tolerance = 2e-5 * (3 * (1 + 2 * 2) + 1)
    eager, pipe = glm_image(), glm_image()
    pipe.transformer = oxidiff.compile(pipe.transformer)
    for sizes in ((32, 64, 7, (2, 3)), (64, 32, 5, (3, 4)), (48, 80, 9, (2, 5))):
        expected, actual = (each(**glm_images(*sizes)).images for each in (eager, pipe))
        assert testing.relative_error(actual, expected) <= tolerance
        report = oxidiff.report(pipe.transformer)
        assert report.captures == 2, "with the picture and without"
    assert {row["reason"] for row in report.fallbacks} == {"an argument has no elements"}, "no text, for the picture"
    assert report.eager_calls == 3


class Preset(enum.Enum):
    """Whose members hold more than their names."""

    SOFT = {"gain": 0.5}  # noqa: RUF012 what is tested

    def __init__(self, _: dict[str, float]) -> None:
        self.bias = 1.0
        self.gains = [1.0]


_OF_PRESETS: dict[str, Callable[[Any, Any], float]] = {
    "value of an attribute": lambda module, _: module.preset.value["gain"],
    "attribute of an attribute": lambda module, _: module.preset.bias,
    "list of an attribute": lambda module, _: module.preset.gains[0],
    "value of a global": lambda module, _: Preset.SOFT.value["gain"],
    "attribute of a global": lambda module, _: Preset.SOFT.bias,
    "list of a global": lambda module, _: Preset.SOFT.gains[0],
    "value of an argument": lambda module, preset: preset.value["gain"],
    "attribute of an argument": lambda module, preset: preset.bias,
}


class Presets(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        # Or a change would be seen there.
        self.preset = Preset.SOFT if what.endswith("an attribute") else None
        self.what = _OF_PRESETS[what]

    def forward(self, x: Tensor, preset: Preset | None) -> Tensor:
        return self.linear(x) * self.what(self, preset)


@pytest.mark.parametrize("what", _OF_PRESETS)
@torch.no_grad()
def test_what_members_of_enumerations_hold(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no more told by their names than what other objects hold."""
    module = Presets(what).eval()
    given = Preset.SOFT if what.endswith("an argument") else None
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    x = torch.randn(2, 4)
    assert_close(compiled(x, given), module(x, given))
    monkeypatch.setitem(Preset.SOFT.value, "gain", 0.7)
    monkeypatch.setattr(Preset.SOFT, "bias", 0.3)
    monkeypatch.setattr(Preset.SOFT, "gains", [0.2])
    assert_close(compiled(x, given), module(x, given))
    Preset.SOFT.gains[0] = 0.9
    assert_close(compiled(x, given), module(x, given))
