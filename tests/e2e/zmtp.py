"""A reader of ZeroMQ's sockets and of MessagePack, for tests: ZMTP 3.0 without security
(https://rfc.zeromq.org/spec/23/), what cache events need of MessagePack."""
import socket
import struct


class Zmtp:
    """A connection as a SUB or a DEALER socket has it."""

    def __init__(self, port, kind, timeout):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self.socket.settimeout(timeout)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        self.socket.sendall(greeting)
        assert self.read(64)[10] >= 3, "an older protocol"
        name = b"Socket-Type"
        ready = b"\x05READY" + bytes([len(name)]) + name + struct.pack(">I", len(kind)) + kind
        self.socket.sendall(bytes([4, len(ready)]) + ready)
        while not self.frame()[1].startswith(b"\x05READY"):
            pass

    def read(self, count):
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            assert more, "the other end has closed the connection"
            data += more
        return data

    def frame(self):
        flags = self.read(1)[0]
        size = struct.unpack(">Q", self.read(8))[0] if flags & 2 else self.read(1)[0]
        return flags, self.read(size)

    def receive(self):
        """The parts of a message."""
        parts = []
        while True:
            flags, body = self.frame()
            if flags & 4:
                continue  # a command
            parts.append(body)
            if not flags & 1:
                return parts

    def send(self, *parts):
        for number, part in enumerate(parts):
            self.socket.sendall(bytes([int(number + 1 < len(parts)), len(part)]) + part)

    def close(self):
        self.socket.close()


def unpack(data):
    """The one value that these bytes are."""
    value, end = unpack_at(data, 0)
    assert end == len(data), f"{len(data) - end} bytes too many"
    return value


def unpack_at(data, at):
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if 0x90 <= tag < 0xA0:
        return unpack_list(data, at, tag & 15)
    if 0xA0 <= tag < 0xC0:
        return data[at:at + (tag & 31)].decode(), at + (tag & 31)
    if tag == 0xC0:
        return None, at
    form = {0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xDC: ">H", 0xDD: ">I"}[tag]
    value = struct.unpack_from(form, data, at)[0]
    at += struct.calcsize(form)
    return unpack_list(data, at, value) if tag in (0xDC, 0xDD) else (value, at)


def unpack_list(data, at, count):
    values = []
    for _ in range(count):
        value, at = unpack_at(data, at)
        values.append(value)
    return values, at
