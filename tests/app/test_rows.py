"""Images as the network takes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ibnn.app.inputs import Pixels


def _decoded(image: Image.Image, folder: Path, channels: int = 1, **options: Any) -> list[Any]:
    image.save(folder / "a.png", **options)
    found, size = Pixels((channels, *image.size[::-1])).decoded(folder / "a.png", "a.png")
    assert size == image.size[0] * image.size[1]
    pixels: list[Any] = (found * 255).round().int().tolist()
    return pixels


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    colours = [(255, 0, 0, 0), (255, 0, 0, 51), (255, 0, 0, 255)]  # a fifth of red on white
    image = Image.fromarray(np.array([colours], np.uint8))
    assert _decoded(image, tmp_path, 3) == [[[255, 255, 255]], [[255, 204, 0]], [[255, 204, 0]]]
    grey = Image.fromarray(np.array([[0, 7, 200]], np.uint8))
    assert _decoded(grey.convert("LA"), tmp_path) == [[[0, 7, 200]]]  # nothing is
    assert _decoded(grey, tmp_path, transparency=7) == [[[0, 255, 200]]]
    assert _decoded(grey.convert("P"), tmp_path, transparency=7) == [[[0, 255, 200]]]


def test_greys_of_16_bits_are_scaled(tmp_path: Path) -> None:
    grey = Image.fromarray(np.array([[0, 128, 129, 257 * 7, 65535]], np.uint16))
    assert _decoded(grey, tmp_path) == [[[0, 0, 1, 7, 255]]]
    assert _decoded(grey, tmp_path, 3) == [[[0, 0, 1, 7, 255]]] * 3
    assert _decoded(grey, tmp_path, transparency=257 * 7) == [[[0, 0, 1, 255, 255]]]
    Image.fromarray(np.array([[70_000]], np.int32)).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match="more than 16 bits a pixel"):
        Pixels((1, 1, 1)).decoded(tmp_path / "a.tif", "a.tif")


def test_images_are_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side: to be turned to the right
    Image.fromarray(np.array([[1000, 2000]], np.uint16)).save(tmp_path / "a.png", exif=exif)
    found, pixels = Pixels((1, 2, 1)).decoded(tmp_path / "a.png", "a.png")
    assert (pixels, (found * 255).round().tolist()) == (2, [[[4.0], [8.0]]])
