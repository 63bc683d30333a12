"""Half-precision reference values: what PyTorch makes of a case in bf16 and in f16.

Parameters and moments stay float32; each step computes with a copy of the parameters in the
half type, as Megatron-LM does, its gradients become float32 before clipping, and f16 scales the
loss with `torch.amp.GradScaler`. Two implementations of attention round in different places and
show how much a right implementation may differ: figures are recorded for both.

A figure is a deviation from the float32 run of the case (see README.md). `sensitivity` has the
figures of runs that get one thing wrong.
"""

import math

import torch
import torch.nn.functional as F

INITIAL_SCALE = 65536.0
ATTENTIONS = ("eager", "sdpa")

# The overflow case: the first `TOO_LARGE` steps overflow because of the loss scale, and one step
# because of a token that no other step has, and whose row of the table is beyond f16. The scale is
# the first of `SCALES` that does so with a `MARGIN` for other orders of rounding.
TOKEN, ROW, STEP, TOO_LARGE = 95, 1e5, 8, 5
SCALES = [float(round(2 ** (quarter / 4))) for quarter in range(80, 120)]
MARGIN = (1.0, 1.15, 1 / 1.15)


class Trainer:
    """Runs of one case. `build(dtype)` makes the model, `optimizer(named)` what updates it."""

    def __init__(self, build, optimizer, clip_norm, weights, batches):
        self.build, self.optimizer, self.clip_norm = build, optimizer, clip_norm
        self.weights, self.batches = weights, batches

    def run(self, dtype, scale=None, attention="eager", masters_in_half=False, skipped=(), skips_count=False):
        """One run: per step loss, gradient norm and loss scale, gradients of step 0, parameters at the end.

        Steps in `skipped` update nothing. With `skips_count`, they advance the bias correction.
        """
        model = self.build(torch.float32)
        model.set_attn_implementation(attention)
        model = model.to(dtype)
        computed = dict(model.named_parameters())
        kept = dtype if masters_in_half else torch.float32
        masters = {key: torch.nn.Parameter(self.weights[key].to(kept, copy=True)) for key in computed}
        optim = self.optimizer(masters)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        made = {"losses": [], "grad_norms": [], "scales": []}
        for step, tokens in enumerate(self.batches):
            with torch.no_grad():
                for key, param in computed.items():
                    param.copy_(masters[key])
                    param.grad = None
            logits = model(input_ids=tokens[:, :-1]).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))
            scaler.scale(loss).backward()
            for key, param in masters.items():
                param.grad = computed[key].grad.to(kept)
            made["scales"].append(scaler.get_scale())
            scaler.unscale_(optim)
            made.setdefault("grads", {key: param.grad.clone() for key, param in masters.items()})
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), self.clip_norm, foreach=False)
            if step not in skipped:
                scaler.step(optim)
                scaler.update()
            if skips_count and (step in skipped or not norm.isfinite()):
                self.advance(optim, masters)
            made["losses"].append(loss.item())
            made["grad_norms"].append(norm.item())
        made["params"] = {key: param.detach().float() for key, param in masters.items()}
        return made

    @staticmethod
    def advance(optim, masters):
        """Counts an update that was not made."""
        for param in masters.values():
            state = optim.state[param]
            if not state:
                state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            state["step"] += 1


def make_half(trainer, skip):
    """Contents of half.json: bf16 and f16 against float32. `skip` as zero_gradient of reference.json."""
    wide = trainer.run(torch.float32)
    result = {}
    for name, dtype, scale in (("bf16", torch.bfloat16, None), ("f16", torch.float16, INITIAL_SCALE)):
        runs = {attention: trainer.run(dtype, scale, attention) for attention in ATTENTIONS}
        result[name] = {
            "losses": runs["eager"]["losses"],
            "grad_norms": runs["eager"]["grad_norms"],
            "figures": {attention: figures(run, wide, skip) for attention, run in runs.items()},
        }
    wrong = trainer.run(torch.bfloat16, masters_in_half=True)
    result["sensitivity"] = {"masters_in_bf16": figures(wrong, wide, skip)}
    return result


def make_overflow(trainer, skip):
    """Contents of overflow.json: f16 with overflows in the backward pass first and in the forward pass later."""
    table = next(key for key, value in trainer.weights.items() if "embed_tokens" in key)
    trainer.weights = {key: value.clone() for key, value in trainer.weights.items()}
    trainer.weights[table][TOKEN] = ROW
    tokens = trainer.batches.clone()
    tokens[tokens == TOKEN] = TOKEN - 1
    tokens[STEP, 0, 3] = TOKEN
    trainer.batches = tokens
    wanted = [*range(TOO_LARGE), STEP]
    scale = next(scale for scale in SCALES if all(skipped_by(trainer, scale * by) == wanted for by in MARGIN))
    runs = {attention: trainer.run(torch.float16, scale, attention) for attention in ATTENTIONS}
    run = runs["eager"]
    wide = trainer.run(torch.float32, skipped=wanted)
    wrong = trainer.run(torch.float16, scale, skips_count=True)
    return {
        "table": table,
        "token": TOKEN,
        "row": ROW,
        "step": STEP,
        "scales": run["scales"],
        "skipped": wanted,
        "losses": [loss if math.isfinite(loss) else None for loss in run["losses"]],
        "f32_losses": wide["losses"],
        "f32_grad_norms": wide["grad_norms"],
        "figures": {attention: figures(made, wide, skip, wanted) for attention, made in runs.items()},
        "sensitivity": {"skips_advance_bias_correction": figures(wrong, wide, skip, wanted)},
    }


def skipped_by(trainer, scale):
    """Steps that overflow when the loss scale begins at `scale`."""
    norms = trainer.run(torch.float16, scale)["grad_norms"]
    return [step for step, norm in enumerate(norms) if not math.isfinite(norm)]


def figures(run, wide, skip, skipped=()):
    """Deviations of a run from the float32 one: losses in root mean square, norms likewise but relative,
    gradients of step 0 and final parameters as norm of the difference over norm."""
    steps = [step for step in range(len(wide["losses"])) if step not in skipped]

    def rms(values):
        return (sum(value**2 for value in values) / len(steps)) ** 0.5

    result = {
        "losses": rms(run["losses"][s] - wide["losses"][s] for s in steps),
        "grad_norms": rms(run["grad_norms"][s] / wide["grad_norms"][s] - 1 for s in steps),
    }
    if not skipped:
        result["grads"] = distance(run["grads"], wide["grads"], skip)
        result["final"] = distance(run["params"], wide["params"], skip)
    return result


def distance(narrow, wide, skip):
    """Norm of the difference over norm, of all tensors together, without what rounding alone decides."""
    difference = total = 0.0
    for key, right in wide.items():
        off = (narrow[key] - right).double()
        if key in skip:
            off[slice(*skip[key])] = 0.0
        difference += off.square().sum().item()
        total += right.double().square().sum().item()
    return (difference / total) ** 0.5
