"""Draws of the latents: one z for every node of the network, by address.

Where the single units of a convolution's input have factors, a draw also has a word for every layer, from which these
factors come (`units`). A `Draw` is what one pass needs, `Draws` are several. Three functions make them: `training` for
the rows of a batch (Algorithm 1), `predictive` by component and number, and `banked` from a bank of sampled z.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ibnn.mixture import Mixture
from ibnn.normal import Space, address, next_words, normals, normals_of, numbered_words, words
from ibnn.units import MIRRORED

Part = tuple[int, int]  # of a batch: its first row, and the rows of the whole batch
KEPT = 2**20  # entries of predictive noise that are worth keeping for the next prediction


@dataclass(frozen=True, slots=True)
class Draw:
    """What multiplies the layers' inputs in one pass."""

    z: Tensor  # factors of the nodes: (nodes,), the same for all rows, or (R, nodes), a z for each row
    words: Tensor | None = None  # where factors of units come from, (layers,) or (R, layers); None if units have none
    unit_std: Tensor | None = None  # τ of each layer, (layers,), if not the network's own


@dataclass(frozen=True, slots=True)
class Draws:
    """J draws: the fields of `Draw`, with an axis of length J in front of z and words."""

    z: Tensor
    words: Tensor | None = None
    unit_std: Tensor | None = None

    def __len__(self) -> int:
        return self.z.shape[0]

    def __getitem__(self, number: int | slice | Tensor) -> Draw:
        """Returns one draw for all rows, or of several one for each row."""
        return Draw(self.z[number], None if self.words is None else self.words[number], self.unit_std)

    def split(self, size: int) -> "list[Draws]":
        """Splits into chunks of at most `size` draws and nearly equal length."""
        size = -(-len(self) // -(-len(self) // size))
        parts = self.z.split(size)
        words = [None] * len(parts) if self.words is None else self.words.split(size)
        return [Draws(z, own, self.unit_std) for z, own in zip(parts, words, strict=True)]

    def as_rows(self, rows: int) -> Draw:
        """Returns J draws for all rows as one draw, for J copies of a batch one after the other."""
        words = None if self.words is None else self.words.repeat_interleave(rows, 0)
        return Draw(self.z.repeat_interleave(rows, 0), words, self.unit_std)


def training(
    q: Mixture, seed: Tensor, examples: Tensor, *, rows: int, samples: int, spread: bool, part: Part | None, layers: int
) -> Draw:
    """Returns a z for each row of S copies of a batch, copy-major: z (S·rows, nodes).

    `examples` is how many were drawn for before, and `layers` how many have words, 0 if units have no factors. With
    `spread` the copies of an example go to different components, not to one. Rows may be a `part` of a larger batch.
    """
    first, total = part or (0, rows)
    turn = assign(seed, examples, total, len(q.mean))[first : first + rows]
    copies = torch.arange(samples, device=turn.device)[:, None]
    component = (turn * samples + copies if spread else turn.expand(samples, -1)) % len(q.mean)
    noise = normals_of(next_words(seed, examples, Space.TRAIN, first, rows, samples), q.mean.shape[1])
    z = q.draw(component.flatten(), noise)
    if not layers:
        return Draw(z)
    return Draw(z, numbered_words(next_words(seed, examples, Space.TRAIN_UNITS, first, rows, samples), layers))


def assign(seed: Tensor, examples: Tensor, rows: int, components: int) -> Tensor:
    """Returns the turn of each example of a batch, (rows,); turn mod K is its component.

    A batch goes on where the last one stopped, so counts differ by at most one and even out. Examples change turns at
    random within each K in a row: a repeated batch does not give a component the same examples.
    """
    groups = -(-rows // components)
    count = groups * components
    shuffle = next_words(seed, examples, Space.ASSIGN, 0, count)
    if count > rows:
        position = torch.arange(count, device=shuffle.device)
        shuffle = torch.where(position < rows, shuffle, 2**32)  # places beyond the batch stay behind those in it
    first = torch.arange(0, count, components, device=shuffle.device)[:, None]
    return (shuffle.view(groups, components).argsort(1) + first + examples).flatten()[:rows]


def predictive(q: Mixture, seed: int, *, components: Sequence[int], samples: int, first: int, layers: int) -> Draws:
    """Returns draws first … first + S − 1 of some components, component-major: z (len(components)·S, nodes).

    Draw s of component k depends on (seed, k, s) and the posterior alone. Every second component has the noise of the
    one before it with the other sign: what is odd in the noise cancels in their mean.
    """
    entries = len(components) * samples * q.mean.shape[1]
    noise = _noise.__wrapped__ if torch.compiler.is_compiling() or entries > KEPT else _noise
    component, normal, own = noise(seed, tuple(components), samples, first, q.mean.shape[1], layers, q.mean.device)
    return Draws(q.draw(component, normal), own)


@lru_cache(maxsize=2)  # input after input asks for the same
def _noise(
    seed: int, components: tuple[int, ...], samples: int, first: int, nodes: int, layers: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the component of every draw (J,), its standard normals (J, nodes), and its words (J, layers)."""
    with torch.inference_mode(False):  # others may need gradients
        k, s = numbers(components, samples, first, device)
        pair, mirrored = (k - k % 2)[:, None], (k % 2).repeat_interleave(samples)[:, None]
        normal = (1 - 2 * mirrored) * normals(address(seed, Space.PREDICT, pair, s), nodes)
        own = numbered_words(words(address(seed, Space.PREDICT_UNITS, pair, s)), layers) + MIRRORED * mirrored
        return k.repeat_interleave(samples), normal, own if layers else None


def banked(bank: Tensor, seed: int, *, components: Sequence[int], samples: int, first: int) -> Draws:
    """Returns rows of a bank (K, S, nodes) in an order that the seed decides, each once before any comes again."""
    with torch.inference_mode(False):
        k, s = numbers(components, samples, first, bank.device)
        kept = bank.shape[1]
        row = torch.arange(kept, device=k.device)
        order = words(address(seed, Space.BANK, k[:, None], row)).view(len(k), kept).argsort(1)
        return Draws(bank[k[:, None], order[:, s % kept]].flatten(0, 1))


def numbers(components: Sequence[int], samples: int, first: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the numbers of components and of draws, as tensors."""
    return torch.tensor(list(components), device=device), torch.arange(first, first + samples, device=device)
