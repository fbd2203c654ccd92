"""One of two workers of torch's DistributedDataParallel: python ddp_job.py RANK MEETING_FILE OUT."""

import sys

import torch
from torch import distributed, nn

import ibnn

ROWS = 8


def make() -> tuple[ibnn.IBNN, torch.Tensor]:
    """A network with convolutions and linear layers in train mode, and a batch for two workers."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    model = ibnn.convert(net.double(), components=3, init_std=0.3, likelihood="gaussian", seed=5).train()
    return model, torch.randn(ROWS, 2, 4, 4, dtype=torch.float64)


def main() -> None:
    rank, meeting, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model, x = make()
    part = x.chunk(2)[rank]
    shared = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # the noise of the likelihood
    for _ in range(2):  # the first pass of a model is watched
        model.zero_grad()
        shared(part).square().sum().backward()
    if rank == 0:
        torch.save([p.grad for p in model.net.parameters()], out)
    distributed.barrier()  # a worker that leaves first may abort the other
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
