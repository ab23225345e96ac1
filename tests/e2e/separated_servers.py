"""A `fathom serve --role prefill` and a `--role decode` that orders from it, for tests. Called as
fathom_server.py says."""
import atexit
import json
import os
import socket
import tempfile

from fathom_server import Server

# A row's bits depend on its own keys only, so the cut before the last token changes none. Chunks of two
# pages: prompts of a few hundred tokens have several.
FLAGS = ("--attention", "absorbed", "--max-total-tokens", "32768", "--threads", "1",
         "--max-num-batched-tokens", "128")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def secret_file(secret="a secret that both sides have"):
    file = tempfile.NamedTemporaryFile("w", suffix=".secret", delete=False)
    with file:
        file.write(secret + "\n")
    atexit.register(os.unlink, file.name)
    return file.name


SECRET = secret_file()


class Pair:
    """A prefill server and a decode server that orders from it."""

    def __init__(self, *flags, decode_flags=()):
        self.port = free_port()
        self.flags = (*FLAGS, *flags, "--transfer-secret-file", SECRET)
        self.prefill = self.start_prefill()
        self.decode = Server(*self.flags, "--role", "decode", "--prefill", self.address,
                             "--transfer-digests", *decode_flags)
        self.wait_ready()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start_prefill(self):
        return Server(*self.flags, "--role", "prefill", "--transfer-addr", self.address)

    def wait_ready(self, count=1):
        self.decode.wait_for("fathom_prefill_servers_ready", count)

    def outcome(self, which):
        return labelled(self.decode, "fathom_prefill_orders_total", f'outcome="{which}"')

    def wait_for_no_page(self):
        """Waits until no page is used or quarantined on either side."""
        for server in (self.prefill, self.decode):
            for state in ("used", "quarantined"):
                server.wait_until(
                    lambda s=server, st=state: labelled(s, "fathom_kv_pages", f'state="{st}"') == 0,
                    f"no page {state}")

    def kill(self):
        self.decode.kill()
        self.prefill.kill()


class OneServer:
    """A server that computes its own prompts. Started when it is asked for the first time; what it said is
    kept."""
    started = {}

    @classmethod
    def with_flags(cls, *flags):
        return cls.started.setdefault(flags, cls(flags))

    def __init__(self, flags):
        self.flags, self.server, self.replies = flags, None, {}

    def said(self, path, body):
        key = json.dumps([path, body])
        if key not in self.replies:
            self.server = self.server or Server(*FLAGS, *self.flags)
            self.replies[key] = said(self.server.post(path, body))
        return self.replies[key]


def labelled(server, name, label):
    _, _, text = server.ask("GET", "/metrics")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
               if line.startswith(name + "{") and label in line)


def story(words, number=0):
    """A prompt of about so many tokens."""
    names = ("Ada", "Ben", "Cleo", "Dan", "Eve")
    return f"Story {number}. " + " ".join(
        f"{names[(i * (number + 2) + number) % 5]} has {(i * 37 + number * 11) % 97} coins."
        for i in range(words // 5)) + " And then"


def said(reply):
    """What must be equal: everything but ids, times and what was cached."""
    choices = json.loads(json.dumps(reply["choices"]))
    return choices, reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]
