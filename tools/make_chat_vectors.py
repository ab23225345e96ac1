#!/usr/bin/env python3
"""Renders conversations with Jinja2, as Hugging Face does, into test vectors for src/chat.

    tools/make_chat_vectors.py fathom_tiny_vectors.json fathom-tiny=MODEL/tokenizer_config.json
    tools/make_chat_vectors.py random_vectors.json deepseek-v3=deepseek-v3.jinja …
    tools/make_chat_vectors.py --prefill prefill_vectors.json deepseek-v3=deepseek-v3.jinja …

Kimi K2.5's template takes tools as text that the checkpoint's tokenizer makes: KIMI_TOOLS names the
Python file with its `encode_tools_to_typescript_style`.

Each argument after the output names a chat format and where its template is: a .jinja file or a
tokenizer_config.json. For each format: fixed conversations in every shape that the format knows, and
random ones (seeded by the format's name). A vector is {format, conversation, expected}; where all prompts
of a format begin with the same page of text, it comes first, as {format, head}.

With --prefill the last message, an assistant's, is to be continued: what the template renders
without its end token. WRITTEN_PREFILLS are those that no template renders, by each format's own rules.
"""
import importlib.util
import json
import os
import random
import sys

import jinja2
from jinja2.sandbox import SandboxedEnvironment

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
GIGACHAT_BOS = "<s>"
WORDS = ["alpha", "Straße", "你好", "naïve", "🙂", "a\nb", "  two  spaces ", "\t", "{\"k\": 1}",
         "x < y", "</b>", "'quoted'", "\"double\"", "back\\slash", "é", "1234", "```", "&amp;", "\u2028"]
CALLS_WITH_CONTENT = {"deepseek-v3", "deepseek-v3.1", "fathom-tiny", "kimi-k2", "kimi-k2-thinking"}
GLM = {"glm-4.7", "glm-5", "glm-5.2"}
GIGACHAT = {"gigachat-3", "gigachat-3.1"}
CALLS_WITH_CONTENT |= GLM | GIGACHAT | {"kimi-k2.5"}
DECLARES_TOOLS = {"fathom-tiny", "kimi-k2", "kimi-k2-thinking", "kimi-k2.5"} | GLM | GIGACHAT
ONE_CALL = GIGACHAT  # a message
NO_CALLS = {"deepseek-v2", "moonlight"}
SENDS_REASONING = {"kimi-k2-thinking", "kimi-k2.5"} | GLM
TYPES = {"kimi-k2.5"} | GIGACHAT  # tools become types of TypeScript


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def load_template(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if path.endswith(".json"):
        text = json.loads(text)["chat_template"]
    # Kimi's templates call list.append, which the immutable sandbox refuses.
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                       extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    return environment.from_string(text)


def make_tool(name, properties, required, description="Does it."):
    return {"type": "function", "function": {
        "name": name, "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required}}}


TOOLS = [
    make_tool("get_weather", {"city": {"type": "string", "description": "Città, 城市"},
                              "days": {"type": "integer", "minimum": 1, "maximum": 1e16}}, ["city"]),
    make_tool("set_level", {"level": {"type": "number", "default": 0.5, "enum": [1.0, 1e-7, -2.25]},
                            "on": {"type": ["boolean", "null"], "default": None}}, []),
    make_tool("clock", {}, [], "Tells the \"time\".\nNow."),
]


# Every part of a schema that has a form in TypeScript.
TYPED_TOOLS = [
    make_tool("book", {
        "when": {"type": "string", "format": "date-time", "description": "UTC.\n\nNot local."},
        "seats": {"type": "integer", "minimum": 1, "maximum": 9, "default": 2},
        "class": {"type": "string", "enum": ["first", "Zweite"], "default": "Zweite"},
        "code": {"type": "string", "pattern": "^[A-Z]+$", "minLength": 2, "maxLength": 8},
        "guests": {"type": "array", "minItems": 1, "maxItems": 4, "items": {
            "type": "object", "description": "One of them.", "required": ["name"],
            "properties": {"name": {"type": "string", "description": "In full"},
                           "age": {"type": ["integer", "null"]},
                           "tags": {"type": "array", "items": {"type": "string"}}}}},
        "extra": {"type": "object", "properties": {"a": {"type": "boolean", "default": True}},
                  "additionalProperties": {"type": "number"}},
        "open": {"type": "object", "additionalProperties": True, "properties": {}},
        "shut": {"type": "object", "additionalProperties": False,
                 "properties": {"x": {"type": "number", "default": 0.5}}},
        "any": {"type": "array"}, "none": {"type": "null"}}, ["when", "class"],
        "Books a table.\n\nTwice never."),
    make_tool("empty", {}, []),
]
# Tools for Kimi alone: references, alternatives, and what has no form.
KIMI_TOOLS = [
    make_tool("tree", {"root": {"$ref": "#/$defs/Node"}, "of": {"anyOf": [
        {"type": "string"}, {"type": "array", "items": {"type": "integer", "description": "n"}}],
        "description": "Either"}}, ["root"]),
    make_tool("self", {"next": {"$ref": "#", "description": "More"}, "b": {"type": "string"}}, []),
]
KIMI_TOOLS[0]["function"]["parameters"]["$defs"] = {
    "Node": {"type": "object", "description": "A node\nof it", "required": ["id"], "properties": {
        "id": {"type": "string"}, "label": {"enum": [1, "two", None, True], "default": None}}},
    "Leaf": {"type": "string"}}
UNTYPED_TOOLS = [make_tool("odd", {"z": {"description": "anything"}, "a": {"type": "string"}}, ["z"])]


def typed_conversations(name):
    user = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be brief."}
    yield {"messages": [system, user], "tools": TYPED_TOOLS}
    yield {"messages": [{"role": "developer", "content": "Be brief."}, user], "tools": TYPED_TOOLS[1:]}
    if name == "kimi-k2.5":
        yield {"messages": [user], "tools": KIMI_TOOLS}
        yield {"messages": [user], "tools": UNTYPED_TOOLS + KIMI_TOOLS}
    else:
        returning = json.loads(json.dumps(TYPED_TOOLS[1]))
        returning["function"]["return_parameters"] = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
        yield {"messages": [user], "tools": [returning] + UNTYPED_TOOLS}
        yield {"messages": [system]}


def text_of(rng, longest=6):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, longest)))


def calls_of(rng, count):
    return [{"id": f"call_{rng.randrange(10**6)}", "type": "function", "function": {
        "name": rng.choice(TOOLS)["function"]["name"],
        "arguments": json.dumps({"city": text_of(rng, 2), "n": rng.choice([1, 2.5, None, True])},
                                ensure_ascii=False)}} for _ in range(count)]


def turn_of(rng, name):
    """One user turn with all that follows until the next."""
    messages = [{"role": "user", "content": text_of(rng)}]
    if name not in NO_CALLS and rng.random() < 0.45:
        for _ in range(rng.randint(1, 2)):
            calls = calls_of(rng, 1 if name in ONE_CALL else rng.randint(1, 3))
            with_content = name in CALLS_WITH_CONTENT and rng.random() < 0.4
            messages.append({"role": "assistant", "content": text_of(rng) if with_content else None,
                             "tool_calls": calls})
            for call in calls:
                messages.append({"role": "tool", "content": text_of(rng), "tool_call_id": call["id"]})
        if rng.random() < 0.3:
            return messages
    answer = {"role": "assistant", "content": text_of(rng)}
    if rng.random() < 0.35:
        answer["content"] = "<think>" + text_of(rng) + "</think>" + text_of(rng)
    elif rng.random() < 0.1:
        answer["content"] = "a</think>b</think>\n\nc"
    if name in SENDS_REASONING and rng.random() < 0.6:
        answer["reasoning_content"] = text_of(rng)
    if name == "deepseek-v3.1" and rng.random() < 0.2:
        answer["prefix"] = True
    return messages + [answer]


def random_conversation(rng, name):
    messages = []
    for _ in range(rng.choice([0, 1, 1, 2])):
        messages.append({"role": "system", "content": text_of(rng)})
    for _ in range(rng.randint(0, 3)):
        messages += turn_of(rng, name)
        if rng.random() < 0.15:
            messages.append({"role": "system", "content": text_of(rng)})
    if not messages or rng.random() < 0.7:
        messages.append({"role": "user", "content": text_of(rng)})
    conversation = {"messages": messages, "thinking": rng.random() < 0.5}
    if name in DECLARES_TOOLS and rng.random() < 0.6:
        conversation["tools"] = rng.sample(TOOLS, rng.randint(1, 3))
    return conversation


def fixed_conversations(name):
    user = {"role": "user", "content": "What time is it in Paris and in Leeds?"}
    system = {"role": "system", "content": "Use the tools when they help."}
    answer = {"role": "assistant", "content": "Ten."}
    yield {"messages": [user]}
    yield {"messages": [user], "thinking": True}
    yield {"messages": [system, user, answer, user]}
    yield {"messages": [system, user, {"role": "assistant", "content": "so</think>Ten."}, user],
           "thinking": True}
    yield {"messages": [user, system, system]}
    if name in DECLARES_TOOLS:
        yield {"messages": [user], "tools": TOOLS[:1]}
        yield {"messages": [system, user], "tools": TOOLS}
        yield {"messages": [system, user], "tools": TOOLS, "thinking": True}
    if name in NO_CALLS:
        return
    call = {"id": "a", "type": "function",
            "function": {"name": "clock", "arguments": "{\"city\": \"Paris\"}"}}
    calls = {"role": "assistant", "content": None,
             "tool_calls": [call] if name in ONE_CALL else [call, call]}
    result = {"role": "tool", "content": "10:00"}
    if name == "kimi-k2.5":  # writes the ids of calls and results as they are given
        call["id"] = result["tool_call_id"] = "functions.clock:0"
    yield {"messages": [user, calls, result, result]}
    yield {"messages": [user, calls, result, result, answer, user, calls, result, result, answer]}
    yield {"messages": [system, user, {**calls, "tool_calls": [call]}, result, user], "thinking": True}
    yield {"messages": [user, {**calls, "content": "Let me see."}, result, result]}


END_MARKS = (EOS, "<|im_end|>")
GIVEN = "The time is"


def prefill_conversations(name):
    user = {"role": "user", "content": "What time is it in Paris?"}
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Ten."}
    start = {"role": "assistant", "content": GIVEN}
    yield {"messages": [user, start]}
    yield {"messages": [system, user, answer, user, start]}
    yield {"messages": [system, user, {**start, "content": "```python\n  x = "}]}
    if name in NO_CALLS:
        return
    call = {"id": "a", "type": "function",
            "function": {"name": "clock", "arguments": "{\"city\": \"Paris\"}"}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "10:00"}
    yield {"messages": [user, calls, result, start]}
    yield {"messages": [user, {**calls, "tool_calls": [call, call]}, result, result, start]}


def without_end(text):
    for mark in END_MARKS:
        if text.endswith(mark):
            return text[:-len(mark)]
    raise ValueError(f"no end token behind {text!r}")


def written_prefills():
    """(format, thinking, the last message, what stands behind the user's turn, opens_reasoning)"""
    content, nothing = {"content": GIVEN}, {"content": ""}
    reasoning = {"content": "", "reasoning_content": "So, Paris"}
    both = {"content": GIVEN, "reasoning_content": "So, Paris"}
    typed = {"content": "<think>So, Paris"}
    typed_both = {"content": "<think>So, Paris</think>" + GIVEN}
    yield "deepseek-v2.5", False, content, "<｜Assistant｜>" + GIVEN, False
    yield "deepseek-v3-0324", False, content, "<｜Assistant｜>" + GIVEN, False
    r1 = "<｜Assistant｜><think>\n"
    for form, head in (("deepseek-r1", r1), ("deepseek-v3-0324", r1)):
        yield form, False, reasoning, head + "So, Paris", True
        yield form, False, typed, head + "So, Paris", True
        yield form, False, both, head + "So, Paris\n</think>\n\n" + GIVEN, False
        yield form, False, {"content": "<think>\nSo, Paris\n</think>\n\n" + GIVEN}, \
            head + "So, Paris\n</think>\n\n" + GIVEN, False
    yield "deepseek-r1", False, content, r1 + "\n</think>\n\n" + GIVEN, False
    yield "deepseek-r1", False, nothing, r1, True
    for form in ("deepseek-v3.1", "deepseek-v3.2", "fathom-tiny"):
        for thinking in (False, True):
            yield form, thinking, content, "<｜Assistant｜></think>" + GIVEN, False
            yield form, thinking, reasoning, "<｜Assistant｜><think>So, Paris", True
            yield form, thinking, typed, "<｜Assistant｜><think>So, Paris", True
            for message in (both, typed_both):
                yield form, thinking, message, \
                    "<｜Assistant｜><think>So, Paris</think>" + GIVEN, False
    kimi = "<|im_assistant|>assistant<|im_middle|>"
    yield "kimi-k2-thinking", False, reasoning, kimi + "<think>So, Paris", True
    yield "kimi-k2-thinking", False, both, kimi + "<think>So, Paris</think>" + GIVEN, False


def prefill_vectors(arguments):
    for argument in arguments:
        name, path = argument.split("=", 1)
        template = load_template(path)
        for conversation in prefill_conversations(name):
            expected = without_end(template.render(
                messages=conversation["messages"], tools=None, thinking=False, bos_token=BOS,
                eos_token=EOS, add_generation_prompt=False))
            yield {"format": name, "conversation": conversation, "expected": expected,
                   "opens_reasoning": False}
    for name, thinking, last, expected, opens in written_prefills():
        head = BOS + "<｜User｜>Hi"
        if name.startswith("kimi"):
            head = ("<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by "
                    "Moonshot AI.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>")
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", **last}]
        yield {"format": name, "conversation": {"messages": messages, "thinking": thinking},
               "expected": head + expected, "opens_reasoning": opens}


def write_vectors(path, vectors):
    with open(path, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(v, ensure_ascii=False) for v in vectors) + "\n]\n")


def as_given(name, messages):
    """Messages as the template takes them. GLM's wants arguments as an object, and would print a
    content that is null as None."""
    if name not in GLM:
        return messages
    given = []
    for message in messages:
        message = {**message, "content": message["content"] or ""}
        if "tool_calls" in message:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]]
        given.append(message)
    return given


def sorted_keys(value):
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(element) for element in value] if isinstance(value, list) else value


def kimi_types(tools):
    """tools, tools_ts_str: as K2.5's tokenizer gives them to its template."""
    spec = importlib.util.spec_from_file_location("kimi_tools", os.environ["KIMI_TOOLS"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tools = sorted_keys(tools)
    try:
        return {"tools": tools, "tools_ts_str": module.encode_tools_to_typescript_style(tools)}
    except Exception:  # whatever it is: the tokenizer goes on without types
        return {"tools": tools}


def main():
    if sys.argv[1] == "--prefill":
        return write_vectors(sys.argv[2], prefill_vectors(sys.argv[3:]))
    vectors = []
    for argument in sys.argv[2:]:
        name, path = argument.split("=", 1)
        template = load_template(path)
        rng = random.Random(name)
        conversations = list(fixed_conversations(name))
        conversations += [random_conversation(rng, name) for _ in range(10)]
        if name in TYPES:
            conversations = list(typed_conversations(name)) + conversations
        head = ""  # GigaChat's first message, the same in each prompt: written once
        if name in GIGACHAT:
            head = template.render(messages=[], tools=None, bos_token=GIGACHAT_BOS)
            vectors.append({"format": name, "head": head})
        for conversation in conversations:
            for generation in (True, False) if conversation is conversations[-1] else (True,):
                tools = {"tools": conversation.get("tools")}
                if name == "kimi-k2.5" and tools["tools"]:
                    tools = kimi_types(tools["tools"])
                expected = template.render(
                    messages=as_given(name, conversation["messages"]), **tools,
                    thinking=conversation.get("thinking", False),
                    enable_thinking=conversation.get("thinking", False),
                    bos_token=GIGACHAT_BOS if name in GIGACHAT else BOS,
                    eos_token=EOS, add_generation_prompt=generation)
                vectors.append({"format": name, "conversation": conversation,
                                "add_generation_prompt": generation,
                                "expected": expected.removeprefix(head)})
    write_vectors(sys.argv[1], vectors)


if __name__ == "__main__":
    main()
