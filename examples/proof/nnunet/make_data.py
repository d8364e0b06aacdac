"""Make a data set of 2D images of one blot each, and let nnU-Net plan and preprocess it."""

import json
import os
from pathlib import Path

import numpy as np
from nnunetv2.experiment_planning.plan_and_preprocess_api import (
    extract_fingerprints,
    plan_experiments,
    preprocess,
)
from PIL import Image

COUNT, SIZE = 10, 32

# nnU-Net's own variables, which `measure.py` sets.
RAW, *OTHERS = (os.environ[f"nnUNet_{kind}"] for kind in ("raw", "preprocessed", "results"))

if __name__ == "__main__":
    folder = Path(RAW, "Dataset001_Blots")
    for kind in ("imagesTr", "labelsTr"):
        (folder / kind).mkdir(parents=True)
    for other in OTHERS:
        Path(other).mkdir()
    rng = np.random.default_rng(7)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for number in range(COUNT):
        row, column, radius = rng.integers((10, 10, 5), (SIZE - 10, SIZE - 10, 12))
        mask = np.hypot(rows - row, columns - column) < radius
        image = rng.integers(0, 100, (SIZE, SIZE), np.uint8) + np.uint8(100) * mask
        Image.fromarray(image).save(folder / "imagesTr" / f"blot_{number:03d}_0000.png")
        Image.fromarray(mask.astype(np.uint8)).save(folder / "labelsTr" / f"blot_{number:03d}.png")
    description = {
        "channel_names": {"0": "blots"},
        "labels": {"background": 0, "blot": 1},
        "numTraining": COUNT,
        "file_ending": ".png",
    }
    (folder / "dataset.json").write_text(json.dumps(description))
    extract_fingerprints([1], num_processes=1)
    plan_experiments([1])
    preprocess([1], configurations=["2d"], num_processes=[1])
