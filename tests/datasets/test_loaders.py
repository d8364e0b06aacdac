"""Loading an image, a sound, an array."""

import contextlib
import io
import re
import struct
import sys
import tarfile
import wave
import zipfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import LIMIT, needs, run_script
from PIL import Image, ImageOps, JpegImagePlugin, features

from enqueuer import DataFileError, FrameworkUnavailable
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


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.tif", "a.webp"])
def test_no_format_is_turned_twice(image, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = image(smooth(), name, exif=exif)
    with Image.open(path) as whole:
        expected = np.asarray(ImageOps.exif_transpose(whole))
    assert np.array_equal(load_image(path), expected)
    high, wide = expected.shape[:2]
    assert np.array_equal(load_image(path, crop=lambda *size: (0, 0, *size)), expected)
    assert np.array_equal(load_image(path, crop=(9, 5, 30, 20)), expected[9:39, 5:25])
    assert load_image(path, size=(high // 2, wide // 2)).shape[:2] == (high // 2, wide // 2)


def tiff(values, bits, white_is=1, kind=1):
    """Return a TIFF file of 8, 12, 16 or 32 bits a sample, without compression."""
    data = values.astype(f"<u{bits // 8}").tobytes() if bits != 12 else b""
    if bits == 12:
        a, b = values[:, 0::2].astype(int), values[:, 1::2].astype(int)
        data = np.stack([a >> 4, (a & 15) << 4 | b >> 8, b & 255], -1).astype("u1").tobytes()
    high, wide = values.shape
    tags = [(256, wide), (257, high), (258, bits), (259, 1), (262, white_is), (273, 134)]
    tags += [(277, 1), (278, high), (279, len(data)), (339, kind)]
    lines = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + lines + bytes(4) + data


def pgm(values, white, plain=False):
    head = f"P{2 if plain else 5} {values.shape[1]} {values.shape[0]} {white}\n".encode()
    return head + (
        " ".join(map(str, values.flat)).encode() if plain else values.astype(">u2").tobytes()
    )


def png(bits, row):
    """Return a PNG file of one row of grey pixels of at most 8 bits."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", len(row) * 8 // bits, 1, bits, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0" + row)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def encoded(values, **options):
    file = io.BytesIO()
    Image.fromarray(values).save(file, **options)
    return file.getvalue()


# 0, 65, ... 4095 in 12 bits, lossless, of OpenJPEG.
JPEG2000 = bytes.fromhex(
    "ff4fff5100290000000000080000000800000000000000000000000800000008000000000000000000010b0101ff52"
    "000c00000001000004040001ff5c00044060ff640025000143726561746564206279204f70656e4a50454720766572"
    "73696f6e20322e352e34ff90000a0000000000660001ff93dfe154122c42a79795b1430ed6283fdee829c548b83456"
    "12e1790e9891854f43d1987e129bce3bc379bd7149c6853782625615b739ce75ea4a400cc02800074465d523cc5386"
    "0b5c67daeb29ab84eb8070d86c361b0d86c3ffd9"
)
TWELVE = (np.arange(64, dtype=np.uint16) * 65).reshape(8, 8)
SIXTEEN = TWELVE * 16


@pytest.mark.parametrize(
    ("data", "values", "white"),
    [
        (tiff(TWELVE, 12), TWELVE, 4095),
        (tiff(SIXTEEN, 16), SIXTEEN, 65535),
        (encoded(SIXTEEN, format="TIFF", compression="tiff_lzw"), SIXTEEN, 65535),
        (encoded(SIXTEEN.astype(">u2"), format="TIFF"), SIXTEEN, 65535),
        (encoded(SIXTEEN, format="PNG"), SIXTEEN, 65535),
        (pgm(SIXTEEN, 65535), SIXTEEN, 65535),
        (pgm(TWELVE, 4095), TWELVE, 4095),
        (pgm(TWELVE, 4095, plain=True), TWELVE, 4095),
        pytest.param(JPEG2000, TWELVE, 4095, marks=pytest.mark.skipif(
            not features.check("jpg_2000"), reason="this Pillow has no JPEG 2000")),
        (encoded((TWELVE // 16).astype(np.uint8), format="PNG"), TWELVE // 16, 255),
    ],
    ids=["tiff-12", "tiff-16", "tiff-lzw", "tiff-big", "png", "pgm", "pgm-12", "pgm-plain", "jp2",
         "8"],
)  # fmt: skip
def test_the_values_of_grey_are_those_in_the_file(data, values, white):
    deep = load_image(data, mode="I;16")
    assert deep.dtype == np.uint16
    assert np.array_equal(deep, values)
    assert load_image(data, mode="F").dtype == np.float32
    assert np.array_equal(load_image(data, mode="F"), values)
    # By the bits that the file declares.
    expected = values.astype(int) * 256 // (white + 1)
    assert np.array_equal(load_image(data, mode="L"), expected)
    assert np.array_equal(load_image(data)[..., 1], expected)
    small = load_image(data, mode="I;16", size=4, crop=(0, 0, 8, 8))
    assert abs(small - values.reshape(4, 2, 4, 2).mean((1, 3))).max() <= white / 30


@pytest.mark.parametrize("bits", [8, 16])
def test_where_zero_is_white_it_is_so_for_any_bits(bits):
    values = SIXTEEN >> (16 - bits)
    data = tiff(values, bits, white_is=0)
    try:
        Image.open(io.BytesIO(data))
    except OSError:
        pytest.skip("this Pillow does not read it")
    assert np.array_equal(load_image(data, mode="I;16"), values)
    assert np.array_equal(load_image(data, mode="L"), 255 - (SIXTEEN >> 8))


FOUR = np.array([[0, 1, 2, 3]])
BELOW_ZERO = np.array([[-128, -1], [0, 127]])
LARGE = np.array([[0, 2**31], [2**16, 2**32 - 256]])


@pytest.mark.parametrize(
    ("data", "values"),
    [
        (png(1, b"\x1b"), np.array([[0, 0, 0, 1, 1, 0, 1, 1]])),
        (png(2, b"\x1b"), FOUR),
        (png(4, b"\x01\x23"), FOUR),
        (b"P5 4 1 3 \0\1\2\3", FOUR),
        (b"P5 4 1 200 \0\1\2\3", FOUR),
        (b"P2 4 1 3 0 1 2 3", FOUR),
        (b"P4 8 1 \x1b", np.array([[0, 0, 0, 1, 1, 0, 1, 1]])),
        (tiff(BELOW_ZERO, 8, kind=2), BELOW_ZERO),
        (tiff(LARGE, 32), LARGE),
    ],
    ids=["png-1", "png-2", "png-4", "pgm-3", "pgm-200", "pgm-plain", "pbm", "tiff-s8", "tiff-32"],
)
def test_the_values_are_those_in_the_file_for_any_bits(data, values):
    assert np.array_equal(load_image(data, mode="F"), values)
    if values.min() >= 0 and values.max() < 2**16:
        assert np.array_equal(load_image(data, mode="I;16"), values)
    else:
        with pytest.raises(DataFileError, match="values that uint16 has not"):
            load_image(data, mode="I;16")


@pytest.mark.parametrize(
    ("picture", "mode", "says"),
    [
        (np.zeros((2, 2), np.float32), "RGB", "32 bits or with a sign, .* mode='F' gives"),
        (np.full((2, 2), -1, np.int32), "L", "32 bits or with a sign, .* mode='F' gives"),
        (np.full((2, 2), -1, np.int32), "I;16", "values that uint16 has not; mode='F'"),
        (np.full((2, 2), 0.5, np.float32), "I;16", "values that uint16 has not; mode='F'"),
        (PIXELS, "I;16", "mode 'I;16' gives the values of grey images, and this one is 'RGB'"),
        (PIXELS, "F", "mode 'F' gives the values of grey images"),
    ],
)
def test_values_that_a_mode_cannot_give_are_refused(image, picture, mode, says):
    path = image(picture, "a.tif")
    with pytest.raises(DataFileError, match=rf"^{path}: .*{says}"):
        load_image(path, mode=mode)
    if picture is not PIXELS:
        assert np.array_equal(load_image(path, mode="F"), picture)


def test_what_pillow_knows_but_does_not_read_is_named():
    with pytest.raises(DataFileError, match="<108 bytes>: cannot find loader for this HDF5 file"):
        load_image(b"\x89HDF\r\n\x1a\n" + bytes(100), size=8)


@contextlib.contextmanager
def kinds_of(path):
    """Yield the ways to pass a file, with what an error calls each."""
    data = path.read_bytes()
    with tarfile.open(path.parent / "a.tar", "w") as tar:
        tar.add(path, path.name)
    with zipfile.ZipFile(path.parent / "a.zip", "w") as archive:
        archive.write(path, path.name)
    # Before Python 3.13, a member of a tar file has the name of the whole.
    with (
        open(path, "rb") as file,
        tarfile.open(path.parent / "a.tar", "r|") as tar,
        zipfile.ZipFile(path.parent / "a.zip") as archive,
        archive.open(path.name) as member,
    ):
        yield [
            (path, str(path)), (str(path), str(path)), (file, str(path)),
            (data, f"<{len(data)} bytes>"), (np.frombuffer(data, "u1"), f"<{len(data)} bytes>"),
            (np.void(data), f"<{len(data)} bytes>"), (io.BytesIO(data), "<_io.BytesIO"),
            (tar.extractfile(tar.next()), "a."), (member, path.name),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("load", "name"), [(load_image, "a.png"), (load_audio, "a.wav"), (load_array, "a.npy")]
)
def test_a_file_is_a_path_bytes_or_a_file_object(tmp_path, load, name):
    path = tmp_path / name
    if load is load_image:
        Image.fromarray(PIXELS).save(path)
    elif load is load_audio:
        sound(path, bytes(range(200)))
    else:
        np.save(path, PIXELS)
    expected = load(path)
    with kinds_of(path) as kinds:
        for file, _ in kinds:
            np.testing.assert_equal(load(file), expected)
    path.write_bytes(path.read_bytes()[:60])
    with kinds_of(path) as kinds:
        for file, named in kinds:
            with pytest.raises(DataFileError, match=re.escape(named)) as caught:
                load(file)
            assert len(str(caught.value)) > len(named) + 10
            assert caught.value.path == (named if isinstance(file, (str, Path)) else "")


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


@pytest.mark.parametrize("name", ["image", "file", "e"])
def test_a_name_that_is_a_part_of_the_reason_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(encoded(np.tile(PIXELS, (40, 40, 1)), format="PNG")[:300])
    with pytest.raises(DataFileError, match=f"^{name}: image file is truncated"):
        load_image(name)
    with pytest.raises(FileNotFoundError, match=f"'{name}.png'$"):
        load_image(f"{name}.png")


@pytest.mark.parametrize("load", [load_image, load_audio, load_array])
def test_what_is_no_file_is_refused(load):
    says = "a file is a path, bytes or a file object, got a tuple; where elements have more"
    with pytest.raises(TypeError, match=says):
        load(("a.png", 3))


def test_an_unknown_mode_is_refused(image):
    says = "mode must be 'RGB', 'BGR', 'L', 'I;16' or 'F', got 'rgb'"
    with pytest.raises(ValueError, match=says):
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
        with pytest.raises(DataFileError, match=rf"{path}: the (file is truncated|header of)"):
            load_audio(path)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0])
def test_a_stream_goes_to_its_end(tmp_path, size):
    path = sound(tmp_path / "a.wav", bytes(range(200)))
    data = path.read_bytes()
    expected, _ = load_audio(path)
    path.write_bytes(
        data[:4] + struct.pack("<I", size) + data[8:40] + struct.pack("<I", size) + data[44:]
    )
    loaded, _ = load_audio(path)
    # As soundfile takes it, none are none.
    assert np.array_equal(loaded, expected if size else expected[:0])


def test_a_recorder_that_was_not_closed_has_its_sound(tmp_path):
    path = sound(tmp_path / "a.wav", bytes(range(200)))
    expected, _ = load_audio(path)
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", 8) + data[8:40] + bytes(4) + data[44:])
    assert np.array_equal(load_audio(path)[0], expected)


def test_what_no_sound_has_is_named(tmp_path):
    path = sound(tmp_path / "a.wav", bytes(200))
    data = bytearray(path.read_bytes())
    data[22:24] = bytes(2)
    path.write_bytes(data)
    with pytest.raises(DataFileError, match=rf"{path}: sound of 16 bits a sample, 0 channels"):
        load_audio(path)


def test_extended_formats_and_further_chunks_are_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    data = struct.pack("<4h", 0, -(2**15), 2**14, -(2**14))
    form = struct.pack("<HHIIHHHHI", 0xFFFE, 1, 8000, 16000, 2, 16, 22, 16, 4)
    form += bytes.fromhex("0100000000001000800000aa00389b71")
    body = b"WAVEJUNK\3\0\0\0abc\0fmt " + struct.pack("<I", len(form)) + form
    body += b"LIST\2\0\0\0ab" + b"data" + struct.pack("<I", len(data)) + data + b"LIST\0\0\0\0"
    loaded, rate = load_audio(b"RIFF" + struct.pack("<I", len(body)) + body)
    assert (loaded.tolist(), rate) == ([0, -1, 0.5, -0.5], 8000)


@pytest.mark.parametrize("frames", [3, 8, 20])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_section_has_one_length(tmp_path, frames, channels):
    data = struct.pack(f"<{8 * channels}h", *range(1, 8 * channels + 1))
    path = sound(tmp_path / "a.wav", data, channels=channels)
    whole, _ = load_audio(path)
    rng = np.random.default_rng(7)
    starts = set()
    for _ in range(60):
        part, _ = load_audio(path, start=rng, frames=frames, pad=True)
        assert part.shape[0] == frames
        assert not part[8:].any()
        first = int(np.flatnonzero(whole == part.flat[0])[0]) // channels
        assert np.array_equal(part[:8], whole[first : first + frames])
        starts.add(first)
    assert starts == set(range(max(0, 8 - frames) + 1))
    assert load_audio(path, start=3, frames=20, pad=True)[0].shape[0] == 20
    mono, _ = load_audio(path, mono=True)
    assert np.allclose(mono, whole if channels == 1 else whole.mean(1))
    for options in ({"pad": True}, {"start": rng}):
        with pytest.raises(ValueError, match="need frames"):
            load_audio(path, **options)


@pytest.mark.parametrize("rate", [4000, 8000, 11025, 16000])
def test_a_sound_comes_at_the_rate_that_is_wanted(tmp_path, rate):
    needs("soxr")
    wave_of = np.sin(np.arange(8000) / 20) * 20000
    path = sound(tmp_path / "a.wav", wave_of.astype("<i2").tobytes())
    loaded, found = load_audio(path, sample_rate=rate)
    assert (loaded.shape, loaded.dtype, found) == ((rate,), np.float32, rate)
    expected = np.sin(np.arange(rate) / 20 * 8000 / rate) * 20000 / 2**15
    assert abs(loaded - expected)[100:-100].max() < 1e-3
    seen = []
    half, _ = load_audio(
        path, start=lambda count: seen.append(count) or rate // 2, frames=rate, sample_rate=rate
    )
    assert seen == [rate]
    assert abs(half - expected[rate // 2 :])[100:-100].max() < 1e-3
    assert len(half) == rate - rate // 2


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
    with pytest.raises(ValueError, match=r"a\.wav: start must be <= 3"):
        load_audio(tmp_path / "a.wav", start=4)


@pytest.mark.parametrize("subtype", ["GSM610", "IMA_ADPCM", "MS_ADPCM", "ULAW"])
def test_compressed_sound_is_read_from_any_place(subtype):
    soundfile = needs("soundfile")
    file = io.BytesIO()
    samples = np.sin(np.arange(8000) / 20)
    soundfile.write(file, samples, 8000, format="WAV", subtype=subtype)
    whole, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    assert np.array_equal(load_audio(file.getvalue())[0], whole)
    with pytest.raises(DataFileError, match=r"<1600 bytes>: the file is truncated"):
        load_audio(file.getvalue()[:1600])
    part, _ = load_audio(file.getvalue(), start=1000, frames=500)
    assert np.array_equal(part, whole[1000:1500])


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        ("AIFF", "PCM_16"), ("AIFF", "FLOAT"), ("AU", "PCM_16"), ("AU", "ULAW"), ("CAF", "PCM_16"),
        ("W64", "PCM_16"), ("RF64", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"),
    ],
)  # fmt: skip
def test_a_truncated_sound_of_any_format_is_an_error(kind, subtype):
    soundfile = needs("soundfile")
    file = io.BytesIO()
    samples = np.random.default_rng(7).normal(0, 0.1, 8000)
    soundfile.write(file, samples, 8000, format=kind, subtype=subtype)
    data = file.getvalue()
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    assert np.array_equal(load_audio(data)[0], expected)
    says = "truncated" if kind != "FLAC" else "lost sync"
    with pytest.raises(DataFileError, match=rf"<\d+ bytes>: .*{says}"):
        load_audio(data[: len(data) * 9 // 10])


def test_a_stream_of_another_format_goes_to_its_end():
    soundfile = needs("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(800) / 20), 8000, format="AU", subtype="PCM_16")
    data = file.getvalue()
    expected, _ = load_audio(data)
    assert len(expected) == 800
    endless = data[:8] + b"\xff" * 4 + data[12:]
    assert np.array_equal(load_audio(endless)[0], expected)


def test_a_flac_stream_without_a_length_is_named():
    soundfile = needs("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros(800), 8000, format="FLAC", subtype="PCM_16")
    data = bytearray(file.getvalue())
    # The number of samples are the last 36 bits before the checksum.
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    with pytest.raises(DataFileError, match=r"bytes>: its header has no length, .* `ffmpeg -i"):
        load_audio(bytes(data))


def mp3(frames, header=b""):
    """Return an MP3 file of silent frames of 1152 samples, 16 kHz and one channel."""
    frame = b"\xff\xfb\x10\xc4".ljust(104, b"\0")
    first = (frame[:4] + bytes(17) + header).ljust(104, b"\0")
    return (first if header else b"") + frame * frames


@pytest.mark.parametrize("tag", [b"", b"ID3\4\0\0\0\0\0\x14" + bytes(20)])
def test_the_sections_of_an_mp3_file_are_within_it(tag):
    soundfile = needs("soundfile")
    data = tag + mp3(9)
    if "MP3" not in soundfile.available_formats():
        pytest.skip("this libsndfile reads no MP3")
    whole, _ = load_audio(data)
    rng = np.random.default_rng(7)
    assert {len(load_audio(data, start=rng, frames=len(whole) - 9)[0]) for _ in range(40)} == {
        len(whole) - 9
    }
    announced = mp3(9, b"Info\0\0\0\1\0\0\0\x14")
    with pytest.raises(DataFileError, match=r"it ends at frame .*, and its header announces"):
        load_audio(tag + announced)


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
    with pytest.raises(DataFileError, match="allow_pickle"):
        load_array(tmp_path / "a.npy")


def test_a_broken_array_is_an_error(tmp_path):
    file = io.BytesIO()
    np.savez(file, x=PIXELS)
    data = {"a.npy": b"", "b.npz": file.getvalue()[:100], "c.npy": b"1 2 3\n"}
    for name, written in data.items():
        (tmp_path / name).write_bytes(written)
        with pytest.raises(DataFileError, match=rf"{name}: .*(no \.npy or \.npz|not a zip) file"):
            load_array(tmp_path / name)
