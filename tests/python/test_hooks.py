"""Modules between whose layers Python runs: hooks of diffusers, accelerate and torch, and a ``forward`` that changes its
module. What lies between is compiled, and results are eager's."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from torch import Tensor, nn

import oxidiff
from nets import shallow
from oxidiff import testing
from oxidiff.module import dispatcher_of

pytestmark = pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def close(actual: Any, expected: Any, bound: float = 2e-5) -> None:
    assert testing.relative_error(actual, expected) < bound


def steps(net: Any, count: int = 6, size: int | None = None) -> list[Tensor]:
    """A denoising loop whose steps differ little, so that caches have something to leave out."""
    size_of: dict[str, Any] = {} if size is None else {"size": (size, size)}
    inputs = testing.example_inputs("flux", **size_of)
    random = torch.Generator().manual_seed(1)
    results = []
    for i in range(count):
        moved = inputs["hidden_states"] + 0.02 * i * torch.randn(inputs["hidden_states"].shape, generator=random)
        with net.cache_context("cond"):
            results.append(net(**{**inputs, "hidden_states": moved}, return_dict=False)[0])
    return results


CACHES: dict[str, Callable[[], Any]] = {
    "first block": lambda: diffusers.FirstBlockCacheConfig(threshold=0.2),
    "pyramid": lambda: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    ),
    "taylor": lambda: diffusers.TaylorSeerCacheConfig(cache_interval=2, max_order=1, disable_cache_before_step=1),
    "mag": lambda: diffusers.MagCacheConfig(mag_ratios=[1.0] * 28, num_inference_steps=28, retention_ratio=0.1),
}


@pytest.mark.parametrize("kind", CACHES)
def test_caches(kind: str) -> None:
    """What a cache leaves out depends on values, and is left out: a step takes what eager takes."""
    eager, module = testing.build("flux"), testing.build("flux")
    compiled: Any = oxidiff.compile(module)
    whole = steps(eager)
    eager.enable_cache(CACHES[kind]())
    compiled.enable_cache(CACHES[kind]())
    expected = steps(eager)
    assert any(testing.relative_error(one, other) > 1e-4 for one, other in zip(expected, whole, strict=True)) or (
        kind == "mag"
    )
    for actual, one in zip(steps(compiled), expected, strict=True):
        close(actual, one)
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert any(
        "transformer_blocks.0" in row["module"] and "diffusers hook" in row["reason"] for row in report.fallbacks
    )
    # The state that hooks keep is not the module's: nothing is captured, or read anew, for it.
    for net in (eager, compiled):
        net._reset_stateful_cache()
    for actual, one in zip(steps(compiled, 8, size=6), steps(eager, 8, size=6), strict=True):
        close(actual, one)
    assert oxidiff.report(compiled).captures == report.captures
    assert oxidiff.report(compiled).variants == report.variants


def test_a_cache_that_comes_and_goes() -> None:
    compiled: Any = oxidiff.compile(testing.build("flux"))
    whole = steps(compiled, 1)[0]
    captured = []
    for _ in range(3):
        compiled.enable_cache(CACHES["first block"]())
        close(steps(compiled, 1)[0], whole)
        compiled.disable_cache()
        close(steps(compiled, 1)[0], whole)
        captured.append(oxidiff.report(compiled).captures)
    assert captured[0] == captured[-1]
    assert oxidiff.report(compiled).eager_calls == 0


def test_weights_change_below_hooks() -> None:
    eager, compiled = testing.build("flux"), oxidiff.compile(testing.build("flux"))
    for net in (eager, compiled):
        net.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.0))
    steps(compiled, 1)
    other = testing.build("flux", seed=3).state_dict()
    eager.load_state_dict(other)
    compiled.load_state_dict(other)
    close(steps(compiled, 2), steps(eager, 2))
    with torch.no_grad():
        for net in (eager, compiled):
            net.transformer_blocks[0].attn.to_q.weight.mul_(1.5)
    close(steps(compiled, 2), steps(eager, 2))


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[len(self.blocks) - 1](x) + len(self.blocks)


def stacks() -> tuple[Stack, Any, Tensor]:
    torch.manual_seed(0)
    eager = Stack().eval()
    return eager, oxidiff.compile(copy.deepcopy(eager)), torch.randn(3, 16)


class WithEagerOp(nn.Module):
    """Has a program around an op that runs eager in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.linalg.matrix_exp(self.first(x)))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), WithEagerOp()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def test_parts_that_other_hooks_have_too_report_to_the_call_that_runs() -> None:
    module = Hooked().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    x, seen = torch.randn(8, 8), []
    for child in (module.a, module.b, module.a):
        hook = child.register_forward_hook(lambda *_: seen.append(1))
        for _ in range(2):
            torch.testing.assert_close(compiled(x), module(x))
        hook.remove()
    assert len(seen) == 12
    assert "matrix_exp" in str(compiled.report().fallbacks)


def test_forward_hooks() -> None:
    """They get the module itself, what is passed to it and what it gives, and may change both."""
    eager, compiled, x = stacks()
    seen: dict[Any, list[Tensor]] = {}

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * 2,)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
        seen.setdefault(module, []).append(result)
        return result + args[0]

    for net in (eager, compiled):
        net.blocks[1].register_forward_pre_hook(before)
        net.blocks[2].register_forward_hook(after, with_kwargs=True)
    for batch in (3, 5):
        x = torch.randn(batch, 16)
        close(compiled(x), eager(x))
    assert seen.keys() == {eager.blocks[2], compiled.blocks[2]}
    close(seen[compiled.blocks[2]], seen[eager.blocks[2]])
    report = oxidiff.report(compiled)
    # Four blocks of one kind.
    assert (report.eager_calls, report.captures) == (0, 1)


def test_a_forward_that_changes_its_module() -> None:
    class Counting(Stack):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    torch.manual_seed(0)
    eager = Counting().eval()
    compiled: Any = oxidiff.compile(copy.deepcopy(eager))
    for _ in range(8):
        x = torch.randn(3, 16)
        close(compiled(x), eager(x))
    captured = oxidiff.report(compiled).captures
    eager_calls = oxidiff.report(compiled).eager_calls
    for _ in range(4):
        x = torch.randn(7, 16)
        close(compiled(x), eager(x))
    assert compiled.calls == 12
    report = oxidiff.report(compiled)
    assert (report.captures, report.eager_calls) == (captured, eager_calls)
    assert any("calls" in row["reason"] for row in report.fallbacks)


class Controller:
    """What attention processors share: it counts, and keeps what passes by."""

    def __init__(self) -> None:
        self.step = 0
        self.kept: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        self.step += 1
        self.kept.setdefault(name, []).append(x)
        return x * (1 + self.step % 3)


class Controlled(nn.Module):
    def __init__(self, controller: Controller, name: str) -> None:
        super().__init__()
        self.controller, self.name = controller, name
        self.gate, self.block = nn.Linear(16, 16), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.controller(self.name, self.gate(x))


class Reader(Block):
    """Reads the step of the model around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = (model,)
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x)) * self.model[0].calls


def test_what_is_changed_below() -> None:
    """Parts are what the changed object is not reached from: none is captured anew because another one wrote it."""
    torch.manual_seed(0)
    eager = Stack()
    controller = Controller()
    for i in (1, 2):
        eager.blocks[i] = Controlled(controller, f"{i}")
    compiled: Any = oxidiff.compile(copy.deepcopy(eager.eval()))
    for i in range(8):
        x = torch.randn(3 + i // 4, 16)
        close(compiled(x), eager(x))
        if i == 3:
            report = oxidiff.report(compiled)
    ours = compiled.blocks[1].controller
    assert (ours.step, ours.kept.keys()) == (controller.step, controller.kept.keys())
    close(ours.kept["2"], controller.kept["2"])
    again = oxidiff.report(compiled)
    assert (again.captures, again.eager_calls) == (report.captures, 1)
    assert {path for path, _ in _parts(compiled)} == {"blocks.0", "blocks.1.block", "blocks.2.block", "blocks.3"}


def test_a_part_that_reads_what_the_model_counts() -> None:
    class Counting(Stack):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Counting().eval()
        model.blocks[1] = Reader(model)
        return model

    eager, module = make(), make()
    compiled: Any = oxidiff.compile(module)
    captures = []
    for _ in range(8):
        x = torch.randn(3, 16)
        close(compiled(x), eager(x))
        captures.append(oxidiff.report(compiled).captures)
    assert captures[3] == captures[-1]
    assert "blocks.1.inner" in {path for path, _ in _parts(compiled)}


def _parts(compiled: nn.Module) -> list[tuple[str, Any]]:
    return [(part.path, part) for part in dispatcher_of(compiled).pieces() if part.path]


@pytest.mark.parametrize("path", ["blocks.1", "inside"])
def test_pieces_once_a_hook_is_gone(path: str) -> None:
    """Dynamo takes it apart, also after a hook was there: on a part, or on a layer, where nothing was compiled then."""

    class Choosing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return -x if x.sum() > 1e9 else x

    torch.manual_seed(0)
    eager = Choosing(1 if path == "inside" else 4).eval()
    if path == "inside":
        eager.blocks[0] = nn.Linear(16, 16)
    compiled: Any = oxidiff.compile(copy.deepcopy(eager))
    x = torch.randn(3, 16)
    handle = compiled.get_submodule(path).register_forward_hook(lambda *_: None)
    close(compiled(x), eager(x))
    handle.remove()
    before = oxidiff.report(compiled).eager_calls
    for _ in range(2):
        close(compiled(x), eager(x))
    assert oxidiff.report(compiled).eager_calls == before
    assert any("is_nonzero" in row["reason"] for row in oxidiff.report(compiled).fallbacks)


class _Doubling(ModelHook):  # type: ignore[misc]
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tuple(arg * 2 for arg in args), kwargs

    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output - 1


class _Twice(ModelHook):  # type: ignore[misc]
    """Runs what is below it twice, in every second call."""

    calls = 0

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = self.fn_ref.original_forward(*args, **kwargs)
        return result if self.calls % 2 else self.fn_ref.original_forward(result)


@pytest.mark.parametrize("path", ["", "blocks.1"])
@pytest.mark.parametrize("kinds", [(_Doubling, _Twice), (_Twice, _Doubling), (_Twice, _Twice)])
def test_chains_of_hooks(path: str, kinds: tuple[type[ModelHook], ...]) -> None:
    """Hooks around hooks, on the module itself or inside of it, registered before and after the first call, and removed."""
    eager, compiled, x = stacks()
    close(compiled(x), eager(x))
    for i, kind in enumerate(kinds):
        for net in (eager, compiled):
            HookRegistry.check_if_exists_or_initialize(net.get_submodule(path)).register_hook(kind(), f"hook {i}")
        for _ in range(3):
            close(compiled(x), eager(x))
    for i in reversed(range(len(kinds))):
        for net in (eager, compiled):
            net.get_submodule(path)._diffusers_hook.remove_hook(f"hook {i}", recurse=False)
        for _ in range(2):
            close(compiled(x), eager(x))
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert report.captures <= 2


def test_accelerate_around_diffusers() -> None:
    accelerate = pytest.importorskip("accelerate")
    eager, compiled, x = stacks()
    for net in (eager, compiled):
        HookRegistry.check_if_exists_or_initialize(net).register_hook(_Doubling(), "hook")
        accelerate.cpu_offload_with_hook(net, CPU)
    for _ in range(2):
        close(compiled(x), eager(x))
    assert oxidiff.report(compiled).eager_calls == 0


def test_models_that_are_offloaded_in_turn_are_programs() -> None:
    """The hook of one has the model that runs before it, which is no part of it."""
    accelerate = pytest.importorskip("accelerate")
    eager, compiled, x = stacks()
    before = oxidiff.compile(Stack().eval(), strict=True)
    _, hook = accelerate.cpu_offload_with_hook(before, CPU)
    accelerate.cpu_offload_with_hook(compiled, CPU, prev_module_hook=hook)
    for _ in range(2):
        before(x)
        close(compiled(x), eager(x))
    report = oxidiff.report(compiled)
    assert (report.programs + report.shared_with, report.eager_calls, report.fallbacks) == (1, 0, [])
    accelerate.hooks.remove_hook_from_module(compiled)
    close(compiled(x), eager(x))
    assert oxidiff.report(compiled).fallbacks == []


def test_a_forward_around_hooks_runs_eager() -> None:
    eager, compiled, x = stacks()
    for net in (eager, compiled):
        HookRegistry.check_if_exists_or_initialize(net).register_hook(_Doubling(), "hook")
        below = net.forward
        net.forward = lambda x, below=below: below(x) + 1
    close(compiled(x), eager(x))
    report = oxidiff.report(compiled)
    assert report.eager_calls == 1
    assert "its forward was replaced" in report.fallbacks[0]["reason"]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(Stack() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            x = stack(x)
        return x


@pytest.mark.parametrize("path", ["stacks.0", "stacks.0.blocks.1", "stacks.0.blocks.2"])
def test_a_forward_replaced_after_hooks(path: str) -> None:
    """Of a module with hooks on it, with hooks inside of it, and of a part; once they have run."""
    torch.manual_seed(0)
    eager = Nested().eval()
    compiled: Any = oxidiff.compile(copy.deepcopy(eager))
    x = torch.randn(3, 16)
    for net in (eager, compiled):
        HookRegistry.check_if_exists_or_initialize(net.stacks[0].blocks[1]).register_hook(_Doubling(), "hook")
    close(compiled(x), eager(x))
    for net in (eager, compiled):
        module = net.get_submodule(path)
        module.forward = lambda x, below=module.forward: below(x) + 1
    for _ in range(2):
        close(compiled(x), eager(x))
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert path != "stacks.0.blocks.1" or "its forward was replaced" in str(report.fallbacks)
    if path != "stacks.0.blocks.1":
        for net in (eager, compiled):
            del net.get_submodule(path).forward
        close(compiled(x), eager(x))


def test_hooks_taken_away_are_let_go() -> None:
    """With what they keep of earlier steps: as much as a model's activations. Others like them find what is compiled."""
    compiled: Any = oxidiff.compile(testing.build("flux"))
    steps(compiled, 1)
    for _ in range(3):
        compiled.enable_cache(CACHES["first block"]())
        steps(compiled, 1)
        hook = weakref.ref(next(iter(compiled.transformer_blocks[0]._diffusers_hook.hooks.values())))
        compiled.disable_cache()
        steps(compiled, 1)
        gc.collect()
        assert hook() is None


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offloading(kind: str) -> None:
    module = shallow("sd15-unet")
    compiled: Any = oxidiff.compile(module)
    inputs = testing.example_inputs("sd15-unet")
    expected = module(**inputs).sample
    several = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    apply_group_offloading(compiled, onload_device=CPU, offload_device=CPU, offload_type=kind, **several)
    for _ in range(2):
        close(compiled(**inputs).sample, expected)
    assert oxidiff.report(compiled).eager_calls == (2 if kind == "leaf_level" else 0)


def test_strict() -> None:
    _, compiled, x = stacks()
    strict: Any = oxidiff.compile(compiled._orig_mod, strict=True)
    strict(x)
    strict.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(oxidiff.UnsupportedError, match="a forward hook is registered on it") as raised:
        strict(x)
    assert raised.value.module == "blocks.1"


def test_threads_run_parts_at_once() -> None:
    eager, compiled, _ = stacks()
    for net in (eager, compiled):
        HookRegistry.check_if_exists_or_initialize(net.blocks[1]).register_hook(_Doubling(), "hook")
    problems: list[Any] = []

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for _ in range(20):
                    x = torch.randn(int(torch.randint(1, 9, (), generator=random)), 16, generator=random)
                    close(compiled(x), eager(x))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert oxidiff.report(compiled).eager_calls == 0


def test_tensors_are_not_bound_below_hooks() -> None:
    """A copy of the module would run the blocks of the module, with its weights."""
    eager, compiled, x = stacks()
    torch.manual_seed(7)
    other = Stack().eval()
    oxidiff.bind(compiled, other.state_dict(), name="before")
    for net in (eager, compiled, other):
        HookRegistry.check_if_exists_or_initialize(net.blocks[1]).register_hook(_Doubling(), "hook")
    with pytest.raises(oxidiff.UnsupportedError, match=r"Stack\.blocks\.1 .*bind a module of its own"):
        oxidiff.bind(compiled, other.state_dict(), name="after")
    oxidiff.use(compiled, "before")
    with pytest.raises(oxidiff.UnsupportedError, match="bind a module of its own"):
        compiled(x)
    oxidiff.use(compiled, None)
    close(compiled(x), eager(x))
    oxidiff.bind(compiled, other, name="module")
    oxidiff.use(compiled, "module")
    close(compiled(x), other(x))


def test_unload_and_new_submodules() -> None:
    eager, compiled, x = stacks()
    for net in (eager, compiled):
        net.blocks[1].register_forward_hook(lambda _module, _args, result: result + 1)
    close(compiled(x), eager(x))
    compiled.unload()
    assert oxidiff.report(compiled).derived_bytes == 0
    close(compiled(x), eager(x))
    torch.manual_seed(5)
    other = Block()
    for net in (eager, compiled):
        net.blocks[3] = other
    close(compiled(x), eager(x))
    for net in (eager, compiled):
        net.blocks.append(copy.deepcopy(other))
    close(compiled(x), eager(x))
    assert oxidiff.report(compiled).eager_calls == 0
    assert "blocks.4" in str(oxidiff.explain(compiled))


def test_forward_hands_its_submodules_on() -> None:
    """What ``forward`` finds in the place of its submodules is they in all but the call."""

    class Handing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = self.blocks[0]
            assert isinstance(first, Block) and first.__class__ is Block and dict(self.named_children())
            assert first.norm.weight is self.get_submodule("blocks.0").norm.weight
            x = copy.deepcopy(first)(x)
            return x + sum(block(x) for block in list(self.blocks.children())) + first.forward(x)

    torch.manual_seed(0)
    eager = Handing().eval()
    compiled: Any = oxidiff.compile(copy.deepcopy(eager))
    for net in (eager, compiled):
        net.blocks[1].register_forward_hook(lambda _module, _args, result: result + 1)
    x = torch.randn(3, 16)
    for _ in range(2):
        close(compiled(x), eager(x))
    assert oxidiff.report(compiled).eager_calls == 0
    assert type(compiled.blocks[0]) is Block


def test_forward_keeps_submodules() -> None:
    """What it makes an attribute or a submodule is the module, not what stands for it in the call."""

    class Keeping(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.last = self.blocks[2]
            self.blocks[3] = self.blocks[2]
            self._modules["first"] = self.blocks[0]
            return super().forward(x) + self.last(x)

    torch.manual_seed(0)
    eager = Keeping().eval()
    compiled: Any = oxidiff.compile(copy.deepcopy(eager))
    for net in (eager, compiled):
        net.blocks[1].register_forward_hook(lambda _module, _args, result: result + 1)
    x = torch.randn(3, 16)
    for _ in range(3):
        close(compiled(x), eager(x))
    assert compiled.last is compiled.blocks[2] is compiled.blocks[3]
    assert compiled.first is compiled.blocks[0]
    assert {type(child) for child in compiled.blocks} == {Block}
    for net in (eager, compiled):
        net.blocks[1]._forward_hooks.clear()
    close(compiled(x), eager(x))


# --- layerwise casting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [("flux", torch.float32), ("sd15-unet", torch.float32), ("flux", torch.bfloat16)]
)
def test_layerwise_casting(name: str, dtype: torch.dtype, tmp_path: Any) -> None:
    """Weights stay in the dtype they are kept in, and are converted where their layer runs, by the program."""
    eager: Any = shallow(name, dtype=dtype)
    compiled: Any = oxidiff.compile(copy.deepcopy(eager))
    inputs = testing.example_inputs(name, dtype=dtype)
    whole = eager(**inputs, return_dict=False)[0]
    close(compiled(**inputs, return_dict=False)[0], whole, 0.05)
    exact = copy.deepcopy(eager)
    for net in (eager, compiled, exact):
        net.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
    expected = eager(**inputs, return_dict=False)[0]
    assert testing.relative_error(expected, whole) > 1e-2
    actual = compiled(**inputs, return_dict=False)[0]
    close(actual, expected, 2e-5 if dtype is torch.float32 else 0.05)
    report = oxidiff.report(compiled)
    assert (report.eager_calls, report.captures) == (0, 2)
    assert torch.float8_e4m3fn in {parameter.dtype for parameter in compiled.parameters()}
    # Another dtype to compute in is another program.
    other: Any = shallow(name, dtype=dtype)
    other.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float64)
    again: Any = oxidiff.compile(exact)
    compiled.save_graph(tmp_path / "cast.oxi")
    with pytest.raises(oxidiff.ArtifactError):
        oxidiff.compile(other).load_graph(tmp_path / "cast.oxi")
    again.load_graph(tmp_path / "cast.oxi")
    assert torch.equal(again(**inputs, return_dict=False)[0], actual)
    assert oxidiff.report(again).captures == 0


def test_layerwise_casting_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    eager: Any = testing.build("flux")
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False)
    eager.add_adapter(config)
    compiled: Any = oxidiff.compile(copy.deepcopy(eager))
    for net in (eager, compiled):
        net.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    for _ in range(2):
        close(steps(compiled, 1), steps(eager, 1))
    for net in (eager, compiled):
        net.disable_adapters()
    close(steps(compiled, 1), steps(eager, 1))


class Sharing(nn.Module):
    """Gives a view of its argument beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, 1)
        return first, self.layer(second)


class Scaling(nn.Module):
    """Writes into such a view."""

    def __init__(self) -> None:
        super().__init__()
        self.sharing, self.out = Sharing(), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 1), None])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x if layer is None else layer(x)
        first, second = self.sharing(x)
        first.mul_(2)
        return self.out(x) + second.mean()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_a_part_that_gives_a_view_of_its_argument() -> None:
    """What the module around it writes there is seen in the argument. A list of modules may have none at a place."""
    module = Scaling()
    module.out[1].register_forward_hook(lambda module, args, result: result * 3)
    compiled = oxidiff.compile(module)
    for size in (8, 12, 8):
        x = torch.randn(2, 8, size, size)
        torch.testing.assert_close(compiled(x), module(x))
    reasons = {fallback["reason"] for fallback in compiled.report().fallbacks}
    assert "it returns a view of an argument, into which what it is part of may write" in reasons
