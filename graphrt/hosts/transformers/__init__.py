"""`generate` of transformers' models through graphs: see `docs/how-to/transformers.md`.

`with_graphs(model, max_batch=4, max_len=512)` puts the graphs in front of a model's `forward`,
`with_batch_graphs(model)` those of `generate_batch`, and `without_graphs(model)` takes them away.
`masks_on_device(model)` is for `graphrt.graphed` of an encoder. transformers is imported by the
first call.
"""

from __future__ import annotations

from graphrt._homes import at_home
from graphrt.hosts.transformers.entry import (
    graphs_of,
    masks_on_device,
    with_batch_graphs,
    with_graphs,
    without_graphs,
)

__all__ = ["graphs_of", "masks_on_device", "with_batch_graphs", "with_graphs", "without_graphs"]

at_home(__name__, *map(globals().__getitem__, __all__))
