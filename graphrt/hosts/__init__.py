"""Thin adapters by which inference engines that exist use graphrt. None is imported by itself.

`graphrt.hosts.vllm`, `graphrt.hosts.vllm_ascend`: the graphs of these engines.
`graphrt.hosts.diffusers`: the denoisers of pipelines.
"""

__all__: list[str] = []
