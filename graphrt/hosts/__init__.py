"""Thin adapters through which existing engines use graphrt. graphrt itself imports none of them.

`graphrt.hosts.vllm`, `graphrt.hosts.vllm_ascend`: the graphs of these engines.
`graphrt.hosts.diffusers`: the denoisers of pipelines.
"""

__all__: list[str] = []
