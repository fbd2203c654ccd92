"""One of two workers that train a sharded network: torchrun --nproc-per-node 2 fsdp_job.py FOLDER STOP KIND.

Without torchrun, the same on one worker, not sharded.
"""

import json
import os
import sys
from pathlib import Path

import torch
from fit_job import Stop, make_data
from torch import nn

import ibnn
from ibnn.training import shard

torch.set_num_threads(1)
OPTIONS = {"batch_size": 32, "optimiser": "adam", "lr": 0.01, "clip": 1.0, "latent_clip": 1.0, "quiet": True}
KINDS = {
    "fixed": {"beta": 3.0, "optimiser": "sgd", "accumulate": 2, "ema": 0.9},
    "steered": {},
}


def make() -> ibnn.IBNN:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *blocks, nn.Linear(16, 3))
    return ibnn.convert(net, components=4, seed=0)


def train(model: ibnn.IBNN, folder: Path, kind: str, stop: int = 0) -> ibnn.History | None:
    """Trains six epochs; after `stop` of them it fails."""

    def watch(row: dict[str, object], model: object) -> None:
        if stop and row["epoch"] == stop:
            raise Stop

    x, y = make_data(403)
    try:
        options = OPTIONS | KINDS[kind]
        return ibnn.fit(
            model, (x[:300], y[:300]), (x[300:], y[300:]), run_dir=folder, epochs=6, callbacks=[watch], **options
        )
    except Stop:
        return None


def main() -> None:
    folder, stop, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    model = make()
    workers = "RANK" in os.environ
    if workers:
        shard(model, blocks=["2", nn.Sequential])
        assert type(model.net[0].weight).__name__ == "DTensor"
        assert model.net[0].weight.to_local().shape[0] == 8  # a half
        assert type(model.latents["0"].mean) is nn.Parameter  # whole
    history = train(model, folder, kind, stop)
    if history is not None:
        model.save_pretrained(folder / "model")
        if not workers or os.environ["RANK"] == "0":
            text = json.dumps({"rows": list(history.rows), "prior_std": model.prior_std})
            (folder / "rows.json").write_text(text)
    if workers:
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
