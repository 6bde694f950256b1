"""Thin adapters by which inference engines that exist use graphrt. None is imported by itself.

`graphrt.hosts.vllm_ascend`: the graphs of vllm-ascend.
"""

__all__: list[str] = []
