"""JPEG files of the photographs that scikit-image and scikit-learn bring with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# (package, folder in it, names)
_BUNDLED = (
    ("skimage", "data", "astronaut.png chelsea.png coffee.png rocket.jpg motorcycle_left.png"),
    ("sklearn", "datasets/images", "china.jpg flower.jpg"),
)
# Pixels of the shorter side.
_SIDES = (256, 400, 640)


def save(folder: Path) -> list[str]:
    """Save each photograph in several sizes, once; return the paths."""
    from PIL import Image

    paths = []
    for package, inner, names in _BUNDLED:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not installed"
        for name in names.split():
            for side in _SIDES:
                path = folder / f"{Path(name).stem}-{side}.jpg"
                paths.append(str(path))
                if path.exists():
                    continue
                with Image.open(Path(spec.origin).parent / inner / name) as opened:
                    scale = side / min(opened.size)
                    size = [round(scale * pixels) for pixels in opened.size]
                    opened.convert("RGB").resize(size).save(path, quality=90)
    return paths
