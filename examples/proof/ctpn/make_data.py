"""Make images with one rectangle of text each, and their labels, as data_provider.py reads them."""

from pathlib import Path

import cv2
import numpy as np

COUNT, SIZE = 16, 256
TEXT = 60, 100, 200, 150  # left, top, right and bottom

rng = np.random.default_rng(7)
for folder in ("image", "label"):
    Path(folder).mkdir()
for number in range(COUNT):
    cv2.imwrite(f"image/{number:02d}.jpg", rng.integers(0, 256, (SIZE, SIZE, 3), np.uint8))
    Path("label", f"{number:02d}.txt").write_text(",".join(map(str, TEXT)) + "\n")
