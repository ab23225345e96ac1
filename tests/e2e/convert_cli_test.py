#!/usr/bin/env python3
"""`fathom convert --to mla`, called as by a person; and four-bit checkpoints that are refused.

    convert_cli_test.py PROGRAM SOURCE_DIR

The model is a small random one of Qwen2's form with the bundled model's tokenizer, whose vocabulary
is cut to what it has.
"""
import array
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

PROGRAM, SOURCE = sys.argv.pop(1), sys.argv.pop(1)
BUNDLED = os.path.join(SOURCE, "models/fathom-tiny")
GOLDENS = os.path.join(SOURCE, "tests/goldens")
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if k == "FATHOM_CPU_ISA" or not k.startswith("FATHOM_")}
VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS, INTER = 8192, 64, 4, 2, 16, 2, 96


def fathom(*arguments, status=0, before=None):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, timeout=300, env=ENVIRONMENT,
                          preexec_fn=before)
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


def write_qwen(folder, **changes):
    config = dict(model_type="qwen2", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
                  num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, intermediate_size=INTER,
                  max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6, torch_dtype="float32",
                  tie_word_embeddings=True, hidden_act="silu", eos_token_id=1) | changes
    shapes = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]}
    for layer in range(LAYERS):
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
            prose = file.read()[:4000]
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

    def test_converts_reports_and_runs(self):
        made = self.place("lossless")
        out, err = fathom("convert", self.source, made, "--to", "mla", "--calibration", self.text,
                          "--dtype", "float32")
        self.assertIn("Calibrating: 100 %", err)
        self.assertIn("Converting: 100 %", err)
        self.assertIn("kv_lora_rank 48, qk_rope_head_dim 16", out)
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
        self.refused(*convert, "--calibration", self.place("nowhere"), says="nowhere", made=made)
        self.refused(*convert, "--calibration", os.path.join(self.source, "model.safetensors"),
                     says="is not UTF-8 text", made=made)
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
        left = [name for name in os.listdir(made) if name.endswith((".safetensors", ".json"))]
        self.assertNotIn("config.json", left)
        for name in left:  # what is there is whole
            with open(os.path.join(made, name), "rb") as file:
                content = file.read()
            (length,) = struct.unpack_from("<Q", content)
            end = max(entry["data_offsets"][1] for name, entry in json.loads(content[8:8 + length]).items()
                      if name != "__metadata__")
            self.assertEqual(len(content), 8 + length + end)
        # With room the same command goes on.
        fathom("convert", self.source, made, "--to", "mla", "-q")
        fathom("inspect", made)


if __name__ == "__main__":
    unittest.main(verbosity=1)
