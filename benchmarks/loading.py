"""What does loading add to a training step? Prints (and with --json writes) the share.

    python benchmarks/loading.py [--json FILE]

Batches of 128 from `Images`, augmented, through a DataLoader without processes of its own, in random order, against
forward, backward and step of an iBNN on a batch made beforehand, on one core. The two alternate, and the medians are
compared.
"""

import time
from collections.abc import Callable

import report
import torch
from torch import nn
from torch.utils.data import DataLoader

import ibnn
from ibnn.data import Images, Split
from ibnn.nets import VGG16, LeNet

BATCH, BATCHES, REPEATS, ROWS = 128, 20, 15, 50_000


def loading(images: Images) -> float:
    """Seconds a batch."""
    order = torch.randperm(len(images))[: BATCH * BATCHES].tolist()
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    start = time.perf_counter()
    for x, _ in DataLoader(images, batch_sampler=batches, collate_fn=tuple):
        assert len(x) == BATCH
    return (time.perf_counter() - start) / BATCHES


def stepping(net: nn.Module, shape: tuple[int, ...], steps: int) -> Callable[[], float]:
    """Seconds a step."""
    model = ibnn.convert(net, components=8, seed=0).train()
    optimiser = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            model.elbo(x, y, n_data=ROWS).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        return (time.perf_counter() - start) / steps

    return measure


def compare(net: nn.Module, shape: tuple[int, ...], steps: int) -> dict[str, float]:
    split = Split(torch.randint(256, (ROWS, *shape), dtype=torch.uint8), torch.randint(10, (ROWS,)))
    images = Images(split, mean=(0.5,) * shape[0], std=(0.25,) * shape[0], augment=True)
    step = stepping(net, shape, steps)
    loading(images), step()  # the first do not count
    return report.compared([(loading(images), step()) for _ in range(REPEATS)], "loading_ms", "step_ms")


def main() -> None:
    """Measures and prints."""
    options = report.parser(__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    result = {
        "LeNet, 1 x 28 x 28": compare(LeNet(), (1, 28, 28), 10),
        "VGG-16 of quarter width, 3 x 32 x 32": compare(VGG16(width=0.25), (3, 32, 32), 1),
        "recipe": {"components": 8, "batch_size": BATCH, "batches": BATCHES, "repeats": REPEATS, "threads": 1},
    }
    report.tell(result, options.json)


if __name__ == "__main__":
    main()
