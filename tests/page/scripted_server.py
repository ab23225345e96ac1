"""A server that answers as scripted, for what the bundled model can't be made to show: slow streams,
tool calls, broken streams, errors. It sends the page under the same policy as Fathom does.

The last user message chooses the answer: its first word names a method of Script, and `echo TEXT`
streams TEXT back. Everything else gets a sentence, with reasoning before it where that is asked for.
"""
import http.server
import json
import pathlib
import re
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import embed_page  # noqa: E402

# Where the build takes it from (src/server/page/CMakeLists.txt).
KATEX = "/usr/share/javascript/katex/katex.js"

LONG_ANSWER = """## Reading a file line by line

There are **three** common ways, and they differ in *what they hold in memory*:

| way | memory | speed |
| --- | --- | ---: |
| `read()` | the whole file | 1.0 |
| `readlines()` | the whole file, as a list | 1.3 |
| a loop over the file | one line | 1.1 |

The loop is the one to use when the file may be large:

```python
def count_words(path: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:  # one line at a time
            for word in line.split():
                counts[word] = counts.get(word, 0) + 1
    return counts
```

1. The file is **opened once** and closed by `with`.
2. Each line is split at white space:
   - tabs count as white space,
   - so does the newline at the end.
3. The counts are returned.

> A generator would let the caller stop early.

More is in the [documentation](https://docs.python.org/3/library/functions.html#open).
"""


FORMULAS = r"""The solutions of $ax^2 + bx + c = 0$ are

$$
x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
$$

It costs $5 and not $10, or $5-$10. With \(a = 1\), and

\[
\sum_{k=1}^{n} k
= \frac{n(n+1)}{2}
+ 0
\]

- in a list: $\alpha \le \beta$,
- a matrix $\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$,
- a mistake: $\frac{1}{$, and a link: $\href{javascript:alert(1)}{x}$.

`$code$` stays, and so does \$a\$.
"""


class Reply(Exception):
    """Ends a request with an error instead of a stream."""

    def __init__(self, status, message, headers=()):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers)


class Script:
    """Each method yields deltas of a chat completion, or raises Reply. `server` keeps what outlasts
    a request."""

    def __init__(self, server, thinking):
        self.server, self.thinking = server, thinking

    @staticmethod
    def words(text, seconds=0.004, field="content"):
        for piece in re.findall(r"\s*\S+\s*$|\s*\S+", text):
            time.sleep(seconds)
            yield {field: piece}

    def sentence(self, _):
        if self.thinking:
            yield from self.words("A sentence will do.", field="reasoning_content")
        yield from self.words("The answer to that is a sentence of ten short words.")

    def echo(self, text):
        yield from self.words(text, 0.001)

    def whole(self, _):
        yield {"content": self.server.answer}

    def quickly(self, _):
        yield from self.words(self.server.answer, 0)

    def document(self, _):
        yield from self.words(LONG_ANSWER)

    def formulas(self, _):
        yield from self.words(FORMULAS)

    def slowly(self, _):
        yield from self.words("one more word " * 2000, 0.02)

    def think(self, _):
        yield from self.words("The user asks for a product. 17 * 23 = 17 * 20 + 17 * 3 = 340 + 51, "
                              "which is **391**. I should check it: 391 / 23 = 17.", 0.05,
                              "reasoning_content")
        yield from self.words("17 * 23 = **391**.")

    def call(self, _):
        for index, city in enumerate(("Oslo", "Rome")):
            yield {"tool_calls": [{"index": index, "id": f"call_{index}", "type": "function",
                                   "function": {"name": "get_weather", "arguments": ""}}]}
            for piece in ('{"city": ', f'"{city}"', ', "days": 3}'):
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}

    def _first_time(self, name):
        first = name not in self.server.seen
        self.server.seen.add(name)
        return first

    def busy(self, _):
        if self._first_time("busy"):
            raise Reply(429, "512 requests are waiting, the limit is 512", [("Retry-After", "2")])
        yield from self.words("There was room at the second try.")

    def starting(self, _):
        if self._first_time("starting"):
            raise Reply(503, "The model is being loaded", [("Retry-After", "1")])
        yield from self.words("It is up.")

    def wrong(self, _):
        raise Reply(400, "temperature is 3, the limit is 2")
        yield

    def broken(self, _):
        yield from self.words("This ends with an")
        yield {"error": {"message": "The engine stopped", "type": "server_error"}}

    def cut(self, _):
        yield from self.words("This just")
        yield None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, content_type, body, headers=()):
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)),
                            **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, status, value, headers=()):
        self.send(status, "application/json", json.dumps(value).encode(), headers)

    def allowed(self):
        key = self.server.key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.send_json(401, {"error": {"message": "The API key is missing or wrong",
                                           "type": "authentication_error"}})
            return False
        return True

    def do_GET(self):
        if self.path == "/":
            html = embed_page.assemble((ROOT / "web/index.html").read_text(encoding="utf-8"), KATEX)
            self.send(200, "text/html; charset=utf-8", html.encode(),
                      {"Content-Security-Policy": embed_page.policy(html),
                       "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})
        elif self.path == "/v1/models" and self.allowed():
            self.send_json(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        elif self.path == "/metrics" and self.allowed():
            self.send(200, "text/plain; version=0.0.4", self.server.metrics().encode())
        elif self.path not in ("/v1/models", "/metrics"):
            self.send_json(404, {"error": {"message": f"{self.path} is not here"}})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        self.server.requests.append(request)
        last = request["messages"][-1]
        word, _, rest = last["content"].partition(" ")
        options = request.get("chat_template_kwargs", {})
        script = Script(self.server, options.get("thinking", False))
        known = last["role"] == "user" and word.isalpha() and hasattr(script, word)
        deltas = getattr(script, word if known else "sentence")(rest)
        try:
            first = next(deltas)
        except Reply as reply:
            self.send_json(reply.status, {"error": {"message": reply.message}}, reply.headers)
            return
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self.stream(request, first, deltas)
        except (BrokenPipeError, ConnectionResetError):
            self.server.aborted += 1

    def event(self, value):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def chunk(self, delta, finish=None, usage=None):
        self.event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "scripted",
                    "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
                    "usage": usage})

    def stream(self, request, first, deltas):
        prompt = sum(len(str(message["content"]).split()) for message in request["messages"]) + 4
        self.chunk({"role": "assistant", "content": ""})
        self.wfile.write(b": keep-alive\n\n")
        tokens, finish, delta = 0, "stop", first
        while delta is not None:
            if "error" in delta:
                self.event(delta)
                return
            tokens += 1
            finish = "tool_calls" if "tool_calls" in delta else finish
            self.chunk(delta, usage={"prompt_tokens": prompt, "completion_tokens": tokens,
                                     "total_tokens": prompt + tokens})
            delta = next(deltas, "end")
            if delta == "end":
                self.chunk({}, finish)
                self.event({"choices": [], "usage": {
                    "prompt_tokens": prompt, "completion_tokens": tokens,
                    "total_tokens": prompt + tokens,
                    "prompt_tokens_details": {"cached_tokens": prompt - 5}}})
                self.event("[DONE]")
                return


class ScriptedServer(http.server.ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1 until close(). requests: the bodies of the chat requests."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.seen, self.aborted = [], set(), 0
        self.key = ""  # what requests must carry, if anything
        self.answer = ""  # what `whole` says, in one piece
        self.loading = False  # /metrics knows nothing of the engine
        self.scrapes = 0
        self.url = f"http://127.0.0.1:{self.server_port}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def metrics(self):
        """Grows by known steps from one scrape to the next, so that each tile's figure is known: 7 sequences
        run, 3 wait, of 100 pages 25 are used and 50 cached, a step takes 4 ms, a first token 120 ms; of 4 drafts at the first position 3 are right, at the second 1."""
        self.scrapes += 1
        n = self.scrapes
        process = 'fathom_build_info{version="1.2.3",commit="abcdef0123456789abcdef0123456789abcdef01, changed",cuda=""} 1\n' \
                  f"process_start_time_seconds{{}} {time.time() - 7260}\n" \
                  "process_resident_memory_bytes{} 1610612736\n"
        if self.loading:
            return process
        labels = 'engine="0",model_name="scripted"'
        wave = 7 + (n % 2)
        return process + "".join(f"{name}{{{labels}{more}}} {value}\n" for name, more, value in (
            ("vllm:num_requests_running", "", wave), ("vllm:num_requests_waiting", "", 3),
            ("vllm:kv_cache_usage_perc", "", 0.25),
            ("fathom_kv_pages", ',state="free"', 25), ("fathom_kv_pages", ',state="cached"', 50),
            ("fathom_kv_pages", ',state="used"', 25),
            ("vllm:generation_tokens_total", "", 5000 * n + 600 * (n % 3)),
            ("vllm:prompt_tokens_total", "", 2000 * n + 900 * (n % 2)),
            ("vllm:time_to_first_token_seconds_bucket", ',le="0.1"', n),
            ("vllm:time_to_first_token_seconds_sum", "", 0.12 * n),
            ("vllm:time_to_first_token_seconds_count", "", n),
            ("vllm:spec_decode_num_drafts_total", "", 200 * n),
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", ',position="0"', 150 * n),
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", ',position="1"', 50 * n),
            ("fathom_step_seconds_total", "", 0.4 * n), ("fathom_steps_total", "", 100 * n),
            ("vllm:cache_config_info", ',cache_dtype="bf16"', 1)))

    def close(self):
        self.shutdown()
        self.server_close()
