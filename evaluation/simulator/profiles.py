"""Workers of known speed."""

from __future__ import annotations

from evaluation.simulator.values import Profile

# Llama-3-8B with AWQ weights on an NVIDIA A10G, by arithmetic (a roofline, not a measurement):
# * base: 5.7 GB of weights read at 80 % of 600 GB/s (NVIDIA's A10G data sheet);
# * a token of a prompt: 16 GFLOP at 60 % of the 70 TFLOP/s that the data sheet gives for FP16 tensor cores;
# * a decoding sequence: the same work, a fifth of it hidden behind the reading of the weights;
# * a token of context: 128 KiB of keys and values (32 layers, 8 heads of 128, FP16) read at 80 % of 600 GB/s;
# * pool: 90 % of 24 GB without weights and 1.5 GB of activations, 131,072 bytes a token, 16 tokens a block.
# 512 tokens per step: with 2,048 a step takes 0.8 s, which is too long between two tokens of other answers.
A10G_8B_AWQ = Profile(
    "a10g-8b-awq",
    base_s=0.012,
    prefill_s=0.00038,
    sequence_s=0.0003,
    context_s=2.7e-7,
    total_blocks=6800,
)
# The same card with FP16 weights: reading them takes 16.1 GB / 480 GB/s, and the rest of the memory holds
# 33,000 tokens. Here memory runs out, not time.
A10G_8B_FP16 = Profile(
    "a10g-8b-fp16",
    base_s=0.033,
    prefill_s=0.00038,
    sequence_s=0.0002,
    context_s=2.7e-7,
    total_blocks=2080,
)

PROFILES = {profile.name: profile for profile in (A10G_8B_AWQ, A10G_8B_FP16)}
