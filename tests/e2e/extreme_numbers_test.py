#!/usr/bin/env python3
"""Denormals, negative zeros, the largest doubles and the last numbers before each limit, in all fields
of all generating endpoints, streamed and not: a completion or an error that names the field, never an
internal error.

    extreme_numbers_test.py PROGRAM SOURCE_DIR
"""
import concurrent.futures
import json
import unittest

from fathom_server import QUESTION, Server

TEXT = QUESTION[0]["content"]
# Endpoint: the rest of its body, with "FIELD" in place of the field.
ENDPOINTS = {
    "/v1/chat/completions":
        {"messages": QUESTION, "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "FIELD": 0},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2, "logprobs": 2, "FIELD": 0},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2, "top_logprobs": 2, "FIELD": 0},
    "/v1/messages": {"model": "m", "messages": QUESTION, "max_tokens": 2, "FIELD": 0},
    "/generate": {"text": TEXT, "return_logprob": True, "top_logprobs_num": 2,
                  "sampling_params": {"max_new_tokens": 2, "FIELD": 0}},
}
ZEROS = ["0", "-0", "-0.0", "0e300"]
TINY = ["5e-324", "1e-310", "2.2250738585072014e-308"]
NEGATIVE = ["-5e-324", "-1e-310"]
LARGE = ["1.7976931348623157e308", "-1.7976931348623157e308", "1e400", "-1e400", "1e39"]


def bias(values):
    return ['{"42": %s, "43": %s}' % (value, value) for value in values]


# Field: accepted values, refused values.
FIELDS = {
    "temperature": (ZEROS + TINY + ["9.999999999999999e-6", "1e-5", "2", "2.0"],
                    NEGATIVE + LARGE + ["2.0000000000000004"]),
    "top_p": (TINY + ["0.9999999999999999", "1"],
              ZEROS + NEGATIVE + LARGE + ["1.0000000000000002"]),
    "min_p": (ZEROS + TINY + ["0.9999999999999999", "1"],
              NEGATIVE + LARGE + ["1.0000000000000002"]),
    "repetition_penalty": (["0.01", "0.010000000000000002", "10"],
                           ZEROS + TINY + NEGATIVE + LARGE + ["0.009999999999999998"]),
    "presence_penalty": (ZEROS + TINY + NEGATIVE + ["2", "-2"], LARGE + ["2.0000000000000004"]),
    "frequency_penalty": (ZEROS + TINY + NEGATIVE + ["2", "-2"], LARGE + ["-2.0000000000000004"]),
    "logit_bias": (bias(ZEROS + TINY + NEGATIVE + ["1e-40", "100", "-100"]),
                   bias(LARGE + ["100.00000000000001"])),
    "top_k": (["0", "-0", "-1", "2147483647", "1.0"], LARGE + ["5e-324", "2147483648", "0.5"]),
    "seed": (["-0", "-9223372036854775808", "9223372036854775807"],
             LARGE + ["5e-324", "9223372036854775808"]),
}


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, (int, float)):
        yield value


class ExtremeNumbers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0, "".join(cls.server.log[-20:])

    def check(self, path, stream, field, value, is_taken):
        body = json.dumps({**ENDPOINTS[path], "stream": stream}).replace(
            '"FIELD": 0', f'"{field}": {value}')
        status, _, text = self.server.ask("POST", path, body)
        said = f"{path}, stream {stream}, {field} {value}: {status} {text}"
        if not is_taken:
            self.assertEqual(status, 400, said)
            message = json.loads(text)["error"]["message"]
            self.assertTrue(field in message or "larger than a double" in message, said)
            return
        self.assertEqual(status, 200, said)
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        replies = [json.loads(one, parse_constant=self.fail)
                   for one in (events if stream else [text])]
        self.assertTrue(replies, said)
        for reply in replies:
            self.assertIsNone(reply.get("error"), said)
            # Stands for a log-probability that is not finite.
            self.assertNotIn(-9999, list(numbers(reply)), said)

    def test_an_answer_or_a_refusal(self):
        cases = [(path, stream, field, value, is_taken)
                 for field, values in FIELDS.items()
                 for is_taken, group in zip((True, False), values) for value in group
                 for path in ENDPOINTS for stream in (False, True)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(self.check, *case) for case in cases]:
                done.result()


if __name__ == "__main__":
    unittest.main(verbosity=2)
