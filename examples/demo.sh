#!/bin/sh
# Train a small GPT on two CPU ranks, on real text, from a plan that MemX measures and searches.
# The second run reuses the cached plan.
set -eu
cd "$(dirname "$0")/.."
data=.demo/python-documentation
if [ ! -f "$data.idx" ]; then
    "${PYTHON:-.venv/bin/python}" examples/text_to_indexed.py --python-documentation --output "$data"
fi
exec "${MEMX_TORCHRUN:-.venv/bin/memx-torchrun}" --nproc-per-node 2 examples/pretrain_gpt.py \
    --auto-parallel --memx-platform cpu --memx-cluster examples/clusters/two_cpu_ranks.yaml \
    --memx-cache-dir .demo/cache \
    --pipeline-model-parallel-size 2 \
    --num-layers 7 --hidden-size 192 --num-attention-heads 6 --swiglu --normalization RMSNorm \
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 \
    --seq-length 192 --max-position-embeddings 192 --global-batch-size 16 \
    --data-path "$data" --data-cache-path .demo/data-cache --split 100,0,0 \
    --tokenizer-type NullTokenizer --vocab-size 512 \
    --train-iters 40 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 40 --lr-warmup-iters 4 \
    --eval-iters 0 --eval-interval 1000 --log-interval 1 "$@"
