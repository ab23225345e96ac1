"""What the robustness tests share: the server of tests/e2e, raw requests, figures.

A test is called as TEST PROGRAM SOURCE_DIR PROGRAM_WITH_FAULTS and obeys these variables:

    ROBUST_SECONDS  how long a load lasts (3). From LONG_FROM on the tests with long waits and many
                    connections run too.
    ROBUST_SLACK    limits of time are so many times as long (1): for machines that do other work, and
                    for programs built with sanitizers.
    ROBUST_MEMORY_SLACK  limits of memory are so many times as large (1): for programs built with
                    sanitizers, which keep what is freed.
    ROBUST_LAYERS   the separation's servers have so many layers of the bundled model (all), and get
                    short prompts: for programs built with sanitizers, which take 15 times as long.
    ROBUST_BACKEND  the separation's --transfer-backend (auto).
"""
import asyncio
import json
import os
import socket
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
from fathom_server import ENVIRONMENT, LONG, MODEL, PROGRAM, QUESTION, SLACK, SOURCE, Server  # noqa: E402
from faulty_server import SLOW, WITH_FAULTS, StepGate, faulty  # noqa: E402

SECONDS = float(os.environ.get("ROBUST_SECONDS", "3"))
MEMORY_SLACK = float(os.environ.get("ROBUST_MEMORY_SLACK", "1"))
LONG_FROM = 20
IS_LONG = SECONDS >= LONG_FROM
CHAT = "/v1/chat/completions"


def cores_apart(add_cleanup):
    """This process takes one core until the cleanup; returns what makes a Server take another, on
    which it computes with one thread. Otherwise a figure says how fast the client is: in Python it
    needs what the server would compute with. With one core in all they share it."""
    cores = sorted(os.sched_getaffinity(0))
    add_cleanup(os.sched_setaffinity, 0, cores)
    os.sched_setaffinity(0, cores[:1])
    return {"preexec_fn": lambda: os.sched_setaffinity(0, cores[-1:])}


def preloaded(library, **variables):
    """Variables for a server with one of this folder's libraries in front of the system's."""
    path = os.path.join(os.path.dirname(os.path.abspath(WITH_FAULTS)), f"lib{library}.so")
    # A sanitizer wants to be the first library, and need not be.
    return {"LD_PRELOAD": path, "ASAN_OPTIONS": "verify_asan_link_order=0", **variables}


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


# The kernel may give a heap a huge page at once: 2 % of a server of 100 MiB.
HUGE_PAGE = 2 << 20


def most_memory(resident, share):
    """Bytes that a server of `resident` bytes may have after a load that leaves nothing behind."""
    return resident * (1 + share * MEMORY_SLACK) + HUGE_PAGE


def figure(name, text):
    """A line for docs/reliability.md."""
    print(f"{name}: {text}", flush=True)


def wait_until(condition, seconds, what):
    end = time.monotonic() + seconds * SLACK
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds * SLACK} s"
        time.sleep(0.01)


def pages(server):
    """Pages of the cache by state."""
    _, _, text = server.ask("GET", "/metrics")
    found = {}
    for line in text.splitlines():
        if line.startswith("fathom_kv_pages{"):
            state = line.split('state="')[1].split('"')[0]
            found[state] = int(line.rsplit(" ", 1)[1])
    return found


def wait_idle(server, seconds=10):
    """Nothing runs or waits and no page is held. Seconds that took."""
    start = time.monotonic()
    wait_until(lambda: pages(server)["used"] == 0, seconds, "pages free")
    server.wait_for("vllm:num_requests_running", 0, seconds)
    server.wait_for("vllm:num_requests_waiting", 0, seconds)
    return time.monotonic() - start


def encode(path, body=b"", headers=(), method="POST"):
    """A request's bytes; the connection ends with its answer."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close",
             "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def connect(server, timeout=30):
    return socket.create_connection(("127.0.0.1", server.port), timeout * SLACK)


def read_to_end(connection):
    """All bytes until the server closes; a reset raises."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def send_raw(server, data, timeout=30, ends=False):
    """What the server answers to these bytes until it closes the connection. `ends`: nothing more will
    come; a request that is not complete then is given up."""
    with connect(server, timeout) as connection:
        connection.sendall(data)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        return read_to_end(connection)


def status_of(answer):
    """The status of an answer's bytes; 0: closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


class Outcome:
    """How one request ended: status and times in seconds, or an error's name."""

    def __init__(self):
        self.status, self.head, self.data, self.error = 0, b"", b"", None
        self.started = time.monotonic()
        self.first_byte = self.seconds = None

    @property
    def complete(self):
        return self.error is None and (b"[DONE]" in self.data or self.status != 200)


async def ask(port, request, limit=60, pieces=None):
    """Sends bytes, reads to the end. `pieces` gets (time, bytes) of each read."""
    outcome = Outcome()

    async def exchange():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            outcome.head = await reader.readuntil(b"\r\n\r\n")
            outcome.first_byte = time.monotonic() - outcome.started
            outcome.status = status_of(outcome.head)
            while part := await reader.read(65536):
                outcome.data += part
                if pieces is not None:
                    pieces.append((time.monotonic(), part))
        finally:
            writer.close()

    try:
        await asyncio.wait_for(exchange(), limit)
    except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as problem:
        outcome.error = type(problem).__name__
    outcome.seconds = time.monotonic() - outcome.started
    return outcome


async def closed_loop(port, request, concurrency, seconds):
    """So many clients that ask again when they are answered."""
    end = time.monotonic() + seconds
    outcomes = []

    async def client():
        while time.monotonic() < end:
            outcomes.append(await ask(port, request))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return outcomes


async def open_loop(port, request, rate, seconds, on_start=None):
    """So many requests a second, whatever becomes of them."""
    tasks, start = [], time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        while len(tasks) < now * rate:
            tasks.append(asyncio.ensure_future(ask(port, request)))
        await asyncio.sleep(0.005)
    if on_start is not None:
        on_start()
    return await asyncio.gather(*tasks)
