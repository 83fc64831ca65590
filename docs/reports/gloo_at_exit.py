"""torchrun --nproc-per-node 4 gloo_at_exit.py: with the mesh, processes abort at their exit."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # Without it, nothing aborts.
    mine = torch.ones(3)
    for _ in range(8):
        of_all = [torch.empty(3) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, mine, group=mesh.get_group())
    dist.destroy_process_group()
