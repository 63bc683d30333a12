"""Meshwright's side: its binary, models and tokens in its forms, and its verbs."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import torch

from train import Model, Shape

# Where a binary is looked for: carried beside these scripts, then where it is built.
HERE = Path(__file__).resolve().parent
TARGET = os.environ.get("CARGO_TARGET_DIR", Path.home() / ".cache" / "meshwright" / "target")
PLACES = (
    HERE / "bin" / "meshwright",
    HERE / ".." / ".." / "target" / "release" / "meshwright",
    Path(TARGET) / "release" / "meshwright",
)
# A cluster of one GPU, by a part of the device's name; any other is taken for an H100.
DEVICES = {"H200": "h200-sxm", "H100": "h100-sxm", "A100": "a100-sxm-80gb"}


class Failed(Exception):
    """A verb that failed, with the end of what it said."""


def binary(name: str = "meshwright") -> Path:
    """The program of this name: $MESHWRIGHT or beside it, in the usual places, or in the PATH."""
    named = os.environ.get("MESHWRIGHT")
    places = [Path(named).resolve()] if named else []
    places += [p.resolve() for p in PLACES]
    for place in places:
        if (found := place.with_name(name)).is_file():
            return found
    if found := shutil.which(name):
        return Path(found)
    raise SystemExit(
        f"There is no program {name}. Build it, and name {places[0].name} in MESHWRIGHT or lay it "
        f"into {PLACES[0].parent}.")


def verb(*arguments: object, seconds: float = 300.0) -> dict[str, object]:
    """Runs a verb with --json and returns what it printed. Warnings go to standard error."""
    command = [str(binary()), *map(str, arguments), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as e:
        raise Failed(f"{arguments[0]}: not done after {seconds:.0f} s") from e
    if done.returncode != 0:
        raise Failed(f"{arguments[0]}: exit code {done.returncode}: {done.stderr[-600:].strip()}")
    return json.loads(done.stdout)


def cluster(on_gpu: bool, n: int = 1) -> str:
    """A cluster of `n` GPUs of this kind."""
    name = torch.cuda.get_device_name() if on_gpu else ""
    device = next((d for part, d in DEVICES.items() if part in name), "h100-sxm")
    return f"{device}*{n}+pcie5"


def write_config(s: Shape, folder: Path) -> Path:
    """The model's config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if s.is_gpt2:
        config = {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": s.vocabulary,
            "n_positions": s.sequence, "n_ctx": s.sequence, "n_embd": s.width, "n_layer": s.layers,
            "n_head": s.heads, "n_inner": s.mlp, "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "embd_pdrop": 0.0,
            "attn_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": True,
        }
    else:
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"],
            "vocab_size": s.vocabulary, "max_position_embeddings": s.sequence,
            "hidden_size": s.width, "intermediate_size": s.mlp, "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads,
            "head_dim": s.head, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "attention_bias": False, "attention_dropout": 0.0,
            "mlp_bias": False, "initializer_range": 0.02, "tie_word_embeddings": True,
        }
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return path


def write_weights(model: Model, path: Path) -> None:
    """A GPT-2's weights under Hugging Face's names; its linear layers are stored transposed."""
    tensors = {"wte.weight": model.tokens.weight, "wpe.weight": model.positions.weight,
               "ln_f.weight": model.norm.weight, "ln_f.bias": model.norm.bias}
    for i, block in enumerate(model.blocks):
        parts = {"ln_1": block.norm_1, "attn.c_attn": block.attention.qkv,
                 "attn.c_proj": block.attention.out, "ln_2": block.norm_2,
                 "mlp.c_fc": block.up, "mlp.c_proj": block.down}
        for name, part in parts.items():
            weight = part.weight.t() if isinstance(part, torch.nn.Linear) else part.weight
            tensors[f"h.{i}.{name}.weight"] = weight
            tensors[f"h.{i}.{name}.bias"] = part.bias
    header, blobs, at = {}, [], 0
    for name, tensor in sorted(tensors.items()):
        blob = tensor.detach().float().cpu().contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape),
                        "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(blobs)


def write_tokens(tokens: torch.Tensor, path: Path) -> None:
    """Tokens as llm.c stores them: a header of 1024 bytes and 4 bytes for each."""
    flat = tokens.flatten().to(torch.int32).cpu()
    header = [20240801, 7, flat.numel()] + [0] * 253
    path.write_bytes(struct.pack("<256i", *header) + flat.numpy().tobytes())


def plan(folder: Path, s: Shape, batch: int, precision: str, where: str, *pins: str,
         ranks: int | None = None) -> Path:
    """Compiles a plan for training as the other scripts do: AdamW, gradients clipped at 1.

    `ranks` is the number of CPU ranks, for clusters whose ranks share one machine's processors.
    """
    path = folder / f"plan-{precision}-{'-'.join(pins).replace('=', '') or 'free'}.json"
    pinned = [a for pin in pins for a in ("--pin", pin)]
    if ranks is not None:
        pinned += ["--ranks", ranks]
    verb("compile", folder, "--cluster", where, "--global-batch", batch, "--sequence", s.sequence,
         "--precision", precision, "--dropout", 0, "--clip-norm", 1, "--weight-decay", 0.1,
         "--beta1", 0.9, "--beta2", 0.999, "-o", path, *pinned)
    return path


def run(path: Path, tokens: Path, steps: int, lr: float, *more: object,
        seconds: float = 300.0) -> tuple[dict[str, object], dict[str, object]]:
    """Trains by a plan on the GPU: what `run` says, and its measurement."""
    out = path.with_suffix(".run.json")
    said = verb("run", path, "--backend", "cuda", "--on-other-gpus", "--data", tokens,
                "--steps", steps, "--lr", lr, "--validation-fraction", 0, "-o", out, *more,
                seconds=seconds)
    return said, json.loads(out.read_text(encoding="utf-8"))
