#!/usr/bin/env python3
"""The documents' tables of GPU figures are what bench/results gives, and the tools that make both say
what is wrong with their input. usage: tables_test.py ROOT"""

import contextlib
import io
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(ROOT / "tools"))
import gpu_report  # noqa: E402
import gpu_report_rows  # noqa: E402
import make_tables  # noqa: E402
import plot_data  # noqa: E402

DOCUMENT = "before\n<!-- table: speed -->\n{}<!-- end -->\nafter\n"


class Repository(unittest.TestCase):
    def test_documents_are_what_the_results_give(self):
        changed = make_tables.run(ROOT, [], check=True)
        self.assertEqual(changed, [], "run tools/make_tables.py")

    def test_figures_are_drawn_from_the_results(self):
        for name, make in plot_data.FIGURES.items():
            figure = (ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8")
            self.assertIn(f"<!-- data: {plot_data.digest(make())} -->", figure,
                          f"{name}: run make plots")

    def test_every_row_says_what_was_measured_where(self):
        rows = make_tables.read_rows(ROOT)
        self.assertGreater(len(rows), 100)
        for name, row in rows.items():
            for field in ("value", "unit", "commit", "date", "device", "driver", "command"):
                self.assertIn(field, row, name)
            if "from" in row:
                self.assertTrue((ROOT / row["from"]).exists(), name)
            else:
                self.assertGreaterEqual(row["repeats"], 3, name)
                self.assertLessEqual(row["min"], row["value"], name)
                self.assertLessEqual(row["value"], row["max"], name)


class Tables(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.root = pathlib.Path(holder.name)
        for folder in ("bench/results", "bench/tables", "docs"):
            (self.root / folder).mkdir(parents=True)
        self.rows = {"a/b1:us": {"value": 2000.0, "min": 1990.0, "max": 2010.0, "repeats": 3,
                                 "commit": "abc"},
                     "a/b2:us": {"value": 500.0, "commit": "abc"}}
        self.write_rows()
        self.template("{{a/b1:us}} {{a/b1:us|,.1f}} {{a/b1:us*0.001|.2f}} {{a/b1:us / a/b2:us|.1f}} "
                      "{{1000 / a/b2:us}} {{a/b1:us#spread}} {{a/b2:us#spread}} {{a/b1:us#commit}}")
        self.document(DOCUMENT.format(""))

    def write_rows(self, name="gpu_report_x.json"):
        (self.root / "bench/results" / name).write_text(json.dumps({"rows": self.rows}))

    def template(self, text, name="speed"):
        (self.root / "bench/tables" / f"{name}.md").write_text(text + "\n")

    def document(self, text):
        (self.root / "README.md").write_text(text)

    def failure(self):
        with self.assertRaises(make_tables.TableError) as caught:
            make_tables.run(self.root, [], check=True)
        return str(caught.exception)

    def test_figures(self):
        make_tables.run(self.root, [], check=False)
        self.assertEqual((self.root / "README.md").read_text(),
                         DOCUMENT.format("2000 2,000.0 2.00 4.0 2 1.0 % – abc\n"))
        self.assertEqual(make_tables.run(self.root, [], check=True), [])

    def test_a_figure_that_was_left_behind_is_seen(self):
        make_tables.run(self.root, [], check=False)
        self.rows["a/b1:us"]["value"] = 2001.0
        self.write_rows()
        self.assertEqual(make_tables.run(self.root, [], check=True), [self.root / "README.md"])

    def test_a_figure_written_by_hand_is_seen(self):
        make_tables.run(self.root, [], check=False)
        text = (self.root / "README.md").read_text()
        self.document(text.replace("2,000.0", "1,900.0"))
        self.assertEqual(make_tables.run(self.root, [], check=True), [self.root / "README.md"])

    def test_what_is_wrong_is_named(self):
        self.template("{{a/b3:us}}")
        self.assertIn("bench/tables/speed.md: no row a/b3:us", self.failure())
        self.template("{{a/b1:us#mood}}")
        self.assertIn("no field mood", self.failure())
        self.template("fine")
        self.document("<!-- table: speed -->\nno end\n")
        self.assertIn("table speed has no <!-- end -->", self.failure())
        self.document("<!-- table: other -->\n<!-- end -->\n")
        self.assertIn("no bench/tables/other.md", self.failure())
        self.document("nothing\n")
        self.assertIn("bench/tables/speed.md is in no document", self.failure())

    def test_a_name_that_stands_in_two_reports_needs_its_chip(self):
        self.rows["a/b1:us"] = {**self.rows["a/b1:us"], "value": 3000.0, "commit": "def"}
        self.write_rows("gpu_report_y.json")
        self.assertIn("a/b1:us is one of x@a/b1:us, y@a/b1:us", self.failure())
        self.template("{{x@a/b1:us}} {{y@a/b1:us}} {{y@a/b1:us / x@a/b1:us}} {{y@a/b1:us#commit}}")
        make_tables.run(self.root, [], check=False)
        self.assertEqual((self.root / "README.md").read_text(),
                         DOCUMENT.format("2000 3000 1.5 def\n"))


class Report(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.program("nvidia-smi", 'case "$*" in *query*) echo "NVIDIA H200, 1.2";; '
                                   '*list-gpus*) echo "GPU 0: NVIDIA H200 (UUID: x)";; '
                                   '*) echo "CUDA Version: 13.0";; esac')

    def program(self, name, body):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_report(self, *flags):
        out = self.folder / "report.json"
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/gpu_report.py"), "--programs", str(self.folder),
             "--fathom", str(self.folder / "fathom"), "--out", str(out), "--commit", "abc", *flags],
            capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"})
        report = json.loads(out.read_text()) if out.exists() else None
        return done, report

    def test_medians_of_repeats(self):
        # 7, 5, 6 us in turn.
        self.program("decode_step_cuda_bench",
                     f'n=$(cat {self.folder}/n 2>/dev/null || echo 0); echo $((n + 1)) > '
                     f'{self.folder}/n\nset -- 7 5 6; shift $n\n'
                     'echo "{\\"device\\": \\"x\\", \\"results\\": [{\\"sequences\\": 1, '
                     '\\"context\\": 128, \\"us\\": $1.0}]}"')
        done, report = self.run_report("--only", "decode_steps")
        self.assertEqual(done.returncode, 0, done.stderr)
        row = report["rows"]["decode_steps/sequences1/context128:us"]
        self.assertEqual((row["value"], row["min"], row["max"], row["repeats"]), (6.0, 5.0, 7.0, 3))
        self.assertEqual((row["commit"], row["device"], row["driver"]),
                         ("abc", "NVIDIA H200", "1.2"))
        self.assertEqual(row["command"], "decode_step_cuda_bench bench/models/v2-lite --json")

    def test_other_rows_stay_and_a_failure_is_said(self):
        self.program("decode_step_cuda_bench", "echo no device >&2; exit 3")
        (self.folder / "report.json").write_text(json.dumps({"rows": {"a:us": {"value": 1}}}))
        done, report = self.run_report("--only", "decode_steps")
        self.assertEqual(done.returncode, 1)
        self.assertIn("status 3", done.stderr)
        self.assertIn("not measured: decode_steps", done.stderr)
        self.assertEqual(report["rows"], {"a:us": {"value": 1}})

    def test_a_budget_leaves_groups_for_another_run(self):
        done, _ = self.run_report("--only", "azure", "--azure", "x", "--budget", "10")
        self.assertEqual(done.returncode, 1)
        self.assertIn("azure: left for another run", done.stdout)

    def test_groups_of_more_gpus_than_there_are_are_not_run(self):
        done, report = self.run_report("--only", "v2_lite_2gpus")
        self.assertEqual(done.returncode, 1)
        self.assertIn("v2_lite_2gpus: not run, needs 2 GPUs of 1", done.stdout)
        self.assertIsNone(report)

    def test_a_run_sees_the_gpus_of_its_group(self):
        self.program("decode_step_cuda_bench",
                     'echo "{\\"device\\": \\"x\\", \\"results\\": [{\\"sequences\\": 1, '
                     '\\"context\\": $((100 + CUDA_VISIBLE_DEVICES)), \\"us\\": 1.0}]}"')
        done, report = self.run_report("--only", "decode_steps")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("decode_steps/sequences1/context100:us", report["rows"])

    def test_a_run_of_a_group_alone(self):
        self.program("fathom", 'echo "{\\"avg_latency\\": $9.0}"')  # --batch-size
        done, report = self.run_report("--only", "v2_lite/b64,v2_lite/b1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual({name: row["value"] for name, row in report["rows"].items()},
                         {"v2_lite/b1:avg_latency": 1.0, "v2_lite/b64:avg_latency": 64.0})

    def test_unknown_group(self):
        done, _ = self.run_report("--only", "speed")
        self.assertIn("--only speed: no group and no run has this name", done.stderr)

    def test_names(self):
        self.assertEqual(
            gpu_report_rows.named("k", {"operation": "latent_decode bf16",
                                        "shape": "16 heads, 1 x 1", "us": 2, "plan": "64x1"}),
            {"k/latent_decode_bf16/16_heads_1_x_1:us": 2.0})
        self.assertEqual(gpu_report_rows.of_fathom("v/b1", {"batch_size": 1, "avg_latency": 2.5}),
                         {"v/b1:avg_latency": 2.5})

    def test_no_time_is_part_of_a_name(self):  # a row of its own for each run
        for report in (ROOT / "bench/results").glob("gpu_report_*.json"):
            for name in json.loads(report.read_text(encoding="utf-8"))["rows"]:
                self.assertNotRegex(name.rpartition(":")[0], r"_us[\d.]+", report.name)

    def test_groups_fit_a_call_of_ten_minutes(self):
        for name, group in gpu_report.GROUPS.items():
            self.assertLessEqual(3 * group.seconds, 540, name)

    def test_written_rows_are_read_again(self):
        path = self.folder / "r.json"
        gpu_report.write(path, {"schema": 1, "rows": {"b:us": {"value": 1}, "a:us": {"value": 2}}})
        self.assertEqual(json.loads(path.read_text()),
                         {"schema": 1, "rows": {"a:us": {"value": 2}, "b:us": {"value": 1}}})


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        unittest.main(argv=sys.argv[:1])
