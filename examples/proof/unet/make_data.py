"""Make images of one blot each, and their masks, where the program looks for them."""

from pathlib import Path

import numpy as np
from PIL import Image

COUNT, HEIGHT, WIDTH = 24, 64, 96

rng = np.random.default_rng(7)
rows, columns = np.mgrid[:HEIGHT, :WIDTH]
for kind in ("imgs", "masks"):
    Path("data", kind).mkdir(parents=True)
for number in range(COUNT):
    row, column, radius = rng.integers((10, 10, 5), (HEIGHT - 10, WIDTH - 10, 20))
    mask = np.hypot(rows - row, columns - column) < radius
    image = rng.integers(0, 100, (HEIGHT, WIDTH, 3), np.uint8) + 100 * mask[..., None]
    Image.fromarray(image.astype(np.uint8)).save(f"data/imgs/{number:02d}.png")
    Image.fromarray(mask.astype(np.uint8)).save(f"data/masks/{number:02d}_mask.png")
