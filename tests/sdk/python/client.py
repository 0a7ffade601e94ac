#!/usr/bin/python3
"""Streams an answer, or several, from a Baton router. Stubs first: ./generate stubs; then PYTHONPATH=stubs ./client.py HOST:PORT PROMPT"""
import argparse
import sys

import grpc
from baton.v1 import inference_pb2 as api, inference_pb2_grpc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("address", help="gRPC address of a router, host:port")
parser.add_argument("prompt")
parser.add_argument("--model", help="default: the first that ListModels names")
parser.add_argument("--max-tokens", type=int, default=128)
parser.add_argument("--temperature", type=float, help="0 = greedy; default: the model's own")
parser.add_argument("--n", type=int, default=1, help="answers to the one prompt, at most 16; each is printed when it is complete")
parser.add_argument("--logprobs", type=int, metavar="K", help="tell each token's logprob and the K likeliest at its place, on stderr")
arguments = parser.parse_args()

with grpc.insecure_channel(arguments.address) as channel:
    inference = inference_pb2_grpc.InferenceStub(channel)
    try:
        model = arguments.model or inference.ListModels(api.ListModelsRequest(), timeout=10).models[0].name
        request = api.GenerateRequest(model=model, prompt=arguments.prompt, max_tokens=arguments.max_tokens, n=arguments.n)
        if arguments.temperature is not None:
            request.sampling.temperature = arguments.temperature
        if arguments.logprobs is not None:
            request.sampling.logprobs = arguments.logprobs
        texts = [""] * arguments.n
        for reply in inference.Generate(request, timeout=600):
            if arguments.n == 1:
                print(reply.text, end="", flush=True)
            else:  # the choices come interleaved: each reply says whose it is
                texts[reply.index] += reply.text
                if reply.finish_reason:
                    print(f"[choice {reply.index}: {reply.finish_reason}]\n{texts[reply.index]}")
            for token, each in zip(reply.token_ids, reply.logprobs):
                others = " ".join(f"{other}:{logprob:.3f}" for other, logprob in zip(each.top_token_ids, each.top_logprobs))
                print(f"{reply.index} token {token} {each.logprob:.3f} | {others}", file=sys.stderr)
        usage = reply.usage
        print(f"\n[{reply.finish_reason}: {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
              f"{usage.completion_tokens} generated, seed {usage.seed}]")
    except IndexError:
        sys.exit("no model is served now")
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
