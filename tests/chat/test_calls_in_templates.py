"""Calls of tools and their results in templates of all kinds: within the turn, as objects, as texts."""

from __future__ import annotations

from worlds.chat_formats import with_format

from heddle_dask.chat.conversation import CalledTool, ChatMessage, with_tool_names

CALL = CalledTool("weather", '{"city": "é"}', "a")
SAID = ChatMessage("assistant", calls=(CALL,))
RESULT = ChatMessage("tool", "sunny", call_id="a")
ASKED = ChatMessage("user", "hello")

# As Gemma 4 has it: results follow the calls in the model's own turn, under the name of the tool.
WITHIN = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
[call {{ call.function.name }}]<|endoftext|>
{%- for result in messages if result.role == 'tool' and result.tool_call_id == call.id -%}
[{{ call.function.name }}: {{ result.content }}]
{%- endfor -%}
{%- else -%}
<|im_end|>
{%- endfor -%}
{%- elif message.role != 'tool' -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}<|im_start|>assistant
{% endif -%}"""

# As DeepSeek R1 has it: the arguments of a call are a text.
AS_TEXT = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ call.function.name + '(' + call.function.arguments + ')' }}
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_results_that_a_template_shows_within_the_turn_of_their_calls_are_shown(model_dir: str) -> None:
    template = with_format(model_dir, WITHIN)
    (end,) = template._encode("<|endoftext|>")
    named = [message.for_template() for message in with_tool_names([RESULT], [ASKED, SAID, RESULT])]
    behind = template.following(named, ended=True, end_id=end)
    assert template._tokenizer.decode(behind.token_ids) == "[weather: sunny]"
    assert behind.owners is not None and 0 in behind.owners
    cut = template.following(named, ended=False)
    assert template._tokenizer.decode(cut.token_ids) == "<|endoftext|>[weather: sunny]"


def test_arguments_are_text_where_the_template_takes_no_object(model_dir: str) -> None:
    template = with_format(model_dir, AS_TEXT)
    text = template.decode(template.render([message.for_template() for message in (ASKED, SAID, RESULT)]))
    assert 'weather({"city": "é"})' in text


def test_results_get_the_names_of_their_calls() -> None:
    other = ChatMessage("tool", "x", call_id="b", name="own")
    assert [message.name for message in with_tool_names([RESULT, other, ASKED], [SAID])] == ["weather", "own", ""]
