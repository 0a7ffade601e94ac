#!/usr/bin/python3
"""tools/cluster and tools/demo as people run them: they start, change, show and stop real clusters and leave nothing behind."""
import json
import os
import re
import signal
import subprocess
import time

from harness import BUILD, ROOT, Case, Client, clusters, golden_request, main, until


class Tool(Case):
    def setUp(self):
        self.state = self.folder()
        self.addCleanup(self.end)

    def end(self):
        subprocess.run([os.path.join(ROOT, "tools", "cluster"), "down", "--dir", self.state], capture_output=True, check=False)

    def run_tool(self, *arguments, code=0, state=None, build=BUILD):
        done = subprocess.run([os.path.join(ROOT, "tools", "cluster"), *arguments, "--dir", state or self.state,
                               "--build", build], capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout if code == 0 else done.stderr

    def description(self):
        with open(os.path.join(self.state, "cluster.json"), encoding="utf-8") as file:
            return json.load(file)

    def test_up_add_remove_kill_status_down(self):
        self.run_tool("up", "--prefill", "1", "--decode", "2", "--router-args=--log-level debug",
                      "--worker-args", "--threads 1")
        shown = self.description()
        self.assertEqual(set(shown), {"etcd", "routers", "workers"})
        self.assertEqual([set(each) for each in shown["routers"]], [{"id", "pid", "http", "grpc", "admin"}])
        self.assertEqual(sorted(each["role"] for each in shown["workers"]), ["decode", "decode", "prefill"])
        for each in shown["workers"]:
            self.assertEqual(set(each), {"role", "id", "pid", "grpc", "admin", "kv"})
            self.assertEqual(clusters.http_get(each["admin"], "/readyz")[0], 200)
        self.assertEqual(self.met(shown), {"prefill-1", "decode-1", "decode-2"})
        with Client(shown["routers"][0]["grpc"]) as each:
            self.assertEqual(len(each.generate(golden_request(0, max_tokens=5)).ids), 5)
            self.assertEqual(self.run_tool("add", "prefill").strip(), "prefill-2")
            self.assertEqual(self.met(shown), {"prefill-1", "prefill-2", "decode-1", "decode-2"})
            self.assertEqual(self.run_tool("remove", "decode", "decode-1").strip(), "decode-1")
            self.assertEqual({each["id"] for each in self.description()["workers"]}, {"prefill-1", "prefill-2", "decode-2"})
            before = [each for each in self.description()["workers"] if each["id"] == "decode-2"][0]
            self.run_tool("kill", "decode-2")
            self.assertRegex(self.run_tool("status"), r"decode-2 +\d+ +gone")
            self.run_tool("add", "decode", "decode-2")
            after = [each for each in self.description()["workers"] if each["id"] == "decode-2"][0]
            self.assertNotEqual(before.pop("pid"), after.pop("pid"))
            self.assertEqual(before, after)
            # The router is honestly not ready until it has a session with the one decode worker that is left.
            until("every member is ready", lambda: {
                row["id"] for row in json.loads(self.run_tool("status", "--json"))["members"] if row["ready"]
            } == {"etcd", "router-1", "prefill-1", "prefill-2", "decode-2"}, 5)
            until("the replacement is used", lambda: self.attempt(each), 10)
        self.assertIn("runs in", self.run_tool("up", code=1))
        self.assertIn("no member is called 'nobody'", self.run_tool("kill", "nobody", code=1))
        self.assertIn("there is no decode", self.run_tool("remove", "decode", "prefill-1", code=1))
        self.run_tool("down")
        self.assertEqual(clusters.marked_processes(self.state), [])
        self.assertEqual(os.listdir(self.state), ["logs"])
        self.run_tool("down")

    @staticmethod
    def met(shown):
        """The workers that the router can use at this moment."""
        return {id for id, port in clusters.sessions(shown["routers"][0]["admin"])}

    @staticmethod
    def attempt(each):
        try:
            return each.generate(golden_request(0, max_tokens=5))
        except Exception:  # not yet
            return None

    def test_a_crashed_cluster_is_taken_down(self):
        self.run_tool("up", "--decode", "1", "--prefill", "0")
        pids = [each["pid"] for each in self.description()["workers"] + self.description()["routers"]]
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)
        with open(os.path.join(self.state, "members.json"), "w", encoding="ascii") as file:
            file.write("{ damaged")
        self.run_tool("down")
        self.assertEqual(clusters.marked_processes(self.state), [])
        self.run_tool("up", "--decode", "1", "--prefill", "0")  # the place can be used again
        self.run_tool("down")

    def test_two_clusters_live_beside_each_other(self):
        second = self.folder()
        self.addCleanup(self.run_tool, "down", state=second)
        processes = [subprocess.Popen([os.path.join(ROOT, "tools", "cluster"), "up", "--prefill", "0", "--build", BUILD,
                                       "--dir", state], stderr=subprocess.DEVNULL) for state in (self.state, second)]
        self.assertEqual([each.wait(60) for each in processes], [0, 0])
        self.run_tool("down")
        self.assertIn("router-1", self.run_tool("status", state=second))
        self.assertTrue(all(row["ready"] for row in json.loads(self.run_tool("status", "--json", state=second))["members"]))

    def test_errors_are_sentences(self):
        self.assertIn("ninja", self.run_tool("up", code=1, build=self.folder()))
        self.assertIn("is not a directory", self.run_tool("up", "--model", "/no/such/model", code=1))
        empty = self.folder()
        told = self.run_tool("up", "--model", empty, code=1)
        self.assertRegex(told, r"(config|tokenizer)\.json")  # the end of the worker's own log
        self.assertIn("ended (code 1)", told)
        self.assertEqual(clusters.marked_processes(self.state), [])
        self.assertIn("tools/cluster up", self.run_tool("status", code=1))

    def test_an_interrupted_start_leaves_nothing(self):
        process = subprocess.Popen([os.path.join(ROOT, "tools", "cluster"), "up", "--dir", self.state, "--build", BUILD],
                                   stderr=subprocess.DEVNULL)
        until("something runs", lambda: clusters.marked_processes(self.state), 20, 0.001)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(20), 130)
        self.assertEqual(clusters.marked_processes(self.state), [])


class Demo(Case):
    def test_the_demo_tells_its_story(self):
        began = time.monotonic()
        done = subprocess.run([os.path.join(ROOT, "tools", "demo"), "--no-setup", "--build", BUILD, "--no-build",
                               "--max-tokens", "40"], capture_output=True, text=True, timeout=90, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        print(f"the demo took {time.monotonic() - began:.1f} s after the build")
        self.assertIn("there was a little girl named Lily", done.stdout)
        for pattern in (r"prefill-1", r"decode-1", r"KV", r"first token", r"tokens/s", r"prompt"):
            self.assertRegex(done.stdout, pattern)
        self.assertNotIn("\033", done.stdout)
        self.assertFalse([line for line in done.stdout.splitlines() if re.search(r"\bnan\b|None|[ :]-\d", line)])

    def test_the_demo_says_what_is_wrong(self):
        done = subprocess.run([os.path.join(ROOT, "tools", "demo"), "--no-setup", "--build", BUILD, "--no-build",
                               "--model", "/no/such/model"], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("/no/such/model", done.stderr)
        self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    main()
