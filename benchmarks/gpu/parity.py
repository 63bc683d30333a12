"""Training of a GPT-2 by Meshwright and by PyTorch, with the same weights and batches.

Every step has the same batch, which the model learns by heart, so that nothing depends on the order
of samples. In f32 both compute without TF32. In bf16 the two round at different places; the band is
the distance of PyTorch's own bf16 losses from its f32 losses.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import own
from common import Bench
from train import MODELS, QUICK, Model

LR = 3e-4
# Largest relative difference of a loss in f32: sums in other orders, over all steps.
TIGHT = 2e-3
# The band of bf16, in distances of PyTorch's bf16 from its f32, and its least width.
BAND, LEAST = 3.0, 2e-3


def losses_of(model: Model, tokens: torch.Tensor, steps: int, bf16: bool) -> list[float]:
    """PyTorch's loss before each step."""
    device = tokens.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.1)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    losses = []
    for _ in range(steps):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def largest(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def main() -> None:
    bench = Bench("parity")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(1)
    s = QUICK[0] if bench.quick else replace(MODELS[0], sequence=512)
    batch, steps = (2, 3) if bench.quick else (4, 20)
    folder = bench.args.out / "work" / "parity"
    own.write_config(s, folder)
    begin = Model(s, bench.device).to(bench.device)
    own.write_weights(begin, folder / "model.safetensors")
    # Windows overlap by the one token that is only a target.
    n = batch * s.sequence
    flat = torch.randint(s.vocabulary, (n + 1,))
    own.write_tokens(flat, folder / "tokens.bin")
    windows = torch.stack([flat[i * s.sequence : (i + 1) * s.sequence + 1] for i in range(batch)])
    windows = windows.to(bench.device)
    state = {k: v.detach().clone() for k, v in begin.state_dict().items()}
    theirs = {}
    for precision in ("f32", "bf16"):
        model = Model(s, bench.device).to(bench.device)
        model.load_state_dict(state)
        theirs[precision] = losses_of(model, windows, steps, precision == "bf16")
    del begin, model
    if bench.on_gpu:
        torch.cuda.empty_cache()
    spread = largest(theirs["bf16"], theirs["f32"])
    for precision, limit in (("f32", TIGHT), ("bf16", max(BAND * spread, LEAST))):
        fields = {"model": s.name, "batch": batch, "sequence": s.sequence, "steps": steps,
                  "precision": precision, "limit": limit}
        try:
            path = own.plan(folder, s, batch, precision, own.cluster(bench.on_gpu))
            said, measured = own.run(path, folder / "tokens.bin", steps, LR, "--weights",
                                     folder / "model.safetensors", "--profile", 0)
            ours = [step["loss"] for step in measured["steps"]]
            off = largest(ours, theirs[precision])
            bench.row(**fields, difference=off, passes=off <= limit, pytorch=theirs[precision],
                      meshwright=ours, matmuls=said.get("matmuls"), spread_of_bf16=spread)
        except (own.Failed, KeyError, ValueError) as e:
            bench.row(**fields, error=str(e)[-600:])


if __name__ == "__main__":
    main()
