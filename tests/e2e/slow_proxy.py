"""A TCP proxy between the nodes of one machine: it delays what it passes on, and can cut connections.

Node 0 listens on 127.0.0.1, the proxy on 127.0.0.2 at the same ports, which it learns from /proc;
the others are told that node 0 is at 127.0.0.2.
"""
import collections
import os
import select
import socket
import threading
import time

TARGET, OWN = "127.0.0.1", "127.0.0.2"


def listening_ports(pid):
    """Ports that a process listens on at TARGET."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    ports = set()
    with open(f"/proc/{pid}/net/tcp", encoding="ascii") as file:
        for line in list(file)[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes and fields[1].startswith("0100007F:"):
                ports.add(int(fields[1].split(":")[1], 16))
    return ports


class Proxy:
    def __init__(self, pid, delay):
        self.pid, self.delay = pid, delay
        self.listeners = {}
        self.pairs = {}  # socket: its counterpart
        self.queues = collections.defaultdict(collections.deque)  # socket: (when, bytes)
        self.to_cut = 0
        self.lock = threading.Lock()
        self.running = True
        threading.Thread(target=self.run, daemon=True).start()

    def stop(self):
        self.running = False

    def connections(self):
        with self.lock:
            return len(self.pairs) // 2

    def cut(self, number):
        """Cuts the n-th open connection, as often as there are ones."""
        with self.lock:
            self.drop(list(self.pairs)[2 * (number % (len(self.pairs) // 2))])

    def drop(self, end):
        other = self.pairs.pop(end, None)
        if other is None:
            return
        self.pairs.pop(other, None)
        for one in (end, other):
            self.queues.pop(one, None)
            one.close()

    def follow_ports(self):
        try:
            ports = listening_ports(self.pid)
        except OSError:
            return
        for port in ports - set(self.listeners):
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((OWN, port))
            listener.listen()
            self.listeners[port] = listener

    def accept(self, port):
        end, _ = self.listeners[port].accept()
        try:
            other = socket.create_connection((TARGET, port))
        except OSError:
            end.close()
            return
        for one in (end, other):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pairs[end], self.pairs[other] = other, end

    def receive(self, end):
        try:
            data = end.recv(1 << 16)
        except OSError:
            data = b""
        if data:
            self.queues[self.pairs[end]].append((time.monotonic() + self.delay, data))
        else:
            self.drop(end)

    def send_due(self):
        now = time.monotonic()
        for end in list(self.pairs):
            queue = self.queues[end]
            while end in self.pairs and queue and queue[0][0] <= now:
                try:
                    end.sendall(queue.popleft()[1])
                except OSError:
                    self.drop(end)

    def run(self):
        looked = 0
        while self.running:
            with self.lock:
                if time.monotonic() - looked > 0.02:
                    looked = time.monotonic()
                    self.follow_ports()
                sockets = [*self.listeners.values(), *self.pairs]
            try:
                ready, _, _ = select.select(sockets, [], [], 0.002)
            except (OSError, ValueError):  # one has been cut since
                continue
            with self.lock:
                for port, listener in self.listeners.items():
                    if listener in ready:
                        self.accept(port)
                for end in ready:
                    if end in self.pairs:
                        self.receive(end)
                self.send_due()
