"""Runs `fathom serve` with faults between its engine and its model (tests/robustness/engine_faults.cc).

A test that imports this is called as TEST PROGRAM SOURCE_DIR PROGRAM_WITH_FAULTS.
"""
import mmap
import os
import struct
import sys
import time

from fathom_server import SLACK, Server

WITH_FAULTS = sys.argv.pop(1)
# Steps of at least 20 ms: LONG lasts at least 30 s on any machine.
SLOW = "step_ms:20"


def faulty(faults, *flags, **options):
    """Starts a server with these faults."""
    return Server(*flags, program=WITH_FAULTS,
                  environment={"FATHOM_FAULT": faults, **options.pop("environment", {})}, **options)


class StepGate:
    """Controls how many steps a server's engine may begin. Initially none; a server whose gate is closed
    does not end."""

    def __init__(self):
        self.descriptor = os.memfd_create("step_gate")
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self.memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)

    def serve(self, *flags, faults="", **options):
        """Starts a server behind this gate, with further faults."""
        gate = f"step_gate:{self.descriptor}"
        return faulty(f"{gate},{faults}" if faults else gate, *flags, pass_fds=(self.descriptor,),
                      **options)

    def allow(self, steps):
        """Allows this many more steps."""
        allowed, = struct.unpack("q", self.memory[0:8])
        self.memory[0:8] = struct.pack("q", allowed + steps)

    def open(self):
        self.memory[0:8] = struct.pack("q", 1 << 40)

    def wait_until_held(self, seconds=60):
        """Waits until the engine has begun all allowed steps and is blocked at the next one."""
        end = time.monotonic() + seconds * SLACK
        while True:
            allowed, reached = struct.unpack("2q", self.memory[0:16])
            if reached > allowed:
                return
            assert time.monotonic() < end, f"step {reached} of {allowed}"
            time.sleep(0.005)
