"""The official `anthropic` client: messages whole and streamed, tools, counting, errors, ends.

The client checks every reply against its own types (_strict_response_validation).
"""
import asyncio
import unittest

import anthropic

from served import ANSWER, ENDLESS, KEY, QUESTION, STORY, WEATHER, ServedTest

MODEL = "tiny"
TOOLS = [{"name": "get_weather", "description": "Gives the weather of a city", "input_schema": {
    "type": "object", "required": ["city"], "additionalProperties": False,
    "properties": {"city": {"type": "string", "maxLength": 12}}}}]


class AnthropicTest(ServedTest):
    def client(self, kind=anthropic.Anthropic, **options):
        return kind(**{"base_url": self.server.url, "api_key": KEY, "max_retries": 0,
                       "timeout": 120, "_strict_response_validation": True, **options})

    def setUp(self):
        self.anthropic = self.client()
        self.addCleanup(self.anthropic.close)

    @staticmethod
    def fields(messages=QUESTION, **more):
        return {"model": MODEL, "messages": messages, "max_tokens": 100, **more,
                "extra_body": {"temperature": 0, **more.get("extra_body", {})}}


class Messages(AnthropicTest):
    def test_create(self):
        message = self.anthropic.messages.create(**self.fields())
        self.assertEqual([block.text for block in message.content], [ANSWER])
        self.assertEqual((message.stop_reason, message.stop_sequence), ("end_turn", None))
        self.assertGreater(message.usage.output_tokens, 5)
        self.assertTrue(message._request_id)

    def test_system_stop_and_length(self):
        message = self.anthropic.messages.create(**self.fields(
            system=[{"type": "text", "text": "Be short.",
                     "cache_control": {"type": "ephemeral"}}], max_tokens=2))
        self.assertEqual((message.stop_reason, message.usage.output_tokens), ("max_tokens", 2))
        message = self.anthropic.messages.create(**self.fields(stop_sequences=["="]))
        self.assertEqual((message.stop_reason, message.stop_sequence, message.content[0].text),
                         ("stop_sequence", "=", "12 + 30 "))

    def test_stream_helper(self):
        with self.anthropic.messages.stream(**self.fields()) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        self.assertGreater(len(pieces), 1)
        self.assertEqual("".join(pieces), ANSWER)
        self.assertEqual((final.content[0].text, final.stop_reason), (ANSWER, "end_turn"))
        whole = self.anthropic.messages.create(**self.fields())
        self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)

    def test_stream_events(self):
        types = [event.type for event in self.anthropic.messages.create(
            **self.fields(), stream=True)]
        self.assertEqual(types[:2], ["message_start", "content_block_start"])
        self.assertEqual(types[-3:], ["content_block_stop", "message_delta", "message_stop"])

    def test_async(self):
        async def ask():
            async with self.client(anthropic.AsyncAnthropic) as client:
                async with client.messages.stream(**self.fields()) as stream:
                    text = "".join([piece async for piece in stream.text_stream])
                return text, await client.messages.create(**self.fields())
        text, message = asyncio.run(ask())
        self.assertEqual((text, message.content[0].text), (ANSWER, ANSWER))

    def test_prefill(self):
        message = self.anthropic.messages.create(**self.fields(
            [*QUESTION, {"role": "assistant", "content": ANSWER[:4]}]))
        self.assertEqual(ANSWER[:4] + message.content[0].text, ANSWER)

    def test_models(self):
        models = list(self.anthropic.models.list())
        self.assertEqual([(model.id, model.type) for model in models], [(MODEL, "model")])
        self.assertEqual(models[0], self.anthropic.models.retrieve(MODEL))
        self.assertGreater(models[0].created_at.year, 2000)
        with self.assertRaises(anthropic.NotFoundError):
            self.anthropic.models.retrieve("another")

    def test_count_tokens(self):
        counted = self.anthropic.messages.count_tokens(model=MODEL, messages=QUESTION)
        usage = self.anthropic.messages.create(**self.fields()).usage
        self.assertEqual(counted.input_tokens,
                         usage.input_tokens + usage.cache_read_input_tokens)
        with_tools = self.anthropic.messages.count_tokens(model=MODEL, messages=QUESTION,
                                                          tools=TOOLS)
        self.assertGreater(with_tools.input_tokens, counted.input_tokens)


class Tools(AnthropicTest):
    def test_any_and_result(self):
        message = self.anthropic.messages.create(**self.fields(
            WEATHER, tools=TOOLS, tool_choice={"type": "any"}))
        self.assertEqual(message.stop_reason, "tool_use")
        uses = [block for block in message.content if block.type == "tool_use"]
        self.assertEqual(uses[0].name, "get_weather")
        self.assertIsInstance(uses[0].input["city"], str)
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "18 C"}
                   for use in uses]
        after = self.anthropic.messages.create(**self.fields(
            [*WEATHER, {"role": "assistant", "content": message.content},
             {"role": "user", "content": results}], tools=TOOLS))
        self.assertGreater(after.usage.output_tokens, 0)

    def test_named_streamed(self):
        with self.anthropic.messages.stream(**self.fields(
                WEATHER, tools=TOOLS,
                tool_choice={"type": "tool", "name": "get_weather"})) as stream:
            partial = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        self.assertGreater(len(partial), 1)
        self.assertIsInstance(final.content[-1].input["city"], str)

    def test_none(self):
        message = self.anthropic.messages.create(**self.fields(
            WEATHER, tools=TOOLS, tool_choice={"type": "none"}))
        self.assertNotEqual(message.stop_reason, "tool_use")


class Errors(AnthropicTest):
    def test_bad_request(self):
        with self.assertRaises(anthropic.BadRequestError) as caught:
            self.anthropic.messages.create(**self.fields(max_tokens=10 ** 6))
        self.assertEqual(caught.exception.body["error"]["type"], "invalid_request_error")
        self.assertTrue(caught.exception.request_id)

    def test_wrong_key(self):
        with self.client(api_key="wrong") as client, \
                self.assertRaises(anthropic.AuthenticationError) as caught:
            client.messages.create(**self.fields())
        self.assertIn("API key", str(caught.exception))

    def test_unknown_model_list(self):
        with self.assertRaises(anthropic.NotFoundError):
            self.anthropic.messages.batches.list()


class Ends(AnthropicTest):
    FLAGS = ("--max-num-seqs", "1", "--max-queued-requests", "1")

    def endless(self, messages=STORY):
        return self.fields(messages, max_tokens=1500, extra_body=ENDLESS)

    def test_leaving_a_stream_frees_its_pages(self):
        with self.anthropic.messages.stream(**self.endless()) as stream:
            next(iter(stream.text_stream))
        self.pages_come_back()

    def test_a_timeout_frees_its_pages(self):
        with self.client(timeout=0.1) as client, self.assertRaises(anthropic.APITimeoutError):
            client.messages.create(**self.endless())
        self.pages_come_back()

    def test_a_full_queue_is_a_rate_limit(self):
        streams = [self.anthropic.messages.create(**self.endless(), stream=True)]
        next(iter(streams[0]))
        streams.append(self.anthropic.messages.create(**self.endless(), stream=True))
        with self.assertRaises(anthropic.RateLimitError) as caught:
            self.anthropic.messages.create(**self.fields())
        self.assertEqual(caught.exception.response.headers["retry-after"], "1")
        for stream in streams:
            stream.close()
        self.pages_come_back()


if __name__ == "__main__":
    unittest.main()
