"""LoRA adapters come, go and change their strength; the program stays.

    python examples/lora_switch.py

Loads two rank-16 adapters for all attention layers of a UNet through diffusers' own calls, switches between them, and
prints for each switch what it took, how far the result is from eager PyTorch, and that nothing was compiled. Weights are
random, no download is needed. `--model sd15` takes the real SD1.5 configuration (3.4 GB of weights).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import oxidiff
from oxidiff import testing

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def lora_state_dict(unet: torch.nn.Module, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA file for all attention layers, as `load_lora_weights` takes it, with random numbers in it."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for path, layer in unet.named_modules():
        if path.endswith(ATTENTION) and isinstance(layer, torch.nn.Linear):
            scale = (layer.in_features * rank) ** -0.5
            state[f"unet.{path}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator) * scale
            state[f"unet.{path}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator)
    return state


@torch.no_grad()
def main() -> None:
    """Switch, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "sd15"], default="tiny")
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    tiny = arguments.model == "tiny"

    eager = testing.build("sd15-unet", tiny=tiny)
    unet: Any = oxidiff.compile(eager, cache=False)
    inputs = testing.example_inputs("sd15-unet", tiny=tiny, size=(16, 16))
    files = {name: lora_state_dict(eager, arguments.rank, seed) for seed, name in enumerate(("ink", "pastel"))}
    # A whole pipeline has `pipe.load_lora_weights(file)`, which calls this for its UNet.
    changes: list[tuple[str, Callable[[], Any]]] = [
        ("no adapter", lambda: None),
        ("load ink", lambda: unet.load_lora_adapter(files["ink"], prefix="unet", adapter_name="ink")),
        ("load pastel", lambda: unet.load_lora_adapter(files["pastel"], prefix="unet", adapter_name="pastel")),
        ("ink", lambda: unet.set_adapters("ink")),
        ("pastel", lambda: unet.set_adapters("pastel")),
        ("ink", lambda: unet.set_adapters("ink")),
        ("0.7 ink + 0.4 pastel", lambda: unet.set_adapters(["ink", "pastel"], [0.7, 0.4])),
        ("disabled", unet.disable_lora),
        ("ink, fused", lambda: (unet.enable_lora(), unet.set_adapters("ink"), unet.fuse_lora())),
        ("unloaded", lambda: (unet.unfuse_lora(), unet.unload_lora())),
    ]
    seen: dict[str, torch.Tensor] = {}
    print(f"{'':<22}{'switch':>10}{'next step':>12}{'off eager':>12}  captures, programs")
    for label, change in changes:
        change()
        started = time.perf_counter()
        result = unet(**inputs).sample
        first = time.perf_counter() - started
        started = time.perf_counter()
        unet(**inputs)
        step = time.perf_counter() - started
        error = testing.relative_error(result, eager(**inputs).sample)
        report = oxidiff.report(unet)
        same = "" if label not in seen else f"; same bits as before: {torch.equal(seen[label], result)}"
        seen[label] = result
        print(
            f"{label:<22}{(first - step) * 1e3:>7.0f} ms{step * 1e3:>9.0f} ms{error:>12.1e}"
            f"  {report.captures}, {report.programs}{same}"
        )


if __name__ == "__main__":
    main()
