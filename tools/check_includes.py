#!/usr/bin/env python3
"""Proves the direction of includes: a room includes only the rooms below it.

The table is the plan of the house (ARCHITECTURE.md, "Rooms"). A room that is not in it, or an
include that is not allowed, is an error with its file and line. A room within a room ("server/http")
has a line of its own.
"""
import pathlib
import re
import sys

ROOMS = {
    "base": [],
    "tensor": ["base"],
    "device": ["base", "tensor"],
    "comm": ["base", "tensor", "device"],
    "checkpoint": ["base", "tensor"],
    "placement": ["base", "tensor", "checkpoint"],
    "tokenizer": ["base"],
    "chat": ["base", "tokenizer"],
    "cache": ["base", "tensor", "device"],
    "transfer": ["base", "tensor", "device", "cache"],
    "transfer/ucx": ["base", "tensor", "device", "cache", "transfer"],
    "transfer/tcp": ["base", "tensor", "device", "comm", "cache", "transfer"],
    "kv_events": ["base", "cache"],
    "ops": ["base", "tensor", "device", "cache"],
    "model": ["base", "tensor", "device", "comm", "cache", "checkpoint", "placement", "ops"],
    "engine": ["base", "tensor", "device", "comm", "cache", "transfer", "checkpoint", "placement", "tokenizer",
               "ops", "model"],
    "convert": ["base", "tensor", "device", "cache", "checkpoint", "ops", "model"],
    "grammar": ["base", "tokenizer", "engine"],
    "server/http": ["base"],
    "server/openai": ["base", "tokenizer", "chat", "engine"],
    "server/client": ["base", "server/http"],
    "server/metrics": ["base"],
    "server/page": [],
    "server/api": ["base", "cache", "tokenizer", "chat", "engine", "grammar", "server/http",
                   "server/metrics", "server/openai", "server/page"],
    "router": ["base", "server/http", "server/client", "server/metrics"],
    "cli": ["base", "tensor", "device", "comm", "cache", "transfer", "transfer/tcp", "transfer/ucx", "checkpoint", "placement", "tokenizer",
            "chat", "ops", "model", "convert", "engine", "kv_events", "grammar", "server/http", "server/openai", "server/api",
            "server/client", "server/metrics", "router", "bench"],
}
# Tests and benchmarks may use more: the machine probe, JSON for the files they make up.
FOR_TESTS = re.compile(r"(_test|_bench)\.cc$|(^|/)fake_[a-z_]+\.(cc|h)$")
TESTS_MAY = {"transfer/tcp": ["bench", "transfer/ucx"]}
# What a room must not see although it is no room of ours.
FORBIDDEN = {
    "placement": [re.compile(r"checkpoint/(?!model_config\.h)")],
    "engine": [re.compile(r"boost/|base/json\.h|CLI/")],
    "ops": [re.compile(r"boost/|base/json\.h")],
    "model": [re.compile(r"boost/|base/json\.h")],
    "server": [re.compile(r"boost/(asio|beast)|openssl/")],
    "cli": [re.compile(r"boost/(asio|beast)|openssl/")],
}
# The headers that others see show nothing of the libraries behind the room.
PUBLIC_HEADERS = {
    "server/http": ["error_body.h", "host.h", "log_text.h", "message.h", "responder.h", "route_table.h", "server.h",
                    "server_options.h", "sse.h"],
    "server/client": ["http_client.h"],
    "transfer/ucx": ["ucx_lane.h"],
    "transfer/tcp": ["facts.h", "prefill_peers.h", "transfer_server.h"],
    "kv_events": ["event_log.h", "event_publisher.h"],
    "router": ["circuit_breaker.h", "policy.h", "router.h", "router_options.h"],
}
# CUDA stays behind files that say so.
CUDA = re.compile(r"cu(da|blas|rand|fft)|nccl|device/cuda/")
SEES_CUDA = re.compile(r"^device/cuda/|_cuda(_test|_bench)?\.[a-z]+$")
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')


def room_of(target: str) -> str:
    """The room of a file under src/, the innermost one that the table has."""
    parts = target.split("/")
    nested = "/".join(parts[:2])
    return nested if nested in ROOMS else parts[0]


def hides_behind(room: str, other: str, target: str) -> bool:
    """Whether target is a header that the other room keeps to itself."""
    public = PUBLIC_HEADERS.get(other)
    return public is not None and room != other and target.split("/")[-1] not in public


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent / "src"
    errors = []
    files = 0
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
            continue
        files += 1
        for_tests = FOR_TESTS.search(str(path.relative_to(root)))
        room = room_of(path.relative_to(root).as_posix())
        is_public = path.name in PUBLIC_HEADERS.get(room, [])
        if room not in ROOMS:
            errors.append(f"{path}: room '{room}' is not in the table of tools/check_includes.py")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            target = match.group(1) or match.group(2)
            other = room_of(target)
            allowed = other == room or other in ROOMS[room] or (for_tests and other in TESTS_MAY.get(room, ["bench"]))
            allowed = allowed and (for_tests or not hides_behind(room, other, target))
            if match.group(1) and not allowed:
                errors.append(f"{path}:{number}: {room} may not include {target}")
            if not for_tests and any(pattern.match(target) for pattern in FORBIDDEN.get(room, [])):
                errors.append(f"{path}:{number}: {room} may not include {target}")
            if CUDA.match(target) and not SEES_CUDA.search(path.relative_to(root).as_posix()):
                errors.append(f"{path}:{number}: only device/cuda and *_cuda files include {target}")
            if is_public and re.match(r"boost/|openssl/|base/json\.h", target):
                errors.append(f"{path}:{number}: a public header may not include {target}")
    print("\n".join(errors) if errors else f"include direction: ok ({files} files)")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
