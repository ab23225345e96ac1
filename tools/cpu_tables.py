"""Tables of what was measured on CPUs, from the reports in bench/results; make_tables.py asks."""

import json


def report(root, name):
    return json.loads((root / "bench/results" / name).read_text(encoding="utf-8"))


def table(head, rows):
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def four_bits(root):
    """compare_cpu.py's report."""
    rows = []
    for row in report(root, "four_bits_cpu.json")["rows"]:
        fp8, int4 = row["fathom fp8"], row["fathom int4-g32"]
        rows.append([
            str(row["threads"]), f"{row['read_bandwidth']['median'] / 1e9:.0f}",
            f"{fp8['median']:.1f}", f"{100 * fp8['of_read_bandwidth']:.0f}",
            f"{int4['median']:.1f}", f"{100 * int4['of_read_bandwidth']:.0f}",
            f"{row['int4_over_fathom fp8']:.2f}", f"{row['llama.cpp q4_k']['median']:.1f}",
            f"{row['int4_over_llama.cpp q4_k']:.2f}", f"{row['llama.cpp q4_0']['median']:.1f}",
            f"{row['int4_over_llama.cpp q4_0']:.2f}"])
    return table(["threads", "read, GB/s", "FP8, tokens/s", "% of it", "INT4 g32", "% of it",
                  "INT4 / FP8", "llama.cpp Q4_K", "INT4 / it", "llama.cpp Q4_0", "INT4 / it"], rows)


def converted_decode(root):
    """Reports of converted_decode_bench."""
    rows = []
    for name, what in (("llama_1b", "Llama-3.2-1B"), ("llama_8b", "Llama-3.1-8B"),
                       ("converted_1b", "Llama-3.2-1B, written by `fathom convert`")):
        found = report(root, "converted_decode_cpu.json")["runs"][name]
        for case in found["cases"]:
            before, after = case["variants"]
            rows.append([
                what, str(case["batch"]),
                f"{before['cache_bytes_per_token']:,} -> {after['cache_bytes_per_token']:,}",
                f"{before['cache_bytes'] / 1e6:,.0f} -> {after['cache_bytes'] / 1e6:,.0f}",
                f"{after['weight_bytes'] / 1e6:,.0f}",
                f"{before['median_ms']:.1f} -> {after['median_ms']:.1f}",
                f"{case['first_over_second']:.2f}"])
    return table(["shape", "sequences", "cache bytes a token", "caches read, MB",
                  "weights read after, MB", "a step, ms", "before / after"], rows)


TABLES = {"cpu_four_bits": four_bits, "cpu_converted_decode": converted_decode}
