"""What does an iBNN cost beside its plain network? Prints (and with --json writes) ratios; 1 is as fast and as light.

    python benchmarks/speed.py [--json FILE] [--nets NAME …] [--batch B] [--repeats N] [--components K]

For each network:
    saved_bytes   kept for the backward pass of a training step on B rows, weights aside
    train         seconds of a training step (forward and backward) on the same rows
    predict       seconds of 5K draws for B inputs, to 5K forward passes of the plain network
    predict_one   seconds of 80 draws for one input, to one forward pass of the plain network on 80 rows

Plain and converted alternate in one process; a ratio is the median over repetitions of the two times side by side.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable

import report
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ibnn
from ibnn.memory import saved_bytes
from ibnn.nets import VGG16, LeNet, WideResNet

CLASSES, DRAWS = 10, 80


class Encoder(nn.Module):
    """A pre-norm Transformer encoder of linear layers on tokens (B, T, width)."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.heads = heads
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        linear = [{name: nn.Linear(*size) for name, size in sizes.items()} for _ in range(depth)]
        self.blocks = nn.ModuleList(
            nn.ModuleDict(layers | {"norm1": nn.LayerNorm(width), "norm2": nn.LayerNorm(width)}) for layers in linear
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            q, k, v = block["qkv"](block["norm1"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + block["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + block["down"](block["up"](block["norm2"](x)).relu())
        return self.head(x.mean(1))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg16-small": (VGG16, (3, 32, 32)),
    "wideresnet-16-4": (lambda: WideResNet(depth=16, width=4), (3, 32, 32)),
    "lenet": (LeNet, (1, 28, 28)),
    "transformer-4": (Encoder, (64, 128)),
}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], plain: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median ratio of the two, called in turn, after one call of each that does not count."""
    ours()
    plain()
    pairs = [(seconds(ours), seconds(plain)) for _ in range(repeats)]
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    middle = statistics.median(x / y for x, y in pairs)
    return {"ratio": round(middle, 4), "ibnn_ms": round(1e3 * a, 3), "plain_ms": round(1e3 * b, 3)}


def measure(name: str, *, batch: int, components: int, repeats: int) -> dict[str, object]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = make()
    model = ibnn.convert(net, components=components, seed=0)
    x, y = torch.randn(batch, *shape), torch.randint(CLASSES, (batch,))
    samples = max(1, DRAWS // components)
    one, many = x[:1], torch.randn(components * samples, *shape)

    def plain_loss() -> Tensor:
        return F.cross_entropy(net(x), y)

    def our_loss() -> Tensor:
        return model.elbo(x, y, n_data=50_000).loss

    @torch.no_grad()
    def plain_predict() -> None:
        for _ in range(5 * components):
            net(x)

    net.train()
    model.train()
    kept = []
    for module, loss in ((model, our_loss), (net, plain_loss)):
        with saved_bytes([*module.parameters(), *module.buffers()]) as saved:
            loss()
        kept.append(saved.bytes)
    found: dict[str, object] = {
        "saved_bytes": {"ratio": round(kept[0] / kept[1], 4), "ibnn": kept[0], "plain": kept[1]},
        "train": ratio(lambda: our_loss().backward(), lambda: plain_loss().backward(), repeats),
    }
    net.eval()
    model.eval()
    found["predict"] = ratio(lambda: model.predict(x, samples=5, batch_size=batch), plain_predict, repeats)
    with torch.no_grad():
        found["predict_one"] = ratio(lambda: model.predict(one, samples=samples), lambda: net(many), repeats)
    return found


def main() -> None:
    """Measures and prints."""
    parser = report.parser(__doc__)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS), help="which networks")
    parser.add_argument("--batch", type=int, default=128, help="B")
    parser.add_argument("--components", type=int, default=8, help="K")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions behind a median")
    options = parser.parse_args()
    sizes = {"batch": options.batch, "components": options.components, "repeats": options.repeats}
    result = {name: measure(name, **sizes) for name in options.nets}
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load": round(os.getloadavg()[0], 2),
    }
    report.tell(result | {"recipe": sizes, "machine": machine}, options.json)


if __name__ == "__main__":
    main()
