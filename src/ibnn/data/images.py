"""IMAGE BATCHES: images held as bytes, normalised and augmented a whole batch at a time."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from ibnn.data.files import Split
from ibnn.data.folder import Folder
from ibnn.errors import complaint

PADDING = 4  # black pixels on each side, zero before normalising, for random crops


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Normalised images and labels; `__getitems__` returns whole batches.

    Augmentation draws from torch's global generator, for the whole batch at once: two numbers an image for the crop
    and, with `flip`, one for the mirror image. In a DataLoader of your own, pass `collate_fn=tuple`: batches are
    already collated.

    >>> split = Split(torch.full((8, 1, 4, 4), 255, dtype=torch.uint8), torch.arange(8))
    >>> images = Images(split, mean=(0.5,), std=(0.25,))
    >>> x, y = next(iter(torch.utils.data.DataLoader(images, batch_size=3, collate_fn=tuple)))
    >>> x.shape, x.max().item(), y.tolist()
    (torch.Size([3, 1, 4, 4]), 2.0, [0, 1, 2])
    """

    def __init__(
        self,
        data: Split | Folder,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool = False,
        flip: bool = True,
    ) -> None:
        """Wraps images.

        Args:
            data: Images in memory, or a folder, which is decoded batch by batch.
            mean: Mean of each channel, for pixels in [0, 1].
            std: Standard deviation of each channel, likewise.
            augment: Whether to crop randomly from the image padded by 4 black pixels.
            flip: Whether augmentation also mirrors half of the images left to right; False for digits and letters.
        """
        channels = data.images.shape[1] if isinstance(data, Split) else 3
        if not len(mean) == len(std) == channels:
            got = f"{len(mean)} and {len(std)}"
            raise ValueError(complaint("mean and std", f"{channels} numbers each", got, "Pass one for each channel."))
        self.data, self.augment, self.flip = data, augment, flip
        self.mean, self.std = tuple(mean), tuple(std)

    def __len__(self) -> int:
        return len(self.data.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns a batch: float32 (B, C, H, W) and int64 (B,)."""
        images, labels = self.data.rows(torch.as_tensor(indices))
        if self.augment:
            images = _augmented(images, self.flip)
        return normalised(images, self.mean, self.std), labels


def normalised(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Turns bytes (B, C, H, W) into float32 (pixel − mean) / std, for pixels in [0, 1]."""
    centre, spread = (torch.tensor(values).view(-1, 1, 1).to(images.device) * 255 for values in (mean, std))
    return images.float().sub_(centre).div_(spread)


def _augmented(images: Tensor, flip: bool) -> Tensor:
    """Crops each padded image at its own place, and mirrors half of them, with one gather for the batch."""
    batch, channels, height, width = images.shape
    down, right = torch.randint(2 * PADDING + 1, (2, batch, 1))
    rows, columns = torch.arange(height), torch.arange(width)
    if flip:
        columns = torch.where(torch.rand(batch, 1) < 0.5, width - 1 - columns, columns)
    rows, columns = (rows + down) * (width + 2 * PADDING), columns + right  # (B, H), (B, W)
    places = (rows[:, :, None] + columns[:, None, :]).view(batch, 1, -1).expand(-1, channels, -1)
    padded = F.pad(images, (PADDING,) * 4)
    return padded.flatten(2).gather(2, places).view(images.shape)
