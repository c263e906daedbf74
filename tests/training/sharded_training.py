"""Run by torchrun: trains models sharded by ``fully_shard`` and prints the losses, as JSON, on the first rank."""

import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mgk.models import MgkConfig, MgkForCausalLM, MgkForSequenceClassification
from mgk.nn.em import m_step_all
from mgk.training import distributed

STEPS, BATCH, LENGTH = 4, 4, 10
CASES = [("softmax", "learned"), ("mgk", "em"), ("smgk", "learned"), ("smlk", "learned")]


def make(attention: str, prior: str, head: type) -> torch.nn.Module:
    torch.manual_seed(0)
    config = MgkConfig(
        attention=attention,
        prior=prior,
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
        num_labels=3,
    )
    return head(config).train()


def losses(model: torch.nn.Module, rank: int, world_size: int) -> list[float]:
    """The mean loss of every step over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(11, (BATCH, LENGTH), generator=generator)
        labels = ids if isinstance(model, MgkForCausalLM) else ids[:, 0] % 3
        mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        loss = model(input_ids=ids[mine], labels=labels[mine]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        m_step_all(model)
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        found.append(float(total) / world_size)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for head in (MgkForSequenceClassification, MgkForCausalLM):
        for attention, prior in CASES:
            model = make(attention, prior, head)
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            found[f"{head.__name__}-{attention}-{prior}"] = losses(model, rank, world_size)
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
    distributed.hard_exit(0)
