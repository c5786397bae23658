"""How the chat templates of open models write calls of tools: the parts that matter, in short."""

# ruff: noqa: RUF001

from __future__ import annotations

_QWEN25 = r"""
{%- if tools %}For each call return {"name": <function-name>, "arguments": <args-json-object>}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ "\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
"""

_LLAMA3 = r"""
{%- if tools %}{{ "Respond in the format {\"name\": function name, \"parameters\": dictionary}" }}
{%- endif %}{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% for call in m.tool_calls or [] -%}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}{{ m.content }}<|eot_id|>{% endfor -%}
"""

_MISTRAL = r"""
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}[TOOL_CALLS][
{%- for call in m.tool_calls -%}
{%- if call.id|length != 9 %}{{ raise_exception("IDs of 9 letters are expected") }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson -}}
{{- ', "id": "' + call.id + '"}' }}{{ ", " if not loop.last else "]" }}
{%- endfor -%}</s>
{%- else %}{{ m.content }}</s>{% endif %}{% endfor -%}
"""

_MISTRAL_ARGS = r"""
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
{%- for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}</s>{% endfor -%}
"""

_QWEN3_CODER = r"""
{%- if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ "\n" }}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments|items -%}
<parameter={{ name }}>
{{ value | tojson if value is sequence and value is not string else value | string }}
</parameter>
{% endfor -%}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
"""

_GLM = r"""
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif -%}
{%- for m in messages %}<|{{ m.role }}|>
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ "\n" }}<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments.items() -%}
<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor -%}
</tool_call>
{%- endfor %}{% endfor -%}
"""

_DEEPSEEK_V3 = r"""
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<｜tool▁call▁end｜>{{ "\n" if not loop.last }}
{%- endfor -%}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endfor -%}
"""

_DEEPSEEK_V31 = r"""
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}
{#- -#}
<｜tool▁call▁end｜>
{%- endfor -%}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endfor -%}
"""

_KIMI = r"""
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}
{#- -#}
<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor -%}
"""

_HARMONY = r"""
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}
{%- if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif -%}
{%- if m.content %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif -%}
{%- for call in m.tool_calls or [] -%}
<|channel|>commentary to=functions.{{ call.function.name }} <|constrain|>json<|message|>
{{- call.function.arguments | tojson }}<|call|>
{%- endfor %}{% endfor -%}
"""

_GRANITE = r"""
{%- if tools %}<|start_of_role|>available_tools{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.content }}{% if m.tool_calls %}<|tool_call|>[
{%- for call in m.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{{- ", " if not loop.last }}{% endfor %}]{% endif %}{% endfor -%}
"""

_PHI4 = _GRANITE.replace("]{% endif %}", "]<|/tool_call|>{% endif %}")

_COMMAND_R = r"""
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.content }}{% if m.tool_calls %}<|START_ACTION|>[
{%- for call in m.tool_calls -%}
{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", "parameters":
{{- " " }}{{ call.function.arguments | tojson }}}{{ ", " if not loop.last }}
{%- endfor %}]<|END_ACTION|>{% endif %}{% endfor -%}
"""

_MINIMAX = r"""
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.content }}{% if m.tool_calls %}<minimax:tool_call>
{% for call in m.tool_calls -%}
<invoke name="{{ call.function.name }}">
{% for name, value in call.function.arguments.items() -%}
<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>
{% endfor -%}
</invoke>
{% endfor -%}
</minimax:tool_call>{% endif %}{% endfor -%}
"""

_SEED = r"""
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] -%}
{{ "\n" }}<seed:tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments.items() -%}
<parameter={{ name }}>{{ value if value is string else value | tojson }}</parameter>
{% endfor -%}
</function>
</seed:tool_call>
{%- endfor %}{% endfor -%}
"""

_GEMMA = r"""
{%- macro write(value) -%}
{%- if value is string %}QUOTE{{ value }}QUOTE
{%- elif value is mapping %}{ {%- for k, v in value.items() %}{{ k }}:{{ write(v) }}
{{- "," if not loop.last }}{% endfor %}}
{%- elif value is sequence %}[{% for v in value %}{{ write(v) }}{{ "," if not loop.last }}
{%- endfor %}]{% else %}{{ value | tojson }}{% endif %}
{%- endmacro -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] -%}
BEGINcall:{{ call.function.name }}{{ write(call.function.arguments) }}END
{%- endfor %}{% endfor -%}
"""


def _gemma(begin, end, quote):
    return _GEMMA.replace("BEGIN", begin).replace("END", end).replace("QUOTE", quote)


TEMPLATES = {
    "hermes": _QWEN25,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "mistral_args": _MISTRAL_ARGS,
    "qwen3_coder": _QWEN3_CODER,
    "glm": _GLM,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "kimi_k2": _KIMI,
    "harmony": _HARMONY,
    "granite": _GRANITE,
    "phi4_mini": _PHI4,
    "command_r": _COMMAND_R,
    "minimax": _MINIMAX,
    "seed_oss": _SEED,
    "function_gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
}
ALONE = ("llama3", "harmony")  # formats of one call in an answer
