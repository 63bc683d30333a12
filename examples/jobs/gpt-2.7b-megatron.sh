#!/usr/bin/env bash
# A GPT of 2.7 billion parameters by Megatron-LM on hosts of eight A100s: NNODES says how many.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPT_ARGS="
    --num-layers 32
    --hidden-size 2560
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
    --tokenizer-type GPT2BPETokenizer
    --micro-batch-size 4
    --global-batch-size ${GLOBAL_BATCH:-256}
    --fp16
    --lr 1.6e-4
    --train-iters 100000
"

torchrun --nproc-per-node 8 --nnodes ${NNODES} --node-rank ${NODE_RANK:-0} \
    --master-addr ${MASTER_ADDR:-localhost} pretrain_gpt.py \
    $GPT_ARGS \
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 1 \
    --recompute-activations \
    --data-path $DATA_PATH
