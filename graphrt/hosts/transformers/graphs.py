"""`ModelGraphs`: the seam between a model that generates and its graphs.

1. Three methods of the model are replaced on the instance: `forward`, `generate` and
   `_prepare_cache_for_generation`.
2. `generate` takes the lease of the memory: one call at a time has it, others run as before. The
   cache that it prepares is then a `KeptCache` over the memory.
3. `forward` recognises a step of one token a row with that cache, and replays a graph. All else,
   prompts included, goes to transformers' own forward.

What is not served says why: once in the log, and with a count in `report()`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from graphrt import Reason
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import shown
from graphrt.errors import InvalidInputError
from graphrt.hosts.transformers.caches import Kept, KeptCache, KeptPair
from graphrt.hosts.transformers.changes import TOKEN_IDS
from graphrt.hosts.transformers.reports import ModelReport
from graphrt.hosts.transformers.seam import NO_GRAPHS, Seam
from graphrt.hosts.transformers.signature import Signature
from graphrt.hosts.transformers.steps import StepGraphs


class ModelGraphs(Seam):
    """Serves a model's decode steps by graphs; `with_graphs` makes it, `graphs_of` finds it."""

    _UNREAD = TOKEN_IDS | {"use_cache"}

    def __init__(self, model: Any, max_batch: int, max_len: int, **arguments: Any) -> None:
        """`arguments` are those of `StepGraphs`."""
        super().__init__(model)
        self.max_batch, self.max_len = max_batch, max_len
        self._arguments = arguments
        # The model's own methods.
        self._generate: Callable[..., Any] = model.generate
        self._prepare: Callable[..., Any] = model._prepare_cache_for_generation
        self._signature = Signature(model, self._forward)
        # Held by the one call of `generate` that may have the memory.
        self._lease = threading.Lock()
        self._calls = _Calls()
        # A weak reference to the cache that is in the memory.
        self._holder: Callable[[], KeptCache | KeptPair | None] = _nobody
        # The sequences of `prefill` and `step`.
        self._loop: _Loop | None = None

    def _methods(self) -> dict[str, Callable[..., Any]]:
        return {
            "forward": self._dispatch,
            "generate": self._generate_leased,
            "_prepare_cache_for_generation": self._prepare_cache,
        }

    @property
    def steps(self) -> StepGraphs | None:
        """The graphs of the model's adapters; None without graphs."""
        return None if self._captured is None else self._captured.graphs

    def _capture(self, beside: StepGraphs | None) -> StepGraphs:
        self._take_over(None)
        # On some devices experts decode with other kernels, which `generate` selects by this.
        with self.model._optimize_model_for_decode():
            make = partial(
                StepGraphs,
                self._signature,
                self._forward,
                max_batch=self.max_batch,
                max_len=self.max_len,
                **self._arguments,
            )
            if beside is not None:
                return make(window=beside.memory.window, checked=beside.checked, beside=beside)
            window, checked = self._signature.window(self.max_len), self._signature.checked()
            try:
                return make(window=window, checked=checked)
            except Exception as error:
                # A model that makes its masks itself may be captured without ring and checks.
                if window is None and not checked:
                    raise
                what = "checks tokens eagerly" if checked else "keeps all positions where it slides"
                logger.warning("%s %s: %s", type(self.model).__name__, what, error)
                return make(window=None, checked=0)

    def _release(self) -> None:
        self._take_over(None)
        pool = None if self.steps is None else self.steps.pool
        super()._release()
        if pool is not None:
            pool.close()

    # The memory -----------------------------------------------------------------------------------

    def new_cache(self) -> Any:
        """A cache for `generate(past_key_values=...)` or a loop over the model, which graphs serve;
        while another call of `generate` has the memory, one that they do not."""
        with self._using:
            self._look_unless_generating(captures=True)
            if self.steps is None or self._changed is not None:
                return self._signature.new_cache()
            is_free = self._calls.has_lease() or not self._lease.locked()
            cache = self.steps.new_cache(attached=is_free)
            if is_free:
                self._take_over(cache)
            return cache

    def _take_over(self, cache: KeptCache | KeptPair | None) -> None:
        """Give the memory to another cache; the one that has it copies its tensors out first."""
        holder = self._holder()
        if holder is not None:
            holder.detach()
        self._holder = _nobody if cache is None else weakref.ref(cache)
        if self.steps is not None:
            self.steps.clear()

    # generate -------------------------------------------------------------------------------------

    def _generate_leased(self, *args: Any, **kwargs: Any) -> Any:
        leased = self.steps is not None and self._lease.acquire(blocking=False)
        call = _Call(leased, None if leased else self._why_no_lease())
        self._calls.stack.append(call)
        try:
            if leased:
                self._look_at_model(captures=True)
            return self._generate(*args, **kwargs)
        finally:
            self._calls.stack.pop()
            if leased:
                self._lease.release()

    def _why_no_lease(self) -> str:
        return NO_GRAPHS if self.steps is None else "another call of generate() has the memory"

    def _prepare_cache(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """In place of the method by which `generate` makes its cache."""
        name = self._signature.cache
        cache, call = model_kwargs.get(name), self._calls.current()
        if call is not None and call.leased:
            if isinstance(cache, Kept) and not cache.attached:
                with self._using:
                    if self.steps is not None and self.steps.owns(cache):
                        self._take_over(cache)
                        cache.attach()
            elif cache is None and generation_config.use_cache is not False:
                call.reason = self._why_no_cache(generation_config, batch_size)
                if call.reason is None:
                    model_kwargs[name] = self.new_cache()
                    if generation_config.is_assistant:
                        model_kwargs[name].activate_past_recording()
                    return None
        return self._prepare(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _why_no_cache(self, config: Any, batch_size: int) -> str | None:
        rows = batch_size * max(config.num_beams, config.num_return_sequences)
        kind = config.cache_implementation
        # Some checkpoints ask for a cache of fixed size, which ours is.
        has_fixed_size = kind in ALL_STATIC_CACHE_IMPLEMENTATIONS and "offloaded" not in kind
        if kind not in (None, "dynamic") and not has_fixed_size:
            return f"cache_implementation={kind!r} was asked for"
        if rows > self.max_batch:
            return f"{rows} rows are above max_batch={self.max_batch}"
        return self._why_other_model()

    # forward --------------------------------------------------------------------------------------

    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's forward: a step by a graph, or the model's own forward, with the
        reason counted if the call was a step."""
        signature, counts = self._signature, self._counts
        call = signature.named(args, kwargs)
        cache, tokens = call.get(signature.cache), call.get(signature.tokens)
        has_rows = isinstance(tokens, torch.Tensor) and tokens.dim() == 2
        count = tokens.shape[1] if tokens is not None and has_rows else 0
        is_step = count == 1
        if not isinstance(cache, Kept):
            self._note_foreign(cache, is_step)
            return self._forward(*args, **kwargs)
        with self._using:
            may_be_served = is_step or self._is_check(count, cache)
            if may_be_served:
                self._look_unless_generating()
            steps, reason = self.steps, self._why_eager(call, cache, may_be_served)
            if reason is None and steps is not None:
                logits, dispatch = steps.replay(call, cache)
                if dispatch is None or dispatch.reason is Reason.HIT:
                    counts.served += 1
                else:
                    counts.note(f"graphrt says {dispatch.reason.name}")
                return steps.output(call, logits, cache)
            # One token for a cache in the memory without rows is a prompt of one token.
            if is_step and (cache.rows or not cache.attached):
                counts.note(reason or NO_GRAPHS)
            else:
                counts.prompts += 1
            return self._forward(*args, **kwargs)

    def _is_check(self, count: int, cache: Any) -> bool:
        """Whether a graph serves `count` tokens of one row, as assisted generation checks them."""
        steps = self.steps
        if steps is None or not 1 < count <= steps.checked or cache.rows != 1:
            return False
        # The graph always writes `checked` positions, so there must be room for them.
        return bool(0 < cache.seen <= self.max_len - steps.checked)

    def _why_eager(self, call: Mapping[str, Any], cache: Any, may_be_served: bool) -> str | None:
        """Why a forward with a cache of ours is no step of a graph; None if it is one."""
        if not may_be_served:
            return "more than one token a row"
        reason = self._why_other_cache(call, cache) or self._why_other_model()
        if reason is not None:
            return reason
        if call.get("use_cache") is False or call.get("return_dict") is False:
            return "use_cache=False or return_dict=False was passed"
        return self._why_other_inputs(call, cache) or self._why_other_arguments(call, cache)

    def _why_other_cache(self, call: Mapping[str, Any], cache: Any) -> str | None:
        if self.steps is None:
            return NO_GRAPHS
        if not self.steps.owns(cache):
            return "the cache is of other graphs than the model's"
        if not cache.attached:
            return str(cache.why_left)
        if cache.seen >= self.max_len:
            return f"the sequence is longer than {self.max_len} tokens"
        if call[self._signature.tokens].shape[0] != cache.rows:
            return "other rows than the prompt's"
        return None

    def _why_other_inputs(self, call: Mapping[str, Any], cache: Any) -> str | None:
        signature, rows = self._signature, cache.rows
        count = call[signature.tokens].shape[1]
        mask = None if signature.mask is None else call.get(signature.mask)
        expected = None if cache.counted is None else (rows, cache.seen + count)
        if mask is not None and tuple(mask.shape) != expected:
            return f"{signature.mask}= is not of the shape (rows, tokens so far and these)"
        if signature.positions is not None:
            positions = call.get(signature.positions)
            if positions is None:
                if self.steps is None or not self.steps.counts_positions:
                    return f"{signature.positions}= was not passed"
            elif not _are_of(positions, signature.planes, rows, count):
                planes = "" if signature.planes is None else f"{signature.planes}, "
                return f"{signature.positions}= is not of the shape ({planes}rows, {count})"
        for name in (signature.tokens, signature.positions):
            value = None if name is None else call.get(name)
            if value is not None and value.dtype != torch.int64:
                return f"{name}= of {value.dtype} was passed"
        return None

    def _why_other_arguments(self, call: Mapping[str, Any], cache: Any) -> str | None:
        served = self._signature.served if self.steps is None else self.steps.known
        for name, value in call.items():
            if name in served or value is None or value is False:
                continue
            if name != "logits_to_keep" or not isinstance(value, int):
                return f"{name}= was passed"
        if self.steps is not None and not self.steps.serves_encoder(call, cache):
            return "the encoder's inputs have another length than graphs were captured for"
        return None

    def _look_unless_generating(self, *, captures: bool = False) -> None:
        """Look at the model in every step of a user's own loop. `generate` looks at its beginning;
        a loop has none, and the model may change between any two steps."""
        if self._calls.current() is None:
            self._look_at_model(captures=captures)

    def _note_foreign(self, cache: Any, is_step: bool) -> None:
        """Count a forward without a cache of ours."""
        if is_step and cache is not None and _is_filled(cache):
            self._counts.note(*self._why_foreign(cache))
        else:
            self._counts.prompts += 1

    def _why_foreign(self, cache: Any) -> tuple[str, str]:
        call = self._calls.current()
        if self.steps is None:
            return NO_GRAPHS, ""
        if call is not None and call.reason is not None:
            return call.reason, ""
        if self._changed is not None:
            return str(self._why_other_model()), ""
        name = self._signature.cache
        return (
            f"a {type(cache).__name__} was passed as {name}=",
            f"leave {name}= out, or pass graphs_of(model).new_cache()",
        )

    # Loops of one's own ---------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Begin sequences with prompts `(rows, length)`, padded on the left where the mask is 0;
        returns the logits `(rows, vocabulary)` of their next tokens. A model beside an encoder,
        and a mask of another kind, raise `InvalidInputError`."""
        if self._signature.has_encoder:
            raise InvalidInputError(
                "prefill() is for decoders alone",
                got=type(self.model).__name__,
                expected="a model without an encoder",
                advice="model.generate(...)",
            )
        mask = _checked_mask(_checked_prompts(input_ids), attention_mask)
        self._loop = loop = _Loop(self.new_cache(), mask)
        return self._next_logits(input_ids, loop, mask)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Go on with one token `(rows,)` of each sequence; returns the logits
        `(rows, vocabulary)` of the next ones. Raises `InvalidInputError` before `prefill`, and for
        other tokens."""
        loop = self._loop
        if loop is None:
            raise InvalidInputError(
                "step() was called before prefill()",
                got="no sequence",
                expected="prefill(input_ids) before",
                advice="logits = graphs.prefill(input_ids)",
            )
        rows = len(loop.mask)
        if not _is_ids(tokens) or tokens.shape != (rows,):
            raise InvalidInputError(
                "step() takes one token of each sequence",
                got=_kind_of(tokens),
                expected=f"a tensor of torch.int64 of the shape ({rows},)",
                advice="graphs.step(logits.argmax(-1))",
            )
        mask = torch.cat([loop.mask, loop.mask.new_ones((rows, 1))], 1)
        logits = self._next_logits(tokens[:, None], loop, mask)
        # After the step: one that fails may be tried again.
        loop.mask = mask
        return logits

    def reset(self) -> None:
        """Forget the sequences of `prefill` and `step`."""
        self._loop = None

    def _next_logits(self, tokens: torch.Tensor, loop: _Loop, mask: torch.Tensor) -> torch.Tensor:
        signature = self._signature
        has_keys = not isinstance(loop.cache, KeptCache) or loop.cache.counted is not None
        masked = has_keys or tokens.shape[1] > 1
        call = signature.call(tokens, mask, None, loop.cache, masked=masked)
        logits: torch.Tensor = self.model(**call).logits[:, -1]
        return logits

    def report(self) -> ModelReport:
        """How steps ran since `with_graphs()`."""
        counts, steps = self._counts, self.steps
        runner = None if steps is None else steps.runner.report()
        window = None if steps is None else steps.memory.window
        eager = dict(counts.eager)
        return ModelReport(counts.served, eager, counts.prompts, self._refused, runner, window)


class _Call:
    """One call of `generate`: whether it has the lease, and if not, why steps are eager."""

    def __init__(self, leased: bool, reason: str | None) -> None:
        self.leased, self.reason = leased, reason


class _Calls(threading.local):
    """The calls of `generate` under way in a thread. The last of `stack` is the innermost: code
    that `generate` runs may call it again."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []

    def current(self) -> _Call | None:
        return self.stack[-1] if self.stack else None

    def has_lease(self) -> bool:
        return bool(self.stack) and self.stack[-1].leased


class _Loop:
    """The cache and the mask of the sequences of `prefill` and `step`."""

    def __init__(self, cache: Any, mask: torch.Tensor) -> None:
        self.cache, self.mask = cache, mask


def _checked_prompts(tokens: torch.Tensor) -> torch.Tensor:
    if not _is_ids(tokens, torch.int32) or tokens.dim() != 2 or tokens.numel() == 0:
        raise InvalidInputError(
            "prefill() takes prompts (rows, length)",
            got=_kind_of(tokens),
            expected="a tensor of torch.int64 of two dimensions, neither of them 0",
            advice='tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")',
        )
    return tokens


def _checked_mask(tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of prompts, as 0 and 1 of int64."""
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.int64)
    if not isinstance(mask, torch.Tensor) or mask.shape != tokens.shape:
        raise InvalidInputError(
            "attention_mask has not the shape of the prompts",
            got=_kind_of(mask),
            expected=f"a tensor of the shape {tuple(tokens.shape)}",
            advice="pass what the tokenizer gives",
        )
    # The next token's logits are those of the last column, so padding must not be there.
    is_binary = mask.eq(0).logical_or(mask.eq(1)).all(-1)
    wrong = is_binary.logical_not().logical_or(mask[:, -1].eq(0)).tolist()
    if any(wrong):
        raise InvalidInputError(
            "attention_mask has padding that is not on the left",
            got=f"row {wrong.index(True)}: {shown(mask[wrong.index(True)].tolist())}",
            expected="0 for padding, and then 1 up to the last token",
            advice='padding_side="left" of the tokenizer',
        )
    return mask.to(torch.int64)


def _is_ids(tokens: object, *other_dtypes: torch.dtype) -> bool:
    return isinstance(tokens, torch.Tensor) and tokens.dtype in (torch.int64, *other_dtypes)


def _kind_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} of the shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _are_of(positions: torch.Tensor, planes: int | None, rows: int, count: int) -> bool:
    """Whether positions are those of a step: in planes if the model has some, of all rows or one
    for all."""
    shape = tuple(positions.shape)
    if planes is not None:
        if len(shape) != 3 or shape[0] not in (planes, 1):
            return False
        shape = shape[1:]
    return shape in ((rows, count), (1, count))


def _nobody() -> None:
    return None


def _is_filled(cache: Any) -> bool:
    """Whether a cache of transformers holds tokens: else its forward is of a prompt."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    return any(getattr(layer, "keys", None) is not None or _has_state(layer) for layer in layers)


def _has_state(layer: Any) -> bool:
    return any(getattr(layer, "has_previous_state", {}).values())
