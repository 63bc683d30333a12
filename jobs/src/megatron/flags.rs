//! Names of Megatron-LM's arguments that no figure counts, and of those that change nothing. Those
//! that are read stand where they are read. A star stands for any ending.
//!
//! They are those of `megatron/training/arguments.py` and the config classes that it takes
//! arguments from, at `core_v0.19.0`, and of Megatron-DeepSpeed's.

/// Arguments that change time or memory of a step, and what they do.
pub(super) const NOT_MODELLED: &[(&str, &str)] = &[
    (
        "optimizer-cpu-offload",
        "optimizer states rest on the host: the memory of all of them is counted there, that of a part and the longer update are not",
    ),
    (
        "optimizer-offload-fraction",
        "a part of the optimizer states rests on the host",
    ),
    (
        "overlap-cpu-optimizer-d2h-h2d",
        "traffic of offloaded states runs beside the update",
    ),
    (
        "use-precision-aware-optimizer",
        "optimizer states may be narrower than f32: less memory",
    ),
    (
        "exp-avg-dtype",
        "the first moment's type: less memory where it is narrow",
    ),
    (
        "exp-avg-sq-dtype",
        "the second moment's type: less memory where it is narrow",
    ),
    ("main-grads-dtype", "the type of the optimizer's gradients"),
    (
        "main-params-dtype",
        "the type of the optimizer's parameters",
    ),
    (
        "rampup-batch-size",
        "early steps have smaller batches; figures are of full ones",
    ),
    (
        "cpu-offloading*",
        "activations rest on the host: less memory, and traffic",
    ),
    (
        "fine-grained-activation-offloading",
        "activations rest on the host: less memory, and traffic",
    ),
    (
        "offload-modules",
        "activations of these modules rest on the host",
    ),
    (
        "distribute-saved-activations",
        "kept activations are split over tensor ranks: less memory, and gathers",
    ),
    (
        "defer-embedding-wgrad-compute",
        "the last stage's output layer is caught up with at the end",
    ),
    (
        "delay-wgrad-compute",
        "gradients of weights are computed later, to fill waiting",
    ),
    (
        "overlap-p2p-communication-warmup-flush",
        "transfers of the pipeline's ends run beside computing",
    ),
    (
        "no-overlap-p2p-communication",
        "transfers between stages are waited for",
    ),
    (
        "overlap-param-gather-with-optimizer-step",
        "gathers of parameters begin within the update",
    ),
    (
        "tp-comm-overlap-*",
        "a part of the tensor ranks' overlap is switched off",
    ),
    (
        "tp-comm-bootstrap-backend",
        "how the tensor ranks' overlap is set up",
    ),
    (
        "tp-comm-overlap-cfg",
        "the tensor ranks' overlap has its own settings",
    ),
    (
        "moe-token-dispatcher-type",
        "how tokens travel to experts; figures are of all-to-alls",
    ),
    ("moe-permute-fusion", "tokens are sorted by one kernel"),
    ("moe-router-fusion", "routing is one kernel"),
    (
        "moe-shared-expert-overlap",
        "shared experts are computed beside the tokens' travel",
    ),
    (
        "moe-shared-expert-gate",
        "the shared expert's output has a gate",
    ),
    (
        "moe-layer-recompute",
        "experts are recomputed: less memory, and more time",
    ),
    (
        "disable-tp-comm-*",
        "a part of the tensor ranks' overlap is switched off",
    ),
    (
        "disable-jit-fuser",
        "elementwise operations as single kernels",
    ),
    ("delay-grad-reduce", "when gradients are reduced"),
    ("delay-param-gather", "when parameters are gathered"),
    ("moe-hybridep-num-sms", "multiprocessors that move tokens"),
    ("moe-deepep-num-sms", "multiprocessors that move tokens"),
    (
        "moe-apply-probs-on-input",
        "where the experts' weights are multiplied",
    ),
    ("moe-use-legacy-grouped-gemm", "another kernel of experts"),
    (
        "moe-use-upcycling",
        "experts are made of a dense model before the first step",
    ),
    (
        "num-moe-experts-per-*",
        "another number of experts in some layers",
    ),
    (
        "cross-entropy-loss-fusion",
        "the loss reads and writes the logits fewer times",
    ),
    (
        "cross-entropy-fusion-impl",
        "which kernels of the loss are fused",
    ),
    (
        "enable-cuda-graph",
        "kernels are issued as one graph: no waiting for the host",
    ),
    (
        "external-cuda-graph",
        "kernels are issued as one graph: no waiting for the host",
    ),
    (
        "cuda-graph-*",
        "kernels are issued as one graph: no waiting for the host, and more memory",
    ),
    (
        "mtp-*",
        "blocks that predict further tokens, which the model here has not",
    ),
    (
        "window-*",
        "attention within a window, in blocks that are read without one: less time than predicted",
    ),
    ("softmax-type", "another softmax of attention"),
    (
        "nccl-ub",
        "collectives have registered buffers: fewer multiprocessors are held",
    ),
    ("use-sharp", "sums in the switches"),
    ("nccl-communicator-config-path", "settings of NCCL"),
    (
        "disable-symmetric-registration",
        "how buffers are registered",
    ),
    (
        "hierarchical-context-parallel-sizes",
        "context ranks meet in two levels",
    ),
    (
        "hybrid-context-parallel",
        "context ranks by the length of samples",
    ),
    ("fp8-param-gather", "parameters travel in eight bits"),
    ("fp4-param-gather", "parameters travel in four bits"),
    (
        "fp8-wgrad",
        "whether gradients of weights are computed in eight bits",
    ),
    (
        "no-fp8-wgrad",
        "gradients of weights are not computed in eight bits",
    ),
    (
        "first-last-layers-bf16",
        "the first and the last layers compute in bf16",
    ),
    (
        "num-layers-at-*",
        "how many layers at an end compute in bf16",
    ),
    (
        "use-flash-attn*",
        "an attention kernel; figures are of the version's usual one",
    ),
    (
        "no-masked-softmax-fusion",
        "unfused softmax, where attention is not fused",
    ),
    (
        "no-rope-fusion",
        "rotation of queries and keys as single kernels",
    ),
    (
        "apply-rope-fusion",
        "rotation of queries and keys as one kernel",
    ),
    ("no-bias-swiglu-fusion", "activations as single kernels"),
    (
        "no-bias-dropout-fusion",
        "dropout and residual as single kernels",
    ),
    (
        "no-gradient-accumulation-fusion",
        "gradients are added by kernels of their own",
    ),
    (
        "gradient-accumulation-fusion",
        "gradients are added by the matmuls that make them",
    ),
    ("no-persist-layer-norm", "another kernel of norms"),
    ("apply-layernorm-1p", "gains of norms are stored less one"),
    (
        "ddp-bucket-size",
        "how large the pieces are in which gradients are reduced",
    ),
    (
        "ddp-num-buckets",
        "in how many pieces gradients are reduced",
    ),
    (
        "ddp-pad-buckets-for-high-nccl-busbw",
        "pieces of gradients are padded",
    ),
    ("ddp-average-in-collective", "where gradients are averaged"),
    (
        "ddp-reduce-scatter-with-fp32-accumulation",
        "sums of reductions in f32",
    ),
    (
        "no-align-*",
        "stages begin their collectives each in its own time",
    ),
    (
        "use-tp-pp-dp-mapping",
        "pipeline ranks lie closer than data ranks, so other links carry both",
    ),
    (
        "standalone-embedding-stage",
        "the embedding has a stage of its own",
    ),
    (
        "empty-unused-memory-level",
        "the allocator is emptied between steps",
    ),
    ("high-priority-stream-groups", "priorities of streams"),
    ("batch-invariant-mode", "slower kernels with equal results"),
    ("deterministic-mode", "slower kernels with equal results"),
    ("tp-only-amax-red", "over which ranks scales are found"),
    (
        "keep-fp8-weight-transpose-cache",
        "copies of weights are kept: more memory",
    ),
    ("use-ring-exchange-p2p", "how stages exchange"),
    (
        "microbatch-group-size-per-vp-stage",
        "another order of interleaved stages",
    ),
    ("encoder-*", "an encoder, which the model here has not"),
    ("decoder-seq-length", "a decoder behind an encoder"),
    (
        "kv-lora-rank",
        "latent attention, which the model here has not",
    ),
    (
        "q-lora-rank",
        "latent attention, which the model here has not",
    ),
    (
        "qk-head-dim",
        "latent attention, which the model here has not",
    ),
    (
        "qk-pos-emb-head-dim",
        "latent attention, which the model here has not",
    ),
    (
        "v-head-dim",
        "latent attention, which the model here has not",
    ),
    (
        "reset-position-ids",
        "positions begin again with each document",
    ),
    (
        "reset-attention-mask",
        "attention ends with each document, so less of it is computed",
    ),
    (
        "create-attention-mask-in-dataloader",
        "masks are made by the loader and moved to the device",
    ),
    ("use-custom-fsdp", "an older name of Megatron-FSDP"),
    (
        "outer-dp-sharding-strategy",
        "states are split over groups of data ranks",
    ),
    (
        "suggested-communication-unit-size",
        "how large pieces of Megatron-FSDP's traffic are",
    ),
    (
        "fsdp-double-buffer",
        "more memory for Megatron-FSDP's buffers",
    ),
    (
        "enable-experimental",
        "features that no published run shows",
    ),
    (
        "torch-fsdp2-no-reshard-after-forward",
        "parameters stay gathered for the backward pass",
    ),
    ("quick-geglu", "another activation"),
    ("memory-centric-tiled-linear", "matmuls in tiles"),
    ("cpu-optimizer", "the optimizer runs on the host"),
    ("cpu-torch-adam", "the optimizer runs on the host"),
    (
        "deepspeed-activation-checkpointing",
        "DeepSpeed's checkpoints, which may be split or moved to the host",
    ),
    (
        "partition-activations",
        "kept activations are split over tensor ranks",
    ),
    ("checkpoint-in-cpu", "kept activations rest on the host"),
    ("synchronize-each-layer", "every layer is waited for"),
    (
        "contigious-checkpointing",
        "kept activations lie in one buffer",
    ),
    (
        "ds-sequence-parallel-size",
        "Ulysses, of which no run of this software was published",
    ),
    ("random-ltd", "layers drop tokens"),
    ("curriculum-learning*", "early steps have shorter sequences"),
    (
        "layernorm-zero-centered*",
        "gains of norms are stored less one",
    ),
    ("embedding-path", "embeddings are read from a file"),
];

/// Arguments that change neither time nor memory of a step.
#[rustfmt::skip]
pub(super) const NO_EFFECT: &[&str] = &[
    "adlr-*", "attention-softmax-in-fp32", "auto-detect-ckpt-format", "apply-query-key-layer-scaling", "async-save",
    "calculate-per-token-loss", "check-for-*", "check-weight-hash*", "ckpt-*", "config-logger-dir",
    "consumed-*", "dataloader-type", "data-*", "dataset-*", "deepspeed", "deepspeed-config", 
    "disable-msc", "disable-straggler-on-startup", "dist-*", "distributed-*", "decoupled-*", "end-weight-decay", "start-weight-decay", "eod-mask-loss", "error-injection-*",
    "eval-*", "exit-*", "finetune", "fp16-lm-cross-entropy", "full-validation", "hysteresis",
    "inference-*", "init-*", "initial-*", "inprocess-*", "iterations-to-skip", "iteration", "lazy-mpu-init", "legacy-tokenizer", "load*", "local-rank",
    "log-*", "loss-scale*", "lr*", "manual-gc*", "master-*", "merge-file", "min-*", "mock-data",
    "moe-aux-loss-coeff", "moe-grouped-gemm", "moe-input-jitter-eps", "moe-per-layer-logging", "moe-token-drop-policy",
    "moe-router-*", "moe-z-loss-coeff", "no-create-attention-mask-in-dataloader", "no-data-sharding", "no-initialization", "no-load-*", "no-mmap-bin-files", "no-one-logger",
    "no-pin-memory*", "no-query-key-layer-scaling", "no-save-*", "no-bias-gelu-fusion", "non-persistent-*",
    "num-dataset-builder-threads", "num-workers", "one-logger-*", "onnx-safe", "override-opt-param-scheduler",
    "perform-initialization", "per-split-data-args-path", "pin-memory", "pretrained-*", "profile*", "record-memory-history", "memory-snapshot-path",
    "rank", "rerun-*", "result-rejected-tracker-filename", "retain-*", "rotary-base", "rotary-percent",
    "rotary-seq-len-interpolation-factor", "rope-scaling-factor", "sample-rate", "save*", "seed", "sgd-momentum",
    "skip-*", "skipped-train-samples", "special-tokens-*", "spec", "split", "squad-*", "straggler-*", "tensorboard-*", "test-data-path", "tiktoken-*", "timing-log-*", "titles-data-path",
    "tokenizer-*", "train-*", "trust-remote-code", "use-checkpoint-*", "use-cpu-initialization", "use-dist-ckpt*", "use-mcore-models",
    "use-persistent-ckpt-worker", "use-pytorch-profiler", "use-rope-scaling", "use-one-sent-docs", "use-tokenizer-*", "valid-data-path", "verify-integrity",
    "vocab-extra-ids", "vocab-file", "wandb-*", "weight-decay-incr-style", "world-size-*", "yaml-cfg", "clip-grad", "max-position-embeddings", "norm-epsilon", "layernorm-epsilon",
    "te-rng-tracker", "no-te-rng-tracker", "log-interval", "export-*", "fim-*", "goodput-*", "enable-ft-package", "enable-gloo-process-groups", "disable-gloo-process-groups",
    "use-legacy-models", "no-weight-decay-*", "apply-residual-connection-post-layernorm", "nvidia-*", "app-tag-*", "short-seq-prob", "mask-*", "tokens-to-*",
];
