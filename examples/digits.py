"""A small class-conditional diffusion pipeline: handwritten digits, 24x24 pixels.

The network is diffusers' own `UNet2DConditionModel`, with residual blocks, cross-attention and up- and downsampling:
the layers of Stable Diffusion at a size that trains in minutes on two CPU cores (`train_digits.py`). The "prompt" is
a digit: two one-hot tokens which the model's own `encoder_hid_proj` embeds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, UNet2DConditionModel
from PIL import Image, ImageDraw
from tqdm import tqdm

ASSETS = Path(__file__).parent / "assets"
SIZE = 24
"""Height and width in pixels of the training images. The network takes other sizes too."""
VOCABULARY = 16
"""Width of a one-hot token: ten digits, `NO_DIGIT`, `START`, and room to spare."""
NO_DIGIT = 10
"""The label that stands for "no condition" in classifier-free guidance."""
START = 11
"""The token in front of every digit: with one token alone, attention over the prompt would have nothing to choose."""


def encode_labels(labels: torch.Tensor) -> torch.Tensor:
    """The prompt of each label, `[batch, 2, VOCABULARY]` f32 one-hot, from int64 `[batch]` labels in 0..=NO_DIGIT."""
    tokens = torch.stack([torch.full_like(labels, START), labels], dim=1)
    return torch.nn.functional.one_hot(tokens, VOCABULARY).float()


def new_unet() -> UNet2DConditionModel:
    """The untrained network: about 1.7 million parameters."""
    return UNet2DConditionModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        cross_attention_dim=48,
        encoder_hid_dim=VOCABULARY,
        encoder_hid_dim_type="text_proj",
        norm_num_groups=8,
    )


class DigitsPipeline(DiffusionPipeline):
    """Draws digits: `pipe([3, 1, 4])` returns one PIL image per label."""

    def __init__(self, unet: UNet2DConditionModel, scheduler: DDIMScheduler) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @classmethod
    def load(cls, style: str) -> DigitsPipeline:
        """The shipped checkpoint called `style` (`chalk` or `ink`), in f32."""
        unet = UNet2DConditionModel.from_pretrained(ASSETS / style, torch_dtype=torch.float32, use_safetensors=True)
        scheduler = DDIMScheduler.from_pretrained(ASSETS / style)
        return cls(unet.eval(), scheduler)

    @torch.no_grad()
    def __call__(
        self,
        labels: list[int],
        *,
        steps: int = 25,
        guidance: float = 1.25,
        size: int = SIZE,
        seed: int = 0,
        progress: bool = False,
    ) -> np.ndarray:
        """Draw `labels`; returns `[len(labels), size, size]` f32 in 0..=1. The same seed gives the same pictures."""
        generator = torch.Generator().manual_seed(seed)
        sample = torch.randn(len(labels), 1, size, size, generator=generator)
        wanted = torch.tensor(labels)
        prompt = encode_labels(torch.cat([torch.full_like(wanted, NO_DIGIT), wanted]))
        self.scheduler.set_timesteps(steps)
        for timestep in tqdm(self.scheduler.timesteps, disable=not progress):
            plain, towards = self.unet(torch.cat([sample, sample]), timestep, prompt).sample.chunk(2)
            sample = self.scheduler.step(plain + guidance * (towards - plain), timestep, sample).prev_sample
        return (sample[:, 0] / 2 + 0.5).clamp(0, 1).numpy()


def draw_grid(images: np.ndarray, columns: int, zoom: int = 3) -> Image.Image:
    """One picture with `images` (`[count, size, size]` f32 in 0..=1) in rows of `columns`, enlarged `zoom` times."""
    count, size, _ = images.shape
    rows = -(-count // columns)
    canvas = np.zeros((rows * size, columns * size), dtype=np.float32)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        canvas[row * size : (row + 1) * size, column * size : (column + 1) * size] = image
    picture = Image.fromarray((canvas * 255).round().astype(np.uint8))
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.BICUBIC)


def side_by_side(grids: list[tuple[str, Image.Image]], margin: int = 16, header: int = 28) -> Image.Image:
    """One picture with titled `grids` next to each other."""
    width = sum(grid.width for _, grid in grids) + margin * (len(grids) + 1)
    height = max(grid.height for _, grid in grids) + header + margin
    sheet = Image.new("L", (width, height), 255)
    draw = ImageDraw.Draw(sheet)
    left = margin
    for title, grid in grids:
        draw.text((left, header // 3), title, fill=0)
        sheet.paste(grid, (left, header))
        left += grid.width + margin
    return sheet
