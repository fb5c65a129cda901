"""Chat templates that show tools and calls of them, on the tokenizer of the shipped model."""

from __future__ import annotations

from heddle_dask.chat.template import ChatTemplate

HERMES = """\
{%- if tools %}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}

# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role != 'system' or not loop.first %}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen2.5 has it, in short."""


def with_format(model_dir: str, text: str = HERMES) -> ChatTemplate:
    """The template of the model directory with another text."""
    chat = ChatTemplate.load(model_dir)
    chat._tokenizer.chat_template = text
    return ChatTemplate(chat._tokenizer, model_dir, chat.end_token_ids)
