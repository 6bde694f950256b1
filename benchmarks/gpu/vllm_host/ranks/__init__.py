"""`ranks`: vLLM on two GPUs, with graphrt and without: tokens, steps, captures, killed workers.

Each engine is a process of its own that vLLM starts its workers from, as a user starts it, with
`GRAPHRT_VLLM=1` or not. The parent asks engines for tokens and step times, one by one.
"""
