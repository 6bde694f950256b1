"""The engine of examples/engine: its tokens are those of loops without graphs, pages and drafts."""

from __future__ import annotations

import ast
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.engine import paged
from examples.engine.__main__ import main
from examples.engine.config import EngineConfig, Sampling
from examples.engine.engine import Engine, accepted, sample
from examples.engine.model import Decoder, DecoderConfig, load, rotations, seeded
from examples.engine.requests import Request, RequestError, Scheduler
from graphrt import Reason
from graphrt.attention import GroupedShape
from tests.draws import rest_long

SHAPE = DecoderConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=48, head_dim=8)
LIMITS = EngineConfig(
    max_num_reqs=3, max_num_tokens=16, max_len=40, page_size=4, num_pages=41, draft_tokens=2
)
PROMPTS = [[7, 1, 200], [3], [90 + n for n in range(21)], [5, 5, 5, 5, 5, 5], [255, 0]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return seeded(SHAPE)


def plain_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits of all tokens of one sequence, without cache, pages, batches and graphs."""
    config = model.config
    rope = rotations(config, len(ids), model.lm_head.weight)
    cos, sin = rope[:, :, None]
    hidden = model.model.embed_tokens(torch.tensor(ids))
    for layer in model.model.layers:
        heads = layer.self_attn.project(layer.input_layernorm(hidden), cos, sin)
        query, key, value = (each.transpose(0, 1) for each in heads)
        groups = config.num_attention_heads // config.num_key_value_heads
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + layer.self_attn.o_proj(attended.transpose(0, 1).flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.logits(model.model.norm(hidden))


@torch.no_grad()
def plain_tokens(model: Decoder, prompt: list[int], sampling: Sampling) -> list[int]:
    """The eager loop: the whole sequence again for every token."""
    request = Request(list(prompt), len(prompt), sampling)
    while not request.done:
        last = plain_logits(model, request.tokens)[-1:]
        request.tokens += sample(last, [(request, len(request.tokens) - 1)])
    return request.generated


@pytest.mark.parametrize(
    ("drafted", "temperature"), rest_long([(0, 0.0), (3, 0.0), (2, 0.1)], (0, 0.0), (2, 0.1))
)
def test_the_engines_tokens_equal_those_of_an_eager_loop(
    model: Decoder, drafted: int, temperature: float
):
    sampling = Sampling(14, temperature, seed=5)
    limits = replace(LIMITS, draft_tokens=drafted)
    draft = model.first_layers(1) if drafted else None
    with Engine(model, limits, draft) as engine:
        generated = engine.generate(PROMPTS, sampling)
        reports = [each.runner.report() for each in (engine.model, engine.draft) if each]
    assert generated == [plain_tokens(model, prompt, sampling) for prompt in PROMPTS]
    # Every step has a graph: prompts too, the draft's among them.
    for report in reports:
        assert {reason for reason, count in report.reasons.items() if count} == {Reason.HIT}
        assert report.reasons[Reason.HIT] > 10
    if drafted:
        # The first layer is no good guess and no bad one: both ways of a proposal were taken.
        assert 0 < engine.accepted < engine.proposed


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("drafted", rest_long([0, 3], 3))
def test_a_prompt_alone_in_a_step_costs_the_engine_no_graph(model: Decoder, drafted: int):
    limits = replace(LIMITS, draft_tokens=drafted)
    draft = model.first_layers(1) if drafted else None
    with Engine(model, limits, draft) as engine:
        for prompts in (PROMPTS, PROMPTS[2:3], PROMPTS[:1], PROMPTS):
            engine.generate(prompts, Sampling(8))
        for each in (engine.model, engine.draft):
            if each is not None:
                trials = each.runner.report().trust.trials
                assert {trial.status for trial in trials} <= {"tried", "untried"}


def test_engine_prompts_run_piecewise_and_decode_steps_run_full(model: Decoder):
    with Engine(model, LIMITS, model.first_layers(1)) as engine:
        engine.submit(PROMPTS[2], Sampling(8))
        modes = []
        while engine.busy:
            engine.step()
            modes.append(engine.model.runner.last_dispatch.mode.name)
    assert modes[:2] == ["PIECEWISE", "PIECEWISE"]
    assert set(modes[2:]) == {"FULL"}


def test_proposals_of_a_draft_equal_to_the_model_are_all_accepted(model: Decoder):
    with Engine(model, replace(LIMITS, mode="NONE"), model) as engine:
        request = engine.submit(PROMPTS[0], Sampling(12))
        while not request.done:
            pages = request.pages or [1]
            engine.step()
            # Its cache has no gap: not the one of a last proposal that was accepted, either.
            for ours, theirs in zip(engine.draft.caches, engine.model.caches, strict=True):
                rows = (each[0][pages].flatten(0, 1)[: request.cached] for each in (ours, theirs))
                torch.testing.assert_close(*rows)
    assert request.generated == plain_tokens(model, PROMPTS[0], Sampling(12))
    assert engine.accepted == engine.proposed > 0


def test_preempted_requests_finish_with_right_tokens_and_free_pages(model: Decoder):
    scarce = replace(LIMITS, num_pages=12)
    sampling = Sampling(16)
    prompts = [prompt[:6] for prompt in PROMPTS]
    with Engine(model, scarce, model.first_layers(1)) as engine:
        assert engine.generate(prompts, sampling) == [
            plain_tokens(model, prompt, sampling) for prompt in prompts
        ]
        assert engine.scheduler.preemptions > 0
        assert sorted(engine.scheduler.free_pages) == list(range(1, 12))


def test_requests_that_join_and_leave_between_steps_get_right_tokens(model: Decoder):
    chosen = random.Random(0)
    waiting = [Sampling(chosen.randint(1, 12)) for _ in PROMPTS * 2]
    with Engine(model, LIMITS, model.first_layers(1)) as engine:
        requests: list[Request] = []
        while engine.busy or waiting:
            if waiting and chosen.random() < 0.5:
                requests.append(engine.submit(chosen.choice(PROMPTS), waiting.pop()))
            elif engine.busy:
                engine.step()
    for request in requests:
        prompt = request.tokens[: request.prompt_len]
        assert request.generated == plain_tokens(model, prompt, request.sampling)


def test_an_accepted_eos_token_ends_a_request_within_proposals(model: Decoder):
    free = plain_tokens(model, PROMPTS[0], Sampling(12))
    eos = free[5]
    with Engine(model, replace(LIMITS, mode="NONE"), model) as engine:
        (tokens,) = engine.generate([PROMPTS[0]], Sampling(12, eos_ids=frozenset({eos})))
    assert tokens == free[: free.index(eos) + 1]


def test_the_engine_gives_equal_tokens_in_every_mode(model: Decoder):
    outputs = []
    for mode in ("PIECEWISE", "FULL_DECODE_ONLY", "NONE"):
        with Engine(model, replace(LIMITS, mode=mode), model.first_layers(1)) as engine:
            outputs.append(engine.generate(PROMPTS, Sampling(9)))
    assert outputs[1:] == outputs[:1] * 2


@pytest.mark.parametrize(
    ("proposed", "sampled", "kept"),
    [
        ([], [4], [4]),
        ([1, 2], [1, 2, 3], [1, 2, 3]),
        ([1, 2], [1, 7, 3], [1, 7]),
        ([1, 2], [7, 2, 3], [7]),
    ],
)
def test_a_proposal_is_accepted_only_after_right_proposals(
    proposed: list[int], sampled: list[int], kept: list[int]
):
    assert accepted(proposed, sampled) == kept


def test_the_scheduler_serves_decode_requests_before_prompts():
    scheduler = Scheduler(LIMITS)
    long = Request([1] * 30, 30, Sampling())
    short = Request([2] * 4, 4, Sampling(), cached=3)
    scheduler.running = [short, long]
    assert scheduler.schedule() == [(short, 3), (long, 13)]


def test_contradictory_engine_limits_are_refused(model: Decoder):
    for wrong in ({"max_num_tokens": 8}, {"num_pages": 6}, {"num_pages": 10}):
        with pytest.raises(ValueError, match="must hold"):
            replace(LIMITS, **wrong)
    with pytest.raises(ValueError, match="go together"):
        Engine(model, LIMITS)
    with pytest.raises(ValueError, match="vocabulary"):
        Engine(model, LIMITS, seeded(replace(SHAPE, vocab_size=128)))


@pytest.mark.parametrize("token", [256, -1, 2**70, 1.5, "a", None, True, False])
def test_a_token_outside_of_the_vocabulary_is_refused_and_other_requests_go_on(
    model: Decoder, token: object
):
    with Engine(model, replace(LIMITS, mode="NONE"), model.first_layers(1)) as engine:
        good = engine.submit(PROMPTS[0], Sampling(6))
        engine.step()
        with pytest.raises(RequestError, match="tokens are 0 to 255"):
            engine.submit([1, token], Sampling(6))
        with pytest.raises(RequestError, match="tokens are 0 to 255"):
            engine.generate([PROMPTS[1], [token]])
        assert not engine.scheduler.waiting
        while engine.busy:
            engine.step()
    assert good.generated == plain_tokens(model, PROMPTS[0], Sampling(6))


@pytest.mark.parametrize(
    "odd",
    [
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"seed": False},
        {"max_tokens": float("nan")},
        {"temperature": None},
        {"temperature": "x"},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"seed": 0.5},
        {"eos_ids": None},
        {"eos_ids": 5},
    ],
)
def test_a_request_with_odd_sampling_is_refused_and_other_requests_go_on(
    model: Decoder, odd: dict[str, object]
):
    with Engine(model, replace(LIMITS, mode="NONE", draft_tokens=0)) as engine:
        good = engine.submit(PROMPTS[0], Sampling(4))
        with pytest.raises(RequestError, match="cannot be served"):
            engine.submit(PROMPTS[1], Sampling(**{"max_tokens": 4, **odd}))
        while engine.busy:
            engine.step()
    assert good.generated == plain_tokens(model, PROMPTS[0], Sampling(4))


def test_a_temperature_next_to_0_gives_the_greedy_tokens(model: Decoder):
    with Engine(model, replace(LIMITS, mode="NONE", draft_tokens=0)) as engine:
        (tokens,) = engine.generate([PROMPTS[0]], Sampling(4, temperature=1e-40))
    assert tokens == plain_tokens(model, PROMPTS[0], Sampling(4))


def test_a_seed_of_any_size_ends_no_step(model: Decoder):
    sampling = Sampling(3, temperature=1.0, seed=2**70)
    with Engine(model, replace(LIMITS, mode="NONE", draft_tokens=0)) as engine:
        (tokens,) = engine.generate([PROMPTS[0]], sampling)
    assert tokens == plain_tokens(model, PROMPTS[0], sampling)


def test_the_engine_tries_its_graphs_at_capture_and_no_served_step(model: Decoder):
    with Engine(model, LIMITS, model.first_layers(1)) as engine:
        runners = [each.runner for each in (engine.model, engine.draft)]

        def tried() -> int:
            trials = (trial for each in runners for trial in each.report().trust.trials)
            return sum(trial.steps for trial in trials)

        before = tried()
        # Token 0 is the padding of tokens.
        engine.generate([[0, 0, 0], [0], *PROMPTS], Sampling(6))
        assert tried() == before > 0


WITHOUT_TRITON = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
"""


def without_triton(code: str) -> subprocess.CompletedProcess[str]:
    """Run code where Triton is not installed, on a CPU."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON + code],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "GRAPHRT_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
    )


def test_the_engine_command_runs_without_triton_and_prints_no_warning():
    done = without_triton(
        "from examples.engine.__main__ import main; "
        "code = main(['--max-tokens', '3', 'Hi']); assert 'triton' not in sys.modules; "
        "sys.exit(code)"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n3 of 3 tokens are those without graphs\n" in done.stdout


def test_the_tutorial_of_the_engine_runs_without_triton():
    page = (Path(__file__).parent.parent / "docs/tutorial/engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    done = without_triton("".join(blocks))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "FULL_AND_PIECEWISE\n"


def test_the_classifier_example_replays_batches_up_to_its_largest_size(
    capsys: pytest.CaptureFixture[str],
):
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "classifier.py"))
    lines = capsys.readouterr().out.splitlines()
    reasons = [tuple(line.split(maxsplit=2)[:2]) for line in lines]
    assert reasons == [("1", "HIT"), ("3", "HIT"), ("16", "HIT"), ("20", "TOO_LARGE")]


def test_the_engine_command_prints_how_many_tokens_equal_eager(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GRAPHRT_PLATFORM", "cpu")
    assert main(["--max-tokens", "6", "Hi", "Ho"]) == 0
    assert "\n12 of 12 tokens are those without graphs\n" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted")
def test_the_engines_gpu_attention_gives_eager_tokens(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from graphrt.attention import TritonAttention

    def interpreted(heads: GroupedShape) -> TritonAttention:
        return TritonAttention(
            heads, max_num_reqs=2, max_query_len=3, dtype=torch.float32, device="cpu"
        )

    monkeypatch.setattr(paged, "SdpaAttention", interpreted)
    with Engine(model, replace(LIMITS, max_num_reqs=2), model.first_layers(1)) as engine:
        generated = engine.generate(PROMPTS[:2], Sampling(5))
    assert generated == [plain_tokens(model, prompt, Sampling(5)) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("kind", rest_long(["llama", "qwen3"], "qwen3"))
def test_the_engine_with_a_checkpoint_gives_the_tokens_of_transformers(kind: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="it writes the checkpoint")
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=kind == "qwen3",
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path, torch.float32)
    with Engine(ours, LIMITS, ours.first_layers(1)) as engine:
        (tokens,) = engine.generate([PROMPTS[0]], Sampling(12))
    prompt = torch.tensor([PROMPTS[0]])
    expected = theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert tokens == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_engine_step_equals_the_padded_eager_step(
    device: str, monkeypatch: pytest.MonkeyPatch
):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    monkeypatch.setenv("GRAPHRT_CHECK", "always")
    model = seeded(SHAPE).to(device)
    with Engine(model, LIMITS, model.first_layers(1)) as engine:
        generated = engine.generate(PROMPTS[:3], Sampling(4))
        served = {r: n for r, n in engine.model.runner.report().reasons.items() if n}
    assert [len(tokens) for tokens in generated] == [4, 4, 4]
    assert served.keys() == {Reason.HIT} and served[Reason.HIT] > 3


def test_the_engine_has_as_few_lines_of_graphrt_as_the_readme_says():
    """Statements that use a name of graphrt, or the runner."""
    source = Path(paged.__file__).read_text(encoding="utf-8")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (most,) = re.findall(r"under (\d+) for the \[engine\]", readme)
    tree = ast.parse(source)
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphrt")
    ]
    names = {alias.name for node in imports for alias in node.names}
    lines = {line for node in imports for line in range(node.lineno, node.end_lineno + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return):
            used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            if used & names or "self.runner" in ast.unparse(node):
                lines |= {*range(node.lineno, node.end_lineno + 1)}
    assert 20 < len(lines) < int(most)
