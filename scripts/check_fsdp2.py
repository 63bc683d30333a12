#!/usr/bin/env python3
"""Trains by an exported fsdp2_plan.py on CPU ranks, and compares the losses with one process.

    python3 scripts/check_fsdp2.py fsdp2_plan.py DEVICES [config.json]

Starts DEVICES processes that meet over gloo. With the model's config.json, a model of transformers
is trained for three steps by the plan, and its losses must be those of one process within 1e-5 (the
plan must be f32 and without a pipeline). Without, the placements of the plan are only read.
"""

import contextlib
import importlib.util
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

STEPS, LR = 3, 1e-3


def load(path):
    spec = importlib.util.spec_from_file_location("fsdp2_plan", path)
    plan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan)
    plan.DEVICE = "cpu"
    return plan


def build(config):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoConfig.for_model(**json.load(open(config)))
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    return model.to(torch.float32)


def batches(plan, vocab):
    sizes = dict(plan.MESH)
    data = sizes["replicate"] * sizes["shard"] // plan.CONTEXT
    shape = (STEPS, plan.ACCUMULATION, data, plan.MICRO_BATCH, plan.SEQUENCE)
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


def loss_of(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    logits = logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def alone(plan, config):
    model = build(config)
    optimizer = plan.optimizer(model, LR)
    losses = []
    for step in batches(plan, model.config.vocab_size):
        optimizer.zero_grad()
        parts = step.flatten(0, 1)
        total = sum(loss_of(model, part) / len(parts) for part in parts)
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


def rank(index, path, devices, config, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=index, world_size=devices)
    plan = load(path)
    mesh = plan.device_mesh()
    sizes = dict(plan.MESH)
    model = build(config)
    plan.parallelize(model, mesh)
    optimizer = plan.optimizer(model, LR)
    holders = sizes["replicate"] * sizes["shard"]
    mine = mesh["replicate"].get_local_rank() * sizes["shard"] + mesh["shard"].get_local_rank()
    # Here every rank of those that share a sequence computes all of it: gloo has no ring.
    mine //= plan.CONTEXT
    assert plan.CONTEXT == 1 or plan.context_mesh().size() == plan.CONTEXT
    from torch.distributed.tensor.experimental import implicit_replication

    context = implicit_replication if sizes["tensor"] > 1 else contextlib.nullcontext
    losses = []
    for step in batches(plan, model.config.vocab_size):
        optimizer.zero_grad()
        total = torch.zeros(())
        for i, part in enumerate(step):
            plan.begin(model, i)
            with context():
                loss = loss_of(model, part[mine]) / plan.ACCUMULATION
                loss.backward()
            total += loss.detach()
        if holders > 1 and not hasattr(model, "set_is_last_backward"):
            raise SystemExit("the plan has data ranks, and nothing reduces their gradients")
        optimizer.step()
        dist.all_reduce(total, group=None)
        losses.append((total / devices).item())
    if index == 0:
        expected = alone(plan, config)
        close = all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(losses, expected))
        words = " ".join(f"{loss:.6f}" for loss in losses)
        print(f"FSDP2 on {devices} gloo ranks {sizes}, ZeRO {plan.ZERO}: losses {words}")
        if not close:
            raise SystemExit(f"expected {expected}")
    dist.destroy_process_group()


def main():
    path, devices = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        mp.spawn(rank, (path, devices, sys.argv[3], 29500 + os.getpid() % 400), devices)
        return
    plan = load(path)
    n = 1
    for _, size in plan.MESH:
        n *= size
    assert n == devices, (plan.MESH, devices)
    print(f"torch {torch.__version__}: {len(plan.placements())} placements on {plan.MESH}")


if __name__ == "__main__":
    main()
