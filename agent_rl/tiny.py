"""The quickstart's model, made here: a Qwen2-shaped network of 0.9 M parameters and a small BPE tokenizer.

The tokenizer's chat template is written after the Hermes convention that Qwen2.5 uses (tool schemas in ``<tools>``,
calls in ``<tool_call>``, results in ``<tool_response>`` of a user turn). Digits are single tokens; everything else may
merge across words, so that the constant part of a prompt takes a handful of tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nCall functions to help the user. Their signatures are within <tools></tools>:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nWrite each call as\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 1024) -> Any:
    """A byte-level BPE tokenizer learned from ``texts``, with the special tokens and the template above."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Tags are cut out, so that no merge runs across them: they become tokens of their own below.
    pieces = (piece for text in texts for piece in _split_at(text, (*SPECIAL_TOKENS, *TAGS)))
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def make_model(vocab_size: int, *, seed: int, eos_token_id: int, pad_token_id: int) -> Any:
    """A randomly initialised Qwen2 of about 0.9 M parameters (float32); torch's global generator stays as it was."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.06,  # at the usual 0.02 attention starts too flat: copying is not learned in 300 steps
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]


def prepare_tiny(folder: Path, texts: Iterable[str], *, seed: int) -> Path:
    """The untrained model and its tokenizer as a model folder; made once, aside, then renamed."""
    if folder.is_dir():
        return folder
    tokenizer = train_tokenizer(texts)
    model = make_model(
        len(tokenizer), seed=seed, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(folder)
    return folder


def _split_at(text: str, marks: Iterable[str]) -> list[str]:
    pieces = [text]
    for mark in marks:
        pieces = [part for piece in pieces for part in piece.split(mark)]
    return [piece for piece in pieces if piece]
