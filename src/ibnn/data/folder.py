"""IMAGE FOLDERS: root/train/CLASS/*.png|jpg and root/val/CLASS/…, as ImageNet has them; decoded when asked for."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ibnn.data.files import Split
from ibnn.errors import DamagedError, complaint

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_SUFFIXES = {".png", ".jpg", ".jpeg"}


def flattened(image: "Picture", mode: str) -> "Picture":
    """Converts a pillow image to mode "L" or "RGB": composites transparent pixels on white, scales 16-bit greys to 8.

    >>> from PIL import Image
    >>> flattened(Image.new("RGBA", (1, 1), (0, 0, 0, 51)), "L").getpixel((0, 0))  # a fifth of black
    204
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        scale = [round(value / 257) for value in range(1 << 16)]
        image = image.convert("I").point(scale, "L")
        if "transparency" in image.info:  # a grey that stands for it
            image.info["transparency"] = scale[image.info["transparency"]]
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"{image.mode}, more than 16 bits a pixel")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert(mode)


class Folder(Dataset[tuple[Tensor, Tensor]]):
    """Images of a folder as uint8 (3, size, size): the shorter side is resized, then the centre is cropped.

    Transparent images are composited on white; 16-bit greys become 8-bit. `Images` takes a folder in place of a `Split`
    and decodes each batch as it is needed (so give the loader some `num_workers`); `split()` decodes everything at once
    into memory.

    >>> Folder("imagenet", train=False, size=224)[0][0].shape  # doctest: +SKIP
    torch.Size([3, 224, 224])

    Attributes:
        classes: Sorted names of the classes of train and val together; a label is an index into it.
        paths: Files, sorted by class and name.
        labels: Their classes, (N,) int64.
    """

    def __init__(self, root: str | Path, *, train: bool, size: int, resize: int | None = None) -> None:
        """Lists the files; `resize` is the shorter side before the crop, by default 8/7 of `size` (256 for 224)."""
        self.size, self.resize = size, resize or size * 8 // 7
        if not 1 <= size <= self.resize:
            raise ValueError(complaint("size", f"between 1 and resize = {self.resize}", size, "Pass a larger resize."))
        part = Path(root) / ("train" if train else "val")
        both = (p for name in ("train", "val") if (Path(root) / name).is_dir() for p in (Path(root) / name).iterdir())
        self.classes = tuple(sorted({path.name for path in both if path.is_dir()}))
        found = [
            (path, label)
            for label, name in enumerate(self.classes)
            if (part / name).is_dir()
            for path in sorted((part / name).iterdir())
            if path.suffix.lower() in _SUFFIXES
        ]
        if not found:
            remedy = "Put one folder per class there."
            raise FileNotFoundError(complaint("root", f"a folder with {part.name}/CLASS/*.png or *.jpg", root, remedy))
        self.paths = [path for path, _ in found]
        self.labels = torch.tensor([label for _, label in found])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._decode(self.paths[index]), self.labels[index]

    def rows(self, index: Tensor) -> Split:
        """Decodes the given rows."""
        return Split(torch.stack([self._decode(self.paths[i]) for i in index.tolist()]), self.labels[index])

    def part(self, index: Tensor) -> "Folder":
        """Returns the given rows, not yet decoded."""
        found = copy.copy(self)
        found.paths, found.labels = [self.paths[i] for i in index.tolist()], self.labels[index]
        return found

    def split(self) -> Split:
        """Decodes all rows, 3·size² bytes each."""
        return self.rows(torch.arange(len(self)))

    def _decode(self, path: Path) -> Tensor:
        from PIL import Image

        try:
            with Image.open(path) as file:
                image = flattened(file, "RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # all that pillow raises
            got, remedy = f"{type(error).__name__}: {error}", "Replace or delete the file."
            raise DamagedError(complaint(str(path), "a readable image", got, remedy)) from error
        short = min(image.size)
        width, height = (side * self.resize // short for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        image = image.crop((left, top, left + self.size, top + self.size))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, 3).permute(2, 0, 1).contiguous()
