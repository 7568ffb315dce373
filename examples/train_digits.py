"""Train the two digit checkpoints that the demo ships: about ten minutes on two CPU cores.

    python examples/train_digits.py                  # writes examples/assets/{chalk,ink}
    python examples/train_digits.py --only ink       # from the chalk that is there

`chalk` is trained from scratch on scikit-learn's bundled digits (1797 scans of 8x8 pixels, enlarged); `ink` is the
same architecture, trained further from `chalk` on the same digits, thin, slanted and dark on light. Weights are stored
as f16 safetensors, with a sheet of samples beside them, after every `SAVE_EVERY` steps. The `ink` that is shipped was
saved after 250 steps.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path

import torch
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from sklearn.datasets import load_digits

from digits import ASSETS, NO_DIGIT, SIZE, DigitsPipeline, draw_grid, encode_labels, new_unet

MARGIN = 2
"""Empty pixels around a digit: the scans touch their edges."""
BATCH = 32
UNCONDITIONAL_SHARE = 0.1
"""The share of training images whose label is hidden, so that the model also learns the unguided direction."""
EMA_DECAY = 0.995
SAVE_EVERY = 250
STEPS = {"chalk": 1000, "ink": 400}


def load_images(style: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images `[1797, 1, SIZE, SIZE]` f32 in -1..=1 and their int64 labels."""
    bunch = load_digits()
    scans = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    inner = (SIZE - 2 * MARGIN, SIZE - 2 * MARGIN)
    enlarged = torch.nn.functional.interpolate(scans, size=inner, mode="bicubic", align_corners=False)
    enlarged = torch.nn.functional.pad(enlarged, (MARGIN,) * 4)
    if style == "chalk":
        stroke = torch.sigmoid((enlarged - 0.45) * 9)
    else:
        slant = torch.tensor([[1.0, 0.3, 0.0], [0.0, 1.0, 0.0]]).expand(len(scans), 2, 3)
        grid = torch.nn.functional.affine_grid(slant, list(enlarged.shape), align_corners=False)
        stroke = 1 - torch.sigmoid((torch.nn.functional.grid_sample(enlarged, grid, align_corners=False) - 0.6) * 9)
    return stroke * 2 - 1, torch.tensor(bunch.target)


def save(style: str, unet: UNet2DConditionModel, out: Path) -> None:
    """Write weights (f16), the scheduler's configuration and forty samples to `out/style`."""
    scheduler = DDIMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    copy.deepcopy(unet).half().save_pretrained(out / style, safe_serialization=True)
    scheduler.save_pretrained(out / style)
    samples = DigitsPipeline(unet, scheduler)(list(range(10)) * 4)
    draw_grid(samples, columns=10).save(out / style / "samples.png")


def train(style: str, unet: UNet2DConditionModel, steps: int, seed: int, out: Path) -> None:
    """Train `unet` on `style` in place; the exponential average of its weights is what is saved."""
    torch.manual_seed(seed)
    images, labels = load_images(style)
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, weight_decay=1e-4)
    warmup = 100
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * (0.5 + 0.5 * math.cos(math.pi * step / steps)) + 0.005
    )
    average = copy.deepcopy(unet).eval().requires_grad_(False)
    unet.train()
    started, running = time.perf_counter(), 0.0
    for step in range(steps):
        picked = torch.randint(len(images), (BATCH,))
        image, label = images[picked], labels[picked]
        label = torch.where(torch.rand(BATCH) < UNCONDITIONAL_SHARE, NO_DIGIT, label)
        noise = torch.randn_like(image)
        timestep = torch.randint(scheduler.config.num_train_timesteps, (BATCH,))
        noisy = scheduler.add_noise(image, noise, timestep)
        target = scheduler.get_velocity(image, noise, timestep)
        loss = torch.nn.functional.mse_loss(unet(noisy, timestep, encode_labels(label)).sample, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(EMA_DECAY, (step + 1) / (step + 10))
        with torch.no_grad():
            for kept, new in zip(average.parameters(), unet.parameters(), strict=True):
                kept.lerp_(new, 1 - decay)
        running += loss.item()
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - started
            print(f"{style} step {step + 1}/{steps} loss {running / 100:.4f} {seconds:.0f} s", flush=True)
            running = 0.0
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save(style, average, out)


def main() -> None:
    """Train both styles and write weights, scheduler configs and a contact sheet of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder for the checkpoints")
    parser.add_argument("--only", choices=list(STEPS), help="train one style")
    parser.add_argument("--steps", type=float, default=1.0, help="factor on the number of training steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    for style in [arguments.only] if arguments.only else list(STEPS):
        if style == "ink":
            unet = UNet2DConditionModel.from_pretrained(arguments.out / "chalk", torch_dtype=torch.float32)
        else:
            unet = new_unet()
        train(style, unet, max(1, int(STEPS[style] * arguments.steps)), arguments.seed, arguments.out)


if __name__ == "__main__":
    main()
