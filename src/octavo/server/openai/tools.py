"""Tool calls in text: how a model writes them, and the grammar that holds it to that.

A `CallForm` says once how calls are written; the grammar follows from it, and so does the reader in
`octavo.server.openai.calls`. Under the grammar a call that was begun is always a valid one of a known function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import InvalidRequest, show

MARGIN = " \t\r\n"


@dataclass(frozen=True)
class CallForm:
    """Calls are `opening` name `middle` arguments `after`, then for each more `again` name `middle` arguments
    `after`, and at the end `close`. `opening` begins with `marker`, which text before a call never holds; without a
    marker a call can only be all of the answer. `id_length` is that of the ids that templates of this form accept.
    """

    marker: str
    opening: str
    middle: str
    after: str
    again: str
    close: str = ""
    id_length: int | None = None


HERMES = CallForm(
    marker="<tool_call>",
    opening='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    after="}\n</tool_call>",
    again='\n<tool_call>\n{"name": "',
)
LLAMA = CallForm(marker="", opening='{"name": "', middle='", "parameters": ', after="}", again='; {"name": "')
MISTRAL_NAMED = CallForm(
    marker="[TOOL_CALLS]",
    opening="[TOOL_CALLS]",
    middle="[ARGS]",
    after="",
    again="[TOOL_CALLS]",
    id_length=9,
)


def _mistral_list(space: str) -> CallForm:
    return CallForm(
        marker="[TOOL_CALLS]",
        opening=f'[TOOL_CALLS]{space}[{{"name": "',
        middle='", "arguments": ',
        after="}",
        again=', {"name": "',
        close="]",
        id_length=9,
    )


def form_of(template: str | None) -> CallForm | None:
    """How a model writes calls, from what its chat template mentions; None if the template tells it nothing of
    tools, or in a form that is not known here."""
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return MISTRAL_NAMED
        return _mistral_list(" " if "[TOOL_CALLS] [" in template else "")
    if "<tool_call>" in template:
        return None if "<function=" in template else HERMES
    if "ipython" in template and "parameters" in template:
        return LLAMA
    return None


@dataclass(frozen=True)
class Function:
    """A function that may be called. `parameters` is the JSON schema of its arguments; `strict` refuses what cannot
    be enforced of it."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool


Mode = Literal["auto", "required", "none"]


@dataclass(frozen=True)
class Rules:
    """What an answer may be: `auto` is text or calls, `required` calls, `none` text. `text_schema` is the JSON schema
    of text, None if it is free."""

    mode: Mode
    parallel: bool
    text_schema: Mapping[str, Any] | None = None


def grammar(form: CallForm, functions: Sequence[Function], rules: Rules, special: Mapping[str, int]) -> str:
    """The Lark grammar of answers. `special` are the tokens that text cannot spell, by their text.

    Raises `InvalidRequest` for arguments that are no object.
    """
    free = rules.text_schema is None
    marker_is_special = form.marker in special
    if rules.mode == "none":
        if not form.marker or marker_is_special:
            return "start: text\n" + _TEXT
        return f"start: TEXT\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{_pattern(form.marker)}(.|\\n)*/\n"

    if rules.mode == "auto" and rules.text_schema is not None and not form.marker:
        return f"start: %json {json.dumps(_either(form, functions, rules.text_schema))}\n"

    def literal(text: str) -> str:
        return _literal(text, special)

    again = f"( {literal(form.again)} call )*" if rules.parallel else ""
    lines = [f"calls: call {again} {literal(form.close)}"]
    if rules.mode == "required" or not (free and form.marker):
        begin = literal(form.opening)
    else:
        lines.append(
            f"head: text {literal(form.marker)}"
            if marker_is_special
            else f"head[lazy]: /(.|\\n)*/ {literal(form.marker)}"
        )
        begin = f"head {literal(form.opening.removeprefix(form.marker))}"
    if rules.mode == "required":
        lines.insert(0, f"start: {begin} calls")
    else:
        lines.insert(0, f"start: text | {begin} calls")
        lines.append(_text_rule(form, rules.text_schema))
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        schema = json.dumps(_argument_schema(i, function))
        lines.append(f"call_{i}: {literal(function.name + form.middle)} args_{i} {literal(form.after)}")
        lines.append(f"args_{i}: %json {schema}")
    return "\n".join(lines) + "\n"


_TEXT = "text: /(.|\\n)*/\n"
# As templates write JSON, so that a call that comes back in a later turn is the same text as the one generated.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _text_rule(form: CallForm, schema: Mapping[str, Any] | None) -> str:
    if schema is not None:
        return f"text: %json {json.dumps(schema)}"
    if form.marker:
        return _TEXT
    # Nothing marks a call, so text must begin in another way.
    return f"text: /([^{_pattern(form.opening[0])}](.|\\n)*)?/"


def _argument_schema(index: int, function: Function) -> dict[str, Any]:
    schema = function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    kind = schema.get("type", "object")
    if kind != "object":
        raise InvalidRequest(
            f"tools[{index}].function.parameters has type {show(kind)}; arguments are an object: "
            '{"type": "object", "properties": {...}} works',
            param=f"tools[{index}].function.parameters",
        )
    return {**schema, "type": "object", "x-guidance": {**_SPACING, "lenient": not function.strict}}


def _either(form: CallForm, functions: Sequence[Function], text: Mapping[str, Any]) -> dict[str, Any]:
    """JSON that is text or one call, where nothing but their keys tells them apart."""
    name_key, arguments_key = json.loads(form.opening + form.middle + "{}" + form.after)
    calls = [
        {
            "type": "object",
            "properties": {name_key: {"const": function.name}, arguments_key: _argument_schema(i, function)},
            "required": [name_key, arguments_key],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]
    return {"anyOf": [*calls, text], "x-guidance": _SPACING}


def _literal(text: str, special: Mapping[str, int]) -> str:
    """`text` in a Lark rule; a special token in it is named by its id."""
    found = [token for token in special if token and token in text]
    parts = re.split("(" + "|".join(map(re.escape, sorted(found, key=len, reverse=True))) + ")", text)
    if not found:
        parts = [text]
    return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p) for p in parts if p)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model is told whose template says nothing of tools; it then writes them as `HERMES` has it."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. Each line between <tools> and </tools> describes one as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and its arguments as JSON in this form, and nothing after it:\n"
        '<tool_call>\n{"name": "the name", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
        "The result comes back between <tool_response> and </tool_response>. Answer without a call if none helps."
    )


def spell_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Earlier calls as `HERMES` writes them. Each has a `function` with `name` and `arguments`."""
    return "\n".join(
        HERMES.opening
        + call["function"]["name"]
        + HERMES.middle
        + _as_json(call["function"]["arguments"])
        + HERMES.after
        for call in calls
    )


def _as_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
