#!/usr/bin/env python3
"""Runs all that needs a GPU, and writes docs/gpu_results.md. `./dev gpu` calls it.

    tools/gpu_run.py --programs FOLDER [--results FILE] [--filter PATTERN] [--under COMMAND]
                     [--jobs N] [--no-bench] [--peers PYTHON]

FOLDER holds gpu_tests, ladon and built_from (two lines: the commit, and tools/cuda_digest.sh's). Each
test suite is a process of its own, a few of them at a time: a fault on the device ends one suite, not
all. --under runs them under a program, such as "compute-sanitizer --error-exitcode 9", with a share of
the random cases and repetitions (LADON_TEST_SHARE).
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# These take longest, and so come first.
LONG = ("Settings/CacheModel", "EachContext/FiniteDifference", "EachContext/MultiHeadGradient", "Cuda")
# These measure the memory that is free, and must be alone on the device.
ALONE = ("CudaMemoryTest",)


def output_of(command):
    """What it printed; nothing where it failed or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def environment():
    """Tests on the GPU alone, with other people's vectors where they are found."""
    settings = dict(os.environ, LADON_TEST_PLACES="cuda")
    if "LADON_CONFORMANCE_DIR" not in settings:
        for folder in (ROOT / "shared/conformance", ROOT.parent / "shared/conformance"):
            if folder.is_dir():
                settings["LADON_CONFORMANCE_DIR"] = str(folder)
    return settings


def suites_of(program, pattern, settings):
    """The names of the suites, the long ones first."""
    command = [program, "--gtest_list_tests", "--gtest_filter=" + pattern]
    listed = subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout
    names = [line.split("#")[0].strip() for line in listed.splitlines()
             if line and not line.startswith((" ", "Running"))]
    return sorted((name[:-1] for name in names), key=lambda name: not name.startswith(LONG))


class Suite:
    """One suite's run: what passed, what failed, what was skipped and why."""

    def __init__(self, name):
        self.name, self.passed, self.failed, self.skipped = name, 0, [], []
        self.seconds, self.log = 0.0, ""

    def run(self, program, pattern, under, settings, logs):
        file = logs / (self.name.replace("/", "_") + ".json")
        file.unlink(missing_ok=True)
        # Where the pattern names tests of this suite, those; GoogleTest has no "and" of two patterns.
        own = [part for part in pattern.split(":") if part.startswith(self.name + ".")]
        wanted = ":".join(own) or self.name + ".*"
        command = under + [program, "--gtest_filter=" + wanted, "--gtest_output=json:" + str(file)]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, env=settings, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, errors="replace", timeout=540)
            self.log, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as expired:
            self.log = (expired.stdout or b"").decode(errors="replace") + "\n(took too long)\n"
            status = -1
        self.seconds = time.monotonic() - begin
        (logs / (self.name.replace("/", "_") + ".log")).write_text(self.log)
        self.read(file)
        if status != 0 and not self.failed:
            self.failed.append("%s ended with status %d" % (self.name, status))
        return self

    def read(self, file):
        if not file.exists():
            return
        for suite in json.loads(file.read_text())["testsuites"]:
            for test in suite["testsuite"]:
                name = suite["name"] + "." + test["name"]
                if test.get("result") == "SKIPPED":
                    why = test.get("skipped", [{}])[0].get("message", "").strip().split("\n")[-1]
                    self.skipped.append((name, why))
                elif test.get("failures"):
                    self.failed.append(name)
                elif test.get("status") == "RUN":
                    self.passed += 1


def run_tests(arguments, settings, logs):
    program = str(arguments.programs / "gpu_tests")
    under = shlex.split(arguments.under)
    names = suites_of(program, arguments.filter, settings)
    suites = []

    def run(name):
        return Suite(name).run(program, arguments.filter, under, settings, logs)

    def note(suite):
        suites.append(suite)
        state = "failed" if suite.failed else "passed"
        print("%-44s %s: %d passed, %d skipped, %.1f s"
              % (suite.name, state, suite.passed, len(suite.skipped), suite.seconds), flush=True)
        if suite.failed:
            print("\n".join(suite.log.splitlines()[-40:]), flush=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        together = [pool.submit(run, name) for name in names if name not in ALONE]
        for one in concurrent.futures.as_completed(together):
            note(one.result())
    for name in names:
        if name in ALONE:
            note(run(name))
    return suites


def run_checks(arguments, settings):
    """ladon check on the GPU: its verdict."""
    done = subprocess.run([arguments.programs / "ladon", "check", "--device", "cuda"],
                          env=settings, capture_output=True, text=True)
    print(done.stdout + done.stderr, flush=True)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return (lines or ["nothing was printed"])[-1], done.returncode == 0


def run_bench(arguments, settings):
    command = [arguments.programs / "ladon", "bench", "--device", "cuda", "--quick", "--json"]
    if arguments.peers:
        command += ["--peers", arguments.peers]
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    if not done.stdout:
        print(done.stderr, flush=True)
        return None
    return json.loads(done.stdout)


def bench_table(bench):
    peers = [peer["name"] for peer in bench["peers"] if "version" in peer]
    lines = ["| case | median ms | rate | share of its ceiling |" +
             "".join(" over %s |" % peer for peer in peers),
             "|---|---|---|---|" + "---|" * len(peers)]
    for row in bench["rows"]:
        rate = ("%.0f TFLOP/s" % (row["gflops"] / 1e3) if row.get("gflops", 0) >= 1e4 else
                "%.1f TFLOP/s" % (row["gflops"] / 1e3) if "gflops" in row else
                "%.0f GB/s" % row["gbps"])
        ratios = "".join(" %s |" % ("%.2fx" % row["ratio"][peer] if peer in row["ratio"] else "-")
                         for peer in peers)
        lines.append("| %s | %.3f | %s | %.0f %% of %s |%s"
                     % (row["name"], row["median_ms"], rate, 100 * row["share"], row["ceiling"], ratios))
    lines += ["| %s | WRONG: %s |" % (fault["name"], fault["what"]) for fault in bench["faults"]]
    versions = ", ".join("%s %s" % (peer["name"], peer["version"]) for peer in bench["peers"]
                         if "version" in peer)
    note = ("Ceilings are measured in turns with the cases: a product of two 8192 x 8192 (16-bit) or 4096 x\n"
            "4096 matrices by Ladon's own projection, or a copy of device memory, bytes read and written.")
    return "\n".join(lines) + "\n\n" + note + (" Peers: %s." % versions if versions else "") + "\n"


def results_text(arguments, suites, verdict, bench, seconds):
    passed = sum(suite.passed for suite in suites)
    failed = [name for suite in suites for name in suite.failed]
    skipped = [one for suite in suites for one in suite.skipped]
    commit, digest = (arguments.programs / "built_from").read_text().split("\n")[:2]
    gpu = output_of(["nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                     "--format=csv,noheader"]).splitlines()
    name, driver, memory = [part.strip() for part in (gpu or ["unknown, unknown, unknown"])[0].split(",")]
    lines = ["# Results on a GPU", "",
             "What `./dev gpu` found where there was one. It writes this file; `./dev check` says when",
             "`src/cuda` has changed since.", "",
             "| | |", "|---|---|",
             "| date | %s |" % datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
             "| device | %s, %s |" % (name, memory),
             "| driver | %s |" % driver,
             "| commit | %s |" % commit,
             "| src/cuda | %s |" % digest,
             "| tests | %d passed, %d failed, %d skipped, %.0f s |" % (passed, len(failed), len(skipped), seconds)]
    if verdict:
        lines.append("| `ladon check --device cuda` | %s |" % verdict)
    lines.append("")
    if failed:
        lines += ["## Failed", ""] + ["- %s" % one for one in failed] + [""]
    if skipped:
        lines += ["## Skipped", ""]
        reasons = {}
        for test, why in skipped:
            reasons.setdefault(why, []).append(test)
        lines += ["- %s: %s" % (why or "no reason given", ", ".join(tests)) for why, tests in reasons.items()]
        lines.append("")
    if bench:
        lines += ["## Speed", "", bench_table(bench)]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "docs/gpu_results.md")
    parser.add_argument("--filter", default="*")
    parser.add_argument("--under", default="")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--peers", default="")
    arguments = parser.parse_args()
    arguments.programs = arguments.programs.resolve()
    settings = environment()
    if arguments.under:
        settings.setdefault("LADON_TEST_SHARE", "0.02")
    logs = arguments.programs / "logs"
    logs.mkdir(exist_ok=True)

    begin = time.monotonic()
    suites = run_tests(arguments, settings, logs)
    seconds = time.monotonic() - begin
    partial = arguments.filter != "*" or arguments.under != ""
    verdict, good = ("", True) if partial else run_checks(arguments, settings)
    bench = None if partial or arguments.no_bench else run_bench(arguments, settings)
    failed = [name for suite in suites for name in suite.failed]
    passed = sum(suite.passed for suite in suites)
    print("%d passed, %d failed, %d skipped in %.0f s"
          % (passed, len(failed), sum(len(suite.skipped) for suite in suites), seconds))
    for name in failed:
        print("failed: " + name)
    if not partial:
        arguments.results.write_text(results_text(arguments, suites, verdict, bench, seconds))
        print("wrote %s" % arguments.results)
    wrong = bool(failed) or not good or (bench is not None and bool(bench["faults"]))
    return 1 if wrong or passed == 0 else 0


sys.exit(main())
