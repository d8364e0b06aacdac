"""Load files that are there, and compare with the library that reads them: python real_files.py.

    python benchmarks/real_files.py                     those of the installed packages
    python benchmarks/real_files.py --sample 200 ~/pictures ~/sounds

Each image must have the pixels of Pillow, each sound the samples of soundfile, each array the
values of numpy, and each dataset of HDF5 those of h5py; or an error of one line with the path.
The exit code says whether all have.
"""

import argparse
import collections
import os
import random
import site
import sys
import warnings

import numpy as np

from enqueuer import DataFileError
from enqueuer.datasets.files import load_array, load_audio, load_image

IMAGES = (
    "avif bmp dds fits gif icns ico im j2k jp2 jpeg jpg mpo pbm pcx pgm png pnm ppm psd sgi tga "
)
IMAGES += "tif tiff webp xbm xpm"
SOUNDS = "aif aiff au caf flac mp3 ogg opus w64 wav"
HDF5 = "h5 h5ad hdf hdf5 he5 loom mat nc nxs"


def image(path):
    """Return a mode of `load_image`, and the pixels that Pillow has for it."""
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        opened.load()
        turned = ImageOps.exif_transpose(opened)
    if turned.mode.startswith("I") or turned.mode == "F":
        return "F", np.asarray(turned)
    if "transparency" in turned.info and turned.mode == "P":
        turned = turned.convert("RGBA")
    return "RGB", np.asarray(turned.convert("RGB"))


def are_datasets_same(path):
    """Return whether the datasets of a file have the values of h5py, or an error that is clear."""
    import h5py

    from enqueuer.datasets.hdf5 import HDF5Source, describe

    for column in describe(path):
        if not column.shape:  # a single value, or one that cannot be read
            continue
        source = None
        try:
            source = HDF5Source(path, column.name)
            found = source[:]
        except DataFileError as error:
            if not is_clear(error, path):
                raise RuntimeError(f"not clear: {error}") from error
            continue
        finally:
            if source is not None:
                source.close()
        with h5py.File(path) as file:
            dataset = file[column.name.encode("utf-8", "surrogateescape")]
            expected = (dataset.asstr() if column.dtype == "text" else dataset)[()]
        if not is_equal(found, expected):
            return False
    return True


def is_equal(found, expected):
    """Return whether two arrays have the same values, bit by bit; fields go by their names."""
    found, expected = np.asarray(found), np.asarray(expected)
    if names := expected.dtype.names:
        return all(is_equal(found[name], expected[name]) for name in names)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if expected.dtype == object:
        return all(map(is_equal, found.flat, expected.flat))
    return found.tobytes() == expected.tobytes()


def is_clear(error, path):
    """Return whether the text of an error is one line with the path."""
    return path in str(error) and "\n" not in str(error)


def is_same(path):
    """Return whether a file is loaded as its library does; raise what that raises."""
    ending = path.rpartition(".")[2].lower()
    if ending in HDF5.split():
        return are_datasets_same(path)
    if ending in SOUNDS.split():
        import soundfile

        expected, _ = soundfile.read(path, dtype="float32")
        return np.array_equal(load_audio(path)[0], expected)
    if ending in IMAGES.split():
        mode, pixels = image(path)
        return np.array_equal(load_image(path, mode=mode), pixels)
    with np.load(path) if ending == "npz" else open(path, "rb") as file:
        expected = dict(file) if ending == "npz" else np.load(file)
    np.testing.assert_equal(load_array(path), expected)
    return True


def result_of(path):
    """Return what became of a file, in capitals if it should not."""
    try:
        return "the same values" if is_same(path) else "OTHER VALUES"
    except DataFileError as error:
        clear = is_clear(error, path)
        return f"an error, {error.__cause__!r}" if clear else f"AN ERROR THAT IS NOT CLEAR: {error}"
    except Exception as error:
        reason = error
    if path.rpartition(".")[2].lower() in HDF5.split():
        return f"ANOTHER ERROR: {reason!r}"
    load = load_array if path.endswith((".npy", ".npz")) else load_image
    load = load_audio if path.rpartition(".")[2].lower() in SOUNDS.split() else load
    try:
        load(path)
    except DataFileError as error:
        return "an error in both" if path in str(error) else f"AN ERROR WITHOUT A PATH: {error}"
    return f"VALUES WHERE THE LIBRARY HAS AN ERROR: {reason!r}"


def main():
    """Load the files, and print the results; return whether one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", default=site.getsitepackages())
    parser.add_argument("--sample", type=int, default=200, help="most files of each ending")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = collections.defaultdict(list)
    for top in options.folders:
        for folder, _, names in os.walk(top):
            for name in names:
                ending = name.rpartition(".")[2].lower()
                if ending in f"{IMAGES} {SOUNDS} {HDF5} npy npz".split():
                    found[ending].append(os.path.join(folder, name))
    failed = False
    for ending, paths in sorted(found.items()):
        some = random.sample(sorted(paths), min(options.sample, len(paths)))
        results = {path: result_of(path) for path in sorted(some)}
        counts = collections.Counter(result.partition(",")[0] for result in results.values())
        print(ending, ", ".join(f"{count} x {result}" for result, count in counts.items()))
        for path, result in results.items():
            if result[0].isupper():
                print(f"    {path}: {result}")
                failed = True
    return failed


if __name__ == "__main__":
    sys.exit(main())
