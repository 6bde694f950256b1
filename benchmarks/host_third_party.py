"""Programs of others on tiny random checkpoints, as they are and with the one line
`with_graphs(model, ...)`: the same answers, and how many of their steps are replays.

    python3 -m benchmarks.host_third_party --site FOLDER [--json FILE]

The folder holds what pip put there: lm_eval, sentence_transformers, fschat, without their own torch
(`pip install --no-deps --target FOLDER ...`). What is not there is left out, with a line that says
so. "apart" is the largest difference of a number that the program gives (log-likelihoods,
embeddings, logits); texts are compared whole.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, show
from graphrt.hosts.transformers import graphs_of, with_graphs

TEXTS = ["Hello there, my friend", "a", "What is 2+2? Answer:", "The quick brown fox", "xyz xyz"]
ROWS, LENGTH, NEW = 8, 128, 16

Answers = Mapping[str, Any]
"""Texts are compared whole, numbers by how far they are apart."""


def checkpoint(folder: Path, model: Any) -> str:
    """A saved model, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {word: at for at, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names).save_pretrained(
        folder
    )
    model.save_pretrained(folder)
    return str(folder)


def new_model(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    if name == "BertModel":
        return transformers.BertModel(transformers.BertConfig(**config))
    config["num_key_value_heads"] = 2
    if name == "Qwen3Model":
        return transformers.Qwen3Model(transformers.Qwen3Config(**config, use_cache=False))
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**config))


def harness(path: str, served: Callable[[Any], Any], device: str) -> Answers:
    """lm_eval's model class: greedy and beams over padded batches, and log-likelihoods."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = served(AutoModelForCausalLM.from_pretrained(path).eval().to(device))
    tokenizer = AutoTokenizer.from_pretrained(path)
    evaluated = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=3, device=device, max_length=LENGTH
    )

    def ask(kind: str, *more: Any) -> list[Instance]:
        return [
            Instance(request_type=kind, doc={}, arguments=(text, *more), idx=at)
            for at, text in enumerate(TEXTS)
        ]

    calls = {"until": ["\n"], "max_gen_toks": NEW, "do_sample": False}
    texts = [
        evaluated.generate_until(ask("generate_until", {**calls, **more}), disable_tqdm=True)
        for more in ({}, {"num_beams": 2})
    ]
    scores = evaluated.loglikelihood(ask("loglikelihood", " and so on"), disable_tqdm=True)
    return {"texts": texts, "numbers": torch.tensor([score for score, _ in scores])}


def embeddings(path: str, served: Callable[[Any], Any], device: str) -> Answers:
    """sentence_transformers' `encode`, alone and in two threads."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    inner = Transformer(path, max_seq_length=64)
    embedder = SentenceTransformer(modules=[inner, Pooling(64)], device=device)
    served(embedder[0].auto_model.eval())
    alone = [embedder.encode(TEXTS, batch_size=size) for size in (2, 4)]
    threaded = in_threads(2, lambda _: embedder.encode(TEXTS, batch_size=2))
    return {"texts": [], "numbers": torch.tensor([each.tolist() for each in (*alone, *threaded)])}


def loop(path: str, served: Callable[[Any], Any], device: str) -> Answers:
    """fastchat's `generate_stream`: its own loop over a cache that the model has returned."""
    from fastchat.serve.inference import generate_stream
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = served(AutoModelForCausalLM.from_pretrained(path).eval().to(device))
    tokenizer = AutoTokenizer.from_pretrained(path)
    asked = {"temperature": 0, "max_new_tokens": NEW, "echo": False}
    texts = [
        [*generate_stream(model, tokenizer, {**asked, "prompt": text}, device, LENGTH)][-1]["text"]
        for text in TEXTS
    ]
    return {"texts": texts, "numbers": torch.zeros(1)}


def pipelines(path: str, served: Callable[[Any], Any], device: str) -> Answers:
    """transformers' own pipeline, streamers in two threads, and a chat of two calls that share a
    cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

    model = served(AutoModelForCausalLM.from_pretrained(path).eval().to(device))
    tokenizer = AutoTokenizer.from_pretrained(path)
    greedy = {"max_new_tokens": NEW, "do_sample": False}
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)
    texts = [write(TEXTS, **greedy, **more) for more in ({}, {"batch_size": 4}, {"num_beams": 2})]

    def streamed(at: int) -> str:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        tokens = tokenizer(TEXTS[at], return_tensors="pt").to(device)
        call = {**tokens, **greedy, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=call)
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    texts.append(in_threads(2, streamed))
    tokens = tokenizer(TEXTS[:3], return_tensors="pt", padding=True).to(device)
    more = {"return_dict_in_generate": True, "output_logits": True}
    first = model.generate(**tokens, **greedy, **more)
    longer = torch.cat([first.sequences, first.sequences[:, -3:]], 1)
    new = torch.ones_like(longer[:, tokens.input_ids.shape[1] :])
    mask = torch.cat([tokens.attention_mask, new], 1)
    second = model.generate(
        longer, attention_mask=mask, past_key_values=first.past_key_values, **greedy, **more
    )
    return {"texts": texts, "numbers": torch.stack([*first.logits, *second.logits])}


PROGRAMS: dict[str, tuple[Callable[..., Answers], str, str]] = {
    "lm_eval": (harness, "lm_eval", "StableLmForCausalLM"),
    "sentence_transformers, BERT": (embeddings, "sentence_transformers", "BertModel"),
    "sentence_transformers, Qwen3": (embeddings, "sentence_transformers", "Qwen3Model"),
    "fastchat": (loop, "fastchat", "StableLmForCausalLM"),
    "pipeline, streamer, chat": (pipelines, "transformers", "StableLmForCausalLM"),
}


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of threads that begin together."""
    found: dict[int, Any] = {}
    begin = threading.Barrier(count)

    def one(at: int) -> None:
        begin.wait()
        found[at] = work(at)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[at] for at in range(count)]


def tried(run: Callable[..., Answers], path: str, device: str) -> dict[str, Any]:
    models: list[Any] = []

    def served(model: Any) -> Any:
        models.append(with_graphs(model, max_batch=ROWS, max_len=LENGTH))
        return model

    plain, ours = run(path, lambda model: model, device), run(path, served, device)
    report = graphs_of(models[0]).report()
    return {
        "texts are equal": plain["texts"] == ours["texts"],
        "apart": (plain["numbers"] - ours["numbers"]).abs().nan_to_num(0).max().item(),
        "served": report.served,
        "eager": report.eager,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--site", type=Path, required=True, help="where pip has put the programs")
    options: argparse.Namespace = parser.parse_args()
    # Behind what is installed: torch and transformers are those of this interpreter.
    sys.path.append(str(options.site))
    import transformers

    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {}
    for name, (run, package, model) in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = checkpoint(Path(folder), new_model(model))
            try:
                results[name] = tried(run, path, options.device)
            except ImportError as error:
                print(f"left out: {name} ({package}: {error})")
    columns = ("texts are equal", "apart", "served", "eager")
    table = [[name, *(str(each[column]) for column in columns)] for name, each in results.items()]
    show("programs of others, with one line", ["", *columns], table)
    told = {**environment(options.device), "transformers": transformers.__version__}
    finish("host_third_party", options, told, results)


if __name__ == "__main__":
    main()
