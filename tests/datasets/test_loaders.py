"""Loading an image, a sound, an array."""

import io
import struct
import sys
import wave
from functools import partial

import numpy as np
import pytest
from helpers import LIMIT, needs, run_script
from PIL import Image, ImageOps, JpegImagePlugin

from enqueuer import FrameworkUnavailable
from enqueuer.common.extras import install_command
from enqueuer.datasets.files import load_array, load_audio, load_image, random_crop

# --- images --------------------------------------------------------------------------------------

PIXELS = np.random.default_rng(7).integers(0, 256, (6, 4, 3), np.uint8)


@pytest.fixture
def image(tmp_path):
    """Save an image, by default PIXELS; return its path."""

    def save(picture=PIXELS, name="a.png", **options):
        if isinstance(picture, np.ndarray):
            picture = Image.fromarray(picture)
        picture.save(tmp_path / name, **options)
        return tmp_path / name

    return save


def test_an_image_is_an_array_of_bytes(image):
    loaded = load_image(image())
    assert loaded.dtype == np.uint8
    assert np.array_equal(loaded, PIXELS)
    assert loaded.flags.writeable and loaded.flags.c_contiguous


def test_bgr_is_rgb_the_other_way_round(image):
    loaded = load_image(image(), mode="BGR")
    assert np.array_equal(loaded, PIXELS[..., ::-1])
    assert loaded.flags.c_contiguous


def test_grey_has_no_channels(image):
    assert load_image(image(), mode="L").shape == (6, 4)
    assert np.array_equal(load_image(image(PIXELS[..., 0]), mode="L"), PIXELS[..., 0])
    assert np.array_equal(load_image(image(PIXELS[..., 0]))[..., 2], PIXELS[..., 0])


def test_a_size_is_height_and_width(image):
    assert partial(load_image, size=(8, 2))(image()).shape == (8, 2, 3)
    assert load_image(image(), size=5, mode="L").shape == (5, 5)


@pytest.mark.parametrize("orientation", [*range(9), 77])
def test_each_orientation_is_turned_as_pillow_does(image, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = image(exif=exif)
    with Image.open(path) as whole:
        assert np.array_equal(load_image(path), ImageOps.exif_transpose(whole))


def smooth(height=300, width=403):
    """Return pixels that a JPEG file keeps, different in each place."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, rows * 0 + 99], -1).astype("u1")


@pytest.fixture
def decoded(monkeypatch):
    """Return a list to which the size is appended at which a JPEG file is decoded."""
    sizes = []
    load = JpegImagePlugin.JpegImageFile.load

    def noted(self):
        sizes.append(self.size)
        return load(self)

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", noted)
    return sizes


@pytest.mark.thorough("processes")
@pytest.mark.parametrize(
    ("size", "scale"), [(300, 1), (151, 1), (150, 2), (75, 4), ((37, 50), 8), ((5, 300), 1), (1, 8)]
)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_file_is_decoded_no_larger_than_needed(image, decoded, size, scale, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = image(smooth(), "a.jpg", quality=95, exif=exif)
    high, wide = (size, size) if isinstance(size, int) else size
    if orientation >= 5 and not isinstance(size, int):
        size = wide, high
    loaded = load_image(path, size=size)
    assert decoded[0] == (-(-403 // scale), -(-300 // scale))
    with Image.open(path) as whole:
        turned = ImageOps.exif_transpose(whole)
    expected = turned.resize(loaded.shape[1::-1], Image.Resampling.BILINEAR)
    assert abs(loaded.astype(int) - np.asarray(expected)).max() <= 4


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_part_of_an_image_is_cut_out_before_it_is_resized(image, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = image(smooth(), name, exif=exif, **({"quality": 95} if name == "a.jpg" else {}))
    whole = load_image(path)
    part = whole[80:280, 40:240]
    assert np.array_equal(load_image(path, crop=(80, 40, 200, 200)), part)
    small = Image.fromarray(part).resize((50, 25), Image.Resampling.BILINEAR)
    loaded = load_image(path, size=(25, 50), crop=lambda *_: (80, 40, 200, 200))
    assert abs(loaded.astype(int) - np.asarray(small)).max() <= 4


def test_a_crop_is_asked_with_the_size_of_the_turned_image(image):
    exif = Image.Exif()
    exif[0x0112] = 6
    asked = []
    load_image(image(exif=exif), crop=lambda *size: asked.append(size) or (0, 0, *size))
    assert asked == [(4, 6)]


@pytest.mark.parametrize("crop", [(0, 0, 7, 4), (3, 0, 4, 4), (0, 0, 0, 4), (0, 4, 6, 1)])
def test_a_crop_that_is_not_within_the_image_is_refused(image, crop):
    with pytest.raises(ValueError, match=r"crop must be .* within the image of 6 x 4 pixels, got"):
        load_image(image(), crop=crop)


def test_random_crops_are_within_the_image_and_have_the_shares():
    draw = random_crop(np.random.default_rng(7), area=(0.2, 0.5), ratio=(0.5, 2))
    for _ in range(200):
        top, left, high, wide = draw(90, 120)
        assert 0 <= top <= 90 - high
        assert 0 <= left <= 120 - wide
        assert 0.19 < high * wide / (90 * 120) < 0.51
        assert 0.48 < wide / high < 2.1
    again = random_crop(np.random.default_rng(7), area=(0.2, 0.5), ratio=(0.5, 2))
    assert again(90, 120) != draw(90, 120)


@pytest.mark.parametrize(
    ("size", "expected"), [((10, 1000), (0, 493, 10, 13)), ((1000, 10), (493, 0, 13, 10))]
)
def test_the_middle_is_taken_where_no_random_part_fits(size, expected):
    assert random_crop(np.random.default_rng(7), area=(0.9, 1))(*size) == expected


@pytest.mark.parametrize("mode", ["RGB", "BGR", "L"])
def test_sixteen_bits_of_grey_are_scaled(image, mode):
    grey = (np.arange(16, dtype=np.uint16) * 4096 + 255).reshape(4, 4)
    loaded = load_image(image(grey), mode=mode)
    assert np.array_equal(loaded.reshape(16, -1)[:, 0], np.arange(16) * 16)


def test_transparency_is_dropped(image):
    alpha = np.full((6, 4, 1), 9, np.uint8)
    assert np.array_equal(load_image(image(np.concatenate([PIXELS, alpha], axis=2))), PIXELS)
    palette = Image.fromarray(PIXELS).quantize(8)
    path = image(palette, transparency=bytes(range(8)))
    assert np.array_equal(load_image(path), np.asarray(palette.convert("RGB")))


def test_thirtytwo_bits_are_refused(image):
    with pytest.raises(ValueError, match=r"a\.tif.* has 32-bit pixels"):
        load_image(image(np.zeros((2, 2), np.float32), "a.tif"))


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_a_truncated_image_is_an_error(image, name):
    path = image(np.tile(PIXELS, (40, 40, 1)), name)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(OSError, match="truncated"):
        load_image(path)


def test_what_is_no_image_or_not_there_is_an_error(tmp_path):
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(OSError, match=r"cannot identify image file .*a\.png"):
        load_image(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError):
        load_image(tmp_path / "b.png")


def test_an_unknown_mode_is_refused(image):
    with pytest.raises(ValueError, match="mode must be 'RGB', 'BGR' or 'L', got 'rgb'"):
        load_image(image(), mode="rgb")


def test_without_pillow_it_says_what_to_install(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.modules['PIL'] = None\n"
        "from enqueuer.datasets.files import load_image; load_image('a.png')"
    )
    _, _, err = run_script(script, tmp_path, LIMIT)
    assert "enqueuer.FrameworkUnavailable: load_image needs Pillow >= 9.2" in err
    assert install_command("images") in err


# --- sounds --------------------------------------------------------------------------------------


def sound(path, data, width=2, channels=1, rate=8000):
    with wave.open(str(path), "wb") as file:
        file.setsampwidth(width)
        file.setnchannels(channels)
        file.setframerate(rate)
        file.writeframes(data)
    return path


@pytest.mark.parametrize(
    ("width", "data"),
    [
        (1, bytes([128, 0, 192, 64])),
        (2, struct.pack("<4h", 0, -(2**15), 2**14, -(2**14))),
        (3, bytes.fromhex("000000 000080 000040 0000c0")),
        (4, struct.pack("<4i", 0, -(2**31), 2**30, -(2**30))),
    ],
)
def test_samples_go_from_minus_one_to_one(tmp_path, width, data):
    samples, rate = load_audio(sound(tmp_path / "a.wav", data, width))
    assert samples.dtype == np.float32
    assert samples.tolist() == [0, -1, 0.5, -0.5]
    assert rate == 8000


def test_several_channels_are_columns(tmp_path):
    data = struct.pack("<6h", 0, 2**14, 0, 2**14, 0, 2**14)
    samples, _ = load_audio(sound(tmp_path / "a.wav", data, channels=2))
    assert samples.tolist() == [[0, 0.5]] * 3


def test_a_truncated_sound_is_an_error(tmp_path):
    path = sound(tmp_path / "a.wav", bytes(200))
    whole = path.read_bytes()
    for size in (20, 100):
        path.write_bytes(whole[:size])
        with pytest.raises(EOFError):
            load_audio(path)


@pytest.mark.parametrize(("start", "frames"), [(0, 3), (2, 3), (5, None), (6, 9), (8, 1)])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_part_of_a_sound_is_read(tmp_path, start, frames, channels):
    data = struct.pack(f"<{8 * channels}h", *range(8 * channels))
    path = sound(tmp_path / "a.wav", data, channels=channels)
    whole, _ = load_audio(path)
    part, rate = load_audio(path, start=start, frames=frames)
    assert rate == 8000
    assert np.array_equal(part, whole[start:][:frames])
    seen = []
    later, _ = load_audio(path, start=lambda count: seen.append(count) or start, frames=frames)
    assert np.array_equal(later, part)
    assert seen == [8]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"start": 5}, "start must be <= 4, the number of frames, got 5"),
        ({"start": -1}, "start must be >= 0, got -1"),
        ({"frames": 0}, "frames must be >= 1, got 0"),
    ],
)
def test_a_part_that_a_sound_does_not_have_is_refused(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        load_audio(sound(tmp_path / "a.wav", bytes(8)), **options)


def floats(path):
    """Write a WAV file of floats, which the standard library does not read."""
    data = np.array([0, 0.5, -1], "<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, 8000, 32000, 4, 32)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    path.write_bytes(struct.pack("<4sI", b"RIFF", len(body)) + body)
    return path


def test_what_the_standard_library_cannot_read_takes_soundfile(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(FrameworkUnavailable, match=r"a\.wav'\) needs soundfile.*\[audio\]"):
        load_audio(floats(tmp_path / "a.wav"))
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    with pytest.raises(FrameworkUnavailable, match=r"a\.flac"):
        load_audio(tmp_path / "a.flac")


def test_soundfile_reads_it(tmp_path):
    needs("soundfile")
    samples, rate = load_audio(floats(tmp_path / "a.wav"))
    assert (samples.dtype, samples.tolist(), rate) == (np.float32, [0, 0.5, -1], 8000)
    part, _ = load_audio(tmp_path / "a.wav", start=1, frames=1)
    assert part.tolist() == [0.5]
    with pytest.raises(ValueError, match="start must be <= 3"):
        load_audio(tmp_path / "a.wav", start=4)


# --- arrays --------------------------------------------------------------------------------------


def test_an_array_and_a_dict_of_arrays_are_loaded(tmp_path):
    np.save(tmp_path / "a.npy", PIXELS)
    np.savez(tmp_path / "a.npz", x=PIXELS, y=np.array(3))
    assert np.array_equal(load_array(tmp_path / "a.npy"), PIXELS)
    loaded = load_array(tmp_path / "a.npz")
    assert list(loaded) == ["x", "y"]
    assert np.array_equal(loaded["x"], PIXELS)
    assert loaded["y"] == 3


def test_pickled_objects_are_not_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([print], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        load_array(tmp_path / "a.npy")


def test_a_broken_array_is_an_error(tmp_path):
    file = io.BytesIO()
    np.savez(file, x=PIXELS)
    for name, data in (("a.npy", b""), ("b.npz", file.getvalue()[:100])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(Exception, match=r"No data left|not a zip file"):
            load_array(tmp_path / name)
