"""What else a machine did during a measurement, from /proc and the control group.

A rate that falls by half has a cause: other processes, a hypervisor that gives the CPUs to another
guest (steal), or a control group at its limit (throttling).
"""

import glob
import os
import pathlib
import time

TICKS = os.sysconf("SC_CLK_TCK")


def first_of(paths):
    return next((path for path in paths if os.path.exists(path)), None)


def throttling():
    """Periods and seconds in which the control group was at its limit; zeros without one."""
    file = first_of(["/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"])
    if file is None:
        return 0, 0.0
    fields = dict(line.split() for line in pathlib.Path(file).read_text().splitlines())
    seconds = int(fields.get("throttled_usec", 0)) / 1e6 + int(fields.get("throttled_time", 0)) / 1e9
    return int(fields.get("nr_throttled", 0)), seconds


def process_seconds(pid):
    """CPU seconds of a process so far, and how often its threads lost a CPU against their will."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    losses = 0
    for status in glob.glob(f"/proc/{pid}/task/*/status"):
        for line in pathlib.Path(status).read_text().splitlines():
            if line.startswith("nonvoluntary_ctxt_switches"):
                losses += int(line.split()[1])
    return (int(fields[11]) + int(fields[12])) / TICKS, losses


def snapshot(pid):
    user, nice, system, _, _, irq, soft_irq, steal = [
        int(field) / TICKS for field in
        pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    own, losses = process_seconds(pid)
    periods, throttled = throttling()
    return {"wall": time.monotonic(), "busy": user + nice + system + irq + soft_irq,
            "steal": steal, "own": own, "lost_cpu": losses, "throttled_periods": periods,
            "throttled": throttled}


def since(before, pid):
    """Seconds since a snapshot, of all CPUs together but for `wall_s`; the load as it is now."""
    after = snapshot(pid)
    change = {key: after[key] - before[key] for key in before}
    return {"wall_s": round(change["wall"], 2), "own_cpu_s": round(change["own"], 2),
            "others_cpu_s": round(change["busy"] - change["own"], 2),
            "steal_s": round(change["steal"], 2), "lost_cpu": change["lost_cpu"],
            "throttled_periods": change["throttled_periods"],
            "throttled_s": round(change["throttled"], 3),
            "load": pathlib.Path("/proc/loadavg").read_text().split()[0]}
