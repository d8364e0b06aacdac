"""Make images with one rectangle of text each, and their labels, as icdar.py reads them."""

from pathlib import Path

import cv2
import numpy as np

COUNT, SIZE, LEFT, TOP, RIGHT, BOTTOM = 16, 128, 30, 50, 100, 75

rng = np.random.default_rng(7)
Path("images").mkdir()
for number in range(COUNT):
    image = rng.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    image[TOP:BOTTOM, LEFT:RIGHT] = 255
    cv2.imwrite(f"images/{number:02d}.jpg", image)
    corners = f"{LEFT},{TOP},{RIGHT},{TOP},{RIGHT},{BOTTOM},{LEFT},{BOTTOM},text\n"
    Path("images", f"{number:02d}.txt").write_text(corners)
