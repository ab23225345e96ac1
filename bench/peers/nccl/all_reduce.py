#!/usr/bin/env python3
"""NCCL's all-reduce of bf16 rows of 7,168 values over the GPUs of this machine, in a CUDA graph of
122, as peer_sum_cuda_bench times its sums: us a sum, the medians of nine replays from launch to end,
of three rounds. Needs PyTorch with CUDA.

usage: all_reduce.py [GPUS=2]
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

CHAIN, WARM, REPLAYS, ROUNDS = 122, 5, 9, 3
VALUES = [1024, 2048] + [7168 * rows for rows in (1, 4, 16, 18, 64, 128, 512, 4096)]


def measure(rank, gpus):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=gpus,
                            device_id=torch.device("cuda", rank))
    for values in VALUES:
        x = torch.randn(values, device="cuda", dtype=torch.bfloat16) * 0.001
        for _ in range(WARM):
            dist.all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CHAIN):
                dist.all_reduce(x)
        medians = []
        for _ in range(ROUNDS):
            times = []
            for replay in range(REPLAYS + 1):
                dist.barrier()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                if replay > 0:
                    times.append((time.perf_counter() - begin) / CHAIN * 1e6)
            medians.append(statistics.median(times))
        if rank == 0:
            low, middle, high = sorted(medians)
            print(f"{values:9d} values  {middle:7.1f} us ({low:.1f} to {high:.1f})", flush=True)
    if rank == 0:
        print("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    dist.destroy_process_group()


if __name__ == "__main__":
    gpus = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    processes.spawn(measure, args=(gpus,), nprocs=gpus)
