#!/usr/bin/env python3
"""`fathom convert --to mla`, called as by a person.

    convert_cli_test.py PROGRAM SOURCE_DIR MAX_MIB

The model is a small random one of Qwen2's form with the bundled model's tokenizer, whose vocabulary
is cut to what it has. MAX_MIB: the most memory that a conversion without calibration may take.
"""
import array
import json
import math
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM, SOURCE, MAX_MIB = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1))
BUNDLED = os.path.join(SOURCE, "models/fathom-tiny")
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if k in ("FATHOM_CPU_ISA", "FATHOM_DEVICE") or not k.startswith("FATHOM_")}
VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS, INTER = 8192, 64, 4, 2, 16, 2, 96


# Prints the peak memory of a program in KiB, as seen by a small parent: a child's peak includes the
# size of the process that forked it.
PEAK = """
import os, sys
_, status, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def fathom(*arguments, status=0, before=None, prefix=()):
    done = subprocess.run([*prefix, PROGRAM, *arguments], capture_output=True, timeout=300,
                          env=ENVIRONMENT, preexec_fn=before)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == status, f"{arguments}: status {done.returncode}\n{out}\n{err}"
    return out, err


def values(count, seed, scale):
    """Numbers from -scale to scale by a linear congruence: the same on every machine."""
    state, out = seed, array.array("f")
    for _ in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        out.append((state / 2**31 - 1) * scale)
    return out


def write_shard(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def end_of(tensors):
    return max(entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__")


def header_of(path):
    """The header, and the bytes before the first tensor."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def contents(folder):
    files = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            files[name] = file.read()
    return files


def write_qwen(folder, layers=LAYERS, **changes):
    config = dict(model_type="qwen2", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=layers,
                  num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, intermediate_size=INTER,
                  max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6, torch_dtype="float32",
                  tie_word_embeddings=True, hidden_act="silu", eos_token_id=1) | changes
    shapes = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = [rows * WIDTH, HIDDEN]
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = [rows * WIDTH]
        shapes[prefix + "self_attn.o_proj.weight"] = [HIDDEN, HEADS * WIDTH]
        for name in ("gate", "up"):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = [INTER, HIDDEN]
        shapes[prefix + "mlp.down_proj.weight"] = [HIDDEN, INTER]
        for name in ("input", "post_attention"):
            shapes[f"{prefix}{name}_layernorm.weight"] = [HIDDEN]
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items(), 1):
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        data = array.array("f", [1.0] * count) if "norm" in name else values(count, seed, 0.3)
        tensors[name] = ("F32", shape, data.tobytes())
    os.mkdir(folder)
    write_shard(os.path.join(folder, "model.safetensors"), tensors)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(BUNDLED, name), folder)


class Convert(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.source = os.path.join(cls.folder.name, "qwen")
        write_qwen(cls.source)
        cls.text = os.path.join(cls.folder.name, "text.txt")
        with open(os.path.join(SOURCE, "tests/data/eval/prose.txt"), encoding="utf-8") as file:
            prose = file.read()[:6000]
        with open(cls.text, "w", encoding="utf-8") as file:
            file.write(prose)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def place(self, name):
        return os.path.join(self.folder.name, name)

    def refused(self, *arguments, says, made=None):
        out, err = fathom(*arguments, status=2)
        self.assertEqual(out, "")
        self.assertIn(says, err)
        self.assertEqual(len(err.strip().splitlines()), 1, err)
        if made is not None:
            self.assertFalse(os.path.exists(os.path.join(made, "config.json")))

    def assert_incomplete_but_whole(self, made):
        """No model yet; a file with its final name is complete."""
        names = os.listdir(made)
        self.assertNotIn("config.json", names)
        for name in names:
            if not name.endswith(".safetensors"):
                continue
            tensors, start = header_of(os.path.join(made, name))
            self.assertEqual(os.path.getsize(os.path.join(made, name)), start + end_of(tensors))

    def test_converts_reports_and_runs(self):
        made = self.place("lossless")
        out, err = fathom("convert", self.source, made, "--to", "mla", "--calibration", self.text,
                          "--dtype", "float32")
        self.assertIn("Calibrating: 100 %", err)
        self.assertIn("Converting: 100 %", err)
        self.assertIn("kv_lora_rank 48, qk_rope_head_dim 16", out)
        kept = re.findall(r"^ +(\d+) +([\d.]+) % +([\d.]+) %$", out, re.MULTILINE)
        self.assertEqual([int(layer) for layer, _, _ in kept], list(range(LAYERS)), out)
        for _, rope, latent in kept:  # the keys are cut, the latent holds all that there is
            self.assertTrue(20 < float(rope) < 100 and float(latent) == 100, out)
        losses = re.search(r"loss on \d+ tokens of .*: ([\d.]+) nats .*, ([\d.]+) nats", out)
        self.assertIsNotNone(losses, out)
        inspected = fathom("inspect", made)[0]
        self.assertIn("kv_lora 48, nope 16, rope 16, v 16", inspected)
        self.assertIn("biases of q and kv_a, no norm on the latent", inspected)
        self.assertIn("4 heads, 2 KV heads of 16", fathom("inspect", self.source)[0])
        run = ("--temperature", "0", "-q", "--device", "cpu", "--dtype", "float32", "--max-tokens", "12")
        exact = self.place("exact")
        out, _ = fathom("convert", self.source, exact, "--to", "mla", "--rope-dim", "32", "-q")
        self.assertIn("without loss", out)
        self.assertIn("cache: 256 bytes a token in bf16, 256 before (100.0 %)", out)
        self.assertEqual(fathom("run", exact, "One two three", *run)[0],
                         fathom("run", self.source, "One two three", *run)[0])
        for model in (self.source, made):
            fathom("eval", model, "-q", "--device", "cpu", "--limit", "1", "--json", "--set", self.text)

    def test_fp8_of_both_forms(self):
        """A directory in FP8 is what loading quantizes; values of the two forms differ little."""
        made = self.place("for-fp8")
        fathom("convert", self.source, made, "--to", "mla", "-q")
        for model in (self.source, made):
            def loss(folder, *flags):
                out, _ = fathom("eval", folder, "-q", "--device", "cpu", "--json", "--set", self.text, *flags)
                return json.loads(out)["text"]["nll_per_token"]

            fathom("quantize", model, model + "-fp8", "-q")
            wide, loaded, stored = loss(model), loss(model, "--quantization", "fp8"), loss(model + "-fp8")
            self.assertEqual(loaded, stored)
            self.assertNotEqual(loaded, wide)
            self.assertLess(abs(loaded - wide), 0.1)
            _, err = fathom("quantize", model, model + "-int4", "--format", "int4-g32", status=2)
            self.assertIn("it has no routed experts", err)
            self.assertFalse(os.path.exists(model + "-int4"))

    def test_a_smaller_rank_loses_more(self):
        losses = []
        for rank in (32, 16, 4):
            out, _ = fathom("convert", self.source, self.place(f"rank-{rank}"), "--to", "mla", "--rank",
                            str(rank), "--rope-dim", "32", "--calibration", self.text, "--dtype",
                            "float32", "-q")
            after, before = re.search(r": ([\d.]+) nats .*, ([\d.]+) nats", out).groups()
            losses.append(abs(float(after) - float(before)))
        self.assertLess(losses[0], 1e-3)
        self.assertLess(losses[0], losses[2])

    def test_what_cannot_be_converted(self):
        made = self.place("never")
        convert = ("convert", self.source, made, "--to", "mla")
        self.refused("convert", BUNDLED, made, "--to", "mla", says="has multi-head latent attention already",
                     made=made)
        self.refused(*convert, "--rank", "49", says="--rank is 49: from 1 to 48", made=made)
        self.refused(*convert, "--rope-dim", "24", says="--rope-dim is 24", made=made)
        self.refused(*convert, "--freqfold", "3", says="--freqfold is 3", made=made)
        empty = self.place("empty.txt")
        with open(empty, "w", encoding="utf-8") as file:
            file.write(" \n\n")
        self.refused(*convert, "--calibration", empty, says="empty.txt: has no text", made=made)
        short = self.place("short.txt")
        with open(short, "w", encoding="utf-8") as file:
            file.write("a")
        self.refused(*convert, "--calibration", short, says="short.txt: has 1 token", made=made)
        self.refused(*convert, "--calibration", self.place("nowhere"), says="nowhere", made=made)
        self.refused(*convert, "--calibration", os.path.join(self.source, "model.safetensors"),
                     says="is not UTF-8 text", made=made)
        self.refused(*convert, "--rank", "0", says="--rank", made=made)
        self.refused(*convert, "--rank", "many", says="--rank", made=made)
        self.refused(*convert, "--rope-dim", "0", says="--rope-dim", made=made)
        self.refused("convert", self.source, made, says="--to", made=made)
        self.refused("convert", self.source, self.text, "--to", "mla", says="text.txt")
        self.assertIn("gqa", fathom("convert", self.source, made, "--to", "gqa", status=2)[1])
        self.refused("convert", self.source, self.source, "--to", "mla", says="is not empty")
        other = self.place("gemma")
        write_qwen(other, model_type="gemma2")
        self.refused("convert", other, made, "--to", "mla", says="of those without it llama, mistral and qwen2",
                     made=made)
        quantized = self.place("quantized")
        write_qwen(quantized, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128],
                                                   "fmt": "e4m3", "activation_scheme": "dynamic"})
        self.refused("convert", quantized, made, "--to", "mla", says="quantization_config", made=made)

    def test_a_full_disk(self):
        """A limit on the size of files stands for the disk's: nothing is left under a final name."""
        made = self.place("full")

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        out, err = fathom("convert", self.source, made, "--to", "mla", "-q", status=2, before=limit)
        self.assertEqual(out, "")
        self.assertIn("model-0000", err)
        self.assert_incomplete_but_whole(made)
        # With room the same command goes on.
        fathom("convert", self.source, made, "--to", "mla", "-q")
        fathom("inspect", made)

    def test_killed_and_resumed(self):
        """However far the first run came: the second one gives the bytes of an undisturbed run."""
        source, made, whole = self.place("deep"), self.place("killed"), self.place("undisturbed")
        write_qwen(source, layers=40)
        command = [PROGRAM, "convert", source, made, "--to", "mla", "--rank", "24", "-q", "-t", "1"]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as running:
            while running.poll() is None:
                if os.path.isdir(made) and any(n.endswith("-00041.safetensors") for n in os.listdir(made)):
                    running.kill()
                    break
                time.sleep(0.001)
        if running.returncode == -signal.SIGKILL and "config.json" not in os.listdir(made):
            self.assert_incomplete_but_whole(made)
            # Other options would give another model.
            _, err = fathom("convert", source, made, "--to", "mla", "--rank", "23", status=2)
            self.assertIn("rank 24", err)
            fathom(*command[1:])
        fathom("convert", source, whole, "--to", "mla", "--rank", "24", "-q")
        self.assertEqual(contents(made), contents(whole))

    def test_memory_is_not_the_models(self):
        """A sparse file of zeros: more than 300 MiB, most of it MLPs."""
        wide, made = self.place("wide"), self.place("wide-made")
        write_qwen(wide)
        path = os.path.join(wide, "model.safetensors")
        tensors, _ = header_of(path)
        offset, inter = 0, 220_000
        for entry in tensors.values():
            entry["shape"] = [inter if size == INTER else size for size in entry["shape"]]
            entry["data_offsets"] = [offset, offset + 4 * math.prod(entry["shape"])]
            offset = entry["data_offsets"][1]
        text = json.dumps(tensors).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)
        self.assertGreater(offset, 300 << 20)
        with open(os.path.join(wide, "config.json")) as file:
            config = json.load(file) | dict(intermediate_size=inter)
        with open(os.path.join(wide, "config.json"), "w") as file:
            json.dump(config, file)
        out, _ = fathom("convert", wide, made, "--to", "mla", "-q", "-t", "2",
                        prefix=(sys.executable, "-c", PEAK))
        self.assertLess(int(out.split()[-1]) / 1024, MAX_MIB)

    def test_a_broken_source(self):
        made = self.place("of-broken")

        def broken(name, damage, says):
            folder = self.place(name)
            shutil.copytree(self.source, folder)
            damage(os.path.join(folder, "model.safetensors"))
            self.refused("convert", folder, made, "--to", "mla", "-q", says=says, made=made)
            shutil.rmtree(made, ignore_errors=True)

        def truncate(path):
            os.truncate(path, os.path.getsize(path) - 4)

        def remove_tensor(path):
            with open(path, "rb") as file:
                text = file.read()
            with open(path, "wb") as file:  # the same length
                file.write(text.replace(b"layers.1.self_attn.k_proj.weight", b"layers.1.self_attn.k_proj.wEight"))

        def write_nan(path):
            tensors, start = header_of(path)
            with open(path, "r+b") as file:
                file.seek(start + tensors["model.layers.1.self_attn.k_proj.weight"]["data_offsets"][0])
                file.write(struct.pack("<f", math.nan))

        broken("truncated", truncate, "model.safetensors")
        broken("without-keys", remove_tensor, "layers.1.self_attn.k_proj")
        broken("not-finite", write_nan, "model.layers.1.self_attn.k_proj.weight")
        self.refused("convert", self.place("no-model"), made, "--to", "mla", says="no-model", made=made)
        without = self.place("no-tokenizer")
        shutil.copytree(self.source, without)
        os.remove(os.path.join(without, "tokenizer.json"))
        self.refused("convert", without, made, "--to", "mla", "--calibration", self.text,
                     says="tokenizer", made=made)


if __name__ == "__main__":
    unittest.main(verbosity=1)
