#!/usr/bin/env python3
"""Compares Fathom's token ids with those of Hugging Face's `tokenizers` on random strings.

    python3 tools/compare_tokenizers.py --program build/src/tokenizer/tokenizer_compare

encodes one million random multilingual strings with every tokenizer below, with both, and fails if
any id differs. Needs `pip install tokenizers==0.23.3` (test time only). With
--sample FILE it writes strings and their ids instead; the fast tests read the one made by

    python3 tools/compare_tokenizers.py --sample tests/data/tokenizers/random_sample.json \\
        --strings 1800 --seed 7
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, __version__

EXPECTED_VERSION = "0.23.3"  # its Unicode version decides how new scripts split
ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "tokenizers"
TOKENIZERS = {
    "deepseek-v3": DATA / "deepseek-v3" / "tokenizer.json",
    "deepseek-v2": DATA / "deepseek-v2" / "tokenizer.json",
    "deepseek-coder-v1": DATA / "deepseek-coder-v1" / "tokenizer.json",
    "fathom-tiny": ROOT / "models" / "fathom-tiny" / "tokenizer.json",
}
SAMPLED = ["deepseek-v3", "deepseek-v2"]

# Code point ranges, by what they are meant to stir up.
SCRIPTS = {
    "latin": [(0x41, 0x5A), (0x61, 0x7A)],
    "latin_accented": [(0xC0, 0x24F), (0x1E00, 0x1EFF)],
    "ascii": [(0x20, 0x7E)],
    "ascii_punctuation": [(0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)],
    "latin1": [(0x80, 0xFF)],
    "ipa_modifiers": [(0x250, 0x2FF)],
    "combining": [(0x300, 0x36F), (0x1AB0, 0x1ACE), (0x20D0, 0x20F0), (0xFE00, 0xFE0F)],
    "greek": [(0x370, 0x3FF), (0x1F00, 0x1FFF)],
    "cyrillic": [(0x400, 0x52F), (0x1C80, 0x1C8A), (0xA640, 0xA69F)],
    "armenian_georgian": [(0x531, 0x58F), (0x10A0, 0x10FF), (0x1C90, 0x1CBF)],
    "hebrew": [(0x591, 0x5F4)],
    "arabic": [(0x600, 0x6FF), (0x750, 0x77F), (0x890, 0x8FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFC)],
    "indic": [(0x900, 0xDFF)],
    "thai_lao_tibetan": [(0xE00, 0xFFF)],
    "burmese_khmer_mongolian": [(0x1000, 0x109F), (0x1780, 0x17FF), (0x1800, 0x18AF)],
    "ethiopic_cherokee": [(0x1200, 0x139F), (0x13A0, 0x13FD), (0xAB70, 0xABBF)],
    "hangul": [(0xAC00, 0xD7FB), (0x1100, 0x11FF), (0x3130, 0x318F)],
    "kana": [(0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)],
    "han": [(0x4E00, 0x9FFF)],
    "han_rare": [(0x3400, 0x4DBF), (0xF900, 0xFAFF), (0x20000, 0x20FFF), (0x2B700, 0x2B740),
                 (0x2EBF0, 0x2EC10), (0x31350, 0x31370)],
    "cjk_punctuation": [(0x3000, 0x303F), (0xFF01, 0xFF65), (0x2FF0, 0x2FFF), (0x3200, 0x32FF)],
    "digits": [(0x30, 0x39)],
    "digits_other": [(0x660, 0x669), (0x966, 0x96F), (0xFF10, 0xFF19), (0x2150, 0x218B),
                     (0x2460, 0x249B), (0xB2, 0xB3), (0xBC, 0xBE), (0x1D7CE, 0x1D7FF)],
    "punctuation": [(0x2010, 0x205E), (0x2E00, 0x2E5D), (0xA1, 0xBF)],
    "symbols": [(0x2190, 0x23FF), (0x2500, 0x27BF), (0x20A0, 0x20C0), (0x2200, 0x22FF)],
    "emoji": [(0x1F300, 0x1F64F), (0x1F680, 0x1F6FF), (0x1F900, 0x1FAFF), (0x1F1E6, 0x1F1FF)],
    "controls": [(0x00, 0x1F), (0x7F, 0x9F), (0x200B, 0x200F), (0x2060, 0x206F), (0xFEFF, 0xFEFF),
                 (0xAD, 0xAD), (0x180E, 0x180E), (0xFFF9, 0xFFFF)],
    "other_planes": [(0x10000, 0x11FFF), (0x12000, 0x14646), (0x16000, 0x18D08),
                     (0x1B000, 0x1E95F), (0x1EC70, 0x1FBFF), (0xE0000, 0xE01EF),
                     (0xF0000, 0xF00FF), (0x10FF00, 0x10FFFF)],
    "anything": [(0x00, 0xD7FF), (0xE000, 0x10FFFF)],
}
SPACES = [" "] * 12 + ["\n"] * 4 + list("\t\r\v\f\x1c\x1f\x85\xa0\u1680\u180e\u2000\u2003\u200a\u200b"
                                       "\u2028\u2029\u202f\u205f\u3000")
WORDS = ("the of and to in is that for it was on are as with his they at be this from have or by one had "
         "not but what all were when we there can an your which their said if do will each about how "
         "tokenizer DeepSeek don't it's I'll we've He'd JavaScript snake_case camelCase std::vector "
         "https://example.com/a?b=c&d=1 user@example.org 3.14159 1,000,000 2024-12-26 0xDEADBEEF "
         "import def return function lambda {} [] () => != == <= >= && || ++ -- /* */ // # "
         "größer Straße façade naïve l'été niño São coração być książka žluťoučký kůň İstanbul ğ "
         "привет мир электричество Ελλάδα γλώσσα שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก "
         "안녕하세요 세계 こんにちは 世界 カタカナ 你好 世界 深度求索 人工智能 北京 天气 한국어 việt nam "
         "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ 1️⃣").split()


class Generator:
    def __init__(self, seed, added, most_parts=12, longest_run=90):
        self.random = random.Random(seed)
        self.most_parts, self.longest_run = most_parts, longest_run
        self.added = added
        self.scripts = list(SCRIPTS)

    def character(self, script):
        low, high = self.random.choice(SCRIPTS[script])
        point = self.random.randint(low, high)
        return chr(point) if not 0xD800 <= point <= 0xDFFF else "x"

    def run(self, script, longest):
        return "".join(self.character(script) for _ in range(self.random.randint(1, longest)))

    def added_token(self):
        token = self.random.choice(self.added)
        kind = self.random.random()
        if kind < 0.7:
            return token
        if kind < 0.85:  # nearly one
            cut = self.random.randrange(len(token))
            return token[:cut] + token[cut + 1:]
        return token[:self.random.randrange(len(token)) + 1]

    def part(self):
        kind = self.random.random()
        if kind < 0.30:
            word = self.random.choice(WORDS)
            return self.random.choice([word, word, word, word.upper(), word.title(), " " + word])
        if kind < 0.50:
            return self.run(self.random.choice(self.scripts), 8)
        if kind < 0.65:
            return "".join(self.random.choices(SPACES, k=self.random.choice([1, 1, 1, 2, 3, 6])))
        if kind < 0.72:
            return self.run("digits", 9)
        if kind < 0.82:
            return self.run("ascii_punctuation", 5)
        if kind < 0.87:  # the same again: runs
            return self.character(self.random.choice(self.scripts)) * self.random.randint(2, self.longest_run)
        if kind < 0.92:
            return self.added_token()
        if kind < 0.96:
            return self.run("latin", 6) + self.run("combining", 3)
        return self.run("latin", 20)

    def string(self):
        joiner = self.random.choice(["", "", " "])
        return joiner.join(self.part() for _ in range(self.random.randint(1, self.most_parts)))


def added_contents():
    """The added tokens of all tokenizers, so that each also sees the others'."""
    contents = {}
    for path in TOKENIZERS.values():
        tokens = json.loads(path.read_text())["added_tokens"]
        for token in tokens[:30] + tokens[-40:]:
            contents[token["content"]] = None
    return list(contents) + ["<think>", "</think>", "<", "｜", "<｜", "｜>"]


def encode_with_fathom(program, path, strings):
    with tempfile.TemporaryFile() as source:
        for text in strings:
            raw = text.encode()
            source.write(struct.pack("<I", len(raw)) + raw)
        source.seek(0)
        output = subprocess.run([program, str(path)], stdin=source, stdout=subprocess.PIPE,
                                check=True).stdout
    ids, position = [], 0
    while position < len(output):
        (count,) = struct.unpack_from("<I", output, position)
        ids.append(list(struct.unpack_from(f"<{count}i", output, position + 4)))
        position += 4 + 4 * count
    return ids


def compare(name, path, program, strings):
    reference = Tokenizer.from_file(str(path))
    expected = [e.ids for e in reference.encode_batch_fast(strings, add_special_tokens=False)]
    actual = encode_with_fathom(program, path, strings)
    if len(actual) != len(strings):
        sys.exit(f"{name}: {len(actual)} answers for {len(strings)} strings")
    different = [i for i in range(len(strings)) if expected[i] != actual[i]]
    for i in different[:10]:
        print(f"{name}: {strings[i]!r}\n  tokenizers: {expected[i]}\n  fathom:     {actual[i]}")
    return len(different)


def write_sample(path, count, seed):
    generator = Generator(seed, added_contents(), most_parts=4, longest_run=8)
    strings = [generator.string() for _ in range(count)]
    sample = {"made_by": f"tools/compare_tokenizers.py --sample, tokenizers {__version__}, seed {seed}",
              "texts": strings}
    for name in SAMPLED:
        reference = Tokenizer.from_file(str(TOKENIZERS[name]))
        sample[name] = [e.ids for e in reference.encode_batch_fast(strings, add_special_tokens=False)]
    path.write_text(json.dumps(sample, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{path}: {count} strings, {path.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", help="the tokenizer_compare program")
    parser.add_argument("--strings", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(TOKENIZERS), help="one tokenizer instead of all")
    parser.add_argument("--sample", type=Path, help="write a sample file instead")
    options = parser.parse_args()
    if __version__ != EXPECTED_VERSION:
        sys.exit(f"tokenizers {__version__} is installed, the comparison is made for {EXPECTED_VERSION}")
    if options.sample:
        return write_sample(options.sample, options.strings, options.seed)
    if not options.program:
        sys.exit("--program is missing")

    generator = Generator(options.seed, added_contents())
    differences, done = 0, 0
    while done < options.strings:
        strings = [generator.string() for _ in range(min(50_000, options.strings - done))]
        for name, path in TOKENIZERS.items():
            if options.only in (None, name):
                differences += compare(name, path, options.program, strings)
        done += len(strings)
        print(f"{done} strings, {differences} differences", flush=True)
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
