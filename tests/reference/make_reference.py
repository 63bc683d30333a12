"""Reference values from PyTorch and transformers for the parity tests.

    python make_reference.py            write every case and ops.json beside this file
    python make_reference.py CASE ..    write these cases alone
    python make_reference.py --check    make them again in memory and compare with what is committed

Each case trains a tiny Hugging Face model for 20 steps on the CPU, one thread, eager attention,
no dropout. The recorded run is float32; a second run in float64 from the same weights tells how
far float32 rounding alone moves each number (`f64_*` and `deviation`). `sensitivity` tells how far
a wrong implementation moves the losses, so that a test can choose a tolerance between the two.
What the files hold is described in README.md.
"""

import argparse
import contextlib
import copy
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers import BloomConfig, BloomForCausalLM
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig
from transformers import GemmaConfig, GemmaForCausalLM
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import GptOssConfig, GptOssForCausalLM
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, NemotronConfig, NemotronForCausalLM
from transformers import OPTConfig, OPTForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers import Mamba2Config, Mamba2ForCausalLM, NemotronHConfig, NemotronHForCausalLM
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.bloom import modeling_bloom
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma import modeling_gemma
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.nemotron import modeling_nemotron
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.opt import modeling_opt
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

sys.dont_write_bytecode = True
import half_reference  # noqa: E402
import ops_reference  # noqa: E402

HERE = Path(__file__).resolve().parent
N_STEPS, BATCH, SEQ, VOCAB = 20, 8, 16, 96
HYPER = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


def gpt2(**changes):
    base = dict(
        n_layer=2, n_head=4, n_embd=32, n_positions=SEQ, vocab_size=VOCAB, activation_function="gelu_new",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )
    return GPT2Config(**{**base, **changes})


def llama(**changes):
    base = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=VOCAB, rms_norm_eps=1e-5, max_position_embeddings=SEQ,
        bos_token_id=0, eos_token_id=0, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaConfig(**{**base, **changes})


def mixtral(**changes):
    base = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCAB, rms_norm_eps=1e-5,
        max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=0, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return MixtralConfig(**{**base, **changes})


def qwen3_moe(**changes):
    base = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=40, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False,
        mlp_only_layers=[1], vocab_size=VOCAB, max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=0,
        use_cache=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return Qwen3MoeConfig(**{**base, **changes})


# Sizes of a dense relative of Llama.
DENSE = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=VOCAB, max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=0, use_cache=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


def mistral(**changes):
    return MistralConfig(**{**DENSE, "rms_norm_eps": 1e-5, "sliding_window": SEQ, **changes})


def qwen2(**changes):
    return Qwen2Config(**{**DENSE, **changes})


def qwen2_moe(**changes):
    base = dict(
        num_hidden_layers=3, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=False, decoder_sparse_step=2,
    )
    return Qwen2MoeConfig(**{**DENSE, **base, **changes})


def qwen3(**changes):
    return Qwen3Config(**{**DENSE, "head_dim": 16, **changes})


def opt(**changes):
    base = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, vocab_size=VOCAB,
        max_position_embeddings=SEQ, dropout=0.0, attention_dropout=0.0, pad_token_id=None, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )
    return OPTConfig(**{**base, **changes})


def gemma(**changes):
    return GemmaConfig(**{**DENSE, "head_dim": 16, "pad_token_id": None, **changes})


# Windows that the sequence exceeds, and bounds that scores and logits reach.
WINDOW = 6


def gemma2(**changes):
    base = dict(
        head_dim=16, pad_token_id=None, query_pre_attn_scalar=24, sliding_window=WINDOW, attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    )
    return Gemma2Config(**{**DENSE, **base, **changes})


TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def gemma3(**changes):
    base = dict(
        num_hidden_layers=3, head_dim=16, pad_token_id=None, query_pre_attn_scalar=24, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=TWO_BASES,
    )
    return Gemma3TextConfig(**{**DENSE, **base, **changes})


def phi3(**changes):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    base = dict(pad_token_id=None, sliding_window=WINDOW + 1, original_max_position_embeddings=SEQ, rope_parameters=rope)
    return Phi3Config(**{**DENSE, **base, **changes})


YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2,
    "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.9,
}

# Latent attention with values of another width than keys, and a dense layer before those with experts.
LATENT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=40,
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=6, v_head_dim=10, n_routed_experts=8, n_shared_experts=2,
    num_experts_per_tok=3, moe_intermediate_size=12, first_k_dense_replace=1, vocab_size=VOCAB, rms_norm_eps=1e-5,
    max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=0, use_cache=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


def deepseek_v2(**changes):
    return DeepseekV2Config(**{**LATENT, "q_lora_rank": None, **changes})


def deepseek_v3(**changes):
    base = dict(q_lora_rank=20, n_group=4, topk_group=2, routed_scaling_factor=1.5, num_mtp_layers=0)
    return DeepseekV3Config(**{**LATENT, **base, **changes})


# A ramp whose ends are no whole pairs, and the factor of sines and cosines that the stretch gives.
GPT_OSS_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0,
    "beta_slow": 0.5, "truncate": False,
}


# A limit that gates and ups reach.
def gpt_oss(**changes):
    base = dict(
        num_hidden_layers=3, head_dim=16, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=WINDOW, swiglu_limit=1.5, rms_norm_eps=1e-5, pad_token_id=None, rope_parameters=GPT_OSS_ROPE,
    )
    return GptOssConfig(**{**DENSE, **base, **changes})


# Half of a head turns.
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def gpt_neox(**changes):
    base = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=VOCAB,
        max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=0, use_cache=False, rope_parameters=PARTIAL_ROPE,
    )
    return GPTNeoXConfig(**{**base, **changes})


def nemotron(**changes):
    return NemotronConfig(**{**DENSE, "head_dim": 16, "rope_parameters": PARTIAL_ROPE, **changes})


# Heads in groups, and chunks that do not divide the sequence.
def mamba2(**changes):
    base = dict(
        hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=6, n_groups=2, expand=2, chunk_size=5,
        vocab_size=VOCAB, initializer_range=0.02, residual_in_fp32=False, tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=0, pad_token_id=0, use_cache=False,
    )
    return Mamba2Config(**{**base, **changes})


# A block of each kind; heads of state spaces are not as wide together as the model.
def nemotron_h(**changes):
    base = dict(
        hidden_size=32, layers_block_type=["linear_attention", "mlp", "full_attention", "moe"], num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, mamba_num_heads=6, mamba_head_dim=8, ssm_state_size=7, n_groups=2,
        chunk_size=5, intermediate_size=40, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20, n_group=4, topk_group=2, routed_scaling_factor=1.5, vocab_size=VOCAB,
        max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=0, use_cache=False,
    )
    return NemotronHConfig(**{**base, **changes})


# Six heads, no power of two: their slopes are those of four heads, then two of those of eight.
def bloom(**changes):
    base = dict(
        hidden_size=36, n_layer=2, n_head=6, vocab_size=VOCAB, seq_length=SEQ, hidden_dropout=0.0, attention_dropout=0.0,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )
    return BloomConfig(**{**base, **changes})


# Class of the model and module that its parts are in, by model_type.
KINDS = {
    "bloom": (BloomForCausalLM, modeling_bloom),
    "deepseek_v2": (DeepseekV2ForCausalLM, modeling_deepseek_v2),
    "deepseek_v3": (DeepseekV3ForCausalLM, modeling_deepseek_v3),
    "gpt2": (GPT2LMHeadModel, None),
    "gemma": (GemmaForCausalLM, modeling_gemma),
    "gemma2": (Gemma2ForCausalLM, modeling_gemma2),
    "gemma3_text": (Gemma3ForCausalLM, modeling_gemma3),
    "gpt_neox": (GPTNeoXForCausalLM, modeling_gpt_neox),
    "gpt_oss": (GptOssForCausalLM, modeling_gpt_oss),
    "llama": (LlamaForCausalLM, modeling_llama),
    "mamba2": (Mamba2ForCausalLM, modeling_mamba2),
    "mistral": (MistralForCausalLM, modeling_mistral),
    "mixtral": (MixtralForCausalLM, modeling_mixtral),
    "nemotron": (NemotronForCausalLM, modeling_nemotron),
    "nemotron_h": (NemotronHForCausalLM, modeling_nemotron_h),
    "opt": (OPTForCausalLM, modeling_opt),
    "phi3": (Phi3ForCausalLM, modeling_phi3),
    "qwen2": (Qwen2ForCausalLM, modeling_qwen2),
    "qwen2_moe": (Qwen2MoeForCausalLM, modeling_qwen2_moe),
    "qwen3": (Qwen3ForCausalLM, modeling_qwen3),
    "qwen3_moe": (Qwen3MoeForCausalLM, modeling_qwen3_moe),
}

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# name -> (seed, configuration). The linear case also has a head_dim that is not hidden / heads.
CASES = {
    "gpt2_small_tied": (11, lambda: gpt2(tie_word_embeddings=True)),
    "gpt2_untied_gelu": (
        12, lambda: gpt2(n_layer=3, n_embd=24, activation_function="gelu", tie_word_embeddings=False)),
    "llama_tied": (13, lambda: llama(tie_word_embeddings=True)),
    "llama_untied_rope": (
        14, lambda: llama(num_hidden_layers=3, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False)),
    "llama_linear_rope": (
        15, lambda: llama(num_hidden_layers=1, head_dim=16, rope_parameters=LINEAR_ROPE, tie_word_embeddings=False)),
    "mixtral": (16, mixtral),
    "qwen3_moe": (17, qwen3_moe),
    "mistral": (18, mistral),
    "qwen2": (19, lambda: qwen2(tie_word_embeddings=True)),
    "qwen3": (20, lambda: qwen3(tie_word_embeddings=True)),
    "qwen2_moe": (21, qwen2_moe),
    "opt": (22, opt),
    "gpt_neox": (23, gpt_neox),
    "gpt_neox_serial": (24, lambda: gpt_neox(use_parallel_residual=False, attention_bias=False)),
    "nemotron": (25, nemotron),
    "gemma": (26, gemma),
    "deepseek_v2": (27, deepseek_v2),
    "deepseek_v2_groups": (28, lambda: deepseek_v2(
        q_lora_rank=20, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=2.0,
        attention_bias=True, mlp_bias=True, rope_parameters=YARN_ROPE)),
    "phi3": (30, phi3),
    "gemma2": (31, gemma2),
    "gemma3": (32, gemma3),
    "mistral_window": (33, lambda: mistral(num_hidden_layers=1, sliding_window=5)),
    "bloom": (34, bloom),
    "gpt_oss": (36, gpt_oss),
    "mamba2": (37, mamba2),
    "nemotron_h": (38, nemotron_h),
    "nemotron_h_latent": (39, lambda: nemotron_h(
        layers_block_type=["linear_attention", "moe", "full_attention"], moe_latent_size=14, n_group=1, topk_group=1,
        norm_topk_prob=False, tie_word_embeddings=False)),
    "deepseek_v3": (29, lambda: deepseek_v3(rope_parameters={**YARN_ROPE, "mscale": 0.9})),
    "deepseek_v3_further": (40, lambda: deepseek_v3(num_mtp_layers=2, mtp_loss_scaling_factor=0.3)),
    "nemotron_h_further": (41, lambda: nemotron_h(
        layers_block_type=["linear_attention", "mlp"], num_nextn_predict_layers=1,
        mtp_layers_block_type=["full_attention", "moe"], mtp_use_repeated_layer=True, mtp_num_layers=2,
        mtp_loss_scaling_factor=0.4)),
}
SHARDED = "llama_tied"
# Cases in half precision too, and the one with overflows.
HALF = ("gpt2_small_tied", "llama_untied_rope", "mixtral")
OVERFLOW = "llama_untied_rope"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases to write; all, and ops.json, where there is none")
    parser.add_argument("--check", action="store_true", help="compare with the committed values, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as made:
        made = Path(made)
        for name in args.cases or CASES:
            seed, make_config = CASES[name]
            write_case(made / name, name, seed, make_config())
        if not args.cases:
            write_json(made / "ops.json", {"versions": versions(), "seed": 7, "entries": ops_reference.make_ops(7)})
        if args.check:
            sys.exit(0 if check(made) else 1)
        for path in sorted(made.iterdir()):
            target = HERE / path.name
            for file in path.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)
            if target.is_dir():
                shutil.rmtree(target)
            shutil.move(path, target)


def write_case(folder, name, seed, config):
    model = build(config, torch.float32)
    perturb(model, seed)
    weights = {key: value.detach().clone() for key, value in stored_tensors(model)}
    batches = make_batches(seed, SEQ + 1 + further_tokens(config))
    save_model(model, folder, weights)
    if name == SHARDED:
        save_model(model, folder / "sharded", weights, max_shard_size="24KB")

    run = train(config, weights, batches, torch.float32)
    wide = train(config, weights, batches, torch.float64)
    with wide_llama():
        narrow = train(config, weights, batches, torch.float32, patch=False)
    drift = max_dev(run["losses"], narrow["losses"])
    if drift > 2e-6:
        raise RuntimeError(f"{name}: the float64 formulas disagree with transformers in float32 by {drift:e}")

    write_json(folder / "batches.json", {"tokens": batches.tolist()}, indent=None)
    for made in (run, wide):
        for key in ("grads", "params"):
            made[key] = as_stored(config, made[key])
    stored = as_stored(config, weights)
    save_tensors(run["grads"], folder / "grads.safetensors")
    save_tensors(run["params"], folder / "final.safetensors")
    skip = zero_gradient(config, weights)
    reference = {
        "case": name,
        "versions": versions(),
        "seed": seed,
        "steps": N_STEPS,
        "batch": BATCH,
        "seq": SEQ,
        "hyper": {
            "optimizer": "AdamW",
            **HYPER,
            "decayed": [key for key, value in stored.items() if value.dim() >= 2],
            "not_decayed": [key for key, value in stored.items() if value.dim() < 2],
        },
        "losses": run["losses"],
        "grad_norms": run["grad_norms"],
        "f64_losses": wide["losses"],
        "f64_grad_norms": wide["grad_norms"],
        "deviation": {
            "losses_max_abs": max_dev(run["losses"], wide["losses"]),
            "grad_norms_max_abs": max_dev(run["grad_norms"], wide["grad_norms"]),
            "grads": tensor_devs(run["grads"], wide["grads"], skip),
            "final": tensor_devs(run["params"], wide["params"], skip),
        },
        "zero_gradient": skip,
        "sensitivity": sensitivity(config, weights, batches, wide["losses"]),
    }
    write_json(folder / "reference.json", reference)

    if name in HALF:
        trainer = half_reference.Trainer(
            lambda dtype: build(config, dtype), lambda named: make_optimizer(named, HYPER), HYPER["clip_norm"],
            weights, batches)
        write_json(folder / "half.json", half_reference.make_half(trainer, skip))
        if name == OVERFLOW:
            write_json(folder / "overflow.json", half_reference.make_overflow(trainer, skip))


def further_modules(config):
    """Modules that predict further tokens."""
    if config.model_type == "deepseek_v3":
        return config.num_mtp_layers
    return config.num_nextn_predict_layers if config.model_type == "nemotron_h" else 0


def further_tokens(config):
    """Tokens behind the next one that are predicted as well."""
    return getattr(config, "mtp_num_layers", further_modules(config))


class HybridFurther(torch.nn.Module):
    """transformers' `MtpLayer`, of several blocks."""

    def __init__(self, config):
        super().__init__()
        norm = lambda: modeling_nemotron_h.NemotronHRMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)  # noqa: E731
        self.enorm, self.hnorm, self.post_norm = norm(), norm(), norm()
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        of_blocks = copy.deepcopy(config)
        of_blocks.layers_block_type = config.mtp_layers_block_type
        of_blocks._attn_implementation = "eager"
        blocks = range(len(config.mtp_layers_block_type))
        self.mtp_block = torch.nn.ModuleList([modeling_nemotron_h.NemotronHBlock(of_blocks, i) for i in blocks])

    def forward(self, embedded, before, mask):
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(before)), dim=-1))
        for block in self.mtp_block:
            x = block(x, attention_mask=mask)
        return self.post_norm(x)


def further_module(config, k):
    if config.model_type == "nemotron_h":
        return HybridFurther(config)
    layer, norm = modeling_deepseek_v3.DeepseekV3DecoderLayer, modeling_deepseek_v3.DeepseekV3RMSNorm
    return MtpLayer(config, layer, norm, config.num_hidden_layers + k)


def losses_of(model, tokens, mask, told, shift=0):
    """The loss of the next tokens, and that of each further one; `shift` misplaces what is embedded."""
    def nll(hidden, ahead):
        logits = model.lm_head(hidden) if ahead else hidden
        return F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1 + ahead:][:, :SEQ].reshape(-1))

    if not further_modules(model.config):
        return nll(model(input_ids=tokens[:, :SEQ], attention_mask=mask, **told).logits, 0), []
    hidden = model.model(input_ids=tokens[:, :SEQ], attention_mask=mask, **told).last_hidden_state
    next_token, further = nll(model.lm_head(hidden), 0), []
    causal = torch.full((SEQ, SEQ), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)[None, None]
    seen = causal if mask is None else torch.zeros_like(causal)
    for k in range(further_tokens(model.config)):
        embedded = model.get_input_embeddings()(tokens[:, k + 1 - shift:][:, :SEQ])
        module = model.mtp[min(k, len(model.mtp) - 1)]
        if isinstance(module, HybridFurther):
            hidden = module(embedded, hidden, seen)
        else:
            places = torch.arange(SEQ)[None]
            turned = model.model.rotary_emb(embedded, position_ids=places)
            hidden = module(embedded, hidden, turned, seen, places, None)
        further.append(nll(hidden, k + 1))
    return next_token, further


def as_stored(config, tensors):
    """Tensors by the names of files: a module keeps experts stacked, a file has three for each; GPT-NeoX's
    head has another name there; modules for further tokens are layers behind the last."""
    if further_modules(config):
        tensors = {of_further(config, key): value for key, value in tensors.items()}
    if config.model_type == "gpt_oss":
        return dict(tensors)
    if config.model_type == "nemotron_h":
        result = {}
        for key, value in tensors.items():
            key = key.replace("model.", "backbone.", 1)
            if ".experts." in key:
                named = enumerate(value)
                scope, part = key.rsplit(".", 1)
                result.update({f"{scope}.{i}.{part}.weight": expert for i, expert in named})
            else:
                result[key] = value
        return result
    if config.model_type == "gpt_neox":
        return {"embed_out.weight" if key == "lm_head.weight" else key: value for key, value in tensors.items()}
    block, parts = {
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "deepseek_v2": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "deepseek_v3": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "qwen2_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    }.get(config.model_type, ("", ()))
    result = {}
    for key, value in tensors.items():
        if key.endswith(".experts.gate_up_proj"):
            named = zip(parts[:2], value.chunk(2, dim=1), strict=True)
        elif key.endswith(".experts.down_proj"):
            named = [(parts[2], value)]
        else:
            result[key.replace(".mlp.gate.", f".{block}.gate.")] = value
            continue
        scope = key.rsplit(".", 1)[0].replace(".mlp.", f".{block}.")
        for part, experts in named:
            result.update({f"{scope}.{i}.{part}.weight": expert for i, expert in enumerate(experts)})
    return result


def of_further(config, key):
    found = re.match(r"mtp\.(\d+)\.(.*)", key)
    if not found:
        return key
    k, rest = int(found[1]), found[2]
    if config.model_type == "nemotron_h":
        last = len(config.mtp_layers_block_type) - 1
        rest = rest.removeprefix("mtp_block.") if "mtp_block" in rest else f"0.{rest}"
        return "mtp.layers." + rest.replace("0.post_norm", f"{last}.final_layernorm")
    rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    return f"model.layers.{config.num_hidden_layers + k}.{rest}"


def stored_tensors(model):
    """Parameters, and DeepSeek-V3's bias of the choice, which files hold and nothing trains."""
    return [*model.named_parameters(), *((key, b) for key, b in model.named_buffers() if key.endswith(CHOICE_BIAS))]


CHOICE_BIAS = "e_score_correction_bias"


def build(config, dtype):
    kind = KINDS[config.model_type][0]
    config = type(config).from_dict(config.to_dict())
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = kind(config)
    if further_modules(config):
        model.mtp = torch.nn.ModuleList([further_module(model.config, k) for k in range(further_modules(config))])
    model = model.to(dtype)
    if model.config._attn_implementation != "eager":
        raise RuntimeError("eager attention was not taken")
    return model.train()


EMBEDDINGS = ("embeddings.", "wte", "wpe", "embed_tokens", "embed_in", "embed_positions", "word_embeddings.")


def perturb(model, seed):
    """Weights large enough that attention, norms and biases all matter to the loss."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in stored_tensors(model):
            noise = torch.randn(param.shape, generator=gen)
            embedding = any(part in name for part in EMBEDDINGS)
            if name.endswith("sinks"):
                param.copy_(noise)
            elif param.dim() >= 2:
                param.copy_(noise * (0.4 if embedding else 0.25))
            elif name.endswith("bias"):
                param.copy_(noise * 0.1)  # DeepSeek-V3's bias of the choice, too: its scores are below 1
            else:
                # Gemma stores gains less one.
                param.copy_((0.0 if model.config.model_type.startswith("gemma") else 1.0) + noise * 0.2)


def make_batches(seed, n):
    """Tokens [steps, batch, n]: mostly 5 t + 7 modulo the vocabulary, one in eight random."""
    gen = torch.Generator().manual_seed(seed + 1000)
    tokens = torch.randint(VOCAB, (N_STEPS, BATCH, n), generator=gen)
    random = torch.randint(8, tokens.shape, generator=gen) == 0
    for pos in range(1, n):
        rule = (5 * tokens[:, :, pos - 1] + 7) % VOCAB
        tokens[:, :, pos] = torch.where(random[:, :, pos], tokens[:, :, pos], rule)
    return tokens


def train(config, weights, batches, dtype, hyper=HYPER, patch=True, causal=True, shift=0, **mutations):
    """Losses and gradient norms before each update, gradients of step 0, parameters at the end."""
    wide = patch and dtype == torch.float64
    is_hybrid = config.model_type in HYBRIDS
    with contextlib.ExitStack() as stack:
        if wide:
            stack.enter_context(wide_llama(causal=causal, **mutations))
        if wide and is_hybrid:
            stack.enter_context(wide_scan(KINDS[config.model_type][1]))
        model = build(config, dtype)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for key, param in stored_tensors(model):
                param.copy_(weights[key])
        optim = make_optimizer(named, hyper)
        losses, norms, grads = [], [], None
        for tokens in batches:
            mask = None if causal else torch.zeros(BATCH, 1, SEQ, SEQ, dtype=dtype)
            if config.model_type == "bloom":
                mask = None  # it counts positions by its mask; `bloom_attention` leaves it out
            if is_hybrid and mask is not None:
                mask = {"full_attention": mask, "linear_attention": None}
            # OPT counts positions by its mask unless it is told them.
            told = {"position_ids": torch.arange(SEQ)[None]} if config.model_type == "opt" else {}
            loss, further = losses_of(model, tokens, mask, told, shift)
            if further:
                loss = loss + model.config.mtp_loss_scaling_factor * sum(further) / len(further)
            optim.zero_grad()
            loss.backward()
            if grads is None:
                # Sinks have none where they are left out.
                zeros = {key: torch.zeros_like(value) for key, value in stored_tensors(model)}
                trained = {key: param.grad.clone() for key, param in named.items() if param.grad is not None}
                grads = {**zeros, **trained}
            norm = torch.nn.utils.clip_grad_norm_(named.values(), hyper["clip_norm"], foreach=False)
            optim.step()
            losses.append(loss.item())
            norms.append(norm.item())
    params = {key: param.detach().clone() for key, param in stored_tensors(model)}
    return {"losses": losses, "grad_norms": norms, "grads": grads, "params": params}


def make_optimizer(named, hyper):
    """AdamW as nanoGPT sets it up: tensors of two or more dims decay, the others do not."""
    decay_dims = hyper.get("decay_dims", 2)
    groups = [
        {"params": [p for p in named.values() if p.dim() >= decay_dims], "weight_decay": hyper["weight_decay"]},
        {"params": [p for p in named.values() if p.dim() < decay_dims], "weight_decay": 0.0},
    ]
    kind = hyper.get("kind", torch.optim.AdamW)
    groups = [group for group in groups if group["params"]]
    return kind(groups, lr=hyper["lr"], betas=tuple(hyper["betas"]), eps=hyper["eps"], foreach=False, fused=False)


@contextlib.contextmanager
def wide_llama(causal=True, interleaved=False, tiled_kv=False, plain_gates=None, slopes=None, sinks=True):
    """Modules of Llama and its relatives that stay in the input's dtype.

    transformers computes their norms, softmaxes and rotary angles in float32 whatever the model's
    dtype, so `model.double()` alone is not a float64 run. The flags make well-known mistakes.
    """

    def norm(self, x):
        if hasattr(self, "variance_epsilon"):
            return ops_reference.rms_norm(x, self.weight, self.variance_epsilon)
        return ops_reference.rms_norm(x, 1.0 + self.weight, self.eps)

    def angles(self, x, position_ids):
        n, dim = position_ids.shape[-1], self.inv_freq.shape[-1] * 2
        cos, sin = ops_reference.angles(dim, self.config.rope_parameters, n, x.dtype)
        return cos[None] * self.attention_scaling, sin[None] * self.attention_scaling

    def half_angles(self, x, position_ids):
        return tuple(part[..., : part.shape[-1] // 2] for part in angles(self, x, position_ids))

    def angles_of_layer(self, x, position_ids, layer_type):
        rope = self.config.rope_parameters[layer_type]
        cos, sin = ops_reference.angles(self.config.head_dim, rope, position_ids.shape[-1], x.dtype)
        return cos[None], sin[None]

    def turns(self, x, position_ids):
        cos, sin = angles(self, x, position_ids)
        half = cos.shape[-1] // 2
        return torch.complex(cos[..., :half], sin[..., :half])

    def turn(q, k, turns):
        def pairs(x):
            if not interleaved:  # as DeepSeek-V2 has it; the mistake is the rule of the others
                x = x.unflatten(-1, (-1, 2))
            else:
                x = x.unflatten(-1, (2, -1)).transpose(-1, -2)
            x = torch.view_as_real(torch.view_as_complex(x.contiguous()) * turns.unsqueeze(1))
            return x.flatten(3)

        return pairs(q), pairs(k)

    def latent_route(self, x):
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        is_sigmoid = hasattr(self, "e_score_correction_bias")
        scores = torch.sigmoid(logits) if is_sigmoid else torch.softmax(logits, dim=-1)
        choice = scores + self.e_score_correction_bias if is_sigmoid else scores
        if is_sigmoid or self.topk_method != "greedy":
            groups = choice.unflatten(-1, (self.num_group, -1))
            best = groups.topk(2 if is_sigmoid else 1, dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(best).scatter(1, best.topk(self.topk_group, dim=-1).indices, 1.0).bool()
            choice = groups.masked_fill(~kept[..., None], -float("inf")).flatten(1)
        chosen = choice.topk(self.top_k, dim=-1).indices
        gates = scores.gather(1, chosen)
        if is_sigmoid and self.norm_topk_prob:
            gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, gates * self.routed_scaling_factor, chosen

    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        def pairs(x):
            a, b = x[..., 0::2], x[..., 1::2]
            c, s = cos[..., : a.shape[-1]][:, None], sin[..., : a.shape[-1]][:, None]
            return torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)

        turned = cos.shape[-1]
        q, k = (torch.cat((pairs(x[..., :turned]), x[..., turned:]), dim=-1) for x in (q, k))
        return q, k

    def attention(module, q, k, v, mask, scaling, dropout=0.0, softcap=None, s_aux=None, **_):
        n = getattr(module, "num_key_value_groups", 1)
        spread = (lambda x: x.repeat(1, n, 1, 1)) if tiled_kv else (lambda x: x.repeat_interleave(n, dim=1))
        scores = q @ spread(k).transpose(2, 3) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + mask
        if s_aux is not None and sinks:
            sink = s_aux[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), dim=-1)
        out = torch.softmax(scores, dim=-1)[..., : k.shape[2]] @ spread(v)
        return out.transpose(1, 2).contiguous(), None

    def bloom_attention(self, hidden_states, residual, alibi, attention_mask, **_):
        q, k, v = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(3)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        of_heads = ops_reference.alibi_slopes(self.num_heads, q.dtype) if slopes is None else slopes(self.num_heads)
        position = torch.arange(q.shape[2], dtype=q.dtype)
        distance = position[:, None] - position[None]
        scores = q @ k.transpose(2, 3) * self.inv_norm_factor - of_heads[:, None, None] * distance
        if causal:
            scores = scores.masked_fill(distance < 0, -float("inf"))
        out = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)
        return residual + self.dense(out), None

    def route(self, x):
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight, getattr(self, "bias", None))
        gates, chosen = torch.topk(torch.softmax(logits, dim=-1), self.top_k, dim=-1)
        plain = not getattr(self, "norm_topk_prob", True) if plain_gates is None else plain_gates
        return logits, gates if plain else gates / gates.sum(dim=-1, keepdim=True), chosen

    swaps = []
    for kind, module in KINDS.values():
        if module is None:
            continue
        name = kind.__name__.removesuffix("ForCausalLM")
        if name == "Bloom":
            swaps.append((module.BloomAttention, "forward", bloom_attention))
            continue
        if hasattr(module, "eager_attention_forward"):
            swaps.append((module, "eager_attention_forward", attention))
        if hasattr(module, "apply_rotary_emb"):
            swaps.append((module, "apply_rotary_emb", turn))
        turned = turns if hasattr(module, "apply_rotary_emb") else angles
        turned = {"Gemma3": angles_of_layer, "GptOss": half_angles}.get(name, turned)
        for part, forward in (("RMSNorm", norm), ("RotaryEmbedding", turned), ("TopkRouter", latent_route)):
            if hasattr(module, f"{name}{part}"):
                swaps.append((getattr(module, f"{name}{part}"), "forward", forward))
        if interleaved and hasattr(module, "apply_rotary_pos_emb"):
            swaps.append((module, "apply_rotary_pos_emb", rotary))
        if hasattr(module, f"{name}TopKRouter"):
            swaps.append((getattr(module, f"{name}TopKRouter"), "forward", route))
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    try:
        for owner, name, value in swaps:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)


HYBRIDS = ("mamba2", "nemotron_h")


@contextlib.contextmanager
def wide_scan(module):
    """State spaces in the input's dtype, token by token where transformers goes chunk by chunk."""

    def scan(x, dt, A, B, C, chunk_size, D=None, dt_bias=None, dt_limit=(0.0, float("inf")), **_):
        t = F.softplus(dt + dt_bias).clamp(min=dt_limit[0])
        B, C = (part.repeat_interleave(x.shape[2] // part.shape[2], dim=2) for part in (B, C))
        state, rows = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[-1], dtype=x.dtype), []
        for i in range(x.shape[1]):
            kept = torch.exp(t[:, i] * A)[..., None, None]
            state = kept * state + (t[:, i, :, None] * x[:, i])[..., None] * B[:, i, :, None]
            rows.append((state * C[:, i, :, None]).sum(-1) + D[:, None] * x[:, i])
        return torch.stack(rows, dim=1)

    def gated_norm(self, x, gate=None):
        x = (x * F.silu(gate)).unflatten(-1, (-1, self.group_size))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.flatten(-2)

    gated = [value for name, value in vars(module).items() if name.endswith("RMSNormGated")]
    swaps = [(module, "mamba2_chunk_scan", scan), (torch.Tensor, "float", lambda self: self)]
    swaps += [(owner, "forward", gated_norm) for owner in gated]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    try:
        for owner, name, value in swaps:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)


def hybrid_sensitivity(config, weights, batches, right, wrong):
    """What can go wrong in models with state spaces alone."""

    def of(key, change):
        other = {name: change(value) if key in name else value for name, value in weights.items()}
        return max_dev(train(config, other, batches, torch.float64)["losses"], right)

    result = {
        "norm_eps_1e-6": wrong({"layer_norm_epsilon": 1e-6}),
        "inputs_do_not_pass_by": of("mixer.D", lambda v: v * 0),
        "steps_without_bias": of("dt_bias", lambda v: v * 0),
        "decays_not_exponential": of("A_log", torch.exp),
        "taps_reversed": of("conv1d.weight", lambda v: v.flip(-1)),
    }
    if config.model_type == "nemotron_h":
        result["one_expert_fewer"] = wrong({"num_experts_per_tok": config.num_experts_per_tok - 1})
        result["gates_scaled_twice"] = wrong({"routed_scaling_factor": 2.0 * config.routed_scaling_factor})
        result["no_bias_of_the_choice"] = of(CHOICE_BIAS, lambda v: v * 0)
        result["kv_heads_tiled"] = wrong(tiled_kv=True)
    return result


def sensitivity(config, weights, batches, right):
    """Largest loss deviation over the steps, in float64, of runs that get one thing wrong."""

    def wrong(changes=None, hyper=None, **kwargs):
        other = config
        if changes:
            other = type(config).from_dict({**config.to_dict(), **changes})
        run = train(other, weights, batches, torch.float64, hyper={**HYPER, **(hyper or {})}, **kwargs)
        return max_dev(run["losses"], right)

    result = {
        "no_clipping": wrong(hyper={"clip_norm": 1e9}),
        "no_weight_decay": wrong(hyper={"weight_decay": 0.0}),
        "decay_every_tensor": wrong(hyper={"decay_dims": 0}),
        "decay_as_l2": wrong(hyper={"kind": torch.optim.Adam}),
        "beta2_0.999": wrong(hyper={"betas": [0.9, 0.999]}),
    }
    if config.model_type != "mamba2":
        result["not_causal"] = wrong(causal=False)
    if further_modules(config):
        result["further_embedding_one_token_early"] = wrong(shift=1)
        result["further_losses_count_as_by_default"] = wrong({"mtp_loss_scaling_factor": 0.1})
    if config.model_type in HYBRIDS:
        return {**result, **hybrid_sensitivity(config, weights, batches, right, wrong)}
    if config.model_type == "gpt2":
        other = "gelu" if config.activation_function == "gelu_new" else "gelu_new"
        result[f"activation_{other}"] = wrong({"activation_function": other})
        result["norm_eps_1e-6"] = wrong({"layer_norm_epsilon": 1e-6})
        return result
    if config.model_type == "bloom":
        result["norm_eps_1e-6"] = wrong({"layer_norm_epsilon": 1e-6})
        right_slopes = lambda n: ops_reference.alibi_slopes(n, torch.float64)  # noqa: E731
        result["no_slopes"] = wrong(slopes=lambda n: torch.zeros(n, dtype=torch.float64))
        result["slopes_of_eight_heads"] = wrong(slopes=lambda n: right_slopes(8)[:n])
        result["slopes_in_order"] = wrong(slopes=lambda n: right_slopes(n).sort(descending=True).values)
        result["slopes_of_half_the_heads"] = wrong(slopes=lambda n: right_slopes(n // 2).repeat(2))
        return result
    if config.model_type == "opt":
        result["activation_gelu"] = wrong({"activation_function": "gelu"})
        return result
    field = next(name for name in ("rms_norm_eps", "layer_norm_eps", "norm_eps") if hasattr(config, name))
    eps = 1e-5 if getattr(config, field) == 1e-6 else 1e-6
    result[f"norm_eps_{eps:.0e}".replace("e-0", "e-")] = wrong({field: eps})
    if config.model_type == "gpt_neox":
        serial = not config.use_parallel_residual
        result["residuals_parallel" if serial else "residuals_serial"] = wrong({"use_parallel_residual": serial})
    if hasattr(config, "kv_lora_rank"):
        return {**result, **latent_sensitivity(config, weights, batches, right, wrong)}
    if hasattr(config, "num_experts_per_tok"):
        result["one_expert_fewer"] = wrong({"num_experts_per_tok": config.num_experts_per_tok - 1})
        normalized = getattr(config, "norm_topk_prob", True)
        result["gates_not_normalized" if normalized else "gates_normalized"] = wrong(plain_gates=normalized)
    if (getattr(config, "sliding_window", None) or SEQ) < SEQ:
        result["window_ignored"] = wrong({"sliding_window": SEQ})
        result["window_longer_by_one"] = wrong({"sliding_window": config.sliding_window + 1})
    if hasattr(config, "query_pre_attn_scalar"):
        result["scaled_by_head_dim"] = wrong({"query_pre_attn_scalar": config.head_dim})
        result["windows_in_other_layers"] = wrong({"layer_types": [
            "full_attention" if kind == "sliding_attention" else "sliding_attention" for kind in config.layer_types]})
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            result[f"no_{name}"] = wrong({name: None})
    if config.model_type == "gpt_oss":
        result["no_sinks"] = wrong(sinks=False)
        result["not_clamped"] = wrong({"swiglu_limit": 1e9})
        result["windows_in_other_layers"] = wrong({"layer_types": [
            "full_attention" if kind == "sliding_attention" else "sliding_attention" for kind in config.layer_types]})
    else:
        result["rotary_interleaved"] = wrong(interleaved=True)
    if getattr(config, "num_key_value_heads", config.num_attention_heads) < config.num_attention_heads:
        result["kv_heads_tiled"] = wrong(tiled_kv=True)
    rope = config.rope_parameters
    if "full_attention" in rope:
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        result["bases_swapped"] = wrong({"rope_parameters": {"full_attention": sliding, "sliding_attention": full}})
        plain = {"rope_type": "default", "rope_theta": full["rope_theta"]}
        result["rope_not_scaled"] = wrong({"rope_parameters": {**rope, "full_attention": plain}})
        return result
    if rope.get("partial_rotary_factor", 1.0) < 1.0:
        result["whole_heads_turn"] = wrong({"rope_parameters": {**rope, "partial_rotary_factor": 1.0}})
    result["rope_theta_doubled"] = wrong({"rope_parameters": {**rope, "rope_theta": rope["rope_theta"] * 2}})
    if rope["rope_type"] != "default":
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        result["rope_not_scaled"] = wrong({"rope_parameters": plain})
    return result


def latent_sensitivity(config, weights, batches, right, wrong):
    """What can go wrong in DeepSeek's models alone."""
    result = {
        "one_expert_fewer": wrong({"num_experts_per_tok": config.num_experts_per_tok - 1}),
        "gates_scaled_twice": wrong({"routed_scaling_factor": 2.0 * config.routed_scaling_factor}),
    }
    is_v3 = config.model_type == "deepseek_v3"
    if is_v3:
        without = {key: value * (0.0 if key.endswith(CHOICE_BIAS) else 1.0) for key, value in weights.items()}
        run = train(config, without, batches, torch.float64)
        result["no_bias_of_the_choice"] = max_dev(run["losses"], right)
        result["gates_not_normalized"] = wrong({"norm_topk_prob": False})
        result["rotary_halves"] = wrong({"rope_interleave": False})
    else:
        result["rotary_halves"] = wrong(interleaved=True)
    if is_v3 or config.topk_method != "greedy":
        result["groups_not_limited"] = wrong({"topk_group": config.n_group})
    rope = config.rope_parameters
    result["rope_theta_doubled"] = wrong({"rope_parameters": {**rope, "rope_theta": rope["rope_theta"] * 2}})
    if rope["rope_type"] != "default":
        result["rope_not_scaled"] = wrong({"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}})
        result["scores_not_scaled"] = wrong({"rope_parameters": {**rope, "mscale_all_dim": 0.0}})
    return result


def zero_gradient(config, weights):
    """Slices whose gradient is zero in exact arithmetic, as first and last element of each in turn: the key
    part of GPT-2's fused bias, OPT's key biases, of BLOOM's fused bias the keys' elements, and of GPT-NeoX's those of
    them that do not turn.

    Biases of keys that are rotated afterwards are not: their scores differ by position.

    A key bias adds the same number to all scores of a row. AdamW divides rounding noise by its own
    size there, so the values after training mean nothing; the losses do not depend on them.
    """
    if config.model_type == "opt":
        return {key: [0, config.hidden_size] for key in weights if key.endswith("k_proj.bias")}
    if config.model_type in ("gpt_neox", "bloom"):
        dim = config.hidden_size // config.num_attention_heads
        turned = 0 if config.model_type == "bloom" else int(dim * config.rope_parameters["partial_rotary_factor"])
        starts = [3 * dim * head + dim for head in range(config.num_attention_heads)]
        still = [end for start in starts for end in (start + turned, start + dim)]
        return {key: still for key in weights if key.endswith("query_key_value.bias")}
    if config.model_type != "gpt2":
        return {}
    width = config.n_embd
    return {key: [width, 2 * width] for key in weights if key.endswith("attn.c_attn.bias")}


def tensor_devs(narrow, wide, skip):
    """Per tensor, `skip` slices left out: largest absolute deviation, and its norm over the norm."""
    result = {}
    for key, right in wide.items():
        diff = narrow[key].double() - right
        if key in skip:
            for ends in zip(skip[key][::2], skip[key][1::2], strict=True):
                diff[slice(*ends)] = 0.0
        norm = right.norm()
        share = (diff.norm() / norm).item() if norm > 0 else 0.0
        result[key] = {"max_abs": diff.abs().max().item(), "rel_l2": share}
    return result


def max_dev(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def save_model(model, folder, weights, **options):
    """config.json and weights as save_pretrained writes them; a 4.x-style config beside, for Llama."""
    further = model._modules.pop("mtp", None)
    model.save_pretrained(folder, **options)
    if further is not None:
        model.mtp = further
        path = folder / "model.safetensors"
        save_tensors({**safetensors.torch.load_file(path), **of_modules(model, weights)}, path)
    (folder / "generation_config.json").unlink(missing_ok=True)
    stored = {}
    for path in folder.glob("model*.safetensors"):
        stored.update(safetensors.torch.load_file(path))
    loaded = dict(stored_tensors(type(model).from_pretrained(folder)))
    main = {key: value for key, value in weights.items() if not key.startswith("mtp.")}
    for read, wanted in ((stored, as_stored(model.config, weights)), (loaded, main)):
        if read.keys() != wanted.keys() or not all(torch.equal(read[key], wanted[key]) for key in wanted):
            raise RuntimeError(f"the weights read back from {folder.name} are not the ones written")
    config = model.config
    if config.model_type == "llama" and not options:
        write_json(folder / "config.v4.json", v4_config(json.loads((folder / "config.json").read_text())))


def of_modules(model, weights):
    """What files have of the modules for further tokens."""
    return as_stored(model.config, {key: value for key, value in weights.items() if key.startswith("mtp.")})


def v4_config(saved):
    """The same configuration as transformers 4.x spells it: rope_theta, rope_scaling, torch_dtype."""
    old = {key: value for key, value in saved.items() if key not in ("rope_parameters", "dtype")}
    rope = dict(saved["rope_parameters"])
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    old["torch_dtype"] = saved["dtype"]
    old["transformers_version"] = "4.45.0"
    if LlamaConfig.from_dict(copy.deepcopy(old)).rope_parameters != saved["rope_parameters"]:
        raise RuntimeError("transformers reads the 4.x-style configuration differently")
    return dict(sorted(old.items()))


def save_tensors(tensors, path):
    safetensors.torch.save_file({key: value.contiguous() for key, value in tensors.items()}, path, {"format": "pt"})


def write_json(path, value, indent=1):
    text = json.dumps(value, indent=indent, allow_nan=False)
    path.write_text(flat_numbers(text) + "\n")


def flat_numbers(text):
    """Puts lists of plain numbers on one line."""
    return re.sub(r"\[[\d\s,.eE+-]+\]", lambda m: " ".join(m.group().split()).replace("[ ", "[").replace(" ]", "]"), text)


def versions():
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": numpy.__version__,
    }


def check(made):
    """Compares with the committed files: weights, configurations and tokens exactly, the rest to 1e-5.

    In half precision another order of additions changes what is rounded to: deviations are compared
    as the test compares them, within a half and one and a half times.
    """
    same = True
    for path in sorted(p for p in made.rglob("*") if p.is_file()):
        committed = HERE / path.relative_to(made)
        if not committed.is_file():
            fine, verdict = False, "missing"
        elif path.read_bytes() == committed.read_bytes():
            fine, verdict = True, "identical"
        elif path.name in ("grads.safetensors", "final.safetensors", "reference.json", "ops.json"):
            off = max_dev_in(numbers(path), numbers(committed))
            fine, verdict = off <= 1e-5, f"off by {off:.1e}"
        elif path.name in ("half.json", "overflow.json"):
            ratios = [a / b for a, b in zip(deviations(path), deviations(committed), strict=True)]
            fine, verdict = all(0.5 < r < 1.5 for r in ratios), f"times {min(ratios):.2f} to {max(ratios):.2f}"
        else:
            fine, verdict = False, "differs"
        same &= fine
        print(f"{'ok  ' if fine else 'FAIL'} {path.relative_to(made)}: {verdict}")
    return same


def deviations(path):
    """All figures of half.json or overflow.json, in order."""

    def leaves(value):
        return [value] if isinstance(value, float) else [leaf for key in sorted(value) for leaf in leaves(value[key])]

    value = json.loads(path.read_text())
    parts = [value] if "figures" in value else [value["bf16"], value["f16"]]
    return [leaf for part in parts for leaf in leaves(part["figures"])]


def numbers(path):
    """The numbers of a file by name; leaves out what rounding alone decides (deviation, zero gradients)."""
    if path.suffix == ".safetensors":
        tensors = safetensors.torch.load_file(path)
        zero = json.loads((path.parent / "reference.json").read_text())["zero_gradient"]
        for key, ends in zero.items():
            for start, stop in zip(ends[::2], ends[1::2], strict=True):
                tensors[key][start:stop] = 0.0
        return {key: value.reshape(-1).tolist() for key, value in tensors.items()}
    value = json.loads(path.read_text())
    if path.name == "reference.json":
        kept = {key: value[key] for key in ("losses", "grad_norms", "f64_losses", "f64_grad_norms")}
        return {**kept, **{key: [item] for key, item in value["sensitivity"].items()}}
    return {
        f"{entry['op']}.{entry['name']}.{part}.{key}": tensor["data"]
        for entry in value["entries"]
        for part in ("inputs", "outputs", "upstream", "grads")
        for key, tensor in entry[part].items()
    }


def max_dev_in(a, b):
    """Largest deviation over all names; infinite when names or lengths differ."""
    if {key: len(value) for key, value in a.items()} != {key: len(value) for key, value in b.items()}:
        return float("inf")
    return max(max_dev(a[key], b[key]) for key in a)


if __name__ == "__main__":
    main()
