"""Facts, conditions on facts, and the level of a backend that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.core.batch.modes import AttentionSupport


@dataclass(frozen=True)
class Fact:
    """Something that a level may depend on; a number is counted from 1."""

    name: str
    default: bool | int
    meaning: str


@dataclass(frozen=True)
class Condition:
    """A fact that is `value`, or at least `value` if it is a number."""

    fact: str
    value: bool | int = True

    def holds(self, facts: dict[str, bool | int]) -> bool:
        """Whether `facts`, which has every fact, fulfils the condition."""
        if isinstance(self.value, bool):
            return facts[self.fact] is self.value
        return facts[self.fact] >= self.value

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return self.fact if self.value else f"not {self.fact}"
        return f"{self.fact} >= {self.value}"


@dataclass(frozen=True)
class Level:
    """A support, the conditions that must all hold for it, and why it is that one.

    A `conservative` level is lower than the kernels may allow, by choice or as it is unchecked.
    """

    support: AttentionSupport
    why: str
    when: tuple[Condition, ...] = ()
    conservative: bool = False


@dataclass(frozen=True)
class KnownBackend:
    """A backend of an engine: the first of `levels` whose conditions hold counts.

    The last level has no conditions. `source` is the engine that was read. With `task_update`, its
    kernels take lengths as host arguments: a FULL graph needs them declared as updatable tasks.
    """

    name: str
    levels: tuple[Level, ...]
    source: str
    aliases: tuple[str, ...] = ()
    task_update: bool = False


FACTS = (
    Fact("causal", True, "every query sees its own position and those before it, no later one"),
    Fact("decode_context_parallel", 1, "how many ranks share the KV cache of a decode request"),
    Fact("fa2_kernels", False, "FlashInfer decodes with FA2, as it does before Hopper"),
    Fact("flattened_queries", False, "the indexer flattens a query into rows of one token"),
    Fact("speculative", False, "decode verifies draft tokens"),
    Fact("static_cache", False, "keys are one buffer of fixed length, masked by a tensor"),
    Fact("trtllm_kernels", False, "TRT-LLM kernels decode every attention layer"),
    Fact("unclamped_window", False, "image masks also lift the bound of a sliding window"),
    Fact("varlen_kernels", False, "the indexer's logits kernel takes any mix of query lengths"),
    Fact("xqa_kernels", False, "XQA kernels decode every layer, as they do on SM90 and SM12x"),
)
