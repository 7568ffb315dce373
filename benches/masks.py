"""Models whose text masks decide what is computed: the first call, a step over eager, and a prompt of another length.

    python benches/masks.py

Eight layers of four heads of 64 columns, f32, two prompts of unequal lengths, random weights; a video of 3 latent frames.
Steps are medians of pairs, each run beside eager PyTorch's. *pieces* is what a compiler that cannot know the masks' values
does: the same model with Dynamo's graph breaks, each piece compiled by oxidiff (`torch.compile(backend="oxidiff")`).
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel, MochiTransformer3DModel
from torch import Tensor, nn

import oxidiff
from measure import describe_machine, interleave, ratio_with_spread, table
from oxidiff import testing

LAYERS, HEADS, WIDTH, WORDS = 8, 4, 64, 40


def mask(*counts: int) -> Tensor:
    """Which words of each prompt count."""
    return torch.arange(WORDS)[None] < torch.tensor(counts)[:, None]


def mochi() -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    """Mochi, which takes the words that count out of each prompt in every layer."""
    module = MochiTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=WIDTH, num_layers=LAYERS, pooled_projection_dim=24, in_channels=4,
        text_embed_dim=24, time_embed_dim=12, max_sequence_length=WORDS,
    )  # fmt: skip
    random = testing.Random(1, torch.float32)

    def call(*counts: int) -> dict[str, Any]:
        return {
            "hidden_states": random.normal(2, 4, 3, 16, 24),
            "encoder_hidden_states": random.normal(2, WORDS, 24),
            "timestep": torch.tensor([600.0, 600.0]),
            "encoder_attention_mask": mask(*counts),
            "return_dict": False,
        }

    return module, call


def hunyuan() -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    """HunyuanVideo 1.5, which puts the words that count before padding, and asks whether there is an image."""
    module = HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=HEADS, attention_head_dim=WIDTH, num_layers=LAYERS,
        num_refiner_layers=1, mlp_ratio=4.0, text_embed_dim=16, text_embed_2_dim=12, image_embed_dim=14,
        rope_axes_dim=(16, 24, 24), target_size=16,
    )  # fmt: skip
    random = testing.Random(1, torch.float32)

    def call(*counts: int) -> dict[str, Any]:
        return {
            "hidden_states": random.normal(2, 9, 3, 16, 24),
            "timestep": torch.tensor([600.0, 600.0]),
            "encoder_hidden_states": random.normal(2, WORDS, 16),
            "encoder_attention_mask": mask(*counts).float(),
            "encoder_hidden_states_2": random.normal(2, WORDS, 12),
            "encoder_attention_mask_2": mask(*(count // 2 for count in counts)).float(),
            "image_embeds": random.normal(2, 7, 14),
            "return_dict": False,
        }

    return module, call


def seconds(run: Callable[[], Any]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@torch.no_grad()
def row(name: str, module: nn.Module, call: Callable[..., dict[str, Any]], is_split: bool, rounds: int) -> list[str]:
    """One line of the table."""
    testing.fill_weights(module)
    module.eval()
    inputs, other = call(30, 21), call(25, 9)
    compiled: Any = (
        torch.compile(module, backend="oxidiff")
        if is_split
        else oxidiff.compile(module, options=oxidiff.CompileOptions(cache=False, tune="off"))
    )
    first = seconds(lambda: compiled(**inputs))
    error = testing.relative_error(compiled(**inputs), testing.reference(module, inputs))
    times = interleave({"oxidiff": lambda: compiled(**inputs), "eager": lambda: module(**inputs)}, rounds)
    ratio, spread = ratio_with_spread(times, "oxidiff", "eager")
    another = seconds(lambda: compiled(**other))
    step = times["oxidiff"].median
    return [
        name, "pieces" if is_split else "whole", f"{first:.1f} s", f"{step * 1e3:.1f} ms", f"{ratio:.2f} ± {spread:.2f}",
        f"{another * 1e3:.0f} ms", f"{error:.1e}",
    ]  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="pairs of steps")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name, make in (("Mochi", mochi), ("HunyuanVideo 1.5", hunyuan)):
        for is_split in (False, True):
            torch._dynamo.reset()
            rows.append(row(name, *make(), is_split, arguments.rounds))
    header = ("model", "compiled", "first call", "step", "over eager", "another prompt", "error against f64")
    print(*describe_machine(), "", *table(header, rows), sep="\n")


if __name__ == "__main__":
    main()
