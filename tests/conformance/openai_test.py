"""The official `openai` client: chat, completions, responses, models, errors, the ends of streams.

The client checks every reply against its own types (_strict_response_validation).
"""
import asyncio
import json
import threading
import time
import unittest
from typing import Annotated, Literal

import openai
from pydantic import BaseModel, Field

from served import ANSWER, ENDLESS, KEY, QUESTION, STORY, WEATHER, ServedTest

MODEL = "tiny"


def tool(name, field):
    return {"type": "function", "function": {
        "name": name, "description": f"Gives the {name} of a {field}", "strict": True,
        "parameters": {"type": "object", "required": [field], "additionalProperties": False,
                       "properties": {field: {"type": "string", "maxLength": 12}}}}}


TOOLS = [tool("get_weather", "city"), tool("get_time", "zone")]


class Fruit(BaseModel):
    name: Literal["apple", "pear"]
    count: Annotated[int, Field(ge=1, le=99)]
    ripe: bool


class Place(BaseModel):
    city: Literal["Paris", "Rome"]


class OpenAiTest(ServedTest):
    def client(self, kind=openai.OpenAI, **options):
        return kind(**{"base_url": self.server.url + "/v1", "api_key": KEY, "max_retries": 0,
                       "timeout": 120, "_strict_response_validation": True, **options})

    def setUp(self):
        self.openai = self.client()
        self.addCleanup(self.openai.close)

    def chat(self, messages=QUESTION, **fields):
        return self.openai.chat.completions.create(model=MODEL, messages=messages,
                                                   **{"temperature": 0, **fields})


class Chat(OpenAiTest):
    def test_create(self):
        reply = self.chat()
        self.assertEqual(reply.choices[0].message.content, ANSWER)
        self.assertEqual(reply.choices[0].finish_reason, "stop")
        self.assertIsNone(reply.choices[0].stop_reason)
        self.assertIsInstance(reply.choices[0].matched_stop, int)
        self.assertTrue(reply.id.startswith("chatcmpl-"))
        self.assertEqual(reply.model, MODEL)
        usage = reply.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertGreaterEqual(usage.prompt_tokens_details.cached_tokens, 0)

    def test_streamed(self):
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual(len({chunk.id for chunk in chunks}), 1)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.assertEqual(text, ANSWER)
        self.assertEqual([c.choices[0].finish_reason for c in chunks[-2:] if c.choices], ["stop"])
        self.assertTrue(all(chunk.usage is None for chunk in chunks[:-1]))
        self.assertEqual((chunks[-1].choices, chunks[-1].usage.total_tokens),
                         ([], self.chat().usage.total_tokens))

    def test_stream_helper(self):
        with self.openai.chat.completions.stream(model=MODEL, messages=QUESTION,
                                                 temperature=0) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        self.assertGreater(len(deltas), 1)
        self.assertEqual(("".join(deltas), final.choices[0].message.content), (ANSWER, ANSWER))

    def test_async(self):
        async def ask():
            async with self.client(openai.AsyncOpenAI) as client:
                async def streamed():
                    stream = await client.chat.completions.create(
                        model=MODEL, messages=QUESTION, temperature=0, stream=True)
                    return "".join([c.choices[0].delta.content or "" async for c in stream])

                whole = client.chat.completions.create(model=MODEL, messages=QUESTION,
                                                       temperature=0)
                return await asyncio.gather(whole, *(streamed() for _ in range(8)))
        whole, *streams = asyncio.run(ask())
        self.assertEqual(whole.choices[0].message.content, ANSWER)
        self.assertEqual(streams, [ANSWER] * 8)

    def test_choices_and_seed(self):
        fields = {"temperature": 1, "n": 3, "seed": 7, "max_tokens": 8}
        first, second = self.chat(STORY, **fields), self.chat(STORY, **fields)
        texts = [choice.message.content for choice in first.choices]
        self.assertEqual([choice.index for choice in first.choices], [0, 1, 2])
        self.assertEqual(texts, [choice.message.content for choice in second.choices])
        self.assertGreater(len(set(texts)), 1)
        streamed = {0: "", 1: "", 2: ""}
        for chunk in self.chat(STORY, stream=True, **fields):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        self.assertEqual(list(streamed.values()), texts)

    def test_logprobs(self):
        choice = self.chat(logprobs=True, top_logprobs=3).choices[0]
        entries = choice.logprobs.content
        said = b"".join(bytes(entry.bytes) for entry in entries)
        self.assertTrue(said.decode().startswith(ANSWER))
        for entry in entries:
            self.assertEqual(len(entry.top_logprobs), 3)
            self.assertEqual(entry.top_logprobs[0].token, entry.token)
            self.assertLessEqual(entry.logprob, 0)
        chunks = self.chat(logprobs=True, top_logprobs=3, stream=True)
        streamed = [entry for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
                    for entry in chunk.choices[0].logprobs.content]
        self.assertEqual([e.token for e in streamed], [e.token for e in entries])

    def test_stop_and_length(self):
        choice = self.chat(stop=["="]).choices[0]
        self.assertEqual((choice.message.content, choice.finish_reason), ("12 + 30 ", "stop"))
        self.assertEqual((choice.matched_stop, choice.stop_reason), ("=", "="))
        reply = self.chat(max_completion_tokens=2)
        self.assertEqual((reply.choices[0].finish_reason, reply.usage.completion_tokens),
                         ("length", 2))

    def test_ignored_fields_and_extra_body(self):
        reply = self.chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto",
                          extra_body={"top_k": 1, "a_field_of_next_month": {"x": 1}})
        self.assertEqual(reply.choices[0].message.content, ANSWER)

    def test_request_ids(self):
        raw = self.openai.chat.completions.with_raw_response.create(
            model=MODEL, messages=QUESTION, extra_headers={"X-Request-Id": "mine-1"})
        self.assertEqual(raw.headers["x-request-id"], "mine-1")
        self.assertEqual(raw.parse()._request_id, "mine-1")
        self.assertTrue(self.chat()._request_id)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=3)
        self.assertTrue(caught.exception.request_id)


class Tools(OpenAiTest):
    def check(self, call, name="get_weather", field="city"):
        self.assertEqual(call.function.name, name)
        self.assertIsInstance(json.loads(call.function.arguments)[field], str)

    def test_required(self):
        choice = self.chat(WEATHER, tools=TOOLS, tool_choice="required").choices[0]
        self.assertEqual(choice.finish_reason, "tool_calls")
        self.assertTrue(choice.message.tool_calls)
        self.check(choice.message.tool_calls[0])

    def test_named(self):
        choice = self.chat(WEATHER, tools=TOOLS, tool_choice={
            "type": "function", "function": {"name": "get_time"}}).choices[0]
        self.assertEqual(len(choice.message.tool_calls), 1)
        self.check(choice.message.tool_calls[0], "get_time", "zone")

    def test_auto_and_none(self):
        choice = self.chat(WEATHER, tools=TOOLS, tool_choice="auto").choices[0]
        self.assertIn(choice.finish_reason, ("stop", "tool_calls"))
        self.assertEqual(choice.finish_reason == "tool_calls", bool(choice.message.tool_calls))
        choice = self.chat(WEATHER, tools=TOOLS, tool_choice="none").choices[0]
        self.assertIsNone(choice.message.tool_calls)

    def calls_of(self, stream):
        """The calls of a stream, put together by index as clients do."""
        calls, pieces, finish = {}, 0, None
        for chunk in stream:
            for delta in chunk.choices[0].delta.tool_calls or []:
                if delta.index not in calls:
                    self.assertTrue(delta.id and delta.function.name and delta.type == "function")
                    calls[delta.index] = [delta.id, delta.function.name, ""]
                else:
                    self.assertIsNone(delta.id)
                calls[delta.index][2] += delta.function.arguments or ""
                pieces += 1
            finish = chunk.choices[0].finish_reason or finish
        return calls, pieces, finish

    def test_streamed(self):
        calls, pieces, finish = self.calls_of(
            self.chat(WEATHER, tools=TOOLS, tool_choice="required", stream=True))
        self.assertEqual(finish, "tool_calls")
        self.assertGreater(pieces, len(calls) + 1)
        self.assertEqual(sorted(calls), list(range(len(calls))))
        self.assertEqual(len({call[0] for call in calls.values()}), len(calls))
        for call in calls.values():
            json.loads(call[2])

    def test_parallel(self):
        question = [{"role": "user",
                     "content": "What is the weather in Paris and what is the time in Rome?"}]
        fields = {"tools": TOOLS, "tool_choice": "required", "stream": True}
        calls, _, finish = self.calls_of(self.chat(question, **fields))
        self.assertEqual((len(calls), finish), (2, "tool_calls"))
        self.assertEqual(len({call[0] for call in calls.values()}), 2)
        for call in calls.values():
            json.loads(call[2])
        calls, _, finish = self.calls_of(
            self.chat(question, parallel_tool_calls=False, **fields))
        self.assertEqual((len(calls), finish), (1, "tool_calls"))

    def test_a_result_is_taken(self):
        message = self.chat(WEATHER, tools=TOOLS, tool_choice="required").choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "18 C"}
                   for call in message.tool_calls]
        reply = self.chat([*WEATHER, message, *results], tools=TOOLS, max_tokens=60)
        self.assertGreater(reply.usage.completion_tokens, 0)

    def test_functions_are_refused(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(functions=[{"name": "f", "parameters": {}}])
        self.assertEqual((caught.exception.param, caught.exception.code),
                         ("functions", "unsupported_parameter"))
        self.assertIn("tools", str(caught.exception))


class Structured(OpenAiTest):
    def test_parse(self):
        reply = self.openai.chat.completions.parse(
            model=MODEL, messages=STORY, response_format=Fruit, temperature=1, seed=1)
        fruit = reply.choices[0].message.parsed
        self.assertIsInstance(fruit, Fruit)
        self.assertIn(fruit.name, ("apple", "pear"))

    def test_parse_streamed(self):
        with self.openai.chat.completions.stream(model=MODEL, messages=STORY, seed=2,
                                                 response_format=Fruit) as stream:
            final = stream.get_final_completion()
        self.assertIsInstance(final.choices[0].message.parsed, Fruit)

    def test_parse_tools(self):
        weather = openai.pydantic_function_tool(Place, name="get_weather")
        reply = self.openai.chat.completions.parse(
            model=MODEL, messages=WEATHER, tools=[weather], tool_choice="required", temperature=0)
        call = reply.choices[0].message.tool_calls[0]
        self.assertIsInstance(call.function.parsed_arguments, Place)

    def test_json_object(self):
        reply = self.chat(STORY, response_format={"type": "json_object"}, max_tokens=200, seed=1)
        if reply.choices[0].finish_reason == "stop":
            self.assertIsInstance(json.loads(reply.choices[0].message.content), dict)
        self.assertTrue(reply.choices[0].message.content.startswith("{"))

    def test_a_schema_that_cannot_be_followed_is_refused_by_keyword(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(response_format={"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"type": "object", "not": {"required": ["a"]}}}})
        self.assertIn("not", caught.exception.message)


class Completions(OpenAiTest):
    def setUp(self):
        # The client's types know neither the null at a prompt's first token nor the one before the
        # end of a stream, which OpenAI sends as well.
        self.openai = self.client(_strict_response_validation=False)
        self.addCleanup(self.openai.close)

    def test_create(self):
        reply = self.openai.completions.create(model=MODEL, prompt=["The sun", "A river"],
                                               max_tokens=5, temperature=0, echo=True, logprobs=2)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1])
        for prompt, choice in zip(("The sun", "A river"), reply.choices):
            self.assertTrue(choice.text.startswith(prompt))
            self.assertEqual(len(choice.logprobs.tokens), len(choice.logprobs.text_offset))
            self.assertIsNone(choice.logprobs.token_logprobs[0])

    def test_streamed(self):
        fields = {"model": MODEL, "prompt": "The sun", "max_tokens": 20, "temperature": 0}
        whole = self.openai.completions.create(**fields)
        chunks = list(self.openai.completions.create(stream=True, **fields))
        self.assertEqual("".join(c.choices[0].text for c in chunks), whole.choices[0].text)
        self.assertEqual(chunks[-1].choices[0].finish_reason, whole.choices[0].finish_reason)

    def test_token_ids(self):
        reply = self.openai.completions.create(model=MODEL, prompt=[10, 11, 12], max_tokens=3)
        self.assertEqual(reply.usage.prompt_tokens, 3)

    def test_suffix(self):
        # The bundled vocabulary has the markers of a gap; the model has not learnt to fill one.
        reply = self.openai.completions.create(model=MODEL, prompt="a", suffix="b", max_tokens=3)
        self.assertGreater(reply.usage.prompt_tokens, 4)


class Responses(OpenAiTest):
    def create(self, **fields):
        return self.openai.responses.create(
            **{"model": MODEL, "input": "What is 12 + 30?", "temperature": 0, **fields})

    def test_create(self):
        reply = self.create(instructions=None, metadata={"a": "b"})
        self.assertEqual((reply.status, reply.output_text), ("completed", ANSWER))
        self.assertEqual(reply.metadata, {"a": "b"})
        self.assertEqual(reply.usage.total_tokens,
                         reply.usage.input_tokens + reply.usage.output_tokens)
        reply = self.create(max_output_tokens=2)
        self.assertEqual((reply.status, reply.incomplete_details.reason),
                         ("incomplete", "max_output_tokens"))

    def test_streamed(self):
        events = list(self.create(stream=True))
        types = [event.type for event in events]
        self.assertEqual(types[:2], ["response.created", "response.in_progress"])
        self.assertEqual(types[-1], "response.completed")
        self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        self.assertEqual((text, events[-1].response.output_text), (ANSWER, ANSWER))

    def test_stream_helper(self):
        with self.openai.responses.stream(model=MODEL, input="What is 12 + 30?",
                                          temperature=0) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
            final = stream.get_final_response()
        self.assertEqual(("".join(deltas), final.output_text), (ANSWER, ANSWER))

    def test_parse(self):
        reply = self.openai.responses.parse(model=MODEL, input="Tell me a story.",
                                            text_format=Fruit)
        self.assertIsInstance(reply.output_parsed, Fruit)
        with self.openai.responses.stream(model=MODEL, input="Tell me a story.",
                                          text_format=Fruit) as stream:
            self.assertIsInstance(stream.get_final_response().output_parsed, Fruit)

    def test_tools(self):
        tools = [{"type": "function", **one["function"]} for one in TOOLS]
        question = [{"role": "user", "content": WEATHER[0]["content"]}]
        reply = self.create(input=question, tools=tools, tool_choice="required")
        calls = [item for item in reply.output if item.type == "function_call"]
        self.assertEqual(calls[0].name, "get_weather")
        json.loads(calls[0].arguments)
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "18 C"}
                   for call in calls]
        reply = self.create(input=[*question, *reply.output, *outputs], tools=tools,
                            max_output_tokens=60)
        self.assertGreater(reply.usage.output_tokens, 0)
        events = list(self.create(input=question, tools=tools, stream=True, tool_choice={
            "type": "function", "name": "get_time"}))
        arguments = "".join(e.delta for e in events
                            if e.type == "response.function_call_arguments.delta")
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        self.assertEqual(done[0].arguments, arguments)
        self.assertIn("zone", json.loads(arguments))

    def test_async(self):
        async def ask():
            async with self.client(openai.AsyncOpenAI) as client:
                async with client.responses.stream(model=MODEL, input="What is 12 + 30?",
                                                   temperature=0) as stream:
                    return (await stream.get_final_response()).output_text
        self.assertEqual(asyncio.run(ask()), ANSWER)


class ModelsAndErrors(OpenAiTest):
    def test_models(self):
        self.assertEqual([model.id for model in self.openai.models.list()], [MODEL])
        self.assertEqual(self.openai.models.retrieve(MODEL).id, MODEL)
        with self.assertRaises(openai.NotFoundError) as caught:
            self.openai.models.retrieve("another/model")
        self.assertEqual(caught.exception.code, "model_not_found")

    def test_bad_request(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=3)
        error = caught.exception
        self.assertEqual((error.param, error.type), ("temperature", "invalid_request_error"))
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(max_tokens=10 ** 6)
        self.assertEqual(caught.exception.code, "context_length_exceeded")

    def test_a_refusal_comes_before_the_stream(self):
        with self.assertRaises(openai.BadRequestError):
            self.chat(temperature=3, stream=True)

    def test_wrong_key(self):
        with self.client(api_key="wrong") as client, \
                self.assertRaises(openai.AuthenticationError) as caught:
            client.models.list()
        self.assertEqual(caught.exception.code, "invalid_api_key")

    def test_embeddings_say_what_this_server_does(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.openai.embeddings.create(model=MODEL, input="text")
        self.assertIn("generates text only", caught.exception.message)
        self.assertEqual(caught.exception.code, "not_supported")

    def test_unknown_routes(self):
        with self.assertRaises(openai.NotFoundError):
            self.openai.moderations.create(input="text")


class Ends(OpenAiTest):
    FLAGS = ("--max-num-seqs", "1", "--max-queued-requests", "1")

    def endless(self, **options):
        return self.client(**options).chat.completions.create(
            model=MODEL, messages=STORY, temperature=1, stream=True, max_tokens=1500,
            extra_body=ENDLESS)

    def test_closing_a_stream_frees_its_pages(self):
        stream = self.endless()
        next(stream)
        self.server.wait_for("vllm:num_requests_running", 1)
        stream.close()
        self.pages_come_back()

    def test_cancelling_a_task_frees_its_pages(self):
        async def begin_and_cancel():
            async with self.client(openai.AsyncOpenAI) as client:
                begun = asyncio.Event()

                async def read():
                    async for _ in await client.chat.completions.create(
                            model=MODEL, messages=STORY, stream=True, max_tokens=1500,
                            extra_body=ENDLESS):
                        begun.set()
                task = asyncio.create_task(read())
                await begun.wait()
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
        asyncio.run(begin_and_cancel())
        self.pages_come_back()

    def test_a_timeout_frees_its_pages(self):
        with self.client(timeout=0.1) as client, self.assertRaises(openai.APITimeoutError):
            client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=1500,
                                           extra_body=ENDLESS)
        self.pages_come_back()

    def fill(self):
        """One request runs, one waits: the next gets 429."""
        streams = [self.endless()]
        next(streams[0])
        streams.append(self.endless())
        return streams

    def test_a_full_queue_is_a_rate_limit(self):
        streams = self.fill()
        with self.assertRaises(openai.RateLimitError) as caught:
            self.chat()
        self.assertEqual(caught.exception.code, "queue_full")
        self.assertEqual(caught.exception.response.headers["retry-after"], "1")
        for stream in streams:
            stream.close()
        self.pages_come_back()

    def test_a_retry_waits_as_told_and_succeeds(self):
        streams = self.fill()

        def leave():
            for stream in streams:
                stream.close()
        timer = threading.Timer(0.3, leave)
        timer.start()
        start = time.monotonic()
        with self.client(max_retries=5) as client:
            reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        timer.join()
        self.assertEqual(reply.choices[0].message.content, ANSWER)
        # The client's own first pause is half a second; Retry-After says one.
        self.assertGreaterEqual(time.monotonic() - start, 0.9)
        self.pages_come_back()


class KeepAlive(OpenAiTest):
    FLAGS = ("--max-num-seqs", "1", "--enable-priority")

    def test_a_stream_that_waits_gets_comments_that_clients_ignore(self):
        # Requests that go before it keep the one place busy until the comment has come.
        stop = threading.Event()

        def keep_busy():
            while not stop.is_set():
                self.chat(STORY, max_tokens=400, extra_body=ENDLESS)
        busy = [threading.Thread(target=keep_busy) for _ in range(3)]
        for thread in busy:
            thread.start()
        self.server.wait_for("vllm:num_requests_running", 1)
        last = {"model": MODEL, "messages": QUESTION, "temperature": 0, "stream": True,
                "extra_body": {"priority": 100}}
        raw = b""
        parsed = self.openai.chat.completions.create(**last)
        with self.openai.chat.completions.with_streaming_response.create(**last) as reply:
            for piece in reply.iter_bytes():
                raw += piece
                if raw:
                    stop.set()
        for thread in busy:
            thread.join()
        self.assertTrue(raw.startswith(b":"), raw[:80])
        self.assertTrue(raw.endswith(b"data: [DONE]\n\n"))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in parsed)
        self.assertEqual(text, ANSWER)


if __name__ == "__main__":
    unittest.main()
