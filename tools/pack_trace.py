#!/usr/bin/env python3
"""Packs a Mooncake trace (JSON lines with hash_ids) into the small text that the replay test reads.

usage: pack_trace.py conversation.jsonl > tests/data/traces/mooncake_conversation.txt

A line a request: prompt tokens, answer tokens, then the ids of the prompt's 512-token blocks, runs
of consecutive ids as first-last.
"""
import json
import sys


def packed(ids):
    runs = []
    for block in ids:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return " ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def main():
    with open(sys.argv[1], encoding="utf-8") as trace:
        for line in trace:
            request = json.loads(line)
            print(request["input_length"], request["output_length"], packed(request["hash_ids"]))


if __name__ == "__main__":
    main()
