"""`with_graphs` and `without_graphs`: which model, which sizes, and whether it can be served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from graphrt.compile.options import CompileOptions
from graphrt.core.base.option_values import check_kind, count_of, items_of, shown
from graphrt.core.capture.options import GraphOptions
from graphrt.core.plan.sizes import check_sizes, positive
from graphrt.errors import InvalidOptionError
from graphrt.hosts.transformers.versions import check_transformers

if TYPE_CHECKING:
    from graphrt.hosts.transformers.batches import BatchGraphs
    from graphrt.hosts.transformers.encoders import EncoderGraphs
    from graphrt.hosts.transformers.graphs import ModelGraphs
    from graphrt.hosts.transformers.seam import Seam

Model = TypeVar("Model")

_ATTRIBUTE = "_graphrt_graphs"


def with_graphs(
    model: Model,
    *,
    max_batch: int,
    max_len: int,
    max_encoder_len: int | None = None,
    sizes: Iterable[int] | None = None,
    capture: bool = True,
    strict: bool = False,
    options: GraphOptions | None = None,
    compile: bool | CompileOptions = False,
) -> Model:
    """Let a model run through graphs: the decode steps of `generate`, or the calls of an encoder;
    returns the model itself.

    Up to `max_batch` rows (beams and returned sequences count) of up to `max_len` tokens, prompt
    included, are served; their cache is allocated here. `sizes` are the row counts that have graphs
    (1, 2, 4, ... `max_batch`); between them rows are padded. Beside an encoder of text its inputs
    may have `max_encoder_len` tokens (`max_len`). Texts of encoders are padded to 16, 32, 64, ...
    `max_len` tokens. A number of proposed tokens in the model's `generation_config` captures steps
    that check them. What is not served runs as before, and `graphs_of(model).report()` says why. A
    model that cannot be captured runs as before too; `strict` raises its error. Without `capture`,
    `graphs_of(model).recapture()` captures later.

    With `compile` the step of a model that generates is compiled as a whole by Inductor before it
    is captured (or as `CompileOptions` say): faster steps, seconds to begin with (less with the
    pieces in the cache), and the rounding of fused kernels.

    Raises `UnsupportedHostError` for a transformers that was not tested, and `InvalidOptionError`.
    """
    check_transformers()
    target = _target(model)
    check_kind("options", options, GraphOptions)
    max_batch = count_of("max_batch", max_batch, least=1)
    max_len = count_of("max_len", max_len, least=16)
    max_encoder_len = count_of("max_encoder_len", max_encoder_len or max_len, least=8)
    row_counts = _doubling(1, max_batch) if sizes is None else _checked_sizes(sizes, max_batch)
    graphs = _graphs_for(
        target,
        max_batch,
        max_len,
        max_encoder_len,
        sizes=row_counts,
        options=options or GraphOptions(),
        compile=_compile_options(compile),
    )
    graphs.install()
    target.__dict__[_ATTRIBUTE] = graphs
    if capture:
        try:
            graphs.capture(strict=strict)
        except BaseException:
            without_graphs(model)
            raise
    return model


def _graphs_for(
    target: Any,
    max_batch: int,
    max_len: int,
    max_encoder_len: int,
    *,
    sizes: list[int],
    options: GraphOptions,
    compile: CompileOptions | None,
) -> Seam:
    """The seam of a model that generates, or of an encoder; an earlier one is taken off."""
    generates = hasattr(target, "_prepare_cache_for_generation")
    if compile is not None and not generates:
        raise InvalidOptionError(
            "compile= is for models that generate",
            got=f"{type(target).__name__}, an encoder",
            expected="compile=False",
            advice="torch.compile(model), without with_graphs()",
        )
    without_graphs(target)
    if not generates:
        from graphrt.hosts.transformers.encoders import EncoderGraphs

        return EncoderGraphs(target, max_batch, _doubling(16, max_len), sizes, options)
    from graphrt.hosts.transformers.graphs import ModelGraphs

    return ModelGraphs(
        target,
        max_batch,
        max_len,
        max_encoder_len=max_encoder_len,
        sizes=sizes,
        options=options,
        compile=compile,
    )


def with_batch_graphs(model: Model, *, options: GraphOptions | None = None) -> Model:
    """Let graphrt capture and replay the graphs of transformers' continuous batching
    (`generate_batch`, `init_continuous_batching`); returns the model itself.

    transformers says which batches have graphs: see `use_cuda_graph` of its
    `ContinuousBatchingConfig`. Each is captured at its first batch, or as `max_graphs=` and
    `graph_bytes=` of `GraphOptions` allow. `graphs_of(model).report()` counts batches. A model has
    these graphs or those of `with_graphs()`: the later call takes the others off.

    Raises `UnsupportedHostError` for a transformers that was not tested, `InvalidOptionError` for a
    model without `generate_batch`, and `CaptureError` for one that graphs cannot stand for.
    """
    check_transformers(batches=True)
    check_kind("options", options, GraphOptions)
    target = _target(model, "with_batch_graphs")
    without_graphs(target)
    if not hasattr(target, "init_continuous_batching"):
        raise InvalidOptionError(
            "with_batch_graphs() serves models with generate_batch()",
            got=type(target).__name__,
            expected="a model that generates",
            advice="with_graphs(model, max_batch=4, max_len=64) serves encoders",
        )
    from graphrt.hosts.transformers.batches import BatchGraphs

    graphs = BatchGraphs(target, options or GraphOptions())
    graphs.capture(strict=True)
    graphs.install()
    target.__dict__[_ATTRIBUTE] = graphs
    return model


def without_graphs(model: Model) -> Model:
    """Give a model its own methods back, and the memory of its graphs to the device."""
    graphs = _target(model, "without_graphs").__dict__.pop(_ATTRIBUTE, None)
    if graphs is not None:
        graphs.uninstall()
    return model


def masks_on_device(model: Model) -> Model:
    """Let a model with the attention `sdpa` make its masks on the device alone; returns the model.

    For graphs of its `forward` (`graphed`, `GraphRunner`): an `attention_mask` that hides nothing
    is left out by transformers, which reads it on the host for that. Results stay, up to rounding.
    `with_graphs` needs it not.

    Raises `UnsupportedHostError` for a transformers that was not tested, and `InvalidOptionError`
    for another attention.
    """
    check_transformers()
    target = _target(model, "masks_on_device")
    from graphrt.hosts.transformers.attention import keep_masks

    keep_masks(target)
    return model


def graphs_of(model: Any) -> Any:
    """The graphs of a model that `with_graphs` was called with, `ModelGraphs` or `EncoderGraphs`,
    or `with_batch_graphs`, `BatchGraphs`; raises `InvalidOptionError` for any other."""
    target = _target(model, "graphs_of")
    graphs: ModelGraphs | EncoderGraphs | BatchGraphs | None = target.__dict__.get(_ATTRIBUTE)
    if graphs is None:
        raise InvalidOptionError(
            "the model has no graphs",
            got=type(model).__name__,
            expected="a model that with_graphs() has returned",
            advice="with_graphs(model, max_batch=4, max_len=512)",
        )
    return graphs


def _target(model: Any, caller: str = "with_graphs") -> Any:
    """The model of transformers that `caller` was given; of a PEFT model the one below its
    adapters."""
    target = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(target, "main_input_name") or not hasattr(target, "config"):
        raise InvalidOptionError(
            f"{caller}() takes a model of transformers",
            got=type(model).__name__,
            expected="a PreTrainedModel, or a PEFT model over one",
            advice="AutoModelForCausalLM.from_pretrained(...)",
        )
    return target


def _compile_options(compile: bool | CompileOptions) -> CompileOptions | None:
    if isinstance(compile, CompileOptions):
        return compile
    if not isinstance(compile, bool):
        raise InvalidOptionError(
            "compile= has a wrong value",
            got=shown(compile),
            expected="True, False, or CompileOptions",
            advice='compile=CompileOptions(backend="inductor")',
        )
    return CompileOptions(backend="inductor") if compile else None


def _checked_sizes(sizes: Iterable[int], max_batch: int) -> list[int]:
    """Row counts that have graphs, ascending: the memory has rows for `max_batch`."""
    default = "sizes=None for 1, 2, 4, ... max_batch"
    listed = items_of("sizes", sizes, "[1, 2, 4]", InvalidOptionError, empty=default)
    checked = check_sizes(sorted(positive("a capture size", each) for each in listed))
    if checked[-1] > max_batch:
        raise InvalidOptionError(
            "sizes has more rows than max_batch",
            got=f"sizes={shown([*checked])}, max_batch={max_batch}",
            expected=f"sizes of at most {max_batch}",
            advice=f"max_batch={checked[-1]}",
        )
    return [*checked]


def _doubling(least: int, most: int) -> list[int]:
    """`least`, twice that, and so on below `most`; and `most`."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]
