#!/usr/bin/python3
"""client_test.py: generates the stubs, runs client.py against a small server with known answers, checks what it prints.

The server here stands for the form of the answers only; tests/integration runs the client against real routers.
"""
import concurrent.futures
import os
import subprocess
import sys
import tempfile

here = os.path.dirname(os.path.abspath(__file__))
stubs = tempfile.TemporaryDirectory()
subprocess.run([os.path.join(here, "generate"), stubs.name], check=True)
sys.path.insert(0, stubs.name)
import grpc
from baton.v1 import inference_pb2 as api, inference_pb2_grpc

seen = []


class Inference(inference_pb2_grpc.InferenceServicer):
    def ListModels(self, request, context):
        return api.ListModelsReply(models=[api.Model(name="only", context_tokens=64)])

    def Generate(self, request, context):
        seen.append(request)
        if request.model != "only":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no worker serves {request.model}")
        if request.n > 1:
            yield api.GenerateReply(index=1, token_ids=[7], text="zwei")
            yield api.GenerateReply(index=0, token_ids=[5], text="eins", finish_reason="length")
            yield api.GenerateReply(index=1, finish_reason="stop", usage=api.Usage(prompt_tokens=4, completion_tokens=2, seed=9))
            return
        logprobs = [api.TokenLogprobs(logprob=-0.5, top_token_ids=[1, 8], top_logprobs=[-0.5, -1.25])]
        yield api.GenerateReply(token_ids=[1], text="Hallo ",
                                logprobs=logprobs if request.sampling.WhichOneof("set_logprobs") else [])
        yield api.GenerateReply(token_ids=[2, 3], text="Welt 🎼", finish_reason="stop",
                                usage=api.Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=3, seed=99))


server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server)
address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()


def client(*arguments):
    environment = dict(os.environ, PYTHONPATH=stubs.name, PYTHONIOENCODING="utf-8")
    return subprocess.run([sys.executable, os.path.join(here, "client.py"), address, *arguments], env=environment, text=True,
                          encoding="utf-8", capture_output=True, timeout=60)


try:
    done = client("hi", "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Hallo Welt 🎼\n[stop: 4 prompt tokens (2 cached), 3 generated, seed 99]\n", done.stdout
    assert (seen[0].model, seen[0].prompt, seen[0].max_tokens) == ("only", "hi", 5), seen[0]
    assert seen[0].sampling.WhichOneof("set_temperature") == "temperature", "0 must be sent: it is not unset"

    done = client("hi", "--model", "only")
    assert done.returncode == 0 and seen[1].max_tokens == 128, done.stderr
    assert seen[1].sampling.WhichOneof("set_temperature") is None, "unset must stay unset"

    done = client("hi", "--logprobs", "2")
    assert done.returncode == 0 and done.stderr == "0 token 1 -0.500 | 1:-0.500 8:-1.250\n", done.stderr
    assert seen[2].sampling.logprobs == 2 and seen[1].sampling.WhichOneof("set_logprobs") is None

    done = client("hi", "--n", "2")
    assert done.stdout == ("[choice 0: length]\neins\n[choice 1: stop]\nzwei\n\n"
                           "[stop: 4 prompt tokens (0 cached), 2 generated, seed 9]\n"), done.stdout
    assert seen[3].n == 2

    done = client("hi", "--model", "other")
    assert done.returncode == 1 and done.stderr == "NOT_FOUND: no worker serves other\n", done.stderr
finally:
    server.stop(None)
    stubs.cleanup()
