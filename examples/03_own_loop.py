"""An own training loop: a Transformers model under DDP, the two halves of each batch in turn.

torchrun --nproc-per-node 2 examples/03_own_loop.py
"""

import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

import steelyard.integrations.transformers as st


def batches(rank: int, steps: int):
    """Packed batches of this rank: five documents each, of very different lengths."""
    draw = random.Random(rank)
    for _ in range(steps):
        lengths = draw.choices([16, 32, 300], k=5)
        yield st.collate([[draw.randrange(3, 64) for _ in range(n)] for n in lengths])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        )
    )  # fmt: skip
    attached = st.attach(model, tolerance=0.02)
    replica = DistributedDataParallel(st.PingPong(model))
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    for step, batch in enumerate(batches(rank, steps=4)):
        labels = st.label_count(batch, dist.group.WORLD)  # of all ranks: the loss is a mean over tokens, not of means
        loss = replica(**batch, num_items_in_batch=labels).loss
        (loss * ranks).backward()  # DDP takes the mean over ranks of what must be summed
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        figures = attached.report.take()
        if rank == 0:
            print(
                f"step {step}: loss {float(total):.3f}, busiest rank over the mean "
                f"{figures['work_max_over_mean']:.3f}, without balancing {figures['work_max_over_mean_packed']:.3f}"
            )
    attached.balancer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
