"""Messages to token ids, once: the codec renders the opening, afterwards it only ever appends.

Sampled ids stay as sampled. What follows a completion (end of turn if it was not sampled, separators, tool results,
the next generation prompt) is cut out of the model's own chat template and encoded alone. Control tokens inside
content (``<|im_end|>`` printed by a tool) are encoded as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

from agent_rl.errors import ConfigError
from envs.types import Message, Opening

ANSWER = "\ue0ffanswer\ue0ff"
"""Stands for a completion while the template is rendered around it."""

OPENINGS_KEPT = 256
"""Rendered prompts that are remembered: a template takes longer than many an episode's bookkeeping together."""

GUARDS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
"""Private-use characters; one that no content holds breaks control tokens apart while the template is rendered. All of
them, because a program may print many."""


class ChatCodec:
    """Renders conversations for one tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        system_text: describes tools in words, for templates that cannot; gets the schemas.

    Raises:
        ConfigError: no chat template, or one that an appending codec cannot follow.
    """

    def __init__(self, tokenizer: Any, *, system_text: Callable[[Sequence[dict[str, Any]]], str]) -> None:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"tokenizer of {name} has no chat template: use an instruct model or add chat_template.jinja"
            )
        self.tokenizer = tokenizer
        self._system_text = system_text
        self._openings: dict[str, list[int]] = {}  # ids by messages and tools, oldest first
        added = tokenizer.added_tokens_decoder
        self._special_ids = {str(token): id_ for id_, token in added.items() if token.special}
        self._special = re.compile(
            "|".join(map(re.escape, sorted(self._special_ids, key=len, reverse=True))) or r"(?!)"
        )
        probe = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
        question: list[Message] = [{"role": "user", "content": "x"}]
        self.template_knows_tools = "probe" in self._render(question, tools=[probe])
        self.template_knows_tool_role = self._template_shows({"role": "tool", "name": "probe", "content": "shown"})

        tail = self._after_answer([], generate=False)
        match = self._special.match(tail)
        if match is None:
            raise ConfigError(f"chat template of {name} ends an assistant turn with {tail[:20]!r}, not a special token")
        self.end_of_turn = self._special_ids[match.group()]
        eos = tokenizer.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple({self.end_of_turn: 0} | ({} if eos is None else {eos: 0}))
        whole = self._render(question, generate=True)
        if self._encode(whole, "") != tokenizer(whole, add_special_tokens=False).input_ids:
            raise ConfigError(f"tokenizer of {name} encodes text differently next to special tokens: not supported")

    def open(self, opening: Opening) -> list[int]:
        """Ids of the first prompt, up to where the assistant begins."""
        key = json.dumps([opening.messages, opening.tools])
        if key not in self._openings:  # all members of a group open alike
            if len(self._openings) == OPENINGS_KEPT:
                self._openings.pop(next(iter(self._openings)))
            self._openings[key] = self._open(opening)
        return list(self._openings[key])

    def _open(self, opening: Opening) -> list[int]:
        guard, messages = self._guarded(self._described(opening))
        tools = list(opening.tools) if self.template_knows_tools else None
        return self._encode(self._render(messages, tools=tools, generate=True), guard)

    def extend(self, finish: Literal["stop", "length"], messages: Sequence[Message]) -> list[int]:
        """Ids between a completion and the next one; the end-of-turn token is left out where it was sampled.

        ``finish == "stop"`` says that the last sampled id was a stop token, by the engine's contract.
        """
        guard, guarded = self._guarded(messages)
        ids = self._encode(self._after_answer(guarded, generate=True), guard)
        assert ids[0] == self.end_of_turn, ids[:4]
        return ids[1:] if finish == "stop" else ids

    def decode(self, token_ids: Sequence[int], finish: Literal["stop", "length"]) -> str:
        """What the model wrote, without its stop token."""
        ids = list(token_ids[:-1] if finish == "stop" else token_ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text as a model might have written it (traces for supervised fine-tuning)."""
        return self._plain(text)

    def _described(self, opening: Opening) -> list[Message]:
        messages = list(opening.messages)
        if self.template_knows_tools or not opening.tools:
            return messages
        text = self._system_text(opening.tools)
        if messages and messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def _render(self, messages: Sequence[Message], *, tools: Any = None, generate: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=generate, tokenize=False
            )
        )

    def _after_answer(self, messages: Sequence[Message], *, generate: bool) -> str:
        head: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
        text = self._render([*head, *messages], generate=generate)
        _, separator, after = text.partition(ANSWER)
        if not separator:
            raise ConfigError("the chat template drops or rewrites assistant text, so turns cannot be appended")
        return after

    def _template_shows(self, message: Message) -> bool:
        try:
            return message["content"] in self._after_answer([message], generate=True)
        except ConfigError:
            raise
        except Exception:  # templates raise their own errors for roles that they do not know
            return False

    def _guarded(self, messages: Sequence[Message]) -> tuple[str, list[Message]]:
        """Messages whose content holds no control token any more, and the character that was put in."""
        contents = [str(m["content"]) for m in messages]
        guard = next(g for g in map(chr, chain(*GUARDS)) if not any(g in content for content in contents))

        def broken(match: re.Match[str]) -> str:
            return match.group()[0] + guard + match.group()[1:]

        return guard, [
            {**m, "content": self._special.sub(broken, content)} for m, content in zip(messages, contents, strict=True)
        ]

    def _encode(self, text: str, guard: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in self._special.finditer(text):
            ids += self._plain(text[end : match.start()].replace(guard, "") if guard else text[end : match.start()])
            ids.append(self._special_ids[match.group()])
            end = match.end()
        tail = text[end:]
        return ids + self._plain(tail.replace(guard, "") if guard else tail)

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        text = text.encode(errors="replace").decode()  # half of a surrogate pair, which no tokenizer takes, becomes "?"
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
