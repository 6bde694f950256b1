"""`StepGraphs`: the captured steps of one model, over memory of its own.

1. A short eager run shows what the model keeps of its past; `Memory` has that for `max_batch` rows
   of `max_len` tokens, or of a `window` of them where layers slide.
2. A step of one token a row is captured for each size. Its cache is made of views of the memory in
   each run; which rows and which position it writes are inputs. So is a step of one row's `checked`
   tokens, for assisted generation; fewer are padded, and the next step overwrites the padding.
3. graphrt tries the graphs on a sequence (`Host(example=)`), and `_compare` compares some steps
   with transformers' own cache and masks: that is what graphrt cannot know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import EncoderDecoderCache

import graphrt
from graphrt import (
    Batch,
    CompileOptions,
    Dispatch,
    Example,
    GraphOptions,
    GraphPool,
    GraphRunner,
    Host,
    InputSpec,
)
from graphrt.errors import CaptureError, VerificationError
from graphrt.hosts.transformers.attention import attention_of, grouped
from graphrt.hosts.transformers.caches import CrossCache, KeptCache, KeptPair, StepCache
from graphrt.hosts.transformers.memory import Memory, first_rows, shapes_of
from graphrt.hosts.transformers.signature import (
    DELTAS,
    GRIDS,
    TYPES_OF_TOKENS,
    Encoded,
    Signature,
    advice_for_outputs,
)

_PROMPT = 6
"""Tokens of the prompt that graphs are captured and tried after."""

CLOSE = {torch.float32: 1e-2, torch.float64: 1e-6, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""How far logits may be from transformers' own, over their norm: other kernels round otherwise
(on a GPU by TF32 too), a wrong mask or position gives other logits altogether."""


class StepGraphs:
    """Captures and replays the decode steps of one model, and makes the caches for them."""

    def __init__(
        self,
        signature: Signature,
        forward: Callable[..., Any],
        *,
        max_batch: int,
        max_len: int,
        max_encoder_len: int,
        window: int | None,
        checked: int,
        sizes: Sequence[int],
        options: GraphOptions,
        compile: CompileOptions | None,
        beside: StepGraphs | None = None,
    ) -> None:
        """Captures, `beside` graphs of other adapters in their memory; raises what capturing
        raises, and `VerificationError` if steps do not give what transformers' own give."""
        self.signature, self._forward = signature, forward
        self._max_batch, self._max_len = max_batch, max_len
        device = signature.model.device
        tokens = self._random_tokens(max_batch, _PROMPT)
        encoder_len = min(_PROMPT, max_encoder_len)
        encoded = signature.encode(max_batch, encoder_len, tokens)
        probe_cache = signature.new_cache()
        probe = self._run(tokens[:1, :2], None, _rows_of(encoded, 1), probe_cache)
        # The class of the forward's output, and whether it has `DELTAS`.
        self._output = _output_of(probe, signature)
        self._has_deltas = signature.planes is not None and hasattr(probe, DELTAS)
        if beside is None:
            shapes = shapes_of(_decoder(probe_cache))
            self.memory = Memory(shapes, max_batch, max_len, device, window)
            self.cross = self._cross_memory(probe_cache, encoded, max_encoder_len)
            self.pool = GraphPool(device.type, device=device)
        else:
            self.memory, self.cross, self.pool = beside.memory, beside.cross, beside.pool
        """`cross`: keys and values of an encoder's outputs; None without an encoder."""
        # On the host: a runner copies them to its graphs.
        self._row_numbers = torch.arange(max_batch, device="cpu")
        self._position_numbers = torch.arange(max_len, device="cpu")
        # The batch of a step by its rows.
        self._batches = [Batch(max(rows, 1)) for rows in range(max_batch + 1)]
        self._takes_positions = signature.positions is not None
        self.checked = checked if self._can_check(checked) else 0
        """Tokens of a step that checks drafts of assisted generation; 0: such steps run eagerly."""
        self.counts_positions = False
        """Whether the model, given no positions, counts all earlier tokens, padding too."""
        self.known = signature.served
        """Arguments that a graph takes, or that the model reads in prompts alone."""
        # The config for `grouped`; None if the model's attention stays as it is.
        self._attention = attention_of(signature.model)
        self._runners: dict[int, GraphRunner[torch.Tensor]] = {}  # by tokens of a row
        try:
            for count in (1, self.checked) if self.checked else (1,):
                step = _Step(signature, forward, self.memory, self.cross, encoded, count)
                if compile is not None:
                    batched = [name for name in self._inputs(count) if name != "length"]
                    graphrt.compile(step, dynamic_dims=batched, options=compile)
                rows, axes = sizes if count == 1 else [1], ("tokens", count, probe.logits.shape[-1])
                self._runners[count] = self._runner(step, count, rows, axes, options)
            self._capture(tokens, encoded)
        except BaseException:
            self.close()
            if beside is None:
                self.pool.close()
            raise

    def _cross_memory(self, cache: Any, encoded: Encoded | None, most: int) -> Memory | None:
        if encoded is None:
            return None
        length = most if self.signature.masks_encoder else encoded.length
        shapes = shapes_of(cache.cross_attention_cache)
        return Memory(shapes, self._max_batch, length, self.signature.model.device)

    def _can_check(self, tokens: int) -> bool:
        """Whether steps may check drafts of so many tokens: there is room for them, and the model
        can take back what is rejected, which one with states cannot."""
        has_states = any(layer.states() for layer in self.memory.layers)
        has_room = _PROMPT + tokens <= self._max_len
        return self.memory.has_keys and has_room and not has_states

    @property
    def runner(self) -> GraphRunner[torch.Tensor]:
        """The graphs of one token a row."""
        return self._runners[1]

    def _runner(
        self,
        step: _Step,
        count: int,
        sizes: Sequence[int],
        outputs: tuple[str, int, int],
        options: GraphOptions,
    ) -> GraphRunner[torch.Tensor]:
        attention = self._attention if count == 1 else None
        return GraphRunner(
            step if attention is None else _Grouped(step, attention),
            inputs=self._inputs(count),
            outputs=outputs,
            mode="FULL",
            sizes=sizes,
            host=Host(example=partial(self._example, count)),
            options=options,
            pool=self.pool,
        )

    def _inputs(self, count: int) -> dict[str, InputSpec]:
        inputs = {"tokens": InputSpec(torch.int64, ("tokens", count))}
        if self.signature.positions is not None:
            planes = self.signature.planes
            shape = ("tokens", count) if planes is None else ("tokens", count, planes)
            inputs["positions"] = InputSpec(torch.int64, shape)
        # Padding writes the memory's last row, which no sequence has.
        inputs["rows"] = InputSpec(torch.int64, ("tokens",), pad=self._max_batch, index=True)
        inputs["length"] = InputSpec(torch.int64, (1,))
        return inputs

    # Capturing ------------------------------------------------------------------------------------

    def _capture(self, tokens: torch.Tensor, encoded: Encoded | None) -> None:
        mask = torch.ones_like(tokens)
        mask[0, :2] = 0
        # Graphs are tried on sequences, not on zeros.
        cache = self.new_cache()
        self._run(tokens, mask, encoded, cache)
        step_mask = torch.cat([mask, mask[:, -1:]], 1)
        self._set_masks(cache, 1, step_mask, None if encoded is None else encoded.mask)
        for count, runner in self._runners.items():
            # `capture()` checks at its end that the config is as it was when code was compiled.
            with grouped(self._attention if count == 1 else None):
                runner.capture()
        lengths: list[int | None] = [None if encoded is None else encoded.length]
        if self.signature.masks_encoder and self.cross is not None:
            lengths.append(self.cross.length)
        for rows in sorted({self._max_batch, max(self._max_batch - 1, 1)}):
            for length in lengths:
                self._compare(tokens[:rows], mask[:rows], length)
        if self.memory.window is not None:
            self._compare_past(self.memory.window, lengths[0])
        if self.checked:
            self._compare(tokens[:1], mask[:1], None, [max(self.checked - 1, 2)])
        self._probe_arguments(tokens, mask)
        self.clear()

    def _probe_arguments(self, tokens: torch.Tensor, mask: torch.Tensor) -> None:
        """Whether the model counts positions itself, and which arguments no step reads."""
        # Models with planes (M-RoPE) are left out: without positions they use what the last call of
        # `generate` left in the model.
        if self._takes_positions and self.memory.has_keys and self.signature.planes is None:
            counted = torch.full_like(tokens[:, :1], _PROMPT)
            self.counts_positions = all(
                self._are_equal(tokens, each, str(self.signature.positions), None, counted)
                for each in (mask, None)
            )
        types = torch.zeros_like(tokens[:, :1])
        grid = torch.tensor([[1, 2, 2]], device=tokens.device)
        values = dict.fromkeys(TYPES_OF_TOKENS, (types, types + 1))
        if self.signature.planes is not None:
            values |= dict.fromkeys(GRIDS, (grid, 2 * grid))
        self.known |= {
            name
            for name in values.keys() & set(self.signature.names)
            if self._are_equal(tokens, mask, name, None, *values[name])
        }

    def _are_equal(
        self,
        prompt: torch.Tensor,
        mask: torch.Tensor | None,
        name: str,
        *values: torch.Tensor | None,
    ) -> bool:
        """Whether the model's own step after a prompt has one result for all values of an argument.

        Models differ: positions count the padding or leave it out; PaliGemma reads `token_type_ids`
        in prompts alone, others in each step.
        """
        step_mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
        logits = []
        for value in values:
            cache = self.signature.new_cache()
            self._run(prompt, mask, None, cache)
            call = self.signature.call(self._random_tokens(len(prompt), 1), step_mask, None, cache)
            logits.append(self._forward(**{**call, name: value}).logits)
        return all(torch.equal(each, logits[0]) for each in logits)

    def _compare_past(self, window: int, length: int | None) -> None:
        """Compare steps that overwrite the first positions of a window, whose padding they see."""
        prompt = self._random_tokens(1, window + 2)
        mask = torch.ones_like(prompt)
        mask[:, : min(5, window + 1)] = 0
        self._compare(prompt, mask, length)

    def _example(self, count: int, batch: Batch, generator: torch.Generator) -> Example:
        shape = batch.num_tokens, count
        tokens = torch.randint(self._vocabulary, shape, generator=generator, device="cpu")
        positions = torch.arange(_PROMPT, _PROMPT + count, device="cpu")[None]
        return Example(self._values(tokens, positions, _PROMPT))

    def _compare(
        self,
        prompt: torch.Tensor,
        mask: torch.Tensor,
        length: int | None,
        counts: Sequence[int] = (1, 1),
    ) -> None:
        """Raise `VerificationError` unless steps of graphs give what transformers' own give."""
        self.clear()
        ours, theirs = self.new_cache(), self.signature.new_cache()
        encoded = None
        if length is not None:
            encoded = self.signature.encode(len(prompt), length, prompt)
        for cache in (ours, theirs):
            self._run(prompt, mask, encoded, cache)
        for tokens in torch.split(self._random_tokens(len(prompt), sum(counts)), [*counts], 1):
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
            # To a model that has states and no keys (Mamba) `generate` passes no mask in steps.
            masked = self.memory.has_keys
            call = self.signature.call(tokens, mask, encoded, theirs, masked=masked)
            if "logits_to_keep" in call:
                call["logits_to_keep"] = tokens.shape[1]
            got, expected = self.replay(call, ours)[0], self._forward(**call).logits
            error = float((got - expected).float().norm() / expected.float().norm())
            if not error <= CLOSE.get(expected.dtype, 1e-2):
                raise VerificationError(
                    "a step by a graph is not the step that transformers makes with its own cache",
                    got=f"logits of {len(prompt)} rows that differ by {error:.2g} of their norm",
                    expected="the same logits, but for rounding",
                    advice="leave with_graphs() out for this model, and report it",
                )

    def _run(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, encoded: Encoded | None, cache: Any
    ) -> Any:
        """transformers' own forward."""
        return self._forward(**self.signature.call(tokens, mask, encoded, cache))

    def _random_tokens(self, rows: int, length: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(0)
        shape = rows, length
        tokens = torch.randint(self._vocabulary, shape, generator=generator, device="cpu")
        return tokens.to(self.signature.model.device)

    @property
    def _vocabulary(self) -> int:
        return int(self.signature.model.config.get_text_config(decoder=True).vocab_size)

    # Steps ----------------------------------------------------------------------------------------

    def new_cache(self, *, attached: bool = True) -> KeptCache | KeptPair:
        """A cache over the memory, which no other cache may be using; or, not `attached`, one with
        tensors of its own."""
        cache = KeptCache(self.memory, attached=attached)
        if self.cross is None:
            return cache
        return KeptPair(cache, KeptCache(self.cross, attached=attached))

    def owns(self, cache: Any) -> bool:
        """Whether a cache is over this memory: not one of another model, or of an earlier capture,
        or one that was saved to a file."""
        return cache.memory is self.memory

    def clear(self) -> None:
        """Forget the sequence that is in the memory."""
        self.memory.clear()
        if self.cross is not None:
            self.cross.clear()

    def serves_encoder(self, call: Mapping[str, Any], cache: Any) -> bool:
        """Whether the encoder's outputs have a length that graphs were captured for."""
        if self.cross is None:
            return True
        length = cache.cross_attention_cache.seen
        if not self.signature.masks_encoder:
            return bool(length == self.cross.length)
        mask = call.get("attention_mask")
        return mask is None or tuple(mask.shape) == (cache.rows, length)

    def replay(self, call: Mapping[str, Any], cache: Any) -> tuple[torch.Tensor, Dispatch | None]:
        """Run one step by a graph; returns its logits, and how it was dispatched."""
        signature, tokens = self.signature, call[self.signature.tokens]
        count = tokens.shape[1]
        mask = None if signature.mask is None else call.get(signature.mask)
        encoder_mask = call.get("attention_mask") if signature.masks_encoder else None
        self._set_masks(cache, count, mask, encoder_mask)
        positions = None if signature.positions is None else call.get(signature.positions)
        if positions is None:
            positions = self._position_numbers[cache.seen : cache.seen + count][None]
        captured = 1 if count == 1 else self.checked
        runner, padding = self._runners[captured], captured - count
        if padding:
            tokens = pad(tokens, (0, padding))
            positions = pad(positions, (0, padding))
        values = self._values(tokens, positions, cache.seen)
        logits = runner(self._batches[tokens.shape[0]], **values)[:, :count]
        cache.stepped(count)
        keep = call.get("logits_to_keep") or 0
        return logits[:, -keep:].clone(), runner.last_dispatch

    def output(self, call: Mapping[str, Any], logits: torch.Tensor, cache: Any) -> Any:
        """The output of a step, as the model's forward returns it."""
        extra: dict[str, Any] = {}
        if self.signature.has_encoder:
            extra["encoder_last_hidden_state"] = call["encoder_outputs"][0]
        if self._has_deltas:
            extra[DELTAS] = self.signature.model.base_model.rope_deltas
        return self._output(logits=logits, **{self.signature.cache: cache}, **extra)

    def close(self) -> None:
        """Destroy the graphs. Those of other adapters may be in the pool."""
        for runner in self._runners.values():
            runner.close()

    def _set_masks(
        self, cache: Any, count: int, mask: torch.Tensor | None, encoder_mask: torch.Tensor | None
    ) -> None:
        if self.memory.has_keys and self.signature.mask is not None:
            self.memory.set_mask(cache.rows, cache.seen + count, mask)
        if self.cross is not None and self.signature.masks_encoder:
            length = cache.cross_attention_cache.seen
            self.cross.set_mask(cache.rows, length, encoder_mask)

    def _values(
        self, tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> Mapping[str, torch.Tensor]:
        rows = tokens.shape[0]
        values = {
            "tokens": tokens,
            "rows": self._row_numbers[:rows],
            "length": self._position_numbers[length : length + 1],
        }
        if self._takes_positions:
            planes = self.signature.planes
            if planes is None:
                values["positions"] = positions.expand(rows, -1)
            else:
                positions = positions.expand(planes, rows, -1).permute(1, 2, 0)
                values["positions"] = positions.contiguous()
        return values


class _Step(nn.Module):
    """The forward that is captured: tokens `(size, tokens)` to logits `(size, tokens, vocabulary)`.

    It holds what a step needs and no more, because graphrt looks through all of it. It is a module,
    because Inductor's kernels are seen to read the weights of a module alone.
    """

    def __init__(
        self,
        signature: Signature,
        forward: Callable[..., Any],
        memory: Memory,
        cross: Memory | None,
        encoded: Encoded | None,
        count: int,
    ) -> None:
        super().__init__()
        self.training = False
        self.model = signature.model
        # The model's own forward, which `with_graphs` has replaced on the model.
        self._forward = forward
        self._memory, self._cross, self._count = memory, cross, count
        # The model's names of these arguments.
        self._names = signature.tokens, signature.positions, signature.cache
        self._mask_name = signature.mask if memory.has_keys else None
        self._masks_encoder = signature.masks_encoder
        # Beside an encoder this call copies the config, which a trace cannot do.
        self._config = signature.model.config.get_text_config(decoder=True)
        # Arguments that are the same in all steps.
        self._fixed: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "logits_to_keep" in signature.names:
            self._fixed["logits_to_keep"] = count
        if encoded is not None:
            # No step reads their values: the cache of cross-attention has what steps need.
            states = encoded.outputs[0]
            self._no_states = states.new_zeros((1, 1, states.shape[-1]))
            # The class of its own outputs: T5Gemma takes no tuple, NLLB-MoE reads extra attributes.
            self._encoder_output = type(encoded.outputs)

    def forward(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        length: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        memory, cross, size = self._memory, self._cross, rows.shape[0]
        tokens_name, positions_name, cache_name = self._names
        step_cache = StepCache(memory, rows, length, self._count)
        call = {**self._fixed, tokens_name: tokens, cache_name: step_cache}
        if positions is not None and positions_name is not None:
            # A runner pads the first dimension of an input, so planes are its last one.
            call[positions_name] = positions if positions.dim() == 2 else positions.permute(2, 0, 1)
        if self._mask_name is not None:
            call[self._mask_name] = step_cache.mask()
        if cross is not None:
            states = self._no_states.expand(size, cross.length, -1)
            call["encoder_outputs"] = self._encoder_output(last_hidden_state=states)
            call[cache_name] = EncoderDecoderCache(step_cache, CrossCache(cross, size))
            if self._masks_encoder:
                call["attention_mask"] = _encoder_mask(
                    self._config, first_rows(cross.mask, size), states
                )
        logits: torch.Tensor = self._forward(**call).logits
        step_cache.write_back()
        return logits


class _Grouped(nn.Module):
    """A step that attends by groups of heads.

    The config is set around a compiled step, not inside: Dynamo of torch 2.11 reads an attribute of
    a config from the object, and does not see what the traced code has stored.
    """

    def __init__(self, step: _Step, config: Any) -> None:
        super().__init__()
        self.training = False
        self._step, self._config = step, config

    def forward(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        length: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        with grouped(self._config):
            logits: torch.Tensor = self._step(tokens, rows, length, positions)
        return logits


def _decoder(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _rows_of(encoded: Encoded | None, rows: int) -> Encoded | None:
    if encoded is None:
        return None
    mask = None if encoded.mask is None else encoded.mask[:rows]
    outputs = type(encoded.outputs)(last_hidden_state=encoded.outputs[0][:rows])
    return Encoded(outputs, mask)


def _encoder_mask(config: Any, mask: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The mask `(size, 1, 1, length)` of an encoder's inputs: made here, because models read a mask
    of two dimensions on the host."""
    from transformers.masking_utils import create_bidirectional_mask

    encoder_mask: torch.Tensor = create_bidirectional_mask(
        config=config,
        inputs_embeds=states[:, :1],
        attention_mask=mask,
        encoder_hidden_states=states,
        allow_is_bidirectional_skip=False,
    )
    return encoder_mask


def _output_of(probe: Any, signature: Signature) -> Callable[..., Any]:
    """The class of a step's output; raises `CaptureError` where it has more than logits."""
    served = {"logits", signature.cache, "encoder_last_hidden_state"}
    if signature.planes is not None:
        served.add(DELTAS)
    others = sorted(name for name in probe if name not in served)
    if others:
        raise CaptureError(
            "the model's forward returns more than logits and its cache",
            got=", ".join(others),
            expected="logits alone",
            advice=advice_for_outputs(signature.model.config),
        )
    return type(probe)
