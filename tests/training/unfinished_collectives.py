"""Run by torchrun: ends while gloo's threads still hold tensors, of a group that a sharded model keeps alive or not."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mgk.training import distributed


def main() -> None:
    dist.init_process_group("gloo")
    if "sharded" in sys.argv:
        fully_shard(nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
    for _ in range(30):
        dist.all_reduce(torch.zeros(100_000), async_op=True)


if __name__ == "__main__":
    main()
    distributed.hard_exit(0)
