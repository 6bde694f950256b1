"""The graphs of vllm-ascend, by graphrt: call `install()` before the engine loads its model.

Its `ACLGraphWrapper`, `GraphParams` and `update_full_graph_params` are replaced by graphrt's. Its
model runner, its attention and its code that updates lengths stay. See
`docs/how-to/vllm_ascend.md`.
"""

from graphrt.hosts.vllm_ascend.engine import Engine
from graphrt.hosts.vllm_ascend.entries import ACLGraphEntry
from graphrt.hosts.vllm_ascend.installing import install, install_if_asked, uninstall
from graphrt.hosts.vllm_ascend.params import GraphParams
from graphrt.hosts.vllm_ascend.updating import updated_by
from graphrt.hosts.vllm_ascend.wrapper import ACLGraphWrapper

__all__ = [
    "ACLGraphEntry",
    "ACLGraphWrapper",
    "Engine",
    "GraphParams",
    "install",
    "install_if_asked",
    "uninstall",
    "updated_by",
]
