"""The part of tools/demo after the build: a cluster, one answer as it streams, what happened on the way, a clean stop."""
import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

from cluster import DEFAULT_MODEL, ROOT, Cluster, Problem, default_build, http_get

BOLD, DIM, PLAIN = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def say(text=""):
    print(text, flush=True)


def headline(text):
    say(f"\n{BOLD}{text}{PLAIN}")


def metric(member, name, **labels):
    """The sum of a metric's series that have these labels; None where the program has no such metric."""
    _, text = http_get(member.address("admin"), "/metrics", 5)
    values = []
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")):
            if all(f'{key}="{value}"' in line for key, value in labels.items()):
                values.append(float(line.rsplit(" ", 1)[1]))
    return sum(values) if values else None


def size(count):
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def stubs(folder):
    done = subprocess.run([os.path.join(ROOT, "tests", "sdk", "python", "generate"), folder], capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        raise Problem(f"the client's stubs cannot be generated: {done.stderr.strip()}")
    sys.path.insert(0, folder)


def chat_template(model):
    """The model's chat template as a function of a list of messages; None for a model that only continues text."""
    try:
        with open(os.path.join(model, "tokenizer_config.json"), encoding="utf-8") as file:
            settings = json.load(file)
    except OSError:
        return None
    text = settings.get("chat_template")
    if not isinstance(text, str):
        return None
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise Problem(f"{error}: 'tools/setup --only run' installs what renders chat templates") from None
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)
    names = {name: token if isinstance(token, str) else token.get("content", "")
             for name, token in settings.items() if name.endswith("_token") and token}
    return lambda messages: template.render(messages=messages, add_generation_prompt=True, **names)


class Conversation:
    """Turns what people type into prompts: as it is, or for a chat model as its template says, with all turns so far."""

    def __init__(self, model):
        self.template = chat_template(model)
        self.messages = []

    def prompt(self, text):
        if self.template is None:
            return text
        self.messages.append({"role": "user", "content": text})
        return self.template(self.messages)

    def answered(self, text):
        self.messages.append({"role": "assistant", "content": text})


def ask(cluster, options, conversation, text):
    """Streams one answer to the terminal. Returns (last reply, moments at which replies with tokens came)."""
    try:
        import grpc
        from baton.v1 import inference_pb2 as api, inference_pb2_grpc
    except ImportError as error:
        raise Problem(f"{error}: 'tools/setup --only test' installs the Python client's packages") from None
    router = cluster.routers()[0]
    with grpc.insecure_channel(router.address("grpc")) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        try:
            deadline = time.monotonic() + 10
            while True:  # ready means a pair; the model is listed with both kinds of worker a moment later
                models = [each for each in inference.ListModels(api.ListModelsRequest(), timeout=10).models
                          if each.decode_workers_ready and each.prefill_workers_ready]
                if models or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            if not models:
                raise Problem("the router lists no model that both workers serve" + router.tail())
            request = api.GenerateRequest(model=models[0].name, prompt=conversation.prompt(text), max_tokens=options.max_tokens,
                                          request_id="demo")
            request.sampling.temperature = options.temperature
            moments, last, answer = [], None, ""
            for last in inference.Generate(request, timeout=300):
                if last.token_ids:
                    moments.append((time.monotonic(), len(last.token_ids)))
                answer += last.text
                print(last.text, end="", flush=True)
            say()
            conversation.answered(answer)
            if last is None:
                raise Problem("the stream ended without a reply" + router.tail())
            return last, moments
        except grpc.RpcError as error:
            raise Problem(f"the router answered {error.code().name}: {error.details()}{router.tail()}") from None


def story(cluster, last, moments):
    usage, trace = last.usage, last.trace
    rows = [("request", f"went to {cluster.routers()[0].id}, which found its workers through etcd and read "
                        f"{usage.prompt_tokens} prompt tokens")]
    if trace.prefill_worker:
        decode = cluster.find(trace.decode_worker)
        moved = metric(decode, "baton_transfer_bytes_total", direction="received")
        rows += [("prefill", f"{trace.prefill_worker} computed the prompt's KV cache"),
                 ("KV cache", f"{size(trace.kv_bytes)} crossed to {trace.decode_worker} while the rest was computed"
                  + (f" ({size(moved)} verified there)" if moved else ""))]
    rows += [("decode", f"{trace.decode_worker} computed the last prompt token itself and generated "
                        f"{usage.completion_tokens} tokens (ended by: {last.finish_reason})"),
             ("time", f"{trace.ttft_ms:.1f} ms to the first token, {trace.total_ms:.1f} ms in all")]
    after = sum(count for _, count in moments[1:])
    if after and moments[-1][0] > moments[0][0]:
        rows.append(("speed", f"{after / (moments[-1][0] - moments[0][0]):.0f} tokens/s after the first"))
    elif trace.total_ms > 0: # all tokens came in one reply
        rows.append(("speed", f"{1000 * usage.completion_tokens / trace.total_ms:.0f} tokens/s, the prompt included"))
    if trace.attempts > 1:
        rows.append(("attempts", f"{trace.attempts}: a pair of workers was replaced on the way"))
    left = sum(metric(each, "baton_entries") or 0 for each in cluster.routers() + cluster.workers())
    rows.append(("left over", "nothing: every program is at rest again" if left == 0 else f"{left:.0f} entries"))
    headline("What happened")
    for name, text in rows:
        filled = textwrap.wrap(text, 92) or [""]
        say(f"  {DIM}{name:<10}{PLAIN} {filled[0]}")
        for line in filled[1:]:
            say(f"  {'':<10} {line}")


def chat(cluster, options, conversation):
    """More turns, until the end of the input: each finds the KV cache of those before it."""
    say(f"\n{DIM}Your turn; an empty line or ^D ends the conversation.{PLAIN}")
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            text = ""
        if not text:
            return
        last, _ = ask(cluster, options, conversation, text)
        usage, trace = last.usage, last.trace
        say(f"{DIM}[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them found in the cache; "
            f"{trace.ttft_ms:.0f} ms to the first token; {usage.completion_tokens} tokens in {trace.total_ms:.0f} ms]{PLAIN}")


def main():
    parser = argparse.ArgumentParser(prog="tools/demo")
    parser.add_argument("--build", default=default_build())
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompt")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--chat", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))
    state = tempfile.mkdtemp(prefix="baton-demo-")
    # 0: every prompt goes to the prefill worker, however short, so that there is something to see.
    cluster = Cluster(state, options.build, options.model, arguments={"router": ["--disaggregate-above", "0"]},
                      say=lambda text: say(f"  {text}"))
    code = 0
    try:
        stubs(os.path.join(state, "stubs"))
        headline("Starting a cluster: etcd, one router, one prefill worker, one decode worker")
        cluster.up()
        conversation = Conversation(options.model)
        is_chat = conversation.template is not None
        if options.chat and not is_chat:
            raise Problem(f"{options.model} has no chat template: it continues text (--prompt), it does not chat")
        prompt = options.prompt or ("What is the capital of France?" if is_chat else "Once upon a time")
        headline("The question, and the answer as it streams" if is_chat else "The prompt, and the answer as it streams")
        print(f"{BOLD}{prompt}{PLAIN}", end="\n" if is_chat else "", flush=True)
        last, moments = ask(cluster, options, conversation, prompt)
        story(cluster, last, moments)
        if options.chat:
            chat(cluster, options, conversation)
        headline("Stopping")
        for member in cluster.routers() + cluster.workers():
            cluster.remove(member, 10)
            say(f"  {member} drained and ended")
        say("\nNext: tools/cluster up keeps a cluster running; README.md shows clients.")
    except Problem as problem:
        print(f"demo: {problem}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        code = 130
    finally:
        with contextlib.suppress(Problem):
            cluster.down()
        shutil.rmtree(state, ignore_errors=True)
    sys.exit(code)


main()
