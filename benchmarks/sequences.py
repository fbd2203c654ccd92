"""Training steps with a z for each row over those of the plain network: recurrent layers and attention.

    python benchmarks/sequences.py [--json FILE]

CPU seconds of one thread, which other work on the machine disturbs less than the clock; the two networks take turns.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from report import parser, saved_bytes, tell
from torch import Tensor, nn

import ibnn

STEPS, TURNS = 64, 25


class Recurrent(nn.Module):
    """Classifies sequences by the mean output of a recurrent layer."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.layer, self.head = getattr(nn, kind)(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences (B, T, width) to scores (B, 10)."""
        scores: Tensor = self.head(self.layer(x)[0].mean(1))
        return scores


class Encoder(nn.Module):
    """Classifies sequences by torch's own Transformer encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences (B, T, width) to scores (B, 10)."""
        scores: Tensor = self.head(self.layers(x).mean(1))
        return scores


def measure(net: nn.Module, width: int, batch: int) -> dict[str, float]:
    """Ratios of CPU seconds and of bytes kept for the backward pass."""
    x, y = torch.randn(batch, STEPS, width), torch.randint(10, (batch,))
    model = ibnn.convert(net, components=8, seed=0).train()
    losses = {
        "plain": (net, lambda: F.cross_entropy(net(x), y)),
        "ibnn": (model, lambda: model.elbo(x, y, n_data=1000).loss),
    }
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    kept = {}
    for name, (module, loss) in losses.items():
        with saved_bytes([*module.parameters(), *module.buffers()]) as saved:
            loss()
        kept[name] = saved.bytes
    for turn in range(TURNS + 2):
        for name, (module, loss) in losses.items():
            module.zero_grad()
            began = time.process_time()
            loss().backward()
            if turn > 1:
                seconds[name].append(time.process_time() - began)
    ratio = statistics.median(a / b for a, b in zip(seconds["ibnn"], seconds["plain"], strict=True))
    return {
        "step": round(ratio, 3),
        "memory": round(kept["ibnn"] / kept["plain"], 3),
        "plain_ms": round(1e3 * statistics.median(seconds["plain"]), 1),
    }


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    found = {}
    for batch in (32, 128):
        for kind in ("LSTM", "GRU"):
            torch.manual_seed(0)
            found[f"{kind}, batch {batch}"] = measure(Recurrent(kind, 128).train(), 128, batch)
    for batch in (16, 64):
        torch.manual_seed(0)
        found[f"Transformer, batch {batch}"] = measure(Encoder(256).train(), 256, batch)
    about = "CPU seconds and kept bytes of a training step over the plain network's; 64 steps, width 128 (256)"
    tell({"what": about, "ratios": found}, options.json)
