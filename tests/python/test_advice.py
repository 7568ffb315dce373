"""Advice: the arithmetic of the roofline, and that it says different things about different devices."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import oxidiff
from nets import Net, image
from oxidiff.__main__ import main
from oxidiff.advice import DEVICES, Device, device_of, place, sentences
from oxidiff.report import _advice, _look

FAST = Device("x", f32_flops=1e12, half_flops=4e12, bandwidth=1e11, launch_s=1e-6)


def test_the_larger_of_both_bounds_counts() -> None:
    steps = [("a", "linear", "", 2e9, 1e6), ("b", "loop", "", 1e6, 1e8)]
    found = place(steps, FAST, False)
    assert found.seconds == pytest.approx(2e-3 + 1e-3 + 2e-6)
    assert (found.arithmetic, found.bandwidth) == pytest.approx((2 / 3.002, 1 / 3.002))
    assert list(found.kernels) == ["linear", "loop"]
    assert place(steps, FAST, True, scale=0.5).seconds == pytest.approx(0.5e-3 + 0.5e-3 + 2e-6)


def test_what_a_cache_holds_need_not_come_from_memory() -> None:
    device = dataclasses.replace(FAST, caches=((1e3, float("inf")), (1e6, 1e12)), launch_s=0.0)
    for size, seconds in [(1e3, 0.0), (1e6, 1e-6), (1e7, 1e-4)]:
        assert place([("a", "loop", "", 0.0, size)], device, False).seconds == pytest.approx(seconds)


def test_convolutions_of_f32_may_be_of_tf32() -> None:
    steps = [("a", "linear", "", 1e9, 0.0), ("b", "convolution", "", 1e9, 0.0)]
    device = dataclasses.replace(FAST, tf32_flops=2e12, launch_s=0.0)
    assert place(steps, device, False).seconds == pytest.approx(1e-3 + 0.5e-3)
    assert place(steps, device, True).seconds == pytest.approx(2 * 0.25e-3)
    assert DEVICES["t4"].tf32_flops == 0 and DEVICES["a100"].tf32_flops == 156e12


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_step_takes_less_than_its_bound(dtype: torch.dtype) -> None:
    """Of convolutions that Winograd's form computes, and of a look-up in a table that is much larger than what is read."""

    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(20_000, 1024)
            self.convs = torch.nn.Sequential(*(torch.nn.Conv2d(128, 128, 3, padding=1) for _ in range(3)))

        def forward(self, rows: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.table(rows), self.convs(x)

    compiled: Any = oxidiff.compile(Looks().to(dtype).eval(), strict=True, cache=False, tune="off")
    given = torch.arange(77)[None], torch.randn(1, 128, 96, 96, dtype=dtype)
    compiled(*given)
    profiles = [compiled.profile(*given) for _ in range(5)]
    assert {step["kernel"] for step in profiles[0].steps} >= {"convolution", "gather"}
    convolutions = [step for step in profiles[0].steps if step["kernel"] == "convolution"]
    saved = {round(step["work"] / step["flops"], 3) for step in convolutions}
    assert saved <= ({0.25, 0.444} if dtype == torch.float32 else {0.25, 0.444, 1.0}), (
        "Winograd's forms, or the direct one"
    )
    (gather,) = (step for step in profiles[0].steps if step["kernel"] == "gather")
    assert gather["bytes"] <= 77 * (2 * 1024 * dtype.itemsize + 8)
    for steps in zip(*(profile.steps for profile in profiles), strict=True):
        row = ("", steps[0]["kernel"], "", steps[0]["work"], steps[0]["bytes"])
        bound = place([row], device_of(None), dtype == torch.bfloat16).seconds
        # A processor's clock, and what its memory gives, are not those of the moment when they were measured.
        assert min(step["seconds"] for step in steps) > 0.7 * bound, steps[0]


def test_devices_by_name() -> None:
    assert device_of("l4") is device_of("L4") is DEVICES["l4"]
    assert device_of("rtx 4090").name == "RTX4090"
    laptop = device_of("NVIDIA GeForce RTX 4090 Laptop GPU")
    assert laptop.name == "RTX4090-Laptop" and laptop.bandwidth < 0.6 * device_of("rtx-4090").bandwidth
    assert device_of("NVIDIA A100-SXM4-40GB").memory_bytes == device_of("A100").memory_bytes / 2
    with pytest.raises(ValueError, match="RTX4070-Laptop"):
        device_of("RTX 4070 Ti")
    with pytest.raises(ValueError, match="H100"):
        device_of("abacus")


@torch.no_grad()
def test_explain_says_what_bounds_it() -> None:
    compiled: Any = oxidiff.compile(Net().eval(), strict=True, cache=False)
    compiled(image())
    (tiny,) = oxidiff.explain(compiled).advice
    assert "this CPU" in tiny and "what bounds it is the call itself" in tiny and "The last one took" in tiny
    compiled(image(4, 3, 256, 256))
    here = "\n".join(oxidiff.explain(compiled).advice)
    assert "this CPU" in here and "The last one took" in here and "bandwidth" in here
    assert "Larger images cost" in here
    there = str(compiled.explain(device="L4"))
    assert "On L4" in there and "The last one took" not in there and "24 GB" in there
    with pytest.raises(ValueError):
        oxidiff.explain(compiled, device="abacus")


@torch.no_grad()
def test_what_would_help_is_said_where_it_would() -> None:
    def advice(memory: str, size: int) -> str:
        net = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.SiLU(), torch.nn.Linear(2048, 2048)).eval()
        compiled: Any = oxidiff.compile(net, strict=True, cache=False, tune="off", memory=memory)
        compiled(torch.zeros(size, 2048))
        return "\n".join(oxidiff.explain(compiled).advice)

    assert 'memory="fast" would keep 0.03 GB more' in advice("low", 1024)
    assert 'memory="fast"' not in advice("low", 64), "few rows are packed instead of the weight"
    assert 'memory="fast"' not in advice("fast", 1024), "it is on already"
    assert "A larger batch helps" in advice("fast", 2)
    assert "A larger batch does not help" in advice("fast", 4096)
    big: Any = oxidiff.compile(torch.nn.Linear(8, 8).eval(), strict=True, cache=False)
    big(torch.zeros(2, 8))
    (variant,) = oxidiff.module.dispatcher_of(big).engines()[0].variants
    facts = {"is_half": False, "weight_bytes": 30e9}
    said = "\n".join(sentences(variant.program, [2], DEVICES["l4"], facts))
    assert "does not fit into the 24 GB of L4" in said and "In 16 bits it would need about 15.00 GB" in said
    said = "\n".join(sentences(variant.program, [2], DEVICES["l4"], {"is_half": True, "weight_bytes": 30e9}))
    assert "weights in 8 bits (GGUF's Q8_0, layerwise casting) it would need about 15.00 GB, and then it fits" in said


@torch.no_grad()
def test_each_memory_option_has_its_bytes_on_a_gpu() -> None:
    convs = [
        torch.nn.Conv2d(256, 256, 3, padding=1),
        torch.nn.Conv2d(256, 512, 3, padding=1),
        torch.nn.Conv2d(512, 8, 1),
    ]
    net = torch.nn.Sequential(*convs).eval().requires_grad_(False)
    first, second = (conv.weight.numel() * 4 for conv in convs[:2])

    def advice(module: torch.nn.Module, device: str | None, memory_bytes: int = 0) -> str:
        compiled: Any = oxidiff.compile(module, strict=True, cache=False, tune="off")
        compiled(torch.zeros(1, 256, 16, 16))
        if memory_bytes:
            asked = dataclasses.replace(DEVICES["t4"], memory_bytes=memory_bytes)
            (variant,) = oxidiff.module.dispatcher_of(compiled).engines()[0].variants
            return "\n".join(_advice(variant, _look(variant, asked)))
        return "\n".join(oxidiff.explain(compiled, device=device).advice)

    said = advice(net, "T4")
    needs, low = _needs(said)
    assert needs - low == pytest.approx(first / 1e6, abs=0.11), "the larger one is laid out in the workspace"
    copies = re.search(r"([\d.]+) MB of that are weights of convolutions", said)
    assert copies is not None and float(copies[1]) == pytest.approx((first + second) / 1e6, abs=0.06)
    assert "laying them out takes" in said and "then it fits" not in said
    weights = sum(p.numel() * 4 for p in net.parameters())
    tight = advice(net, None, weights + first + second)
    assert "does not fit into" in tight and 'memory="low" needs' in tight and "and then it fits" in tight
    lying_so = advice(net.to(memory_format=torch.channels_last), "T4")
    assert "need the same there" in lying_so and "of that are weights" not in lying_so
    assert "need the same there" not in advice(net, None), "a processor has no memory of its own"


def _needs(said: str) -> tuple[float, float]:
    needs, low = re.search(r"It needs ([\d.]+) MB", said), re.search(r'memory="low" needs ([\d.]+) MB', said)
    assert needs is not None and low is not None, said
    return float(needs[1]), float(low[1])


@torch.no_grad()
def test_attention_makes_large_images_dear() -> None:
    class Attends(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = x.flatten(2).transpose(1, 2).unsqueeze(1)
            return torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)

    compiled: Any = oxidiff.compile(Attends().eval(), strict=True, cache=False, tune="off")
    compiled(torch.randn(1, 64, 48, 48))
    said = "\n".join(oxidiff.explain(compiled).advice)
    assert "more than their pixels" in said


@torch.no_grad()
def test_fusion_is_chosen_for_the_device() -> None:
    """The same graph: a card with arithmetic to spare computes again what others keep."""

    class Modulated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(1280, elementwise_affine=False)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * torch.nn.functional.silu(scale)

    compiled: Any = oxidiff.compile(Modulated().eval(), strict=True, cache=False, tune="off")
    compiled(torch.randn(2, 1024, 1280), torch.randn(2, 1, 1280))
    said = {device: "\n".join(compiled.explain(device=device).advice) for device in ("H100", "T4")}
    assert "Compiled for H100 it has 1 kernels, 1 fewer than for a processor" in said["H100"]
    assert "fewer than" not in said["T4"]


def test_doctor_asks_about_a_card_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for device in ("T4", "H100"):
        assert main(["doctor", "--model", "sd15-vae-decoder", "--dtype", "f16", "--device", device]) == 0
        said[device] = capsys.readouterr().out
        assert f"On {device}" in said[device] and "fits into" in said[device]
    assert said["T4"] != said["H100"]
    assert main(["doctor", "--device", "abacus"]) == 1
    assert "no profile" in capsys.readouterr().err
    assert main(["doctor", "--model", "clip-l", "--device", "L4", "--batch", "3", "--size", "50"]) == 0
    asked = capsys.readouterr().out
    assert "= 3" in asked and "= 50" in asked
    assert main(["doctor", "--model", "clip-l", "--size", "50", "60"]) == 1
    assert "clip-l takes sizes like (77,)" in capsys.readouterr().err


@torch.no_grad()
def test_advice_of_a_size_that_cannot_be_doubled() -> None:
    # A sixth of a side, rounded: the program is for this rest by six.
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, stride=6, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1))
    compiled: Any = oxidiff.compile(module.eval(), cache=False)
    compiled(torch.randn(1, 3, 39, 51))
    assert "at three times the size" in str(oxidiff.explain(compiled))
