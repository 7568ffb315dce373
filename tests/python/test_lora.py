"""LoRA adapters: weights of the base graph, whatever is done to them."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from diffusers.utils import scale_lora_layers, unscale_lora_layers
from torch import Tensor

import oxidiff
from nets import shallow
from oxidiff import testing

peft = pytest.importorskip("peft")

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TARGETS = {
    "sd15-unet": [*ATTENTION, "conv1", "conv_in", "proj_in"],
    "flux": [*ATTENTION, "ff.net.0.proj"],
    "clip-l": ["q_proj", "v_proj", "fc1"],
}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


class Subject:
    """A model of the zoo, compiled, and its example call."""

    def __init__(self, name: str = "sd15-unet", **options: Any) -> None:
        self.name = name
        self.module = shallow(name)
        self.compiled: Any = oxidiff.compile(self.module, strict=True, **options)
        self.inputs = testing.example_inputs(name)

    def add(self, name: str, rank: int = 4, **fields: Any) -> None:
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=fields.pop("target_modules", TARGETS[self.name]),
            init_lora_weights=False,
            **fields,
        )
        peft.inject_adapter_in_model(config, self.module, adapter_name=name)
        self.module.eval()

    def set(self, names: str | list[str], weights: list[float] | float = 1.0) -> None:
        names = [names] if isinstance(names, str) else names
        weights = [weights] if isinstance(weights, float) else weights
        for layer in self.layers():
            layer.set_adapter(names)
            for adapter, weight in zip(names, weights, strict=True):
                layer.set_scale(adapter, weight)

    def layers(self) -> list[Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return [m for m in self.module.modules() if isinstance(m, BaseTunerLayer)]

    def result(self, call: Callable[..., Any] | None = None, **more: Any) -> Tensor:
        return testing.flatten_outputs((call or self.compiled)(**self.inputs, **more))[0].clone()

    def check(self, **more: Any) -> Tensor:
        ours = self.result(**more)
        assert testing.relative_error(ours, self.result(self.module, **more)) < 2e-5
        return ours

    def counts(self) -> tuple[int, int, int]:
        report = oxidiff.report(self.compiled)
        return report.captures, report.programs, report.eager_calls


@pytest.mark.parametrize("name", TARGETS)
def test_the_graph_stays_the_base_graph(name: str) -> None:
    subject = Subject(name)
    base = subject.check()
    counts = subject.counts()
    subject.add("one", 4)
    one = subject.check()
    assert testing.relative_error(one, base) > 1e-3
    subject.add("two", 3)
    subject.set(["one", "two"], [0.7, -0.4])
    both = subject.check()
    subject.set("two", 1.5)
    two = subject.check()
    # A, B, A: the same bits.
    subject.set("one", 1.0)
    assert torch.equal(subject.result(), one)
    subject.set("two", 1.5)
    assert torch.equal(subject.result(), two)
    subject.set(["one", "two"], [0.7, -0.4])
    assert torch.equal(subject.result(), both)
    for layer in subject.layers():
        layer.enable_adapters(False)
    assert torch.equal(subject.result(), base)
    assert subject.counts() == counts


def test_loaded_before_the_first_call() -> None:
    plain, subject = Subject(), Subject()
    plain.check()
    subject.add("one")
    subject.check()
    # What a module without adapters compiled serves one with them.
    assert subject.counts() == (0, 0, 0)


def test_changes_of_an_adapter_are_noticed() -> None:
    subject = Subject()
    subject.add("one")
    before = subject.check()
    layer = subject.layers()[3]
    for part in (layer.lora_A["one"].weight, layer.lora_B["one"].weight, layer.base_layer.weight):
        part.view(-1)[part.numel() // 3] += 0.5
        after = subject.check()
        assert not torch.equal(before, after)
        before = after
    layer.scaling["one"] = 0.25
    assert not torch.equal(subject.check(), before)


def test_scale_of_a_call() -> None:
    subject = Subject()
    base = subject.check()
    subject.add("one")
    counts = subject.counts()
    one = subject.check()
    half = subject.check(cross_attention_kwargs={"scale": 0.5})
    assert torch.equal(subject.check(cross_attention_kwargs={"scale": 0.0}), base)
    assert torch.equal(subject.check(), one)
    assert torch.equal(subject.check(cross_attention_kwargs={"scale": 0.5}), half)
    assert torch.equal(subject.check(cross_attention_kwargs={"scale": 1.0}), one)
    # A dictionary in place of None is another structure of the call, captured once, and the same program.
    assert subject.counts() == (counts[0] + 1, counts[1], 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    module = shallow("sd15-unet", dtype=dtype)
    compiled: Any = oxidiff.compile(module, strict=True)
    config = peft.LoraConfig(r=4, target_modules=TARGETS["sd15-unet"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, module, adapter_name="one")
    module.eval()
    # The error at one input is one draw: a third of eager's more or less.
    inputs = [testing.example_inputs("sd15-unet", dtype=dtype, seed=seed) for seed in range(1, 9)]
    exact = [testing.reference(module, each) for each in inputs]
    own = testing.typical_error([module(**each) for each in inputs], exact)
    assert testing.typical_error([compiled(**each) for each in inputs], exact) <= 1.25 * own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_and_unloaded_between_two_calls(dtype: torch.dtype) -> None:
    """What PEFT writes into weights, past torch's counter, with no call in between, is noticed."""
    module = shallow("sd15-unet", dtype=dtype)
    compiled: Any = oxidiff.compile(module, strict=True)
    inputs = testing.example_inputs("sd15-unet", dtype=dtype)
    compiled(**inputs)
    config = peft.LoraConfig(r=4, target_modules=TARGETS["sd15-unet"], init_lora_weights=False)
    compiled.add_adapter(config, adapter_name="one")
    # One changed element that is not among those that are sampled.
    for layer in (m for m in module.modules() if hasattr(m, "lora_A")):
        down, up = layer.lora_A["one"].weight, layer.lora_B["one"].weight
        kept = up.flatten()[1].clone(), down.flatten()[1].clone()
        up.zero_()
        down.zero_()
        up.view(-1)[up.shape[1]] = kept[0]
        down.view(-1)[1] = kept[1] * 50
    compiled.fuse_lora()
    compiled.unload_lora()
    fresh = oxidiff.compile(module, strict=True)
    assert not any(hasattr(m, "lora_A") for m in module.modules())
    assert torch.equal(compiled(**inputs).sample, fresh(**inputs).sample)


def test_fuse_and_unfuse() -> None:
    subject = Subject()
    subject.check()
    counts = subject.counts()
    subject.compiled.add_adapter(
        peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False), adapter_name="one"
    )
    subject.check()
    subject.compiled.fuse_lora(lora_scale=0.5)
    subject.check()
    subject.compiled.unfuse_lora()
    subject.check()
    subject.compiled.delete_adapters("one")
    subject.check()
    assert subject.counts() == counts


def test_dora() -> None:
    subject = Subject()
    base = subject.check()
    counts = subject.counts()
    subject.add("plain", 2)
    subject.add("dora", 4, use_dora=True)
    for layer in subject.layers():
        layer.lora_magnitude_vector["dora"].weight.mul_(1.1)
    subject.set("dora")
    first = subject.check()
    subject.set(["plain", "dora"], [0.5, 0.7])
    subject.check()
    subject.set(["dora", "plain"], [0.7, 0.5])
    subject.check()
    subject.set("dora")
    assert torch.equal(subject.result(), first)
    assert testing.relative_error(first, base) > 1e-3
    assert subject.counts() == counts


OTHERS: dict[str, Callable[[], Any]] = {
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=ATTENTION, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=ATTENTION, init_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=ATTENTION, feedforward_modules=[], init_ia3_weights=False),
    "bias": lambda: peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False, lora_bias=True),
    "oft": lambda: peft.OFTConfig(target_modules=ATTENTION, init_weights=False, oft_block_size=4),
}


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_other_kinds_are_captured_as_they_are(kind: str) -> None:
    module = shallow("sd15-unet")
    compiled: Any = oxidiff.compile(module)
    inputs = testing.example_inputs("sd15-unet")
    base = compiled(**inputs).sample
    peft.inject_adapter_in_model(OTHERS[kind](), module, adapter_name="one")
    module.eval()
    ours = compiled(**inputs).sample
    assert testing.relative_error(ours, module(**inputs).sample) < 2e-5
    assert testing.relative_error(ours, base) > 1e-3
    # LoKr's `kron` and OFT's indexed writes have no lowering: these ops alone run eager.
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert bool(report.fallbacks) == (kind == "oft")


def _pipeline_file(unet: torch.nn.Module, text_encoder: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """A LoRA file as trainers write it: for the UNet's attention and the text encoder's."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for prefix, model, ends in (
        ("unet", unet, tuple(ATTENTION)),
        ("text_encoder", text_encoder, ("q_proj", "out_proj")),
    ):
        for path, layer in model.named_modules():
            if path.endswith(ends) and isinstance(layer, torch.nn.Linear):
                down = torch.randn(4, layer.in_features, generator=generator) * layer.in_features**-0.5
                state[f"{prefix}.{path}.lora_A.weight"] = down
                state[f"{prefix}.{path}.lora_B.weight"] = torch.randn(layer.out_features, 4, generator=generator) * 0.3
    return state


def test_calls_of_a_pipeline() -> None:
    from test_pipelines import build_pipeline, encode_prompt

    eager = build_pipeline("StableDiffusionPipeline")
    pipe = oxidiff.compile_pipe(build_pipeline("StableDiffusionPipeline"))
    files = {name: _pipeline_file(eager.unet, eager.text_encoder, seed) for seed, name in enumerate(("a", "b"))}
    inputs = testing.example_inputs("sd15-unet")

    def results(one: Any) -> list[Tensor]:
        return [encode_prompt(one, seed=1)["prompt_embeds"], one.unet(**inputs).sample]

    def check() -> list[Tensor]:
        ours = results(pipe)
        for mine, theirs in zip(ours, results(eager), strict=True):
            assert testing.relative_error(mine, theirs) < 2e-5
        return ours

    base = check()
    steps: list[tuple[str, Callable[[Any], Any]]] = [
        ("a", lambda p: p.load_lora_weights(dict(files["a"]), adapter_name="a")),
        ("ab", lambda p: p.load_lora_weights(dict(files["b"]), adapter_name="b")),
        ("b", lambda p: p.set_adapters("b")),
        ("mix", lambda p: p.set_adapters(["a", "b"], [0.7, 0.4])),
        ("b", lambda p: p.set_adapters("b")),
        ("base", lambda p: p.disable_lora()),
        ("b", lambda p: p.enable_lora()),
        ("fused", lambda p: p.fuse_lora(lora_scale=0.5)),
        ("unfused", lambda p: p.unfuse_lora()),
        ("deleted", lambda p: p.delete_adapters("a")),
        ("unloaded", lambda p: p.unload_lora_weights()),
    ]
    seen = {"base": base}
    for label, change in steps:
        for one in (eager, pipe):
            change(one)
        now = check()
        if label in seen:
            assert all(map(torch.equal, now, seen[label])), label
        seen[label] = now
    for part in (pipe.unet, pipe.text_encoder):
        report = oxidiff.report(part)
        # None where another test's module of the same structure is still alive.
        assert report.captures <= 1 and report.programs <= 1 and report.eager_calls == 0


def test_effective_weights_are_counted() -> None:
    subject = Subject(memory="low")
    subject.compiled(**subject.inputs)
    assert subject.compiled.report().derived_bytes == 0
    plain = subject.compiled.report().peak_bytes
    subject.add("ink")
    subject.set("ink")
    bytes_of_layers = sum(layer.base_layer.weight.nbytes for layer in subject.layers())
    subject.compiled(**subject.inputs)
    report = subject.compiled.report()
    assert report.derived_bytes == bytes_of_layers > 0
    assert report.peak_bytes == plain + bytes_of_layers
    assert oxidiff.estimate(subject.compiled, **subject.inputs).peak_bytes == report.peak_bytes
    for layer in subject.layers():
        layer.enable_adapters(False)
    subject.compiled(**subject.inputs)
    report = subject.compiled.report()
    assert report.derived_bytes == 0, "without adapters the layers' own weights are used"
    assert report.peak_bytes == plain + bytes_of_layers, "the highest so far"


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig", "IA3Config"])
@pytest.mark.parametrize("background", [False, True])
def test_merged_and_then_disabled(kind: str, background: bool) -> None:
    modules: list[Any] = []
    for _ in range(2):
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(32, 32))
        extra: dict[str, Any] = {"feedforward_modules": []} if kind == "IA3Config" else {"r": 4}
        peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["0"], **extra), module)
        for name, parameter in module.named_parameters():
            if "base_layer" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        modules.append(module.eval())
    module, eager = modules
    compiled: Any = oxidiff.compile(module, background=background)
    x = torch.randn(4, 32)
    before = eager[0].base_layer.weight.clone()
    compiled(x)
    for one in modules:
        one[0].merge()
        one[0].enable_adapters(False)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-4)
    assert not module[0].merged
    torch.testing.assert_close(module[0].base_layer.weight, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_weight_is_stale_after_one_could_not_be_computed(monkeypatch: Any, error: type[BaseException]) -> None:
    subject = Subject()
    subject.add("ink")
    subject.set("ink")
    subject.compiled(**subject.inputs)
    subject.set("ink", 0.5)

    def fail(*_: Any) -> Any:
        raise error("while weights are computed")

    with monkeypatch.context() as patch:
        patch.setattr("oxidiff.adapters._effective", fail)
        for _ in range(2):
            with pytest.raises(error, match="while weights"):
                subject.compiled(**subject.inputs)
    subject.check()


@pytest.mark.parametrize("which", ["lora_", "base_layer.weight"])
def test_written_uncounted_while_an_attribute_changes(which: str) -> None:
    subject = Subject()
    subject.add("ink")
    subject.set("ink")
    subject.check()
    for flag in range(2):
        for name, parameter in subject.module.named_parameters():
            if which in name:
                parameter.data.mul_(-0.75)
        subject.module.flag = flag
        subject.check()


def test_threads_with_and_without_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    from oxidiff import dispatch

    subject = Subject()
    subject.add("ink")
    subject.set("ink")
    scaled = {"cross_attention_kwargs": {"scale": 0.25}}
    expected = {name: subject.result(subject.module, **more) for name, more in (("plain", {}), ("scaled", scaled))}
    for more in ({}, scaled):
        subject.check(**more)
    key_of = dispatch.key_of

    def slowly(*args: Any) -> Any:
        # Other threads come between the choice of weights and the run.
        time.sleep(0.002)
        return key_of(*args)

    monkeypatch.setattr(dispatch, "key_of", slowly)

    def errors(name: str) -> list[float]:
        with torch.no_grad():
            more = scaled if name == "scaled" else {}
            return [testing.relative_error(subject.result(**more), expected[name]) for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(errors, ["plain", "scaled", "plain"]):
            assert max(found) < 2e-5


@torch.no_grad()
def test_the_first_factor_during_a_call_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from oxidiff import dispatch

    subject = Subject()
    subject.add("ink")
    subject.set("ink")
    subject.check()
    key_of = dispatch.key_of

    def meanwhile() -> None:
        with torch.no_grad():
            subject.result(cross_attention_kwargs={"scale": 0.25})

    def slowly(*args: Any) -> Any:
        monkeypatch.setattr(dispatch, "key_of", key_of)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(meanwhile).result()
        return key_of(*args)

    monkeypatch.setattr(dispatch, "key_of", slowly)
    subject.check()


class Tied(torch.nn.Module):
    """Its output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 8)
        self.out = torch.nn.Linear(8, 8, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.embedding(x))
        return y


def test_an_adapter_on_a_weight_that_two_layers_share() -> None:
    module = Tied().eval()
    compiled: Any = oxidiff.compile(module)
    x = torch.arange(8)[None]
    torch.testing.assert_close(compiled(x), module(x))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["out"], init_lora_weights=False), module)
    module.eval()
    with pytest.warns(oxidiff.FallbackWarning, match="another layer shares"):
        torch.testing.assert_close(compiled(x), module(x))
    module.out.scaling["default"] = 9.0
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("target_rank", [None, 8])
def test_hotswap(target_rank: int | None) -> None:
    # PEFT takes what has an `_orig_mod` for torch.compile's wrapper and looked for keys that begin with it.
    targets = ["to_q", "to_v"]
    eager = shallow("sd15-unet")
    compiled = oxidiff.compile(shallow("sd15-unet"), strict=True)
    compiled.load_state_dict(eager.state_dict())
    inputs = testing.example_inputs("sd15-unet")

    def adapter(seed: int, rank: int) -> dict[str, Tensor]:
        model = shallow("sd15-unet")
        model.add_adapter(peft.LoraConfig(r=rank, target_modules=targets, init_lora_weights=False))
        state = peft.get_peft_model_state_dict(model, adapter_name="default")
        numbers = torch.Generator().manual_seed(seed)
        return {f"unet.{name}": 0.1 * torch.randn(value.shape, generator=numbers) for name, value in state.items()}

    results = []
    second_rank = 4 if target_rank is None else 8
    for model in (eager, compiled):
        if target_rank is not None:
            model.enable_lora_hotswap(target_rank=target_rank)
        model.load_lora_adapter(adapter(1, 4), prefix="unet", adapter_name="only")
        first = model(**inputs).sample
        model.load_lora_adapter(adapter(2, second_rank), prefix="unet", adapter_name="only", hotswap=True)
        results.append((first, model(**inputs).sample))
    for want, got in zip(*results, strict=True):
        assert testing.relative_error(got, want) < 1e-5
    assert testing.relative_error(*results[1]) > 1e-3, "the second adapter is another one"
    report = oxidiff.report(compiled)
    assert (report.captures, report.eager_calls) == (1, 0)


class Layer(torch.nn.Module):
    """A linear layer that is used as a function says."""

    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q = torch.nn.Linear(8, 8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.q, x)


def _adapted(module: torch.nn.Module, targets: list[str], seed: int = 1, **fields: Any) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **fields)
    peft.inject_adapter_in_model(config, module, adapter_name="one")
    return module.eval().requires_grad_(False)


def _without_for_a_while(q: Any, x: Tensor) -> Tensor:
    with_it = q(x)
    q.enable_adapters(False)
    without = q(x)
    q.enable_adapters(True)
    return with_it - 2 * without


def _at_half(q: Any, x: Tensor) -> Tensor:
    q.scaling["one"] *= 0.5
    try:
        return q(x)
    finally:
        q.scaling["one"] *= 2


USES: dict[str, Callable[..., Tensor]] = {
    "disabled for a while": _without_for_a_while,
    "scaled by a method": lambda q, x: (q.scale_layer(0.5), q(x), q.unscale_layer(0.5))[1],
    "scaled by hand": _at_half,
    "forward called": lambda q, x: q.forward(x),
    "layer inside called": lambda q, x: q(x) - 2 * q.base_layer(x),
    "weight used before": lambda q, x: q.weight.sum() + q(x),
    "weight used after": lambda q, x: q(x) + q.weight.sum(),
    "names of adapters passed": lambda q, x: q(x, adapter_names=["one", "__base__", "one"]),
}


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("use", USES)
def test_a_forward_that_touches_its_adapters(use: str) -> None:
    """The weights that a graph is bound to are the effective ones of before the call: not right here."""
    module = _adapted(Layer(USES[use]), ["q"])
    x = torch.randn(3, 8)
    expected = module(x)
    assert testing.relative_error(expected, module.q(x)) > 1e-2 or use == "forward called"
    compiled = oxidiff.compile(module)
    for _ in range(2):
        assert testing.relative_error(compiled(x), expected) < 2e-6
    # Nothing is left of it, and what is set from outside counts as always.
    assert module.q.scaling == {"one": 4.0}
    module.q.set_scale("one", 0.25)
    assert testing.relative_error(compiled(x), module.forward(x)) < 2e-6


class Inner(torch.nn.Module):
    """A model that passes a scale on to one of diffusers'."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, scale: float, **inputs: Any) -> Tensor:
        result: Tensor = self.net(**inputs, joint_attention_kwargs={"scale": scale})[0]
        return result


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_scale_passed_on_by_a_model_around() -> None:
    subject = Subject("flux")
    subject.add("one")
    inner = Inner(testing.build("flux"))
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS["flux"], init_lora_weights=False),
        inner.net,
        adapter_name="one",
    )
    inner.net.load_state_dict(subject.module.state_dict())
    outer: Any = oxidiff.compile(inner.eval())
    for scale in (0.5, 1.0, 0.2):
        given = {"scale": scale}
        ours = outer(scale=scale, **subject.inputs)
        assert testing.relative_error(ours, subject.result(joint_attention_kwargs=given)) < 2e-5


class Scales(dict[str, float]):
    """A dictionary of a class of its own."""

    def copy(self) -> Scales:
        return Scales(self)


def test_scale_in_a_dictionary_of_another_class() -> None:
    subject = Subject()
    subject.add("one")
    subject.check(cross_attention_kwargs=Scales(scale=0.5))


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_a_model_that_ignores_the_scale() -> None:
    """UNet3DConditionModel has the argument, and does not scale its adapters by it."""
    from diffusers import UNet3DConditionModel

    module: Any = UNet3DConditionModel(
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=8,
        layers_per_block=1,
        attention_head_dim=8,
    )
    testing.fill_weights(module, 0)
    module = _adapted(module, ATTENTION)
    inputs = torch.randn(1, 4, 3, 8, 8), torch.tensor(7), torch.randn(1, 5, 8)
    expected = copy.deepcopy(module).double()(*(x.double() if x.is_floating_point() else x for x in inputs))[0]
    compiled = oxidiff.compile(module)
    assert testing.relative_error(compiled(*inputs, cross_attention_kwargs={"scale": 0.3})[0], expected) < 2e-5


class Scaled(torch.nn.Module):
    """Scales its adapters as diffusers' models do, and cannot be captured whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.up, self.gate, self.down = Gate(), Gate(), Gate()
        if kind == "hooked":
            self.gate.register_forward_hook(lambda _module, _args, result: result + 1)

    def forward(self, x: Tensor, steps: int = 1, cross_attention_kwargs: dict[str, Any] | None = None) -> Tensor:
        from diffusers.utils import scale_lora_layers, unscale_lora_layers

        scale = (cross_attention_kwargs or {}).copy().pop("scale", 1.0)
        scale_lora_layers(self, scale)
        x = self.up(x)
        if self.kind == "pieces" and x.sum() > 1e9:
            x = -x
        self.calls += self.kind == "counting"
        x = self.down(self.gate(x)) * steps
        unscale_lora_layers(self, scale)
        return x


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.linear(x))


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("kind", ["pieces", "counting", "hooked"])
def test_scale_of_what_runs_in_pieces_or_parts(kind: str) -> None:
    torch.manual_seed(0)
    module: Any = _adapted(Scaled(kind), ["linear"])
    eager = copy.deepcopy(module)
    compiled: Any = oxidiff.compile(module)
    for scale in (None, 0.5, 0.5, 2.0, None):
        given = {} if scale is None else {"cross_attention_kwargs": {"scale": scale}}
        x = torch.randn(3, 8)
        assert testing.relative_error(compiled(x, **given), eager(x, **given)) < 2e-5
        assert testing.relative_error(compiled(x, numpy.int64(2), **given), eager(x, 2, **given)) < 2e-5
    # The first call of either kind finds out that it counts.
    assert oxidiff.report(compiled).eager_calls <= 2


def test_a_tensor_as_scale_leaves_the_adapters_as_they_are() -> None:
    subject = Subject("flux")
    subject.add("one")
    before = [dict(layer.scaling) for layer in subject.layers()]
    compiled: Any = oxidiff.compile(subject.module)
    given = {"scale": torch.tensor(0.6)}
    with pytest.warns(oxidiff.FallbackWarning):
        ours = subject.result(compiled, joint_attention_kwargs=given)
    assert [dict(layer.scaling) for layer in subject.layers()] == before
    assert testing.relative_error(ours, subject.result(joint_attention_kwargs={"scale": 0.6})) < 2e-5


class Seamless(torch.nn.Module):
    """A convolution that goes around the edges; PEFT's pads with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(x)
        return result


def _patched(module: Any) -> None:
    module.forward = lambda x: 2 * type(module).forward(module, x)


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("part", ["padding", "layer", "base", "down", "up"])
def test_layers_that_compute_something_else(part: str) -> None:
    module = _adapted(Seamless(), ["conv"])
    if part != "padding":
        module.conv.base_layer.padding_mode = "zeros"
        _patched(
            {
                "layer": module.conv,
                "base": module.conv.base_layer,
                "down": module.conv.lora_A["one"],
                "up": module.conv.lora_B["one"],
            }[part]
        )
    x = torch.randn(2, 4, 6, 7)
    expected = module(x)
    assert testing.relative_error(oxidiff.compile(module)(x), expected) < 2e-6


def test_fused_again_with_another_factor() -> None:
    """The weight differs where nobody looks: three places of it are looked at where torch does not count."""
    module = _adapted(Layer(lambda q, x: q(x)), ["q"])
    for row in (0, 3, 4, 7):
        # The first, middle and last bytes stay as they are.
        module.q.lora_B["one"].weight[row] = 0
    compiled: Any = oxidiff.compile(module, strict=True)
    x = torch.randn(3, 8)
    for factor in (1.0, 3.0, 0.5):
        module.q.set_scale("one", factor)
        module.q.merge()
        expected = module.q.base_layer(x)
        assert testing.relative_error(compiled(x), expected) < 2e-6
        module.q.unmerge()


# --- weight sets ----------------------------------------------------------------------------------------------------


def with_weights(module: Any, state: dict[str, Tensor]) -> Any:
    """A copy of a module with other weights and the same adapters, merged where these are."""
    eager = copy.deepcopy(module)
    merged = [
        (layer, list(layer.merged_adapters)) for layer in eager.modules() if getattr(layer, "merged_adapters", ())
    ]
    for layer, _ in merged:
        layer.unmerge()
    for name, parameter in eager.named_parameters():
        if (given := state.get(name.replace(".base_layer", ""))) is not None:
            parameter.copy_(given)
    for layer, names in merged:
        layer.merge(adapter_names=names)
    return eager


def test_a_set_has_the_adapters_of_the_module() -> None:
    subject = Subject()
    state = {name: tensor * 1.1 for name, tensor in subject.module.state_dict().items()}
    subject.compiled.bind(state, "set")
    subject.compiled.use("set")
    before = subject.result()

    def check() -> Tensor:
        ours = subject.result()
        assert testing.relative_error(ours, subject.result(with_weights(subject.module, state))) < 2e-5
        return ours

    assert torch.equal(check(), before)
    counts = subject.counts()
    subject.add("one")
    one = check()
    assert testing.relative_error(one, before) > 1e-3
    subject.set("one", 0.3)
    assert testing.relative_error(check(), one) > 1e-3
    subject.add("two", 3)
    subject.set(["one", "two"], [0.7, -0.4])
    check()
    for layer in subject.layers():
        layer.enable_adapters(False)
    assert torch.equal(check(), before)
    for layer in subject.layers():
        layer.enable_adapters(True)
        layer.merge(adapter_names=["one"])
    check()
    for layer in subject.layers():
        layer.unmerge()
    subject.set("one")
    assert torch.equal(check(), one)
    for layer in subject.layers():
        layer.lora_B["one"].weight.mul_(2)
    assert testing.relative_error(check(), one) > 1e-3
    for layer in subject.layers():
        layer.delete_adapter("one")
        layer.delete_adapter("two")
    assert torch.equal(check(), before)
    assert subject.counts() == counts
    # All that were the module's own.
    subject.compiled.use(None)
    subject.check()


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig", "IA3Config"])
def test_adapters_of_other_kinds_in_a_set(kind: str) -> None:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(32, 32))
    state = {name: torch.randn_like(tensor) * 0.2 for name, tensor in module.state_dict().items()}
    compiled: Any = oxidiff.compile(module.eval(), strict=True)
    compiled.use(compiled.bind(state))
    x = torch.randn(4, 32)
    plain = compiled(x)

    def check(is_plain: bool = False) -> None:
        expected = with_weights(module, state)(x)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
        assert (testing.relative_error(expected, plain) < 1e-6) == is_plain

    extra: dict[str, Any] = {"feedforward_modules": []} if kind == "IA3Config" else {"r": 4}
    peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["0"], **extra), module)
    for name, parameter in module.named_parameters():
        if "base_layer" not in name:
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    module.eval()
    layer: Any = module[0]
    check()
    layer.merge()
    check()
    layer.enable_adapters(False)
    check(is_plain=True)
    layer.enable_adapters(True)
    check()
    layer.unmerge()
    check()
    # Another one of the same name and form.
    layer.delete_adapter("default")
    peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["0"], **extra), module)
    for name, parameter in module.named_parameters():
        if "base_layer" not in name:
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    module.eval()
    check()


def test_a_set_that_names_weights_of_adapters() -> None:
    module = _adapted(Layer(lambda q, x: q(x)), ["q"])
    compiled: Any = oxidiff.compile(module, strict=True)
    x = torch.randn(3, 8)
    compiled(x)
    # With PEFT's names: all weights are the set's, how much of an adapter is added is the module's.
    state = {name: torch.randn_like(tensor) for name, tensor in module.state_dict().items()}
    other = copy.deepcopy(module)
    other.load_state_dict(state)
    oxidiff.use(compiled, compiled.bind(state, "all"))
    assert testing.relative_error(compiled(x), other(x)) < 2e-6
    for one in (module, other):
        one.q.set_scale("one", 0.25)
    assert testing.relative_error(compiled(x), other(x)) < 2e-6
    # Those that only the set has changed.
    state["q.lora_B.one.weight"].mul_(3)
    other.q.lora_B["one"].weight.mul_(3)
    assert testing.relative_error(compiled(x), other(x)) < 2e-6
    with pytest.raises(oxidiff.ShapeError, match=r"q.lora_A.zzz.weight: not a tensor of the module"):
        compiled.bind({**state, "q.lora_A.zzz.weight": x})


def test_a_set_of_the_modules_own_tensors_when_adapters_are_merged() -> None:
    """They are in these already."""
    module = _adapted(Layer(lambda q, x: q(x)), ["q"])
    compiled: Any = oxidiff.compile(module, strict=True)
    x = torch.randn(3, 8)
    oxidiff.use(compiled, compiled.bind(dict(module.state_dict()), "own"))
    expected = module(x)
    assert testing.relative_error(compiled(x), expected) < 2e-6
    module.q.merge()
    assert testing.relative_error(compiled(x), expected) < 2e-6


class KeepingScaled(torch.nn.Module):
    """Keeps what it is given, and takes a factor for its adapters, as diffusers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.kept: Any = None

    def forward(self, x: Tensor, timestep: Any, cross_attention_kwargs: dict[str, Any] | None = None) -> Tensor:
        scale = (cross_attention_kwargs or {}).get("scale", 1.0)
        scale_lora_layers(self, scale)
        before = torch.zeros_like(x) if self.kept is None else self.kept
        self.kept = x
        result = self.layer(x) * timestep + before
        unscale_lora_layers(self, scale)
        return result


def test_a_scale_beside_a_number_of_numpys_where_tensors_are_kept() -> None:
    module = KeepingScaled().eval()
    config = peft.LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, module)
    eager = copy.deepcopy(module)
    compiled: Any = oxidiff.compile(module, cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        for step, scale in enumerate((1.0, 1.0, 1.0, 0.25, 0.5)):
            x = torch.randn(3, 8)
            for timestep in (numpy.float64(step + 0.5), step + 0.5):
                more = {"cross_attention_kwargs": {"scale": scale}}
                torch.testing.assert_close(compiled(x, timestep, **more), eager(x, timestep, **more))
