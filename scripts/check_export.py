#!/usr/bin/env python3
"""Gives files of `meshwright export` to the software that they are for.

    python3 scripts/check_export.py FOLDER..

A folder holds what one `export` wrote. Each file is read by its software's own parser where that is
installed: DeepSpeed's config class, torchtitan's manager (0.2), accelerate's launcher and config
classes, Megatron-LM's parser and validation (a checkout in MEGATRON_LM), jax and torch on CPU. What
is not installed is skipped by name. docs/export.md has what they said. Exit code 1: something was
refused.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


class Skipped(Exception):
    """The software is not there."""


def need(module):
    """Skips where a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"{module} is not installed")


def python(code, *args, env=None):
    """Runs code in a process of its own, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise ValueError(done.stderr.strip()[-2000:])
    return done.stdout.strip().splitlines()[-1]


def degrees(path):
    """The numbers of a file's first line: data, context, tensor, pipeline and devices."""
    first = path.read_text().splitlines()
    line = next(l for l in first if "by `meshwright export`" in l)
    found = {name: int(n) for name, n in re.findall(r"(\w+) (\d+)(?=[, ])", line)}
    devices = int(re.search(r"on (\d+) device", line).group(1))
    return found, devices


DEEPSPEED = """
import json, sys
from unittest import mock
import deepspeed.comm as dist
from deepspeed.runtime.config import DeepSpeedConfig
path = sys.argv[1]
config = json.load(open(path))
micro, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
data = config["train_batch_size"] // (micro * steps)
class Mpu:
    get_data_parallel_world_size = staticmethod(lambda: data)
with mock.patch.object(dist, "get_rank", lambda *a: 0):
    read = DeepSpeedConfig(path, mpu=Mpu())
assert read.train_batch_size == micro * steps * data
assert read.zero_optimization_stage == config["zero_optimization"]["stage"]
print(f"DeepSpeedConfig: batch {read.train_batch_size} = {read.train_micro_batch_size_per_gpu} x "
      f"{read.gradient_accumulation_steps} x {data}, ZeRO {read.zero_optimization_stage}")
"""


def deepspeed(folder):
    need("deepspeed")
    return python(DEEPSPEED, folder / "ds_config.json", env={"DS_ACCELERATOR": "cpu"})


TORCHTITAN = """
import sys
from torchtitan.config import ConfigManager
c = ConfigManager().parse_args(["--job.config_file", sys.argv[1]])
p, t, devices = c.parallelism, c.training, int(sys.argv[2])
from torchtitan.distributed import ParallelDims
dims = ParallelDims(
    dp_replicate=p.data_parallel_replicate_degree, dp_shard=p.data_parallel_shard_degree,
    cp=p.context_parallel_degree, tp=p.tensor_parallel_degree, pp=p.pipeline_parallel_degree,
    ep=p.expert_parallel_degree, etp=p.expert_tensor_parallel_degree, world_size=devices)
data = dims.dp_replicate * dims.dp_shard
assert t.global_batch_size % (t.local_batch_size * data) == 0
if dims.pp > 1:
    assert t.local_batch_size % p.pipeline_parallel_microbatch_size == 0
    from torch.distributed.pipelining.schedules import get_schedule_class
    get_schedule_class(p.pipeline_parallel_schedule)
print(f"JobConfig and ParallelDims: {c.model.name} {c.model.flavor}, {dims.dp_replicate} x "
      f"{dims.dp_shard} x {dims.cp} x {dims.tp} x {dims.pp} on {devices}, "
      f"{c.activation_checkpoint.mode}")
"""


def torchtitan(folder):
    need("torchtitan")
    path = folder / "torchtitan.toml"
    return python(TORCHTITAN, path, degrees(path)[1])


ACCELERATE = """
import os, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser, _validate_launch_command
path = sys.argv[1]
config = load_config_from_file(path)
args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
args, _, _ = _validate_launch_command(args)
said = str(config.distributed_type)
if args.use_fsdp or args.use_parallelism_config:
    from accelerate.utils.launch import prepare_multi_gpu_env
    args.num_machines, args.main_process_port = 1, 29517
    os.environ.update(prepare_multi_gpu_env(args))
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    plugin = FullyShardedDataParallelPlugin()
    sizes = ParallelismConfig()
    assert plugin.fsdp_version == 2
    assert sizes.total_size == config.num_processes, (sizes, config.num_processes)
    said += f", FSDP {plugin.fsdp_version} on {sizes.active_mesh_dims} of {sizes.total_size}"
if args.use_deepspeed:
    said += f", ZeRO {args.zero_stage}"
print("launcher:", said)
"""


def accelerate(folder):
    need("accelerate")
    return python(ACCELERATE, folder / "accelerate.yaml")


MEGATRON = """
import os, sys, json
sys.path.insert(0, sys.argv[1])
words = json.loads(sys.argv[2])
sys.argv = ["pretrain_gpt.py", *words]
import torch, typing, typing_extensions
typing.override = typing_extensions.override  # Python 3.11 has none.
torch.cuda.get_device_capability = lambda *a: (9, 0)
torch.cuda.get_device_properties = lambda *a: type("P", (), {"major": 9, "minor": 0})()
from megatron.training.arguments import parse_args, validate_args
from megatron.training.argument_utils import core_transformer_config_from_args
args = validate_args(parse_args())
args.apply_rope_fusion = False  # It needs Transformer Engine.
config = core_transformer_config_from_args(args)
config_of = (config.tensor_model_parallel_size, config.pipeline_model_parallel_size)
steps = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
assert args.global_batch_size == args.micro_batch_size * args.data_parallel_size * steps
print(f"parse_args, validate_args, TransformerConfig: data {args.data_parallel_size}, tensor, "
      f"pipeline {config_of}, virtual {config.virtual_pipeline_model_parallel_size}, "
      f"recompute {config.recompute_granularity}, batch {args.global_batch_size} = "
      f"{args.micro_batch_size} x {steps} x {args.data_parallel_size}")
"""


def megatron(folder):
    checkout = os.environ.get("MEGATRON_LM")
    if not checkout:
        raise Skipped("MEGATRON_LM names no checkout")
    need("torch")
    # The script itself says what torchrun would be called with.
    with tempfile.TemporaryDirectory() as made:
        fake = Path(made) / "torchrun"
        fake.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
        fake.chmod(0o755)
        env = {**os.environ, "PATH": f"{made}:{os.environ['PATH']}"}
        said = subprocess.run(
            ["bash", folder / "launch.sh"], env=env, check=True, capture_output=True, text=True
        )
    words = said.stdout.split("\n")[:-1]
    words = words[words.index("pretrain_gpt.py") + 1 :]
    flags = {word.split("=")[0] for word in words if word.startswith("--")}
    import yaml

    listed = yaml.safe_load((folder / "args.yaml").read_text())["MODEL_ARGS"]
    assert set(listed) <= flags, set(listed) - flags
    devices = degrees(folder / "launch.sh")[1]
    env = {"WORLD_SIZE": str(devices), "RANK": "0", "LOCAL_RANK": "0"}
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if "--use-megatron-fsdp" in flags else "1"
    return python(MEGATRON, checkout, json.dumps(words), env=env)


JAX = """
import sys, importlib.util
import jax, numpy as np
spec = importlib.util.spec_from_file_location("jax_plan", sys.argv[1])
plan = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plan)
devices = jax.devices()
n = 0
for at_rest in (True, False):
    for path, sharding in plan.shardings(devices, at_rest).items():
        shape = plan.parameters()[path][1]
        assert np.prod(sharding.shard_shape(shape)) <= np.prod(shape)
        if np.prod(shape) < 1 << 20:
            jax.device_put(np.zeros(shape, np.float32), sharding)
        n += 1
tokens = plan.batch_shardings(devices)["tokens"]
part = tokens.shard_shape((plan.MICROBATCH, plan.SEQUENCE))
assert plan.MICROBATCH * plan.MICROBATCHES == plan.GLOBAL_BATCH

# The collectives that the forward pass of a gated MLP is compiled to: a sum over the axes that split
# its width, and a gather for every matrix that is split over others.
import re
names = plan.parameters()
gates = [p for p in names if p.endswith(".mlp.gate.weight")]
specs = {op: s for layers, ops in plan.ACTIVATIONS for op, s in ops.items()}
def axes(s, dims=slice(None)):
    parts = [p if isinstance(p, tuple) else (p,) for p in tuple(s)[dims] if p is not None]
    return {a for part in parts for a in part}
mlp = ""
if gates and not axes(specs["{}.norm_2"], slice(1, None)):
    h = gates[0].removesuffix(".mlp.gate.weight")
    mesh = plan.meshes(devices)[names[gates[0]][0]]
    use = plan.shardings(devices, at_rest=False)
    path = lambda w: f"{h}.mlp.{w}.weight"
    shape = lambda *dims, **s: jax.ShapeDtypeStruct(dims, np.float32, **s)
    weights = {w: shape(*names[path(w)][1], sharding=use[path(w)]) for w in ("gate", "up", "down")}
    at = lambda op, y: plan.constrain(f"{h}.{op}", y, mesh)
    def forward(w, x):
        x = at("norm_2", x)
        gate = at("mlp.act", jax.nn.silu(at("mlp.gate", x @ w["gate"])))
        return at("mlp.down", at("mlp.mul", gate * at("mlp.up", x @ w["up"])) @ w["down"])
    x = shape(plan.MICROBATCH, plan.SEQUENCE, weights["gate"].shape[0])
    hlo = jax.jit(forward).lower(weights, x).compile().as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = sorted(re.findall(rf"= \\S+ ({kinds})(?:-start)?\\(", hlo))
    width = axes(specs["{}.mlp.mul"], slice(2, 3))
    gathers = sum(bool(axes(use[path(w)].spec) - width) for w in weights)
    expected = ["all-gather"] * gathers + ["all-reduce"] * bool(width)
    assert found == expected, (found, expected)
    mlp = f"; an MLP is compiled to {found}"
print(f"jax {jax.__version__}: {n} shardings, a device has {part} of "
      f"({plan.MICROBATCH}, {plan.SEQUENCE}) tokens{mlp}")
"""


def jax(folder):
    need("jax")
    path = folder / "jax_plan.py"
    text = path.read_text()
    stages = re.search(r"STAGES = \[(.*?)\n\]", text, re.S).group(1)
    devices = re.search(r"on (\d+) device", text).group(1)
    assert stages
    flags = f"--xla_force_host_platform_device_count={devices}"
    return python(JAX, path, env={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"})


def fsdp2(folder):
    need("torch")
    need("transformers")
    here = Path(__file__).parent / "check_fsdp2.py"
    path = folder / "fsdp2_plan.py"
    devices = degrees(path)[1]
    # With the model's config.json beside it, the plan is trained by.
    config = [folder / "config.json"] if (folder / "config.json").exists() else []
    done = subprocess.run(
        [sys.executable, here, path, str(devices), *config], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ValueError(done.stderr.strip()[-2000:])
    return done.stdout.strip().splitlines()[-1]


CHECKS = {
    "ds_config.json": deepspeed,
    "torchtitan.toml": torchtitan,
    "accelerate.yaml": accelerate,
    "launch.sh": megatron,
    "jax_plan.py": jax,
    "fsdp2_plan.py": fsdp2,
}


def main():
    refused = 0
    for folder in map(Path, sys.argv[1:]):
        for name, check in CHECKS.items():
            if not (folder / name).exists():
                continue
            try:
                print(f"{folder / name}: {check(folder)}", flush=True)
            except Skipped as why:
                print(f"{folder / name}: skipped: {why}", flush=True)
            except Exception as e:
                refused += 1
                print(f"{folder / name}: REFUSED: {shlex.quote(str(e))}", flush=True)
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()
