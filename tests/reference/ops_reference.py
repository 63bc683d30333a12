"""Op-level reference values: small inputs, outputs and gradients, all in float64.

Each entry of `ops.json` is one op on one set of inputs:

    {"op", "name", "attrs", "inputs", "outputs", "upstream", "grads"}

A tensor is {"shape": [..], "data": [..]}, row-major. `grads[x]` is the gradient with respect to
input `x` of sum over outputs o in `upstream` of <o, upstream[o]>. Outputs that `upstream` does
not name (log-sum-exp rows, statistics) carry no gradient. Formulas are written out here and
checked against PyTorch's or transformers' own implementation before they are stored.
"""

import math

import torch
import torch.nn.functional as F

F64 = torch.float64

# Rotary settings the ops and the rotary entries use. `llama3` with dim 32 has frequencies in all
# three of its bands: kept, interpolated and divided.
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def inv_freq(head_dim, rope, dtype=F64):
    """Inverse rotary frequencies [head_dim / 2], radians per position, computed in `dtype`."""
    exponent = torch.arange(0, head_dim, 2, dtype=dtype) / head_dim
    freq = 1.0 / (rope["rope_theta"] ** exponent)
    kind = rope["rope_type"]
    if kind == "default":
        return freq
    if kind == "linear":
        return freq / rope["factor"]
    if kind == "yarn":
        original = rope["original_max_position_embeddings"]

        def pair(turns):
            return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

        ends = [pair(rope["beta_fast"]), pair(rope["beta_slow"])]
        if rope.get("truncate", True):
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], head_dim - 1)
        divided = ((torch.arange(head_dim // 2, dtype=dtype) - first) / max(last - first, 0.001)).clamp(0, 1)
        return freq / rope["factor"] * divided + freq * (1 - divided)
    if kind != "llama3":
        raise ValueError(f"no formula for rope type {kind}")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * freq / rope["factor"] + smooth * freq
    return torch.where(turns < low, freq / rope["factor"], torch.where(turns > high, freq, between))


def rotate(x, cos, sin):
    """Rotate-half rotary embedding; x [B, S, H, D], cos and sin [S, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None, :] + turned * sin[:, None, :]


def angles(head_dim, rope, n_positions, dtype=F64):
    """cos and sin, each [n_positions, head_dim]; the second half repeats the first."""
    pos = torch.arange(n_positions, dtype=dtype)
    half = pos[:, None] * inv_freq(head_dim, rope, dtype)[None, :]
    full = torch.cat((half, half), dim=-1)
    return full.cos(), full.sin()


def causal_attention(q, k, v):
    """q [B, S, K, G, D]; k, v [B, S, K, D] -> out like q, log-sum-exp of scaled scores [B, S, K, G]."""
    n = q.shape[1]
    scores = torch.einsum("bskgd,btkd->bkgst", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("bkgst,btkd->bskgd", (scores - lse[..., None]).exp(), v)
    return out, lse.permute(0, 3, 1, 2)


def alibi_slopes(heads, dtype=F64):
    """What a score loses for each position between key and query, by head (Press et al. 2022, as their code has it)."""
    def of_power(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start ** (i + 1) for i in range(n)]

    n = 2 ** math.floor(math.log2(heads))
    return torch.tensor(of_power(n) + of_power(2 * n)[0::2][: heads - n], dtype=dtype)


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def make_ops(seed):
    """All entries, in a fixed order."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape, scale=1.0, shift=0.0):
        return torch.randn(*shape, generator=gen, dtype=F64) * scale + shift

    def entry(op, name, attrs, inputs, fn, against=None):
        return _entry(rand, op, name, attrs, inputs, fn, against)

    entries = []
    for name, shift, eps in [("plain", 0.0, 1e-5), ("shifted", 30.0, 1e-5), ("large_eps", 0.0, 0.1)]:
        norm_in = {"x": rand(2, 3, 8, shift=shift), "weight": rand(8, scale=0.3, shift=1.0)}
        with_bias = {**norm_in, "bias": rand(8, scale=0.3)}
        entries.append(entry(
            "layer_norm", name, {"eps": eps}, with_bias,
            lambda x, weight, bias, eps=eps: {"y": F.layer_norm(x, (8,), weight, bias, eps)},
        ))
        entries.append(entry(
            "rms_norm", name, {"eps": eps}, norm_in,
            lambda x, weight, eps=eps: {"y": rms_norm(x, weight, eps)},
            against=lambda x, weight, eps=eps: {"y": F.rms_norm(x, (8,), weight, eps)},
        ))

    points = torch.cat((rand(12, scale=1.5), torch.tensor([-12.0, -6.0, -1.0, 0.0, 0.5, 4.0, 9.0], dtype=F64)))
    entries.append(entry("gelu_erf", "points", {}, {"x": points}, lambda x: {"y": F.gelu(x)}))
    entries.append(entry(
        "gelu_tanh", "points", {}, {"x": points},
        lambda x: {"y": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))},
        against=lambda x: {"y": F.gelu(x, approximate="tanh")},
    ))
    entries.append(entry("silu", "points", {}, {"x": points}, lambda x: {"y": F.silu(x)}))

    for name, (b, s, kv, g, d), scale in [
        ("gqa", (2, 5, 2, 2, 4), 1.0),
        ("multi_head", (1, 4, 3, 1, 4), 1.0),
        ("multi_query_sharp", (1, 6, 1, 3, 2), 6.0),
    ]:
        qkv = {"q": rand(b, s, kv, g, d, scale=scale), "k": rand(b, s, kv, d), "v": rand(b, s, kv, d)}
        entries.append(entry(
            "causal_attention", name, {"scale": 1 / math.sqrt(d)}, qkv,
            lambda q, k, v: dict(zip(("out", "lse"), causal_attention(q, k, v))),
            against=_sdpa,
        ))

    for kind, rope in ROPE.items():
        for d in (8, 32):
            cos, sin = angles(d, rope, 5)
            made = entry(
                "rotary", f"{kind}_{d}", {"rope": rope, "head_dim": d, "positions": list(range(5))},
                {"x": rand(1, 5, 1, d)}, lambda x, cos=cos, sin=sin: {"y": rotate(x, cos, sin)},
                against=lambda x, cos=cos, sin=sin: {"y": _hf_rotate(x, cos, sin)},
            )
            made["outputs"]["inv_freq"] = tensor(inv_freq(d, rope))
            entries.append(made)

    labels = torch.tensor([3, -100, 0, 6, -100, 2])
    entries.append(_cross_entropy(rand(6, 7, scale=2.0), labels, "some_ignored"))
    entries.append(_cross_entropy(rand(4, 5, scale=40.0), torch.tensor([4, 0, 1, 2]), "large_logits"))
    entries.append(_adamw(rand))
    entries.extend(_images(entry, rand))
    return entries


def _images(entry, rand):
    """Ops on images [N, H, W, C], convolutions by weights [KH, KW, in, out]."""
    def channels_first(x):
        return x.permute(0, 3, 1, 2)

    def channels_last(x):
        return x.permute(0, 2, 3, 1)

    def conv(x, weight, **windows):
        return {"y": channels_last(F.conv2d(channels_first(x), weight.permute(3, 2, 0, 1), **windows))}

    def pool(x, **windows):
        return {"y": channels_last(F.max_pool2d(channels_first(x), **windows))}

    for name, (h, w), (kh, kw), stride, padding in [
        ("same", (5, 4), (3, 3), 1, 1),
        ("strided", (6, 5), (3, 3), 2, 1),
        ("stem", (9, 8), (7, 7), 2, 3),
        ("pixels", (3, 4), (1, 1), 1, 0),
        ("projection", (5, 5), (1, 1), 2, 0),
        ("oblong", (6, 7), (2, 3), 2, 1),
    ]:
        windows = {"stride": stride, "padding": padding}
        yield entry(
            "conv2d", name, windows, {"x": rand(2, h, w, 3), "weight": rand(kh, kw, 3, 4)},
            lambda x, weight, windows=windows: conv(x, weight, **windows),
        )
    for name, (h, w), kernel, stride, padding in [("stem", (7, 6), 3, 2, 1), ("halves", (4, 6), 2, 2, 0)]:
        windows = {"kernel_size": kernel, "stride": stride, "padding": padding}
        yield entry(
            "max_pool2d", name, windows, {"x": rand(2, h, w, 3)},
            lambda x, windows=windows: pool(x, **windows),
        )
    for name, groups, shift in [("plain", 3, 0.0), ("shifted", 2, 30.0)]:
        inputs = {"x": rand(2, 4, 3, 6, shift=shift), "weight": rand(6, scale=0.3, shift=1.0), "bias": rand(6, scale=0.3)}
        yield entry(
            "group_norm", name, {"groups": groups, "eps": 1e-5}, inputs,
            lambda x, weight, bias, groups=groups: {
                "y": channels_last(F.group_norm(channels_first(x), groups, weight, bias, 1e-5))},
        )


def tensor(value):
    """A tensor as JSON: shape and row-major data."""
    return {"shape": list(value.shape), "data": value.detach().reshape(-1).tolist()}


def _entry(rand, op, name, attrs, inputs, fn, against):
    leaves = {key: value.clone().requires_grad_() for key, value in inputs.items()}
    outputs = fn(**leaves)
    carried = {key: value for key, value in outputs.items() if key != "lse"}
    upstream = {key: rand(*value.shape) for key, value in carried.items()}
    total = sum((value * upstream[key]).sum() for key, value in carried.items())
    grads = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()))))
    if against is not None:
        _agree(op, name, leaves, carried, upstream, grads, against)
    return {
        "op": op,
        "name": name,
        "attrs": attrs,
        "inputs": {key: tensor(value) for key, value in inputs.items()},
        "outputs": {key: tensor(value) for key, value in outputs.items()},
        "upstream": {key: tensor(value) for key, value in upstream.items()},
        "grads": {key: tensor(value) for key, value in grads.items()},
    }


def _agree(op, name, leaves, outputs, upstream, grads, against):
    """Fails unless an independent implementation gives the same outputs and gradients."""
    other = against(**leaves)
    total = sum((value * upstream[key]).sum() for key, value in other.items())
    other_grads = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()))))
    pairs = [(outputs[key], other[key]) for key in outputs] + [(grads[key], other_grads[key]) for key in grads]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11, msg=lambda m: f"{op} {name}: {m}")


def _sdpa(q, k, v):
    b, s, kv, g, d = q.shape
    heads = q.reshape(b, s, kv * g, d).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        heads, k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
    return {"out": out.transpose(1, 2).reshape(b, s, kv, g, d)}


def _hf_rotate(x, cos, sin):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x, x, cos[None], sin[None], unsqueeze_dim=2)[0]


def _cross_entropy(logits, labels, name):
    """Mean over the labels that are not -100; `lse` and `token_loss` (0 where ignored) per row."""
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, labels, ignore_index=-100)
    (grad,) = torch.autograd.grad(loss, [leaf])
    outputs = {
        "loss": loss,
        "token_loss": F.cross_entropy(leaf, labels, ignore_index=-100, reduction="none"),
        "lse": torch.logsumexp(leaf, dim=-1),
    }
    return {
        "op": "cross_entropy",
        "name": name,
        "attrs": {"ignore_index": -100, "n_counted": int((labels != -100).sum())},
        "inputs": {"logits": tensor(logits), "labels": tensor(labels)},
        "outputs": {key: tensor(value) for key, value in outputs.items()},
        "upstream": {"loss": tensor(torch.ones((), dtype=F64))},
        "grads": {"logits": tensor(grad)},
    }


def _adamw(rand):
    """Three steps of clipping and AdamW on a decayed matrix `w` and an undecayed vector `b`.

    Inputs hold the gradients per step ([3, ..]); outputs the parameters after each step and the
    norms before clipping. The first step's norm is under the limit, so that no clipping is seen too.
    """
    w, b = rand(3, 4), rand(4)
    per_step = torch.tensor([0.1, 1.0, 3.0], dtype=F64)
    grad_w, grad_b = rand(3, 3, 4) * per_step[:, None, None], rand(3, 4) * per_step[:, None]
    hyper = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
    params = [torch.nn.Parameter(w.clone()), torch.nn.Parameter(b.clone())]
    optim = torch.optim.AdamW(
        [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    norms, after_w, after_b = [], [], []
    for step in range(3):
        params[0].grad, params[1].grad = grad_w[step].clone(), grad_b[step].clone()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=False))
        optim.step()
        after_w.append(params[0].detach().clone())
        after_b.append(params[1].detach().clone())
    if not norms[0] < 1.0 < norms[2]:
        raise RuntimeError("the AdamW entry must show steps with and without clipping")
    outputs = {"w": torch.stack(after_w), "b": torch.stack(after_b), "norms": torch.stack(norms)}
    return {
        "op": "adamw",
        "name": "three_steps",
        "attrs": hyper,
        "inputs": {"w": tensor(w), "b": tensor(b), "grad_w": tensor(grad_w), "grad_b": tensor(grad_b)},
        "outputs": {key: tensor(value) for key, value in outputs.items()},
        "upstream": {},
        "grads": {},
    }
