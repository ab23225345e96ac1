#!/usr/bin/env python3
"""Damaged copies of the bundled model are refused by `fathom run` and `fathom inspect`.

    bad_model_test.py PROGRAM SOURCE_DIR MEBIBYTES [TEST…]

Each case must end with exit status 2 and one sentence on stderr that names the file and the error,
within MEBIBYTES of resident memory, with nothing on stdout. The unit tests in src/checkpoint and
src/tokenizer have the full tables; these cases cover the whole program.
"""
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

PROGRAM, SOURCE = sys.argv.pop(1), sys.argv.pop(1)
MAX_MEBIBYTES = int(sys.argv.pop(1))
# The kernel kills a program that takes more, which is then stuck in a loop. A limit near what a case
# takes would fail on a slow machine.
MAX_CPU_SECONDS = 60
MODEL = os.path.join(SOURCE, "models/fathom-tiny")
# Keeps FATHOM_CPU_ISA: the suite also runs with slow kernels.
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if k in ("FATHOM_CPU_ISA", "FATHOM_DEVICE") or not k.startswith("FATHOM_")}

CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
SHARDS = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
# The smallest shard; its first tensor by offset is EH_PROJ.
SHARD, EH_PROJ = SHARDS[2], "model.layers.8.eh_proj.weight"


def read_shard():
    """Returns the header of SHARD as an object, and the number of data bytes after it."""
    path = os.path.join(MODEL, SHARD)
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), os.path.getsize(path) - 8 - length


def read_json(name):
    with open(os.path.join(MODEL, name), encoding="utf-8") as file:
        return json.load(file)


class Copy:
    """A folder of links to the bundled model's files; a case replaces some of them."""

    def __init__(self, path):
        self.path = path
        for name in os.listdir(MODEL):
            os.symlink(os.path.join(MODEL, name), os.path.join(path, name))

    def place(self, name):
        return os.path.join(self.path, name)

    def remove(self, name):
        os.remove(self.place(name))

    def write(self, name, data, size=None):
        """Replaces the file by `data`, padded to `size` with zeros that take no disk space."""
        if os.path.lexists(self.place(name)):
            self.remove(name)
        with open(self.place(name), "wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode())
            if size is not None:
                file.truncate(size)

    def link(self, name, target):
        self.remove(name)
        os.symlink(target, self.place(name))

    def edit(self, name, change):
        value = read_json(name)
        change(value)
        self.write(name, json.dumps(value, ensure_ascii=False))

    def config(self, **fields):
        """Replaces fields of config.json; ... removes one."""
        def change(config):
            for key, value in fields.items():
                config.pop(key, None)
                if value is not ...:
                    config[key] = value
        self.edit(CONFIG, change)

    def header(self, text, data_bytes=None, length=None):
        """Writes SHARD with this header and length field; its data are zeros, as many as originally."""
        text = text if isinstance(text, bytes) else text.encode()
        data_bytes = read_shard()[1] if data_bytes is None else data_bytes
        length = len(text) if length is None else length
        self.write(SHARD, struct.pack("<Q", length) + text, 8 + len(text) + data_bytes)

    def entry(self, **fields):
        """Replaces fields of one tensor in SHARD's header."""
        header, _ = read_shard()
        header[EH_PROJ].update(fields)
        self.header(json.dumps(header))


def run_once(arguments):
    """Runs the program: (exit status, stdout, stderr, peak resident MiB)."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen([PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=err, env=ENVIRONMENT)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return (process.returncode, out.read().decode(), err.read().decode(),
                usage.ru_maxrss / 1024)


class BadModel(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.mkdtemp(prefix="fathom-bad-")
        self.addCleanup(shutil.rmtree, self.scratch)
        self.made = 0

    def check(self, arguments, file, part, shows=False):
        status, out, err, mebibytes = run_once(arguments)
        shown = f"{arguments}: status {status}, {mebibytes:.0f} MiB\n{out}\n{err}"
        self.assertEqual(status, 2, shown)
        if not shows:
            self.assertEqual(out, "", shown)
        self.assertRegex(err, r"\Afathom: [^\n]+\n\Z", shown)
        self.assertIn(file, err, shown)
        self.assertIn(part, err, shown)
        self.assertLess(mebibytes, MAX_MEBIBYTES, shown)

    def refused(self, file, part, damage, commands=("run", "inspect"), shows=False):
        """Expects a refusal in one sentence that contains `file`'s name and `part`. shows: `inspect` may
        print what it read before the error."""
        self.made += 1
        path = os.path.join(self.scratch, str(self.made))
        os.mkdir(path)
        copy = Copy(path)
        damage(copy)
        with self.subTest(f"{file}: {part}"):
            if "inspect" in commands:
                self.check(["inspect", path], file, part, shows)
            if "run" in commands:
                self.check(["run", path, "Hello", "-q", "--max-tokens", "1"], file, part)
        shutil.rmtree(path)

    def test_the_copy_itself_is_a_model(self):
        copy = Copy(self.scratch)
        header, _ = read_shard()
        copy.header(json.dumps(header))
        self.assertEqual(run_once(["inspect", self.scratch])[0], 0)
        copy.link(SHARD, os.path.join(MODEL, SHARD))
        self.assertEqual(run_once(["run", self.scratch, "Hello", "-q", "--max-tokens", "1"])[0], 0)

    def test_header_length(self):
        size = 8 + 640
        self.refused(SHARD, "too short", lambda c: c.write(SHARD, b"\x10\0\0"))
        self.refused(SHARD, "header length is 0", lambda c: c.header("", length=0))
        self.refused(SHARD, "header length is 4096, the file has 640",
                     lambda c: c.write(SHARD, struct.pack("<Q", 4096), size))
        self.refused(SHARD, "header length is 18446744073709551615, the format's limit",
                     lambda c: c.write(SHARD, b"\xff" * 8, size))
        self.refused(SHARD, "header length is 200000000, the format's limit is 100000000",
                     lambda c: c.write(SHARD, struct.pack("<Q", 200_000_000), 300_000_000))
        self.refused(SHARD, "does not begin with '{'",
                     lambda c: c.write(SHARD, struct.pack("<Q", 90_000_000), 100_000_000))

    def test_header_text(self):
        header, data_bytes = read_shard()
        text = json.dumps(header)
        twice = text[:-1] + f', "{EH_PROJ}": {json.dumps(header[EH_PROJ])}' + "}"
        self.refused(SHARD, "does not begin with '{'", lambda c: c.header("[" + text + "]"))
        self.refused(SHARD, "not valid JSON", lambda c: c.header(text[:-1]))
        self.refused(SHARD, "not valid JSON",
                     lambda c: c.header(text.encode().replace(b"eh_proj", b"eh\xffproj")))
        self.refused(SHARD, f"tensor \"{EH_PROJ}\" is listed twice", lambda c: c.header(twice))
        self.refused(SHARD, "the file has", lambda c: c.header(text, data_bytes + 1))
        self.refused(SHARD, "the file has", lambda c: c.header(text, data_bytes // 2))
        self.refused(SHARD, 'tensor "a" is an array',
                     lambda c: c.header('{"a":' + "[" * 1_000_000))

    def test_tensor_entries(self):
        for part, fields in [
                ('dtype "F4"', {"dtype": "F4"}),
                ("-256 shape, which is negative", {"shape": [-256, 512]}),
                ("shape holds 1e+30", {"shape": [1e30, 512]}),
                ("exceeds 64 bits", {"shape": [2**32, 2**32]}),
                ("takes 262142 bytes", {"shape": [131071]}),
                ("the end before the beginning", {"data_offsets": [262144, 0]}),
                ("a hole before", {"shape": [128, 512], "data_offsets": [131072, 262144]}),
                ("ends at byte", {"shape": [2**40, 512], "data_offsets": [0, 2**50]}),
                ("exactly two", {"data_offsets": [0]})]:
            self.refused(SHARD, part, lambda c, f=fields: c.entry(**f))
        # The next tensor begins where this one should have ended.
        self.refused(SHARD, "inside the tensor before it",
                     lambda c: c.entry(shape=[512, 512], data_offsets=[0, 524288]))

    def test_stored_forms(self):
        """Errors that only loading detects: `inspect` reports them too, and `run` before it reads weights."""
        shard = SHARDS[1]
        with open(os.path.join(MODEL, shard), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        size = os.path.getsize(os.path.join(MODEL, shard)) - 8 - length
        norm = next(name for name in header if name.endswith("input_layernorm.weight"))
        scale = next(name for name in header if name.endswith(".weight_scale_inv"))
        rows, cols = header[scale]["shape"]
        for part, name, fields in [
                ('"I16"', norm, {"dtype": "I16"}),
                (scale, scale, {"shape": [rows * cols, 1, 1]})]:
            text = json.dumps({**header, name: {**header[name], **fields}}).encode()
            self.refused(shard, part, lambda c, t=text: c.write(
                shard, struct.pack("<Q", len(t)) + t, 8 + len(t) + size), shows=True)

    def test_set_of_shards(self):
        self.refused(INDEX, f'"{SHARD}", which is not there', lambda c: c.remove(SHARD))
        self.refused(SHARD, "cannot be read", lambda c: c.link(SHARD, SHARD))
        self.refused(SHARD, "not a regular file", lambda c: (c.remove(SHARD),
                                                             os.mkfifo(c.place(SHARD))))
        self.refused(SHARD, "is also in",
                     lambda c: c.link(SHARD, os.path.join(MODEL, SHARDS[1])))
        for value in ("../" + SHARD, "/etc/passwd", "a\0.safetensors", 7):
            self.refused(INDEX, "lm_head.weight",
                         lambda c, v=value: c.edit(
                             INDEX, lambda index: index["weight_map"].update(
                                 {"lm_head.weight": v})))
        self.refused(INDEX, "lm_head.bias", lambda c: c.edit(
            INDEX, lambda index: index["weight_map"].update({"lm_head.bias": SHARD})))
        self.refused(INDEX, "weight_map is missing", lambda c: c.write(INDEX, "{}"))
        self.refused("model.safetensors", "neither", lambda c: c.remove(INDEX))

    def test_config_numbers(self):
        for field, value in [("hidden_size", -1), ("hidden_size", 10**12), ("hidden_size", "256"),
                             ("hidden_size", ...), ("vocab_size", 0), ("vocab_size", 2**63),
                             ("num_hidden_layers", 10**12), ("num_hidden_layers", 1.5),
                             ("n_routed_experts", 10**12), ("n_routed_experts", -16),
                             ("num_experts_per_tok", 0), ("kv_lora_rank", ...),
                             ("max_position_embeddings", 10**12), ("rms_norm_eps", 0),
                             ("rope_theta", 1e300), ("n_group", 3), ("eos_token_id", 8192)]:
            self.refused(CONFIG, field, lambda c, f=field, v=value: c.config(**{f: v}))

    def test_config_against_the_weights(self):
        # Large values within limits: refused before anything of that size is allocated.
        self.refused("", 'tensor "model.layers.9.', lambda c: c.config(num_hidden_layers=512))
        self.refused("", 'tensor "model.layers.1.mlp.experts.16.',
                     lambda c: c.config(n_routed_experts=1024))
        for field in ("hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size",
                      "kv_lora_rank", "q_lora_rank"):
            for value in (read_json(CONFIG)[field] * 8, 65536):
                self.refused(".safetensors: tensor \"", ", config.json calls for [",
                             lambda c, f=field, v=value: c.config(**{f: v}))

    def test_config_text(self):
        self.refused(CONFIG, "not valid JSON", lambda c: c.write(CONFIG, '{"hidden_size": 256'))
        self.refused(CONFIG, "cannot be read", lambda c: c.remove(CONFIG))
        self.refused(CONFIG, "nest", lambda c: c.write(CONFIG, '{"a":' * 100_000))
        self.refused(CONFIG, '"gemma2" has no multi-head latent attention',
                     lambda c: c.config(model_type="gemma2", kv_lora_rank=...))
        self.refused(CONFIG, "quantization_config",
                     lambda c: c.config(quantization_config={"quant_method": "gptq"}))

    def test_tokenizer(self):
        def edit(change):
            return lambda c: c.edit(TOKENIZER, change)
        for part, damage in [
                ("not valid JSON", lambda c: c.write(TOKENIZER, '{"model":')),
                ("not valid JSON", lambda c: c.write(TOKENIZER, b'{"\xff": 1}')),
                ("model is missing", lambda c: c.write(TOKENIZER, "{}")),
                ("nest", lambda c: c.write(TOKENIZER, '{"model":' + "[" * 1_000_000)),
                ("model.type", edit(lambda t: t["model"].update(type="Unigram"))),
                ("model.vocab", edit(lambda t: t["model"].update(vocab=[]))),
                ("model.vocab", edit(lambda t: t["model"]["vocab"].update(the=-1))),
                ("model.vocab", edit(lambda t: t["model"]["vocab"].update(the=10**12))),
                ("model.merges[0]",
                 edit(lambda t: t["model"]["merges"].insert(0, ["no such", "piece"]))),
                ("model.merges[0]", edit(lambda t: t["model"]["merges"].insert(0, 7))),
                ("added_tokens", edit(lambda t: t["added_tokens"][0].update(id=10**9))),
                ("pre_tokenizer",
                 edit(lambda t: t["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(
                     Regex="(" * 100_000))),
                ("its largest id is 8192, vocab_size in config.json is 8192",
                 edit(lambda t: t["added_tokens"].append(
                     {**t["added_tokens"][0], "id": 8192, "content": "<new>"})))]:
            self.refused(TOKENIZER, part, damage, commands=("run",))


if __name__ == "__main__":
    unittest.main(verbosity=2)
