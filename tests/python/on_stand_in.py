"""Compiled modules on the CUDA backend behind a stand-in for the driver (`stand_in.py`). `test_cuda.py` runs this file in a
process of its own."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxidiff
from nets import Net, assert_close, image
from oxidiff import testing
from stand_in import NoCompilerError, StandIn, in_use, stand_in

# f32 sums in another order, over the depth of the model.
MODEL_TOLERANCE = 2e-5
HALF_ERROR_RATIO = 1.25
"""Promised for a model of 16 bits: its error against f64, over eager's own, which is of the type's epsilon."""


@pytest.fixture
def gpu() -> Iterator[StandIn]:
    try:
        made = stand_in()
    except NoCompilerError as error:
        pytest.skip(str(error))
    with in_use(made):
        yield made


@pytest.fixture
def other(gpu: StandIn) -> StandIn:
    """The second device."""
    return stand_in(1)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def compiled(module: nn.Module, **options: Any) -> Any:
    options = {"cache": False, "strict": True, **options}
    return oxidiff.compile(module.eval(), **options)


@torch.no_grad()
def test_a_unet_runs_as_on_the_cpu(gpu: StandIn) -> None:
    unet = testing.build("sd15-unet", tiny=True).eval()
    ours = compiled(unet)
    for size in (8, 16):
        for _ in range(3):
            inputs = testing.example_inputs("sd15-unet", tiny=True, batch=2, size=(size, size))
            launched = gpu.count("launches") + gpu.count("graph_launches")
            assert relative(ours(**inputs).sample, unet(**inputs).sample) < MODEL_TOLERANCE
            assert gpu.count("launches") + gpu.count("graph_launches") > launched, "it ran behind the driver"
    report = ours.report()
    assert (report.captures, report.programs, report.eager_calls, report.specializations) == (1, 1, 0, 2)
    assert "cuda/sm_80" in str(ours._oxidiff.engines()[-1].variants[0].program.text("plan"))


@pytest.mark.parametrize(("name", "dtype"), [("sd15-unet", torch.float16), ("sd3", torch.bfloat16)])
@torch.no_grad()
def test_a_model_of_16_bits_is_as_near_to_f64_as_eager(name: str, dtype: torch.dtype, gpu: StandIn) -> None:
    """Launched, and replayed with other tensors."""
    module = testing.build(name, tiny=True, dtype=dtype).eval()
    ours = compiled(module)
    launched = gpu.count("launches"), gpu.count("graph_launches")
    for seed in (1, 2):
        inputs = testing.example_inputs(name, tiny=True, batch=2, dtype=dtype, seed=seed)
        exact = testing.reference(module, inputs)
        error, own = (testing.typical_error(run(**inputs), exact) for run in (ours, module))
        assert 0 < error <= HALF_ERROR_RATIO * own, f"seed {seed}: {error:.2e}, eager {own:.2e}"
    assert gpu.count("launches") > launched[0] and gpu.count("graph_launches") == launched[1] + 1
    report = ours.report()
    assert (report.captures, report.programs, report.eager_calls) == (1, 1, 0)


@torch.no_grad()
def test_numbers_reach_the_device(gpu: StandIn) -> None:
    net, x = Net(), image()
    ours = compiled(net)
    for factor in (2.0, 3.5, 2.0, -1.25):
        written = gpu.count("writes")
        assert_close(ours(x, factor), net(x, factor))
        assert gpu.count("writes") == written + 2, "a number is two words"


@torch.no_grad()
def test_the_second_call_is_a_graph_launch(gpu: StandIn) -> None:
    net = Net()
    ours = compiled(net)
    ours(image())
    before = {what: gpu.count(what) for what in ("launches", "graphs", "graph_launches")}
    for seed in range(3):
        assert_close(ours(image(seed=seed)), net(image(seed=seed)))
    assert gpu.count("launches") == before["launches"]
    assert gpu.count("graphs") == before["graphs"] + 1
    assert gpu.count("graph_launches") == before["graph_launches"] + 3


@torch.no_grad()
def test_graphs_can_be_had_without(gpu: StandIn) -> None:
    net, x = Net(), image()
    ours, graphs = compiled(net, cuda_graphs=False), gpu.count("graphs")
    for _ in range(3):
        assert_close(ours(x), net(x))
    assert gpu.count("graphs") == graphs


@torch.no_grad()
def test_a_result_without_room_is_asked_for_again(gpu: StandIn) -> None:
    net, x = Net(), image()
    ours = compiled(net)
    ours(x)
    real, refused = gpu.empty, []

    def refuse_once(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        if not refused:
            refused.append(shape)
            raise MemoryError("no room")
        return real(shape, dtype)

    gpu.empty = refuse_once  # type: ignore[method-assign]
    try:
        assert_close(ours(x), net(x))
    finally:
        del gpu.empty
    assert refused and ours.report().eager_calls == 0


@torch.no_grad()
def test_adapters_are_scaled_outside_of_captures(gpu: StandIn) -> None:
    peft = pytest.importorskip("peft")
    unet = testing.build("sd15-unet", tiny=True).eval()
    unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))  # type: ignore
    unet.requires_grad_(False)
    inputs = testing.example_inputs("sd15-unet", tiny=True)
    ours = compiled(unet, strict=False)

    def check(scale: float) -> None:
        extra = {"cross_attention_kwargs": {"scale": scale}}
        assert relative(ours(**inputs, **extra).sample, unet(**inputs, **extra).sample) < MODEL_TOLERANCE

    check(1.0)
    waits = gpu.waits
    check(0.5)
    assert gpu.waits > waits, "other streams may read the weights that are replaced"
    with gpu.capture(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        waits = gpu.waits
        check(0.25)
        assert gpu.waits == waits
    assert ours.report().eager_calls == 1
    check(0.25)
    assert ours.report().eager_calls == 1


@torch.no_grad()
def test_streams_have_workspaces_and_graphs_of_their_own(gpu: StandIn) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
    ours = compiled(net)
    ours(image())
    one = ours.report()
    graphs = gpu.count("graphs")
    for _ in range(3):
        for handle in (0x10, 0x20):
            with gpu.on_stream(handle):
                assert_close(ours(image(seed=handle)), net(image(seed=handle)))
    assert ours.report().pool_bytes >= 3 * one.arena_bytes > 0
    assert gpu.count("graphs") == graphs + 2


@torch.no_grad()
def test_threads_on_streams_of_their_own(gpu: StandIn) -> None:
    net = Net()
    ours = compiled(net)
    problems: list[BaseException] = []

    def work(handle: int) -> None:
        try:
            with torch.no_grad(), gpu.on_stream(handle):
                for seed in range(8):
                    x = image(2, 3, 8 + 2 * (seed % 2), 8, seed=seed)
                    assert_close(ours(x), net(x))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(0x10 * (1 + i % 3),)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert ours.report().programs == 1


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch lends captures no memory"
)
@torch.no_grad()
def test_what_is_captured_is_launches_over_memory_of_its_own(gpu: StandIn) -> None:
    net, x = Net(), image()
    ours = compiled(net)
    ours(x)
    ours(x)
    graph_launches, pool = gpu.count("graph_launches"), ours.report().pool_bytes
    launches = gpu.count("launches")
    with gpu.capture():
        ours(x)
    assert gpu.count("launches") > launches
    assert gpu.count("graph_launches") == graph_launches
    assert ours.report().pool_bytes == pool, "the memory of the capture went back"
    assert_close(ours(x), net(x))


@pytest.mark.skipif(hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch lends memory to captures")
@torch.no_grad()
def test_without_memory_that_torch_lends_a_capture_runs_eager(gpu: StandIn) -> None:
    net, x = Net(), image()
    ours = compiled(net, strict=False)
    assert_close(ours(x), net(x))
    with (
        gpu.capture(),
        pytest.warns(oxidiff.FallbackWarning, match=r"lends no memory to captures, from 2\.10 on it does"),
    ):
        assert_close(ours(x), net(x))
    assert ours.report().eager_calls == 1
    assert_close(ours(x), net(x))
    assert ours.report().eager_calls == 1


@torch.no_grad()
def test_nothing_is_compiled_in_a_capture(gpu: StandIn) -> None:
    net, x = Net(), image()
    ours = compiled(net, strict=False)
    with gpu.capture(), pytest.warns(oxidiff.FallbackWarning, match="being captured"):
        assert_close(ours(x), net(x))
    report = ours.report()
    assert (report.captures, report.eager_calls) == (0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(ours(x), net(x))
    report = ours.report()
    assert (report.captures, report.eager_calls) == (1, 1), "the capture is not held against it"
    # Other weights are not bound in a capture either.
    net.linear.bias.add_(1.0)
    with gpu.capture():
        assert_close(ours(x), net(x))
    assert ours.report().eager_calls == 2
    assert_close(ours(x), net(x))
    assert ours.report().eager_calls == 2


def test_nothing_is_compiled_in_a_capture_strictly(gpu: StandIn) -> None:
    ours = compiled(Net())
    with gpu.capture(), torch.no_grad(), pytest.raises(oxidiff.UnsupportedError, match="being captured"):
        ours(image())


@torch.no_grad()
def test_f32_may_be_rounded_where_torch_says_so(gpu: StandIn) -> None:
    net, x = Net(), image()
    ours = compiled(net)
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    def seen() -> list[tuple[bool, bool]]:
        return [variant.captured.tf32 for variant in ours._oxidiff.engines()[-1].variants]

    try:
        torch.backends.cudnn.allow_tf32 = True
        ours(x)
        assert seen() == [(False, True)], "eager's convolutions are rounded unless told otherwise"
        torch.backends.cudnn.allow_tf32 = False
        assert_close(ours(x), net(x))
        torch.set_float32_matmul_precision("high")
        assert_close(ours(x), net(x))
        assert seen() == [(False, True), (False, False), (True, False)]
        torch.set_float32_matmul_precision("highest")
        assert_close(ours(x), net(x))
        report = ours.report()
        assert (report.captures, report.programs, report.eager_calls) == (1, 3, 0)
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


@torch.no_grad()
def test_a_size_without_a_graph_is_launched_and_says_why(gpu: StandIn) -> None:
    net = Net()
    ours = compiled(net)
    gpu.driver.fake_refuse(5)
    try:
        replayed = gpu.count("graph_launches")
        for _ in range(3):
            assert_close(ours(image()), net(image()))
    finally:
        gpu.driver.fake_refuse(0)
    for size in (image(), image(1, 3, 6, 6)):
        for _ in range(2):
            assert_close(ours(size), net(size))
    assert gpu.count("graph_launches") == replayed + 1, "the other size has a graph"
    report = ours.report()
    assert report.eager_calls == 0
    reasons = [row.get("no_graphs", "") for row in report.sizes]
    assert sorted(bool(reason) for reason in reasons) == [False, True]
    assert "a graph's launch" in max(reasons)
    (variant,) = ours.explain().variants
    ((_, reason),) = variant["no_graphs"]
    assert reason == max(reasons) and reason in str(ours.explain())


@torch.no_grad()
def test_who_computes_what_shows(gpu: StandIn) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3))
    ours = compiled(net)
    ours(image())
    assert ours.report().sizes[0]["computed_by"] == {"kernel": 2}
    (variant,) = ours.explain().variants
    steps = variant["not_by_libraries"]
    assert len(steps) == 2 and all("convolution" in step and reason for step, reason in steps)
    assert "not_by_libraries: " in str(ours.explain())


class Prepared(nn.Module):
    """Something of it depends on weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.norm = nn.Parameter(torch.randn(16))
        self.register_buffer("table", torch.arange(16.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.softmax(self.weight * self.norm, dim=0)
        return x @ scaled + torch.tensor([1.0, 2.0, 3.0, 4.0] * 4)


@torch.no_grad()
def test_weights_change_in_place_and_as_a_whole(gpu: StandIn) -> None:
    net, x = Prepared(), image(5, 16)
    ours = compiled(net)
    assert_close(ours(x), net(x))
    assert ours.report().derived_bytes > 0
    net.norm.mul_(2.0)
    assert_close(ours(x), net(x))
    net.load_state_dict({name: torch.randn_like(tensor) for name, tensor in net.state_dict().items()})
    assert_close(ours(x), net(x))
    net.weight.data = torch.randn(16, 16).T
    assert_close(ours(x), net(x))
    assert ours.report().captures <= 2


@torch.no_grad()
def test_memory_read_on_another_stream_is_freed_after_it(gpu: StandIn) -> None:
    net, x = Prepared(), image(5, 16)
    ours = compiled(net)
    with gpu.on_stream(0x111):
        assert_close(ours(x), net(x))
    with gpu.on_stream(0x222):
        assert_close(ours(x), net(x))
    assert not gpu.has_waited(0x222, 0x111)
    ours.unload()
    assert gpu.has_waited(0x222, 0x111), "its stream waits for the reader before the memory goes"
    assert not gpu.has_waited(0x111, 0x222)


@torch.no_grad()
def test_memory_read_on_another_stream_outlives_a_capture(gpu: StandIn) -> None:
    net, x = Prepared(), image(5, 16)
    ours = compiled(net)
    with gpu.on_stream(0x333):
        ours(x)
    with gpu.on_stream(0x444):
        ours(x)
    with gpu.capture(0x444):
        ours.unload()
        assert not gpu.has_waited(0x444, 0x333), "an event of a captured stream would be the graph's"
    compiled(Net())(image())
    assert gpu.has_waited(0x444, 0x333)


@torch.no_grad()
def test_the_callers_context_is_its_own(gpu: StandIn) -> None:
    other, x = 0x777, image()
    ours = compiled(Net())
    gpu.driver.cuCtxSetCurrent(other)
    try:
        ours(x)
        ours(x)
        assert gpu.context() == other
    finally:
        gpu.driver.cuCtxSetCurrent(None)
    ours(x)
    assert gpu.context() is None


def test_inference_mode_and_tensors_made_in_it(gpu: StandIn) -> None:
    with torch.inference_mode():
        net, x = Prepared().eval(), image(5, 16)
        ours = compiled(net)
        result = ours(x)
        assert result.is_inference()
        assert_close(result, net(x))
        # No counter shows this write, and a device's memory is not looked at.
        net.weight.mul_(0.5)
        assert_close(ours(x), net(x))


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch lends captures no memory"
)
def test_what_is_not_ready_is_not_made_in_a_capture(gpu: StandIn) -> None:
    with torch.inference_mode():
        net, x = Prepared().eval(), image(5, 16)
        ours = compiled(net, strict=False)
        assert_close(ours(x), net(x))
        # What is derived from uncounted weights is made anew by every call.
        with gpu.capture(), pytest.warns(oxidiff.FallbackWarning, match="not ready yet"):
            assert_close(ours(x), net(x))
        assert ours.report().eager_calls == 1
        assert_close(ours(x), net(x))


@torch.no_grad()
def test_kernels_are_unloaded_when_others_are_loaded(gpu: StandIn) -> None:
    ours = compiled(nn.Linear(7, 9))
    ours(torch.randn(3, 7))
    unloads = gpu.count("unloads")
    ours.unload()
    del ours
    gc.collect()
    assert gpu.count("unloads") == unloads, "somebody may be capturing"
    compiled(nn.Linear(9, 7))(torch.randn(3, 9))
    assert gpu.count("unloads") > unloads


@torch.no_grad()
def test_results_are_torchs_own_tensors(gpu: StandIn) -> None:
    made = []
    real = gpu.empty
    gpu.empty = lambda shape, dtype: made.append(real(shape, dtype)) or made[-1]  # type: ignore
    try:
        result = compiled(Net())(image())
    finally:
        del gpu.empty
    assert result.data_ptr() == made[-1].data_ptr()


@torch.no_grad()
def test_a_cast_program(gpu: StandIn) -> None:
    """Weights of 32 bits, products of 16: as under autocast."""
    net, x = Net(), image()
    ours = compiled(net)
    with torch.autocast("cpu", torch.float16):
        result, expected = ours(x), net(x)
    assert result.dtype is expected.dtype is torch.float16
    assert relative(result, expected) < 2**-9
    assert_close(ours(x), net(x))


@torch.no_grad()
def test_windows_padded_with_infinity(gpu: StandIn) -> None:
    module = nn.MaxPool2d(3, 2, 1)
    x = image() - 10
    assert torch.equal(compiled(module)(x), module(x))


@torch.no_grad()
def test_an_op_without_a_kernel_runs_eager_between_programs(gpu: StandIn) -> None:
    class Sorts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.sort(self.linear(x), dim=1).values) + 1.0

    net, x = Sorts(), image(5, 16)
    ours = compiled(net, strict=False)
    launched = gpu.count("launches")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(ours(x), net(x))
    assert gpu.count("launches") > launched


@torch.no_grad()
def test_everything_goes_with_the_module(gpu: StandIn) -> None:
    ours = compiled(Net())
    ours(image())
    assert ours.report().pool_bytes > 0
    ours.unload()
    del ours
    gc.collect()
    again = compiled(Net())
    x = image(1, 3, 4, 4)
    again(x)
    report = again.report()
    assert report.pool_bytes == report.arena_bytes


@torch.no_grad()
def test_a_model_runs_on_the_second_device(gpu: StandIn, other: StandIn) -> None:
    net, x = Prepared(), image(5, 16)
    launched = gpu.launched()
    with in_use(other), other.owning(x, *net.parameters()):
        ours = compiled(net)
        for _ in range(3):
            assert_close(ours(x), net(x))
        assert other.launched() > 0
    assert gpu.launched() == launched, "nothing of it ran on the first one"
    report = ours.report()
    assert (report.captures, report.programs, report.eager_calls) == (1, 1, 0)


@torch.no_grad()
def test_two_devices_have_a_program_each_and_memory_of_their_own(gpu: StandIn, other: StandIn) -> None:
    nets, inputs, made = [Prepared(), Prepared()], [image(5, 16), image(5, 16, seed=1)], []
    for device, net, x in zip((gpu, other), nets, inputs, strict=True):
        with in_use(device), device.owning(x, *net.parameters()):
            # Tensors of both stand-ins say that they are on the CPU: without another option the family would be one.
            made.append(compiled(net, max_specializations=8 + len(made)))
            assert_close(made[-1](x), net(x))
    programs = [ours._oxidiff.engines()[-1].variants[0].program for ours in made]
    assert programs[0].hash == programs[1].hash and programs[0] is not programs[1]
    for _ in range(3):
        for device, ours, net, x in zip((gpu, other), made, nets, inputs, strict=True):
            with in_use(device), device.owning(x, *net.parameters()):
                launched = [gpu.launched(), other.launched()]
                assert_close(ours(x), net(x))
                now = [gpu.launched(), other.launched()]
                assert [n > before for n, before in zip(now, launched, strict=True)] == [device is gpu, device is other]
    assert [ours.report().eager_calls for ours in made] == [0, 0]


@torch.no_grad()
def test_memory_of_the_other_device_is_an_error(gpu: StandIn, other: StandIn) -> None:
    net, x = Net(), image()
    ours = compiled(net)
    assert_close(ours(x), net(x))
    with other.owning(x), pytest.raises(oxidiff.Error, match="ILLEGAL_ADDRESS"):
        ours(x)
    assert_close(ours(x), net(x))


@torch.no_grad()
def test_what_was_saved_on_one_device_is_loaded_on_the_other(gpu: StandIn, other: StandIn, tmp_path: Path) -> None:
    net, x, path = Net(), image(), tmp_path / "net.oxidiff"
    ours = compiled(net)
    ours(x)
    ours.save_graph(path)
    again = Net()
    with in_use(other), other.owning(x, *again.parameters()):
        loaded = compiled(again, max_specializations=9)
        loaded.load_graph(path)
        launched = other.launched(), gpu.launched()
        for _ in range(2):
            assert_close(loaded(x), again(x))
        assert other.launched() > launched[0] and gpu.launched() == launched[1]
    report = loaded.report()
    assert (report.captures, report.eager_calls) == (0, 0)
