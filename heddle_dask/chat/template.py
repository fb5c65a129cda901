"""Chat templates as deltas: what a template puts between a sampled turn and the next generation prompt.

History is never tokenised again. The first prompt is rendered completely (`ChatTemplate.render`); after that each
step adds only a bridge (`ChatTemplate.following`), taken from a dummy conversation: the text after the end token of the
dummy's assistant turn. Every assumption about the template is checked and fails with `BadInput`.

An assistant message that comes last is a prefill: the model continues it. It stands where the template shows the
content of an assistant, outside of a thinking block that the generation prompt opens. Others are earlier turns.

Most formats end an assistant turn by a token of its own. In others (GLM) the marker of the next role ends it: the
policy samples that marker, and what follows begins behind it.

A delta is tokenised as one text, so that its tokens are those that the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from heddle_dask.chat.content_spans import Message, Rendering, content_spans, owners_of
from heddle_dask.chat.reply_parts import CLOSE
from heddle_dask.core.errors import BadInput, encodable_text

_REPLY = "Zq7 reply Zq7"  # stands for the sampled turn; no template text contains it
_BEGUN = "Zq7 begun Zq7"  # stands for the beginning of a reply
_THINKING_REPLY = f"<think>\nplan\n</think>\n\n{_REPLY}"
_KEPT_TEMPLATES = 64
# `ChatTemplate` sets these itself, or they would change what its methods return.
_OWN_VARIABLES = frozenset(
    {
        *("conversation", "messages", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
_QUESTION: Message = {"role": "user", "content": "question"}


class ChatTemplate:
    """The tokenizer and chat template of one model directory. Make it with `load`.

    Attributes
    ----------
    end_token_ids
        Tokens that end an assistant turn: the template's own first, then those of the model's files.
    thinking_end_ids
        Tokens of what ends the thinking of a reply.
    vocab_size
        Number of token ids of the tokenizer, special ones included.
    """

    def __init__(
        self,
        tokenizer: Any,
        model_dir: str,
        more_end_ids: Sequence[int] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._model_dir = model_dir
        self._more_end_ids = tuple(more_end_ids)
        self._variables = dict(variables or {})
        # Trajectories mostly set the same variables, and the checks of a template take milliseconds.
        self._made: dict[str, ChatTemplate] = {}
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(str(t.content) for t in added if t.special)}
        self._special = sorted(special, key=lambda token: (-len(token), token))
        known = [*more_end_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        # Empty: the marker of the next role ends a turn.
        self._end_text = self._find_end_text(self._token_texts(known))
        self.end_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*self._encode(self._end_text), *known]))
        self.vocab_size = len(tokenizer)
        self.thinking_end_ids = tuple(self._encode(CLOSE))

    @classmethod
    def load(cls, model_dir: str) -> ChatTemplate:
        """Read tokenizer and chat template from a Hugging Face model directory.

        Raises
        ------
        BadInput
            The directory has no tokenizer or no chat template, or its template cannot be used.
        """
        folder = Path(model_dir)
        if not folder.is_dir():
            raise BadInput(f"model directory {model_dir!r}: no such directory")
        tokenizer = _load_tokenizer(folder)
        if not tokenizer.chat_template:
            raise BadInput(
                f"model directory {model_dir!r}: the tokenizer has no chat template; "
                "add chat_template.jinja or use an instruction-tuned model"
            )
        return cls(tokenizer, model_dir, _generation_end_ids(folder))

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The same template with these variables of it set, beside those that are set already.

        Parameters
        ----------
        variables
            JSON values, as the template names them: ``tools`` (schemas of functions), ``enable_thinking`` and others.

        Raises
        ------
        BadInput
            A name that is no variable, a value that is not JSON-able, or the template cannot be used with these values.
        """
        for name in variables:
            if not isinstance(name, str) or not name.isidentifier() or name in _OWN_VARIABLES:
                raise BadInput(f"chat template: {name!r} is no variable that can be set")
        try:
            text = json.dumps({**self._variables, **variables}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInput(f"chat template: a variable is no JSON value: {error}") from None
        if text not in self._made:
            if len(self._made) >= _KEPT_TEMPLATES:
                self._made.clear()
            self._made[text] = ChatTemplate(self._tokenizer, self._model_dir, self._more_end_ids, json.loads(text))
        return self._made[text]

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a conversation shows the tools that are set."""
        without = self._variables.keys() - {"tools"}
        for system in ([], [{"role": "system", "content": "system"}]):
            with suppress(BadInput):  # some formats have no system message
                text = self._text([*system, _QUESTION], prompt=True)
                if text != self._text([*system, _QUESTION], prompt=True, names=without):
                    return True
        return False

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a whole conversation, ending with the generation prompt or with a prefill."""
        return self.opening(messages).token_ids

    def opening(self, messages: Sequence[Message]) -> Rendering:
        """A whole conversation, as `render`, with the owner of each token."""
        return self._rendering(self._opening_text, self._clean(messages))

    def bridge(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """The token ids of `following`."""
        return self.following(messages, ended=ended).token_ids

    def following(self, messages: Sequence[Message], *, ended: bool, end_id: int | None = None) -> Rendering:
        """What follows a sampled assistant turn, to the end of the next generation prompt, with owners of tokens.

        Parameters
        ----------
        messages
            The messages between the two turns; may be empty.
        ended
            True if the sampled turn contains its end token; else the text starts with it.
        end_id
            The token that ended it; None: the one that the format has before these messages. Where it is the marker of
            another role than the next, what was sampled stays, and the marker of the next follows.
        """
        ends = self.end_token_ids if end_id is None else (end_id,)
        end_texts = [self._end_text] if self._end_text else self._token_texts(ends)
        if end_id is not None:
            end_texts += self._token_texts((end_id,))

        def text_of(clean: Sequence[Message]) -> str:
            text = self._following_text(clean)
            found = [each for each in end_texts if text.startswith(each)] if ended else []
            return text.removeprefix(found[0]) if found else text

        return self._rendering(text_of, self._clean(messages))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text by itself; special tokens in it are read as such."""
        return self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, special tokens kept, without the token that ends the turn."""
        ids = list(token_ids)
        if ids and ids[-1] in self.end_token_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self._encode(text))

    def check_append_only(self) -> None:
        """Check that the rendering of earlier turns does not change as the conversation grows.

        A template that rewrites them (for example, drops the thinking of earlier turns) renders another history than
        the sampled one; a trajectory keeps what was sampled.

        Raises
        ------
        BadInput
            The template rewrites history, or its text is tokenised differently in pieces.
        """
        for role in ("user", "tool"):
            for reply in (_REPLY, _THINKING_REPLY):
                self._check_one(role, reply)

    def _rendering(self, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> Rendering:
        text = render(messages)
        if not self._tokenizer.is_fast:
            return Rendering(self._encode(text), None)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = content_spans(lambda given: text if given is messages else render(given), messages)
        owners = None if spans is None else owners_of(encoded["offset_mapping"], spans)
        return Rendering(list(encoded["input_ids"]), owners)

    def _opening_text(self, messages: Sequence[Message]) -> str:
        if _is_begun(messages):
            if len(messages) == 1:
                raise BadInput("an assistant message needs a message before it that it answers")
            text = self._text([*messages[:-1], {"role": "assistant", "content": _BEGUN}], prompt=False)
            return self._before(text, _BEGUN, messages) + str(messages[-1]["content"])
        return self._text(messages, prompt=True)

    def _following_text(self, messages: Sequence[Message]) -> str:
        if _is_begun(messages):
            text = self._bridge_text([*messages[:-1], {"role": "assistant", "content": _BEGUN}], prompt=False)
            return self._before(text, _BEGUN, messages) + str(messages[-1]["content"])
        return self._bridge_text(messages)

    def _before(self, text: str, marker: str, messages: Sequence[Message]) -> str:
        before, found, _ = text.partition(marker)
        if not found:
            roles = ", ".join(message["role"] for message in messages)
            raise self._bad(f"does not show the last assistant message of: {roles}")
        return before

    def _check_one(self, role: str, reply: str) -> None:
        answer: Message = {"role": role, "content": "answer"}
        history: list[Message] = [_QUESTION, {"role": "assistant", "content": reply}]
        try:
            whole = self._text([*history, answer], prompt=True)
        except BadInput:
            if role == "tool":
                return  # a template without tools: nothing to check
            raise
        pieces = [self._text([_QUESTION], prompt=True), reply + self._end_text]
        pieces.append(self._bridge_text([answer]).removeprefix(self._end_text))
        what = "with thinking " if reply == _THINKING_REPLY else ""
        if "".join(pieces) != whole:
            raise self._bad(
                f"rewrites an earlier assistant turn {what}when a {role} message follows; "
                "steps would not extend what was sampled"
            )
        ids = [token for piece in pieces for token in self._encode(piece)]
        if ids != self._encode(whole):
            raise self._bad(f"is tokenised otherwise in pieces when a {role} message follows")

    def _find_end_text(self, known: Sequence[str]) -> str:
        """The special token right after an assistant turn; empty where one of the `known` marks the next turn."""
        turn = [_QUESTION, {"role": "assistant", "content": _REPLY}]
        text = self._text(turn, prompt=False)
        if text.count(_REPLY) != 1:
            raise self._bad("does not show an assistant turn exactly once")
        if self._text([_QUESTION], prompt=True) == self._text([_QUESTION], prompt=False):
            raise self._bad("has no generation prompt (add_generation_prompt changes nothing)")
        behind = text.partition(_REPLY)[2]
        for token in self._special:
            if behind.startswith(token):
                return str(token)
        following = self._text([*turn, _QUESTION], prompt=True).partition(_REPLY)[2]
        if any(following.startswith(token) for token in known):
            return ""
        raise self._bad(f"puts no special token behind an assistant turn, but {behind[:20]!r}")

    def _bridge_text(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        """What the template puts behind an assistant turn; a turn with calls where only that shows their results."""
        results = list(takewhile(lambda message: message["role"] == "tool", messages))
        try:
            text = self._behind_reply(messages, prompt=prompt)
        except BadInput:
            if not results:
                raise
            text = None
        if text is not None and all(message["content"].strip() in text for message in results):
            return text
        behind = self._behind_calls(messages, len(results), prompt=prompt)
        if behind is None and text is None:
            return self._behind_reply(messages, prompt=prompt)  # says why it cannot
        return behind or text or ""

    def _behind_calls(self, messages: Sequence[Message], results: int, *, prompt: bool) -> str | None:
        """What is behind a turn that calls a tool for each of the first messages; None if the turn changes with them.

        It begins with the token that ends such a turn. Gemma 4 shows results only so, within the turn of their calls.
        """
        named = [
            {**message, "tool_call_id": message.get("tool_call_id") or f"call_{number}"}
            for number, message in enumerate(messages[:results])
        ]
        calls = [
            {
                "type": "function",
                "id": message["tool_call_id"],
                "function": {"name": message.get("name") or "tool", "arguments": {}},
            }
            for message in named
        ]
        turn: list[Message] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            alone = self._text(turn, prompt=False)
            whole = self._text([*turn, *named, *messages[results:]], prompt=prompt)
        except BadInput:
            return None
        if not whole.startswith(alone):
            return None
        end = next((token for token in self._special if alone.endswith(token)), "")
        return str(end) + whole.removeprefix(alone)

    def _behind_reply(self, messages: Sequence[Message], *, prompt: bool) -> str:
        turn: list[Message] = [_QUESTION, {"role": "assistant", "content": _REPLY}]
        text = self._text([*turn, *messages], prompt=prompt)
        _, found, behind = text.partition(_REPLY)
        if not found or not behind.startswith(self._end_text):
            roles = ", ".join(message["role"] for message in messages)
            raise self._bad(f"drops or changes an assistant turn when these follow: {roles}")
        return behind

    def _text(self, messages: Sequence[Message], *, prompt: bool, names: Iterable[str] | None = None) -> str:
        """The text of a conversation, with all variables or with those of these names."""
        from jinja2.exceptions import TemplateError

        variables = {name: self._variables[name] for name in (self._variables if names is None else names)}

        def shown(given: Sequence[Message]) -> Any:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in given], tokenize=False, add_generation_prompt=prompt, **variables
            )

        try:
            try:
                text = shown(messages)
            except TypeError:
                # Most templates take the arguments of a call as an object, those of DeepSeek as text.
                as_text = [_with_text_arguments(message) for message in messages]
                if as_text == list(messages):
                    raise
                text = shown(as_text)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages) or "no message"
            raise self._bad(f"refuses a conversation of {roles}: {error}") from error
        except (TypeError, ValueError) as error:
            if not self._variables:
                raise
            raise self._bad(f"cannot be used with {', '.join(self._variables)}: {error}") from error
        return str(text)

    def _clean(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with texts that the tokenizer takes, in which no special token ends a turn."""
        return [{name: self._harmless(value) for name, value in message.items()} for message in messages]

    def _harmless(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._defuse(value)
        if isinstance(value, Mapping):
            return {self._harmless(name): self._harmless(each) for name, each in value.items()}
        return [self._harmless(each) for each in value] if isinstance(value, list) else value

    def _defuse(self, text: str) -> str:
        text = encodable_text(text)
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _token_texts(self, ids: Sequence[int]) -> list[str]:
        return [str(text) for text in self._tokenizer.convert_ids_to_tokens(list(ids))]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _bad(self, reason: str) -> BadInput:
        return BadInput(f"chat template of {self._model_dir!r} {reason}")


def _is_begun(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the reply.

    Raises
    ------
    BadInput
        It calls tools: such a turn is whole.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return False
    if messages[-1].get("tool_calls"):
        raise BadInput("the last message is an assistant's that calls tools: append the results of its calls")
    return True


def _with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    functions = [{**call["function"], "arguments": text} for call, text in zip(calls, texts, strict=True)]
    return {**message, "tool_calls": [{**call, "function": f} for call, f in zip(calls, functions, strict=True)]}


def _load_tokenizer(folder: Path) -> Any:
    # Imported here because only rendering needs them, and they take 0.1 s and 1 to 2 s.
    try:
        if (folder / "tokenizer.json").is_file():
            from heddle_dask.chat.tokenizer import TokenizerFiles

            return TokenizerFiles(folder)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise BadInput(
            f"model directory {str(folder)!r} has no tokenizer.json: "
            "its tokenizer needs transformers (pip install transformers)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise BadInput(f"model directory {str(folder)!r}: no usable tokenizer: {first[0]}") from error


def _generation_end_ids(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise BadInput(f"{str(path)!r}: not a JSON object: {error}") from error
    ids = value if isinstance(value, list) else [value]
    return tuple(token for token in ids if isinstance(token, int))
