#!/usr/bin/env python3
"""Makes small tokenizers in the forms of GLM and of Kimi K2, with ids of texts, for src/tokenizer's tests.

    tools/make_tokenizer_vectors.py tests/data/tokenizers

glm-form is a tokenizer.json with GLM's split; Hugging Face's `tokenizers` trains it and makes the ids.
kimi-form is a tiktoken.model with Kimi's special tokens; its ids come from the rule of tiktoken written
out here (of all adjacent pairs whose bytes are a token the one of lowest rank merges, the leftmost first),
with the pattern of Kimi K2 in the module `regex`, which has the set operations that it is written with.
"""
import base64
import json
import os
import random
import sys

import regex
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

GLM_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
             r"|\s*[\r\n]+|\s+(?!\S)|\s+")
UPPER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]"
LOWER = r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_SPLIT = "|".join([
    r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
WORDS = ["the", "theory", "weather", "Paris", "HTTPServer", "naïve", "Straße", "don't", "THEY'LL", "你好", "世界你好", "こんにちは",
         "мир", "1234567", "3.14", "x=y+1;", "!!!", "…", "🙂", "é", "e\u0301", "\n", "\r\n\n", "\t", "  ", "   ", "\u00a0",
         "<|im_end|>", "[BOS]", "[gMASK]", "<sop>", "<think>", "</think>", "'s", "ǅ", "٣٤"]
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 12: "<|tool_call_begin|>", 255: "[PAD]"}


def texts(rng):
    yield from ("", "a", "Hello world", "你好，世界", "I'm sure they'LL don'T", "naïve Straße\n\n  x", "12345 67", "  \n \t\n",
                "[BOS]hi<|im_end|>", "<|reserved_token_330|>", "HTTPServerError你好World")
    for _ in range(60):
        yield "".join(rng.choice(WORDS) + rng.choice(["", " ", ""]) for _ in range(rng.randint(1, 12)))


def corpus(rng):
    return ["".join(rng.choice(WORDS[:20]) + " " for _ in range(20)) for _ in range(200)]


def write_vectors(path, vectors):
    with open(path, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(v, ensure_ascii=False) for v in vectors) + "\n]\n")


def make_glm(folder):
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(5)
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GLM_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(corpus(rng), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save(os.path.join(folder, "tokenizer.json"), pretty=False)
    vectors = [{"text": t, "ids": tokenizer.encode(t, add_special_tokens=False).ids} for t in texts(rng)]
    write_vectors(os.path.join(folder, "golden_vectors.json"), vectors)


def merge(piece, ranks):
    """Token ids of one piece."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i:i + 1] for i in range(len(piece))]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]


def make_kimi(folder):
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(6)
    split = regex.compile(KIMI_SPLIT, regex.V1)
    pieces = [[bytes([b]) for b in piece.encode()] for text in corpus(rng) for piece in split.findall(text)]
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < 320:                       # the commonest pair becomes a token
        counts = {}
        for piece in pieces:
            for pair in zip(piece, piece[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        a, b = max(counts, key=lambda pair: (counts[pair], pair))
        ranks.setdefault(a + b, len(ranks))
        for piece in pieces:
            i = 0
            while i + 1 < len(piece):
                if piece[i] == a and piece[i + 1] == b:
                    piece[i:i + 2] = [a + b]
                i += 1
    with open(os.path.join(folder, "tiktoken.model"), "w") as file:
        for token, rank in ranks.items():
            file.write(f"{base64.b64encode(token).decode()} {rank}\n")
    first = len(ranks)
    named = {str(first + i): {"content": name, "special": i != 12} for i, name in SPECIAL.items()}
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
                   "added_tokens_decoder": named}, file, indent=1)
        file.write("\n")
    special = {SPECIAL.get(i, f"<|reserved_token_{first + i}|>"): first + i for i in range(256)}
    marks = regex.compile("|".join(map(regex.escape, special)))

    def encode(text):
        ids, done = [], 0
        for match in [*marks.finditer(text), None]:
            between = text[done:match.start() if match else len(text)]
            for piece in split.findall(between):
                ids += merge(piece.encode(), ranks)
            if match:
                ids.append(special[match.group()])
                done = match.end()
        return ids

    write_vectors(os.path.join(folder, "golden_vectors.json"),
                  [{"text": t, "ids": encode(t), "pieces": split.findall(t)} for t in texts(rng)])


if __name__ == "__main__":
    make_glm(os.path.join(sys.argv[1], "glm-form"))
    make_kimi(os.path.join(sys.argv[1], "kimi-form"))
